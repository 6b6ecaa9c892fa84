# SPDX-License-Identifier: Apache-2.0
"""Training on several devices: axis "data" for sequences, axis "model" for weights.

The weights of layers are split as in inference (`checkpoints.sharding`), embedding and
head by token where that divides evenly. XLA adds the communication.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_dflash.checkpoints.sharding import param_sharding
from torchax_dflash.core.config import DFlashConfig, TargetConfig, config_error
from torchax_dflash.core.draft_weights import EMBEDDING, HEAD
from torchax_dflash.core.target import Target
from torchax_dflash.training.run.trainer import Frozen, TrainState

DATA, MODEL = "data", "model"


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of the first `data * model` devices.

    Raises:
        ValueError: there are not that many devices.
    """
    devices = jax.devices()
    if data < 1 or model < 1 or data * model > len(devices):
        raise config_error(
            "--mesh",
            f"two numbers whose product is at most {len(devices)} (devices)",
            (data, model),
            "Choose a smaller mesh.",
        )
    return jax.make_mesh(
        (data, model),
        (DATA, MODEL),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=devices[: data * model],
    )


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Splits the first dimension of every array over the "data" axis."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(DATA)))


def shard_target(target: Target, mesh: Mesh) -> Target:
    """The target, split over a mesh."""
    linear = target.module.linear_weights
    params = {
        name: jax.device_put(
            array,
            _sharding(name, array, target.config, mesh, transposed=name not in linear),
        )
        for name, array in target.params.items()
    }
    return replace(target, params=params)


def shard_state(
    state: TrainState, frozen: Frozen, mesh: Mesh
) -> tuple[TrainState, Frozen]:
    """A run's state and models, split over a mesh.

    The optimiser's moments are split like the weights they belong to.
    """
    config = frozen.draft.config

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = str(keys[-1]) if keys else ""
        return jax.device_put(
            leaf, _sharding(name, leaf, config, mesh, transposed=True)
        )

    everywhere = NamedSharding(mesh, PartitionSpec())
    rest = replace(frozen, target=replace(frozen.target, params={}))
    rest = jax.device_put(rest, everywhere)
    state = jax.tree_util.tree_map_with_path(place, state)
    return state, replace(rest, target=shard_target(frozen.target, mesh))


def _sharding(
    name: str,
    array: jax.Array,
    config: DFlashConfig | TargetConfig,
    mesh: Mesh,
    *,
    transposed: bool,
) -> NamedSharding:
    """How a weight is split; with `transposed`, linear weights are [out, in]."""
    shape = array.shape[::-1] if transposed else array.shape
    if name.endswith((EMBEDDING, HEAD)) and array.ndim == 2:
        # [D, V], or its transpose
        split = shape[1] % mesh.shape[MODEL] == 0
        spec = (None, MODEL) if split else (None, None)
    else:
        spec = param_sharding(name, shape, config=config, mesh=mesh, axis=MODEL).spec
        spec = (*spec, *[None] * (array.ndim - len(spec)))
    return NamedSharding(mesh, PartitionSpec(*(spec[::-1] if transposed else spec)))
