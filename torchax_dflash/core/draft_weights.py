# SPDX-License-Identifier: Apache-2.0
"""The weight names of a draft, and what follows from them: one table for everyone.

    layers.0.self_attn.q_proj.weight      a linear layer of `LINEAR_LAYERS`
    fc.weight                             the projection of context features, likewise
    candidate_selector.….weight           DFlash-2's selector
    norm.weight, hidden_norm.weight, …    everything else: small, and left as it is

Beside the module's own parameters a checkpoint may hold those of `EXTRA_TENSORS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LinearLayer:
    """How a linear layer of a draft may be split over devices.

    All of them may be kept as int8.

    Attributes:
        split: the dimension that is split, of a weight [in, out].
        by_head: it is split between heads, never inside one.
        noise_path: only noise rows pass through it: it is a part of the MLP, or the
            attention's output projection.
    """

    split: Literal["in", "out"]
    by_head: bool = False
    noise_path: Literal["mlp", "output"] | None = None


LINEAR_LAYERS = {
    "fc": LinearLayer("out"),
    "q_proj": LinearLayer("out", by_head=True),
    "k_proj": LinearLayer("out", by_head=True),
    "v_proj": LinearLayer("out", by_head=True),
    "o_proj": LinearLayer("in", by_head=True, noise_path="output"),
    "gate_proj": LinearLayer("out", noise_path="mlp"),
    "up_proj": LinearLayer("out", noise_path="mlp"),
    "down_proj": LinearLayer("in", noise_path="mlp"),
}
"""The transformer's linear layers and its input; no heads, convolutions, selectors."""

FC = "fc.weight"
"""Projects a context row of all tapped layers, F, to the hidden size, D."""

LAYERS = "layers."
"""What the names of the transformer's layers begin with."""

NORM, HIDDEN_NORM = "norm.weight", "hidden_norm.weight"
"""The final norm, and the norm of projected context rows."""

QUERY_NORM, KEY_NORM = "q_norm.weight", "k_norm.weight"
"""How the names of a layer's norms of queries and keys end."""

CONV_KERNEL, CONV_PROJECTION = "base_kernel", "kernel_projection.weight"
"""How the names of DFlash-2's convolutions end: kernels [2, taps, D], and what is
added to them by the row they are applied to."""

SELECTOR = "candidate_selector."
"""What the names of DFlash-2's candidate selector begin with."""

CODEBOOK = "codebook.weight"
"""How the names of the selector's two embeddings end."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""A draft's own embedding [V, D] and head [draft_vocab_size, D], if it has them."""

TOKEN_OFFSETS, KNOWN_TOKENS = "d2t", "t2d"
"""Target tokens that a reduced head knows: token i is i + d2t[i]; t2d is a mask."""

# Copies of the target's weights that `speculators` compares with while it trains.
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
EXTRA_TENSORS = frozenset(
    {EMBEDDING, HEAD, TOKEN_OFFSETS, KNOWN_TOKENS, *_TRAINING_ONLY}
)
"""What a draft's checkpoint may hold beside the parameters of its module."""


def linear_layer(name: str) -> LinearLayer | None:
    """The linear layer that a parameter belongs to, weight or bias; None for others."""
    *_, layer, _ = ("", *name.split("."))
    return LINEAR_LAYERS.get(layer)


def published_name(name: str) -> str:
    """A parameter's name in checkpoints: DFlash-2's codebooks lack the last word."""
    return name.removesuffix(".weight") if name.endswith(CODEBOOK) else name
