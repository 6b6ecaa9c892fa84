# SPDX-License-Identifier: Apache-2.0
"""What a run starts from: a draft, the size of features, the softmax's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from torchax_dflash.checkpoints.pretrained import DraftModel
from torchax_dflash.core.config import config_error
from torchax_dflash.core.target import Target
from torchax_dflash.training.data.padding import pad
from torchax_dflash.training.data.sequences import TokenSequence
from torchax_dflash.training.model.new_draft import new_draft, new_draft_config
from torchax_dflash.training.model.teacher import feature_sizes, query_key_sizes, think
from torchax_dflash.training.report.export import refuse_own_vocabulary
from torchax_dflash.training.run import trainer
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.recipe import Recipe

_SAMPLE = 8  # sequences that sizes are measured on


def starting_draft(
    init: str | Path,
    target_folder: Path,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    num_layers: int,
    dflash2: bool,
    block_size: int,
    mask_token_id: int | None,
    target_layer_ids: tuple[int, ...] | None,
    seed: int,
) -> DraftModel:
    """The draft to train, in float32.

    Args:
        init: a checkpoint to go on from, or "new".
        target_folder: the target's checkpoint.
        target: the target.
        sequences: to measure sizes on, for a new draft.
        num_layers: of a new draft.
        dflash2: a new draft has DFlash-2's convolutions and candidate selector.
        block_size: the largest that will be trained.
        mask_token_id: of a new draft; None looks for one.
        target_layer_ids: of a new draft.
        seed: of a new draft.

    Raises:
        ValueError: the draft is not for this target, has its own embedding or head, or
            has smaller blocks.
    """
    if str(init) != "new":
        draft = DraftModel.from_pretrained(init)
        draft.config.check_target(target.config)
        refuse_own_vocabulary(draft)
        # Not all formats say it; `export` writes it.
        layers = target.config.num_hidden_layers
        draft = replace(draft, config=replace(draft.config, num_target_layers=layers))
        if block_size > draft.config.block_size:
            raise config_error(
                "--stages",
                f"blocks of at most {draft.config.block_size} (the block size of "
                f"{init})",
                block_size,
                "Train shorter blocks, or start with --init new.",
            )
        return draft
    config = new_draft_config(
        target_folder,
        num_layers=num_layers,
        dflash2=dflash2,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
    )
    token_ids, lengths = _sample(sequences)
    layer_ids = tuple(config.dflash_config["target_layer_ids"])
    thoughts = think(target, token_ids, lengths, layer_ids=layer_ids)
    scale = feature_sizes(thoughts.features, jnp.array(lengths), len(layer_ids))
    return new_draft(
        config,
        target_folder,
        feature_scale=np.asarray(scale),
        query_key_sizes=np.asarray(query_key_sizes(target, token_ids, lengths)),
        seed=seed,
    )


def prepare(
    draft: DraftModel, target: Target, batches: Batches, recipe: Recipe
) -> tuple[trainer.TrainState, trainer.Frozen]:
    """A state before its first step, and what does not change.

    Args:
        draft: to start from.
        target: lends embedding and head.
        batches: to measure features and count tokens on.
        recipe: hyperparameters.

    Raises:
        ValueError: the draft is quantised or has its own embedding or head, or blocks
            are shorter than its convolutions.
    """
    refuse_own_vocabulary(draft)
    smallest = min(block_size for block_size, _ in recipe.stages)
    if smallest < draft.config.least_block_rows:
        raise config_error(
            "--stages",
            f"blocks of at least {draft.config.least_block_rows} (as far as the "
            "draft's convolutions reach)",
            smallest,
            "Train longer blocks.",
        )
    batch = batches.batch(0)
    scale = feature_sizes(
        batch.features, batch.lengths, len(draft.config.target_layer_ids)
    )
    frozen = trainer.Frozen(draft=trainer.frozen_part(draft), target=target)
    vocab_size = target.config.vocab_size
    if 0 < recipe.common_tokens < vocab_size - 1:
        counts = batches.token_counts(vocab_size)
        order = np.argsort(-counts, kind="stable").astype(np.int32)
        common, rare = np.split(order, [recipe.common_tokens])
        index = np.full(vocab_size, -1, np.int32)
        index[common] = np.arange(len(common))
        frozen = replace(
            frozen,
            common=jnp.array(common),
            rare=jnp.array(rare),
            index=jnp.array(index),
        )
    return trainer.start(draft, scale, recipe), frozen


def _sample(sequences: Sequence[TokenSequence]) -> tuple[np.ndarray, np.ndarray]:
    if not sequences:
        raise config_error(
            "--data", "sequences", "none", "Run `train_draft.py generate` first."
        )
    return pad(sequences[:_SAMPLE])
