# SPDX-License-Identifier: Apache-2.0
"""A draft as a checkpoint folder, which `dflash`, vLLM and this package load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from torchax_dflash.core.config import config_error
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.draft_weights import (
    EMBEDDING,
    HEAD,
    KNOWN_TOKENS,
    TOKEN_OFFSETS,
    published_name,
)
from torchax_dflash.core.target import Target
from torchax_dflash.core.vocabulary import OwnVocabulary, rows_of_tokens
from torchax_dflash.training.data.storage import save_tensors, write_atomically


def with_draft_vocabulary(draft: Draft, target: Target, token_ids: np.ndarray) -> Draft:
    """The draft with a head of its own: the target's head, for some tokens only.

    Args:
        draft: without a head of its own.
        target: whose head it is.
        token_ids: int [draft_vocab_size], distinct, the tokens that it is to know.
    """
    ids = np.sort(np.asarray(token_ids, np.int32))
    width, size = draft.config.hidden_size, draft.config.vocab_size
    head = target.project_to(jnp.eye(width, dtype=target.dtype), jnp.array(ids))
    return replace(
        draft,
        own=OwnVocabulary(head=head, row_of_token=rows_of_tokens(ids, size)),
        config=replace(draft.config, draft_vocab_size=len(ids)),
    )


def export(
    draft: Draft,
    folder: Path,
    *,
    dtype: str = "bfloat16",
    speculators_for: str | None = None,
) -> None:
    """Writes config.json and model.safetensors.

    Args:
        draft: the draft to write.
        folder: created if needed; other files in it are kept.
        dtype: of the weights on disk.
        speculators_for: write the `speculators` library's format instead, naming this
            target (a hub id or a folder) as the verifier.

    Raises:
        ValueError: the draft is quantised, has its own embedding, does not know its
            target's number of layers, or the format cannot represent it.
        OSError: the disk is full; an older export is unharmed.
    """
    if draft.own.embedding is not None:
        raise config_error(
            "draft",
            "one that borrows its target's embedding",
            f"one with its own {EMBEDDING}",
            "Such drafts can be used, but not exported.",
        )
    if draft.config.num_target_layers is None:
        raise config_error(
            "num_target_layers",
            "the target's number of layers",
            None,
            "Add it to the draft's config.json.",
        )
    config = _config(draft, dtype)
    if speculators_for is not None:
        if draft.config.has_selector:
            raise config_error(
                "--speculators",
                "a DFlashDraftModel",
                type(draft.module.module).__name__,
                "The format has no candidate selector; export without --speculators.",
            )
        config = _speculators_config(draft, config, speculators_for)
    weights = dict(draft.module.module.named_parameters())
    tensors = {
        published_name(name): np.asarray(
            array.T if name in draft.module.linear_weights else array
        )
        for name, array in draft.plain_params.items()
        if name in weights
    }
    tensors = {n: array.astype(jnp.dtype(dtype)) for n, array in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors | _own_head(draft, dtype))
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _own_head(draft: Draft, dtype: str) -> dict[str, np.ndarray]:
    """The tensors of the draft's own head, if it has one."""
    if draft.own.head is None:
        return {}
    assert draft.own.row_of_token is not None
    row_of_token, known = np.asarray(draft.own.row_of_token), draft.own.head.shape[1]
    is_known = row_of_token < known
    token_ids = np.zeros(known, np.int64)
    token_ids[row_of_token[is_known]] = np.flatnonzero(is_known)
    return {
        HEAD: np.asarray(draft.own.head.T.astype(jnp.dtype(dtype))),
        TOKEN_OFFSETS: token_ids - np.arange(known),
        KNOWN_TOKENS: is_known,
    }


def _config(draft: Draft, dtype: str) -> dict[str, Any]:
    hf_config: Any = draft.module.module.config
    config = json.loads(hf_config.to_json_string(use_diff=True))
    config["num_target_layers"] = draft.config.num_target_layers
    if draft.own.head is not None:
        config["draft_vocab_size"] = draft.config.draft_vocab_size
    config["architectures"] = [type(draft.module.module).__name__]
    config["dtype"] = dtype
    # Where readers before transformers 5 look.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    return {name: value for name, value in sorted(config.items()) if name[0] != "_"}


def _speculators_config(
    draft: Draft, config: dict[str, Any], target: str
) -> dict[str, Any]:
    """The config of a `speculators` checkpoint, as vLLM reads it.

    There tapped layers are numbered like vLLM's aux hidden states, by the input of a
    layer, so they are one more than DFlash's ids.
    """
    block_size = draft.config.block_size
    own = ("architectures", "block_size", "dflash_config", "num_target_layers", "dtype")
    own += ("draft_vocab_size",)
    layers = {name: value for name, value in config.items() if name not in own}
    # Only where it is true: vLLM 0.32 reads false as causal in full layers, too.
    non_causal = {"sliding_window_non_causal": True}
    return (non_causal if layers.get("is_causal") is False else {}) | {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "dtype": config["dtype"],
        "transformer_layer_config": layers,
        "draft_vocab_size": draft.config.draft_vocab_size,
        "target_hidden_size": draft.config.hidden_size,
        "block_size": block_size,
        "mask_token_id": draft.config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in draft.config.target_layer_ids],
        "num_target_layers": draft.config.num_target_layers,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": block_size - 1}
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }
