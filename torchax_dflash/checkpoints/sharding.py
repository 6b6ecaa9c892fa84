# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of a draft: where its weights and cache are, on several devices.

    q_proj, k_proj, v_proj      split by head, on the output dimension
    o_proj                      split by head, on the input dimension
    gate_proj, up_proj, fc      split on the output dimension
    down_proj                   split on the input dimension
    cache                       split by KV head
    own head, own embedding     split by token, and on the embedding's width
    norms, and what cannot be split evenly: whole on each device

XLA adds the communication. On one device the rules change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_dflash.core.config import DFlashConfig, TargetConfig
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.draft_weights import linear_layer
from torchax_dflash.core.int8 import Int8Weight, MaybeQuantized


def param_sharding(
    name: str,
    shape: tuple[int, ...],
    *,
    config: DFlashConfig | TargetConfig,
    mesh: Mesh,
    axis: str,
) -> NamedSharding:
    """Where one of a model's parameters is placed.

    Args:
        name: as in the module, like "layers.0.self_attn.q_proj.weight".
        shape: linear weights are [in, out], biases [out].
        config: the model's.
        mesh: the devices.
        axis: the mesh axis to split over.
    """
    spec: list[str | None] = [None] * len(shape)
    layer = linear_layer(name)
    if layer is None or (layer.split == "in" and len(shape) != 2):
        return NamedSharding(mesh, PartitionSpec())
    dimension = len(shape) - 1 if layer.split == "out" else 0
    unit = config.head_dim if layer.by_head else 1
    if shape[dimension] % (unit * mesh.shape[axis]) == 0:
        spec[dimension] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))


def shard_draft[D: Draft](draft: D, mesh: Mesh, axis: str) -> D:
    """The same draft, its weights split over the devices along `axis` of the mesh.

    Its cache goes with it: see `pool_sharding`.
    """
    return replace(
        draft,
        params=_shard_params(draft.params, config=draft.config, mesh=mesh, axis=axis),
        own=jax.tree.map(partial(_shard_table, mesh=mesh, axis=axis), draft.own),
    )


def pool_sharding(*, config: DFlashConfig, mesh: Mesh, axis: str) -> NamedSharding:
    """Where the pages [P, page_size, H, K] of every layer are placed."""
    splits = config.num_key_value_heads % mesh.shape[axis] == 0
    return NamedSharding(mesh, PartitionSpec(None, None, axis if splits else None))


def _shard_params(
    params: MaybeQuantized, *, config: DFlashConfig, mesh: Mesh, axis: str
) -> dict[str, jax.Array | Int8Weight]:
    """A draft's params where they belong; int8 values as weights, scales as biases."""

    def put(name: str, array: jax.Array) -> jax.Array:
        place = param_sharding(name, array.shape, config=config, mesh=mesh, axis=axis)
        return jax.device_put(array, place)

    return {
        name: jax.tree.map(partial(put, name), weight)
        for name, weight in params.items()
    }


def _shard_table(array: jax.Array, *, mesh: Mesh, axis: str) -> jax.Array:
    """A draft's own embedding [V, D] or head [D, V] where it belongs; others whole."""
    splits = array.ndim == 2 and array.shape[1] % mesh.shape[axis] == 0
    spec = PartitionSpec(None, axis) if splits else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))
