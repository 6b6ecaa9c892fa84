# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's two ragged-paged-attention kernels in plain JAX, for CPUs.

Their Pallas kernels run on TPUs only. Same arguments and cache layouts:

    head_dim 128 and multiples   a row holds K and V of each head in turn
    head_dim 64                  a row holds K and V side by side in 128 lanes

Masks and the running softmax are the core's. The core's paged attention itself cannot
be used: it reads K and V from pages of their own, and rows of blocks of one size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv
from tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64 import (
    merge_kv as merge_kv_hd64,
)

from torchax_dflash.core.attention import Attend, RunningSoftmax, capped, sees
from torchax_dflash.core.kv_cache import slots_at
from torchax_dflash.serving.flat_rows import flat_rows


def _split(rows: jax.Array, heads: int, dim: int) -> tuple[jax.Array, jax.Array]:
    """Cache rows [S, …, lanes] of the general kernel -> K and V, [S, H, D]."""
    flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, : 2 * heads, :dim]
    pairs = flat.reshape(rows.shape[0], heads, 2, dim)
    return pairs[:, :, 0], pairs[:, :, 1]


def _split_hd64(rows: jax.Array, heads: int, dim: int) -> tuple[jax.Array, jax.Array]:
    """The same for the kernel of head_dim 64."""
    flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, :heads]
    return flat[..., :dim], flat[..., dim : 2 * dim]


# The parameters are those of tpu-inference's kernels, but for `merge` and `split`.
def _attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
    *,
    merge: Callable[..., jax.Array],
    split: Callable[..., tuple[jax.Array, jax.Array]],
    tile: int = 128,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **_others: Any,
) -> tuple[jax.Array, jax.Array]:
    """Stores this step's K and V, then attends, request by request, tile by tile.

    Args:
        queries: [T, N, D], rows of all requests in turn.
        keys: [T, H, D].
        values: [T, H, D].
        kv_cache: [pages, page_size, …].
        kv_lens: int32 [S], rows of each request, these included.
        page_indices: int32 [S * pages of a request].
        cu_q_lens: int32 [S + 1].
        distribution: int32 [3]; the last is the number of requests.
        attention_sink: [N], or None.
        merge: lays K and V out as the cache does.
        split: the other way.
        tile: cache rows read at a time (static).
        use_causal_mask: see the kernels, as for the others.
        update_kv_cache: store K and V.
        sm_scale: factor on the scores.
        sliding_window: keys this far back are not seen.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        k_scale: factor on stored keys.
        v_scale: factor on stored values.

    Returns:
        [T, N, D] in the queries' dtype, and the cache.
    """
    tokens, _, dim = queries.shape
    heads = keys.shape[1]
    page_size = kv_cache.shape[1]
    tables = page_indices.reshape(kv_lens.shape[0], -1)
    num_requests = distribution[-1]
    rows = flat_rows(cu_q_lens, num_requests, rows=tokens)
    request = rows.request
    context_lens = kv_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    positions = context_lens[request] + rows.place

    if update_kv_cache:
        num_slots = kv_cache.shape[0] * page_size
        slots = slots_at(tables[request], positions[:, None], page_size)[:, 0]
        slots = jnp.where(rows.exists & (positions >= 0), slots, num_slots)
        flat = kv_cache.reshape(num_slots, *kv_cache.shape[2:])
        new = merge(keys, values).astype(kv_cache.dtype)
        kv_cache = flat.at[slots].set(new, mode="drop").reshape(kv_cache.shape)

    causal = Attend(0, sm_scale, True, sliding_window, soft_cap)
    pages_per_tile = max(1, tile // page_size)
    tile = pages_per_tile * page_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_per_tile)))
    grouped = queries.astype(jnp.float32).reshape(tokens, heads, -1, dim)

    def one_tile(owner, index, softmax):
        table = jax.lax.dynamic_slice(
            tables, (owner, index * pages_per_tile), (1, pages_per_tile)
        )[0]
        stored = kv_cache[table].reshape(tile, *kv_cache.shape[2:])
        k, v = (x.astype(jnp.float32) for x in split(stored, heads, dim))
        k = k if k_scale is None else k * k_scale
        v = v if v_scale is None else v * v_scale
        key_pos = index * tile + jnp.arange(tile)
        exists = key_pos < kv_lens[owner]
        v = jnp.where(exists[:, None, None], v, 0)
        scores = jnp.einsum("thgd,shd->thgs", grouped, k) * sm_scale
        visible = sees(causal, positions[:, None], key_pos)
        if not use_causal_mask:
            # These kernels limit the window backwards only.
            visible |= key_pos > positions[:, None]
        visible &= (request == owner)[:, None] & exists
        return softmax.add(
            capped(causal, scores),
            visible[:, None, None, :],
            lambda weights: jnp.einsum("thgs,shd->thgd", weights, v),
        )

    def one_request(owner, softmax):
        tiles = (kv_lens[owner] + tile - 1) // tile
        return jax.lax.fori_loop(0, tiles, functools.partial(one_tile, owner), softmax)

    softmax = RunningSoftmax.empty(grouped.shape)
    if attention_sink is not None:
        sink = attention_sink.astype(jnp.float32).reshape(1, heads, -1)
        peak = jnp.broadcast_to(sink, softmax.peak.shape)
        softmax = RunningSoftmax(peak, jnp.ones_like(peak), softmax.out)
    out = jax.lax.fori_loop(0, num_requests, one_request, softmax).result()
    return out.reshape(queries.shape).astype(queries.dtype), kv_cache


ragged_paged_attention = functools.partial(_attention, merge=merge_kv, split=_split)
ragged_paged_attention_hd64 = functools.partial(
    _attention, merge=merge_kv_hd64, split=_split_hd64
)
