# SPDX-License-Identifier: Apache-2.0
"""`torchax-dflash train run`: a training run, new or continued."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from torchax_dflash import TargetModel
from torchax_dflash.checkpoints.demo import demo_draft
from torchax_dflash.cli.progress import ProgressBar
from torchax_dflash.cli.terminal import notes
from torchax_dflash.cli.train_arguments import locate
from torchax_dflash.core.config import config_error
from torchax_dflash.training.data.sequences import SequenceStore, fingerprint
from torchax_dflash.training.model.feature_store import stored_features
from torchax_dflash.training.model.initial_draft import load_draft, make_draft
from torchax_dflash.training.report.export import export, with_draft_vocabulary
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.initial_state import initial_state
from torchax_dflash.training.run.mesh import make_mesh, shard_state, shard_target
from torchax_dflash.training.run.recipe import PRESETS, Recipe
from torchax_dflash.training.run.trainer import trained_draft
from torchax_dflash.training.run.training_run import Cadence, Run, stopping


def train(arguments: argparse.Namespace) -> None:
    """Trains a draft and exports it."""
    folder, place = locate(arguments)
    recipe = _recipe(arguments)
    target_hash = fingerprint(folder)
    store = SequenceStore(arguments.data or place / "data", target_hash)
    target = TargetModel.from_pretrained(folder, dtype=arguments.dtype)
    mesh = _mesh(arguments.mesh)
    if mesh is not None:
        target = shard_target(target, mesh)
    sequences = list(store)
    init = str(arguments.init or ("new" if arguments.target else demo_draft()))
    if init == "new":
        draft = make_draft(
            folder,
            target,
            sequences,
            num_layers=arguments.num_layers,
            block_size=recipe.largest_block,
            dflash2=arguments.dflash2,
            mask_token_id=arguments.mask_token_id,
            target_layer_ids=arguments.target_layer_ids,
            seed=recipe.seed,
        )
    else:
        draft = load_draft(init, target, largest_block=recipe.largest_block)
    layer_ids = draft.config.target_layer_ids
    stored = stored_features(
        store.folder / "features", target_hash, layer_ids, len(sequences)
    )
    batches = Batches(
        sequences, recipe, target=target, layer_ids=layer_ids, store=stored, mesh=mesh
    )
    state, frozen = initial_state(draft, target, batches, recipe)
    run = Run(
        folder=place / arguments.name,
        recipe=recipe,
        frozen=frozen,
        batches=batches,
        about={"target": target_hash, "init": init, "sequences": len(sequences)},
        cadence=Cadence(
            checkpoint=arguments.checkpoint_every, held_out=arguments.held_out_every
        ),
    )
    state = run.resume(state)
    if mesh is not None:
        state, run.frozen = shard_state(state, frozen, mesh)
    notes.print(
        f"{len(batches.train)} sequences, {batches.steps_per_epoch} steps per epoch; "
        f"features {'from disk' if stored else 'computed while training'}; "
        f"from step {int(state.step)} of {recipe.steps}"
    )
    with ProgressBar("Training") as (log, update), stopping(run):

        def on_step(step: int, line: dict[str, Any] | None) -> None:
            update(step, recipe.steps)
            if line is not None:
                log(line)

        state = run.train(state, on_step)
    draft = trained_draft(state, run.frozen, "float32")
    if recipe.draft_vocab_size and run.frozen.common is not None:
        draft = with_draft_vocabulary(draft, target, np.asarray(run.frozen.common))
    export(draft, run.folder / "draft")
    notes.print(f"the current draft: {run.folder / 'draft'}")
    if run.stopped:
        raise KeyboardInterrupt


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """The preset, with what the command line changes."""
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Recipe)
        if getattr(arguments, field.name) is not None
    }
    return dataclasses.replace(PRESETS[arguments.preset], **given)


def _mesh(shape: tuple[int, ...] | None) -> Mesh | None:
    """The mesh asked for; None for a single device."""
    shape = shape or (jax.device_count(), 1)
    if len(shape) != 2:
        raise config_error(
            "--mesh",
            "two numbers, like 4,2",
            shape,
            "The first is how many devices share a batch, the second how many share "
            "the weights.",
        )
    return None if shape == (1, 1) else make_mesh(*shape)
