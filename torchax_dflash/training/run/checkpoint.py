# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run, for an exact resume.

    checkpoints/00002000/state.safetensors    weights, average, optimiser
    checkpoints/00002000/recipe.json          hyperparameters

A checkpoint is written whole or not at all; the two newest are kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file

from torchax_dflash.core.config import config_error
from torchax_dflash.training.data.storage import save_tensors
from torchax_dflash.training.run.recipe import Recipe
from torchax_dflash.training.run.trainer import TrainState

_KEEP = 2


def save(
    folder: Path, state: TrainState, recipe: Recipe, about: dict[str, Any]
) -> Path:
    """Writes a checkpoint and removes old ones.

    Args:
        folder: of all checkpoints.
        state: to save.
        recipe: to compare with on resuming.
        about: what else must be the same then.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full; older checkpoints are unharmed.
    """
    place = folder / f"{int(state.step):08d}"
    scratch = folder / f".{place.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        arrays = {name: np.asarray(array) for name, array in _by_name(state).items()}
        save_tensors(scratch / "state.safetensors", arrays)
        saved = {"recipe": recipe.to_json(), "about": about}
        (scratch / "recipe.json").write_text(json.dumps(saved, indent=2) + "\n")
        shutil.rmtree(place, ignore_errors=True)
        scratch.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in _checkpoints(folder)[:-_KEEP]:
        shutil.rmtree(old)
    return place


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, or None."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def load(
    place: Path, like: TrainState, recipe: Recipe, about: dict[str, Any]
) -> TrainState:
    """Reads a checkpoint.

    Args:
        place: its folder.
        like: a state of the same shapes, from `trainer.new_state`.
        recipe: of this run.
        about: of this run.

    Raises:
        ValueError: the checkpoint is of a run with other settings.
    """
    saved = json.loads((place / "recipe.json").read_text())
    recipe.check_same(Recipe.from_json(saved["recipe"]))
    for name, value in about.items():
        if saved["about"].get(name) != value:
            raise config_error(
                name,
                f"the interrupted run's, {saved['about'].get(name)}",
                value,
                "Resume with the same settings, or start a new run with another --run.",
            )
    tensors = load_file(place / "state.safetensors")
    wanted = _by_name(like)
    if {n: a.shape for n, a in tensors.items()} != {
        n: a.shape for n, a in wanted.items()
    }:
        raise config_error(
            str(place),
            "weights of this draft's shapes",
            "others",
            "Start a new run with another --run.",
        )
    leaves = [tensors[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _by_name(state: TrainState) -> dict[str, jax.Array]:
    leaves, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): jnp.asarray(leaf) for path, leaf in leaves}


def _checkpoints(folder: Path) -> list[Path]:
    found = folder.glob("[0-9]*") if folder.is_dir() else ()
    return sorted(place for place in found if (place / "recipe.json").is_file())
