# SPDX-License-Identifier: Apache-2.0
"""The draft that training starts from: a checkpoint, or a new one for the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from torchax_dflash.checkpoints.pretrained import DraftModel
from torchax_dflash.core.config import config_error
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.draft_weights import EMBEDDING, HEAD
from torchax_dflash.core.target import Target
from torchax_dflash.training.data.padding import pad
from torchax_dflash.training.data.sequences import TokenSequence
from torchax_dflash.training.model.new_draft import new_draft, new_draft_config
from torchax_dflash.training.model.teacher import (
    feature_sizes,
    query_key_sizes,
    teacher_outputs,
)

_SAMPLE = 8  # sequences on which sizes are measured


def load_draft(
    name_or_path: str | Path, target: Target, *, largest_block: int
) -> DraftModel:
    """An existing draft, in float32.

    Args:
        name_or_path: a checkpoint folder or a hub id.
        target: the target to train it for.
        largest_block: the largest block size that will be trained.

    Raises:
        ValueError: the draft is not for this target, has its own embedding or head, or
            has smaller blocks.
    """
    draft = DraftModel.from_pretrained(name_or_path)
    draft.config.check_target(target.config)
    check_borrows_vocabulary(draft)
    # Not every format names it, but `export` writes it.
    layers = target.config.num_hidden_layers
    draft = replace(draft, config=replace(draft.config, num_target_layers=layers))
    if largest_block > draft.config.block_size:
        raise config_error(
            "--stages",
            f"blocks of at most {draft.config.block_size} (the block size of "
            f"{name_or_path})",
            largest_block,
            "Train shorter blocks, or start with --init new.",
        )
    return draft


def make_draft(
    target_folder: Path,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    num_layers: int,
    block_size: int,
    dflash2: bool = False,
    mask_token_id: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    seed: int = 0,
) -> DraftModel:
    """A new draft, in float32.

    Args:
        target_folder: the target's checkpoint.
        target: the target.
        sequences: the size of features, queries and keys is measured on them.
        num_layers: of the draft.
        block_size: Q.
        dflash2: with DFlash-2's convolutions and candidate selector.
        mask_token_id: a token that does not occur in texts; None looks for one.
        target_layer_ids: tapped layers; None spreads five over the target.
        seed: of the random weights.

    Raises:
        ValueError: there are no sequences, `mask_token_id` is out of range, or no
            unused token was found.
    """
    config = new_draft_config(
        target_folder,
        num_layers=num_layers,
        block_size=block_size,
        dflash2=dflash2,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
    )
    if not sequences:
        raise config_error(
            "--data", "sequences", "none", "Run the step `generate` first."
        )
    token_ids, lengths = pad(sequences[:_SAMPLE])
    layer_ids = tuple(config.dflash_config["target_layer_ids"])
    outputs = teacher_outputs(target, token_ids, lengths, layer_ids=layer_ids)
    scale = feature_sizes(outputs.features, jnp.array(lengths), len(layer_ids))
    return new_draft(
        config,
        target_folder,
        feature_scale=np.asarray(scale),
        query_key_sizes=np.asarray(query_key_sizes(target, token_ids, lengths)),
        seed=seed,
    )


def check_borrows_vocabulary(draft: Draft) -> None:
    """Raises ValueError unless the draft uses its target's embedding and head.

    The loss is over the target's vocabulary and trains neither embedding nor head.
    """
    if not draft.own.is_empty:
        raise config_error(
            "draft",
            "one that borrows its target's embedding and head",
            f"one with its own {EMBEDDING} or {HEAD}",
            "Such drafts can be used, but not trained.",
        )
