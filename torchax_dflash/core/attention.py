# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of rows over its paged context and itself.

    keys:      | context rows 0 … context_len-1, in pages | the block's own rows |
    positions:   0 …                        context_len-1   context_len + 0 … Q-1

Masks come from these true positions, per layer, so padding never counts. The context
is read tile by tile with a running softmax, and only as many tiles as the longest
request has: cost follows the true length, and length is no static shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

MASKED = -1e30
"""The score of a key that is not seen; finite, so that no row gives NaN."""


@dataclass(frozen=True)
class Attend:
    """How a layer attends: what a module hands its attention function.

    Hashable, so that it can be a static argument. Layers that differ in nothing but
    their number are equal, and share one traced program.

    Attributes:
        layer_idx: which layer; not part of comparisons.
        scale: factor on the scores.
        is_causal: a row sees no later row.
        sliding_window: distance from which a key is no longer seen (before the row,
            and in non-causal layers also after it), or None.
        softcap: scores become softcap * tanh(scores / softcap), or None.
    """

    layer_idx: int = field(compare=False)
    scale: float
    is_causal: bool
    sliding_window: int | None = None
    softcap: float | None = None


def sees(how: Attend, query_pos: jax.Array, key_pos: jax.Array) -> jax.Array:
    """Which keys a query sees, by position alone.

    Args:
        how: the layer's way to attend.
        query_pos: int32, positions of queries.
        key_pos: int32, positions of keys; the two broadcast.

    Returns:
        bool, of the broadcast shape.
    """
    distance = query_pos - key_pos
    visible = distance >= 0 if how.is_causal else jnp.ones_like(distance, bool)
    if how.sliding_window is not None:
        visible &= distance < how.sliding_window
        if not how.is_causal:
            visible &= -distance < how.sliding_window
    return visible


def capped(how: Attend, scores: jax.Array) -> jax.Array:
    """Scores after the layer's soft cap, if it has one."""
    if how.softcap is None:
        return scores
    return how.softcap * jnp.tanh(scores / how.softcap)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningSoftmax:
    """A softmax-weighted sum of values, a few keys at a time, in float32.

    Attributes:
        peak: [..., M], the highest score so far.
        norm: [..., M], the sum of exp(score - peak).
        out: [..., M, K], the sum of exp(score - peak) * value.
    """

    peak: jax.Array
    norm: jax.Array
    out: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> RunningSoftmax:
        """Before the first key; `shape` is that of `out`."""
        return cls(
            peak=jnp.full(shape[:-1], MASKED, jnp.float32),
            norm=jnp.zeros(shape[:-1], jnp.float32),
            out=jnp.zeros(shape, jnp.float32),
        )

    def add(
        self,
        scores: jax.Array,
        visible: jax.Array,
        weigh: Callable[[jax.Array], jax.Array],
    ) -> RunningSoftmax:
        """Adds S keys.

        Args:
            scores: float32 [..., M, S].
            visible: bool, broadcasts to `scores`.
            weigh: weights [..., M, S] -> float32 [..., M, K], the sum of values.
        """
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.maximum(self.peak, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0)
        decay = jnp.exp(self.peak - peak)
        return RunningSoftmax(
            peak=peak,
            norm=self.norm * decay + weights.sum(-1),
            out=self.out * decay[..., None] + weigh(weights),
        )

    def result(self) -> jax.Array:
        """The weighted mean, [..., M, K]; zero where no key was visible."""
        norm = self.norm[..., None]
        return jnp.where(norm > 0, self.out / norm, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What each block of a batch follows, and how much of the block exists.

    Attributes:
        block_table: int32 [B, pages]; entries past a request's context may be anything
            in range.
        context_lens: int32 [B], rows of context.
        block_lens: int32 [B], rows of the block that exist; the others are padding.
    """

    block_table: jax.Array
    context_lens: jax.Array
    block_lens: jax.Array

    def positions(self, rows: int) -> jax.Array:
        """Positions of the first `rows` rows of each block, int32 [B, rows]."""
        return self.context_lens[:, None] + jnp.arange(rows)


# Jitted, so that equal layers are traced once.
@partial(jax.jit, static_argnames=("how", "tile", "folded_rows", "may_fold"))
def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    context: Context,
    *,
    how: Attend,
    tile: int = 128,
    folded_rows: int = 48,
    may_fold: bool = True,
) -> jax.Array:
    """Attends from each block to its context and to itself.

    Args:
        query: [B, N, Q, K].
        key: [B, H, Q, K], the block's own keys.
        value: [B, H, Q, K], the block's own values.
        pages: K and V of this layer, each [P, page_size, H, K].
        context: where the context is, and how long context and blocks are.
        how: the layer's way to attend (static).
        tile: context rows read at a time (static).
        folded_rows: up to this many query rows, all heads counted, heads share one
            product; see `_fold_heads` (static).
        may_fold: heads are all on one device, so they may share a product (static).

    Returns:
        [B, N, Q, K] in the query's dtype. A row that sees nothing is zero. Softmax and
        sums are float32.
    """
    batch, num_heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, -1, head_dim)  # [B, H, N/H * Q, K]
    folded = may_fold and kv_heads > 1 and num_heads * rows <= folded_rows
    if folded:
        grouped, key, value = _fold_heads(grouped, key, value)
        kv_heads, head_dim = 1, kv_heads * head_dim
    query_pos = context.positions(rows)  # [B, Q]

    def add(softmax, keys, values, key_pos, exists):
        """Adds keys [B, H, S, K] at key_pos [B, S]."""
        visible = sees(how, query_pos[:, :, None], key_pos[:, None, :])
        visible &= exists[:, None, :]  # [B, Q, S]
        visible = jnp.tile(visible, (1, num_heads // kv_heads, 1))[:, None]
        # A padding row may hold NaN, and 0 * NaN is NaN: zero the values themselves.
        values = jnp.where(exists[:, None, :, None], values, 0)
        scores = how.scale * jnp.einsum(
            "bhmk,bhsk->bhms", grouped, keys, preferred_element_type=jnp.float32
        )

        def weigh(weights):
            return jnp.einsum(
                "bhms,bhsk->bhmk",
                weights.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )

        return softmax.add(capped(how, scores), visible, weigh)

    in_block = jnp.arange(rows) < context.block_lens[:, None]
    softmax = RunningSoftmax.empty(grouped.shape)
    softmax = add(softmax, key, value, query_pos, in_block)

    page_size = pages[0].shape[1]
    pages_per_tile = min(max(1, tile // page_size), context.block_table.shape[1])
    tile = pages_per_tile * page_size
    block_table = _pad_to_multiple(context.block_table, pages_per_tile)

    def read_tile(index, softmax):
        table = jax.lax.dynamic_slice_in_dim(
            block_table, index * pages_per_tile, pages_per_tile, axis=1
        )
        keys, values = (
            layer[table].reshape(batch, tile, kv_heads, head_dim).swapaxes(1, 2)
            for layer in pages
        )
        key_pos = jnp.broadcast_to(index * tile + jnp.arange(tile), (batch, tile))
        exists = key_pos < context.context_lens[:, None]
        return add(softmax, keys, values, key_pos, exists)

    first, last = _tiles(how, context, tile)
    out = jax.lax.fori_loop(first, last, read_tile, softmax).result()
    if folded:
        out = _unfold_heads(out, query.shape[-1])
    return out.astype(query.dtype).reshape(query.shape)


def _tiles(
    how: Attend, context: Context, tile: int
) -> tuple[jax.Array | int, jax.Array]:
    """The first tile that any request sees, and the end of the last, int32 []."""
    last = (context.context_lens.max() + tile - 1) // tile
    if how.sliding_window is None:
        return 0, last
    reach = jnp.where(
        context.block_lens > 0,
        context.context_lens - how.sliding_window + 1,
        last * tile,
    )
    return jnp.clip(reach.min(), 0, last * tile) // tile, last


def _fold_heads(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """H heads as one of H times the width; a query is zero in other heads' columns.

        query [B, H, M, K] -> [B, 1, H * M, H * K]      q0  0  0
        key   [B, H, S, K] -> [B, 1, S, H * K]           0 q1  0    M rows each
                                                         0  0 q2

    Pages hold the heads of a row side by side, so a tile is multiplied as it is,
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
