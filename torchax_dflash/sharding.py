# SPDX-License-Identifier: Apache-2.0
"""How weights lie on a mesh of devices: by name, the same rules for every model.

    q, k, v, gate, up, fc     split by output         [in, out / n]
    o, down                   split by input          [in / n, out]
    embedding and head        split by token
    norms and all others      on every device

A dimension that the mesh does not divide stays whole. Axes: "data" for sequences,
"model" for weights.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_dflash.bridge import Params
from torchax_dflash.config import config_error

DATA, MODEL = "data", "model"

_BY_OUTPUT = re.compile(r"(^|\.)(q_proj|k_proj|v_proj|gate_proj|up_proj|fc)\.weight$")
_BY_INPUT = re.compile(r"(^|\.)(o_proj|down_proj)\.weight$")
_BY_TOKEN = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of the first `data * model` devices.

    Raises:
        ValueError: there are not so many.
    """
    devices = jax.devices()
    if data < 1 or model < 1 or data * model > len(devices):
        raise config_error(
            "mesh",
            f"two numbers whose product is at most {len(devices)} (devices)",
            (data, model),
            "Choose a smaller mesh.",
        )
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(
        (data, model),
        (DATA, MODEL),
        axis_types=axis_types,
        devices=devices[: data * model],
    )


def shard_params(
    params: Params, mesh: Mesh, linear_weights: frozenset[str] = frozenset()
) -> Params:
    """Lays weights out on a mesh.

    Args:
        params: weights by name, [out, in] where linear.
        mesh: from `make_mesh`.
        linear_weights: names of those that are [in, out].
    """
    return {
        name: jax.device_put(array, sharding_of(name, array, mesh, linear_weights))
        for name, array in params.items()
    }


def sharding_of(
    name: str,
    array: jax.Array,
    mesh: Mesh,
    linear_weights: frozenset[str] = frozenset(),
) -> NamedSharding:
    """Where the weight of this name lies; see `shard_params`."""
    axis = None
    if _BY_OUTPUT.search(name) or _BY_TOKEN.search(name):
        axis = 0
    elif _BY_INPUT.search(name):
        axis = 1
    if axis is None or array.ndim != 2:
        return NamedSharding(mesh, PartitionSpec())
    if name in linear_weights:
        axis = 1 - axis
    if array.shape[axis] % mesh.shape[MODEL]:
        return NamedSharding(mesh, PartitionSpec())
    spec: list[str | None] = [None, None]
    spec[axis] = MODEL
    return NamedSharding(mesh, PartitionSpec(*spec))


def shard_tree(tree: Any, mesh: Mesh) -> Any:
    """Lays out anything that holds weights in dictionaries by name, [out, in].

    An optimiser's state, for example; leaves without a weight's name are on every
    device.
    """

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = str(keys[-1]) if keys else ""
        return jax.device_put(leaf, sharding_of(name, leaf, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Splits the first dimension of every array over the "data" axis."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(DATA)))
