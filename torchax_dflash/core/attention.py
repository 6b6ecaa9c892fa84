# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of rows over its paged context and itself.

    keys:      | context rows 0 … context_len-1, in pages | the block's own rows |
    positions:   0 …                        context_len-1   context_len + 0 … Q-1

Masks come from these true positions, per layer, so padding never counts. The context
is read tile by tile with a running softmax, and only as many tiles as the longest
request has: cost follows the true length, and length is no static shape.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

# Context rows read at a time; fewer programs and less copying than whole tables.
_TILE = 128
# Up to this many query rows (of all heads), heads share one product; see _fold_heads.
_FOLDED_ROWS = 48
_MASKED = -1e30


# Jitted, so that equal layers are traced once.
@partial(
    jax.jit,
    static_argnames=("scale", "is_causal", "sliding_window", "softcap", "may_fold"),
)
def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    pages: tuple[jax.Array, jax.Array],
    block_table: jax.Array,
    context_lens: jax.Array,
    block_lens: jax.Array,
    scale: float,
    is_causal: bool,
    sliding_window: int | None = None,
    softcap: float | None = None,
    may_fold: bool = True,
) -> jax.Array:
    """Attends from each block to its context and to itself.

    Args:
        query: [B, N, Q, K].
        key: [B, H, Q, K], the block's own keys.
        value: [B, H, Q, K], the block's own values.
        pages: K and V of this layer, each [P, page_size, H, K].
        block_table: int32 [B, pages]; entries past a request's context may be anything
            in range.
        context_lens: int32 [B], rows of context.
        block_lens: int32 [B], rows of the block that exist; the others are padding.
        scale: factor on the scores.
        is_causal: row i sees no later row.
        sliding_window: distance from which a key is no longer seen (before, and in
            non-causal layers after), or None.
        softcap: scores become softcap * tanh(scores / softcap), or None.
        may_fold: heads are all on one device, so they may share a product.

    Returns:
        [B, N, Q, K] in the query's dtype. A row that sees nothing is zero. Softmax and
        sums are float32.
    """
    batch, num_heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, -1, head_dim)  # [B, H, N/H * Q, K]
    folded = may_fold and kv_heads > 1 and num_heads * rows <= _FOLDED_ROWS
    if folded:
        grouped, key, value = _fold_heads(grouped, key, value)
        kv_heads, head_dim = 1, kv_heads * head_dim
    query_pos = context_lens[:, None] + jnp.arange(rows)  # [B, Q]

    def fold(carry, keys, values, key_pos, exists):
        """Adds keys [B, H, S, K] at key_pos [B, S] to the running softmax."""
        peak, norm, out = carry
        visible = exists[:, None, :]  # [B, 1 or Q, S]
        distance = query_pos[:, :, None] - key_pos[:, None, :]
        if is_causal:
            visible &= distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
            if not is_causal:
                visible &= -distance < sliding_window
        visible = jnp.broadcast_to(visible, distance.shape)
        visible = jnp.tile(visible, (1, num_heads // kv_heads, 1))[:, None]
        # A padding row may hold NaN, and 0 * NaN is NaN: zero the values themselves.
        values = jnp.where(exists[:, None, :, None], values, 0)
        scores = scale * jnp.einsum(
            "bhmk,bhsk->bhms", grouped, keys, preferred_element_type=jnp.float32
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
        decay = jnp.exp(peak - new_peak)
        mixed = jnp.einsum(
            "bhms,bhsk->bhmk",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return (
            new_peak,
            norm * decay + weights.sum(-1),
            out * decay[..., None] + mixed,
        )

    empty = (
        jnp.full(grouped.shape[:3], _MASKED, jnp.float32),
        jnp.zeros(grouped.shape[:3], jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    in_block = jnp.arange(rows) < block_lens[:, None]
    carry = fold(empty, key, value, query_pos, in_block)

    page_size = pages[0].shape[1]
    pages_per_tile = max(1, _TILE // page_size)
    tile = pages_per_tile * page_size
    block_table = _pad_to_multiple(block_table, pages_per_tile)

    def read_tile(index, carry):
        table = jax.lax.dynamic_slice_in_dim(
            block_table, index * pages_per_tile, pages_per_tile, axis=1
        )
        keys, values = (
            layer[table].reshape(batch, tile, kv_heads, head_dim).swapaxes(1, 2)
            for layer in pages
        )
        key_pos = jnp.broadcast_to(index * tile + jnp.arange(tile), (batch, tile))
        return fold(carry, keys, values, key_pos, key_pos < context_lens[:, None])

    first, last = 0, (context_lens.max() + tile - 1) // tile
    if sliding_window is not None:
        reach = jnp.where(
            block_lens > 0, context_lens - sliding_window + 1, last * tile
        )
        first = jnp.clip(reach.min(), 0, last * tile) // tile
    _, norm, out = jax.lax.fori_loop(first, last, read_tile, carry)

    out = jnp.where(norm[..., None] > 0, out / norm[..., None], 0)
    if folded:
        out = _unfold_heads(out, query.shape[-1])
    return out.astype(query.dtype).reshape(query.shape)


def _fold_heads(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """H heads as one of H times the width; a query is zero where other heads lie.

        query [B, H, M, K] -> [B, 1, H * M, H * K]      q0  0  0
        key   [B, H, S, K] -> [B, 1, S, H * K]           0 q1  0    M rows each
                                                         0  0 q2

    Pages hold the heads of a row side by side, so a tile is multiplied as it lies,
    without being transposed. The extra products are with zeros, and with few rows a
    matrix unit has room for them.
    """
    batch, heads, rows, width = query.shape
    apart = jnp.eye(heads, dtype=query.dtype)[:, None, :, None]
    wide = query[:, :, :, None] * apart  # [B, H, M, H, K]

    def side_by_side(states: jax.Array) -> jax.Array:
        return states.swapaxes(1, 2).reshape(batch, 1, -1, heads * width)

    wide = wide.reshape(batch, 1, heads * rows, heads * width)
    return wide, side_by_side(key), side_by_side(value)


def _unfold_heads(out: jax.Array, head_dim: int) -> jax.Array:
    """[B, 1, H * M, H * K] -> [B, H, M, K], each head's own part of the width."""
    batch, _, _, width = out.shape
    heads = width // head_dim
    out = out.reshape(batch, heads, -1, heads, head_dim)
    return jnp.stack([out[:, head, :, head] for head in range(heads)], axis=1)


def _pad_to_multiple(block_table: jax.Array, multiple: int) -> jax.Array:
    padding = -block_table.shape[1] % multiple
    return jnp.pad(block_table, ((0, 0), (0, padding)))
