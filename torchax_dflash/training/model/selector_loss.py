# SPDX-License-Identifier: Apache-2.0
"""The logits of DFlash-2's candidate selector, for its part of the loss.

When drafting, the selector walks along the block and sees the token that it chose
before. In training that token is the label before, so all positions are scored at once;
behind a label that it would not have chosen nothing would be accepted anyway.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torchax.interop import jax_view, torch_view

from torchax_dflash.core.draft import Draft
from torchax_dflash.core.draft_weights import SELECTOR

EXCLUDED = -1e30
"""The logit of a token that is not a candidate."""


def candidate_logits(
    draft: Draft,
    hidden: jax.Array,
    before: jax.Array,
    logits: jax.Array,
    token_ids: jax.Array,
) -> jax.Array:
    """The scores that the selector compares.

    Args:
        draft: a DFlash-2 draft.
        hidden: [R, D], the module's output.
        before: int32 [R], the token before each row.
        logits: float32 [R, S], the draft's.
        token_ids: int32 [S], the tokens that the logits are of.

    Returns:
        float32 [R, S]; `EXCLUDED` for all tokens but the candidates.
    """

    def pair_scores(module: Any) -> Any:
        selector = module.candidate_selector
        known = torch_view(jnp.minimum(token_ids, draft.config.vocab_size - 1))
        states = selector.hidden_projection(torch_view(hidden))
        states = selector.predecessor_codebook(torch_view(before)) * states
        return states @ selector.successor_codebook(known).T

    pairs = jax_view(
        draft.module.apply(draft.arrays(SELECTOR), pair_scores, dtype=draft.dtype)
    )
    module: Any = draft.module.module
    count = min(module.candidate_selector.top_k, logits.shape[-1])
    least = jax.lax.stop_gradient(jax.lax.top_k(logits, count)[0][..., -1:])
    return jnp.where(logits >= least, logits + pairs.astype(jnp.float32), EXCLUDED)
