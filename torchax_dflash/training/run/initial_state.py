# SPDX-License-Identifier: Apache-2.0
"""A run before its first step: its state, and what stays constant."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from torchax_dflash.core.config import config_error
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.target import Target
from torchax_dflash.training.model.initial_draft import check_borrows_vocabulary
from torchax_dflash.training.model.teacher import feature_sizes
from torchax_dflash.training.run import trainer
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.recipe import Recipe


def initial_state(
    draft: Draft, target: Target, batches: Batches, recipe: Recipe
) -> tuple[trainer.TrainState, trainer.Frozen]:
    """The state before the first step, and what no step changes.

    Args:
        draft: to start from.
        target: lends its embedding and head.
        batches: to measure the size of features and to count tokens.
        recipe: hyperparameters.

    Raises:
        ValueError: the draft is quantised, has its own embedding or head, or its
            convolutions reach further than the shortest block.
    """
    check_borrows_vocabulary(draft)
    shortest = min(block_size for block_size, _ in recipe.stages)
    if shortest < draft.config.least_block_rows:
        raise config_error(
            "--stages",
            f"blocks of at least {draft.config.least_block_rows} (as far as the "
            "draft's convolutions reach)",
            shortest,
            "Train longer blocks.",
        )
    batch = batches.batch(0)
    scale = feature_sizes(
        batch.features, batch.lengths, len(draft.config.target_layer_ids)
    )
    frozen = trainer.Frozen(draft=trainer.frozen_part(draft), target=target)
    vocab_size = target.config.vocab_size
    count = recipe.draft_vocab_size or recipe.common_tokens
    if 0 < count < vocab_size - 1:
        counts = batches.token_counts(vocab_size)
        order = np.argsort(-counts, kind="stable").astype(np.int32)
        common, rare = np.split(order, [count])
        index = np.full(vocab_size, -1, np.int32)
        index[common] = np.arange(len(common))
        frozen = replace(
            frozen,
            common=jnp.array(common),
            rare=jnp.array(rare),
            index=jnp.array(index),
        )
    return trainer.new_state(draft, scale, recipe), frozen
