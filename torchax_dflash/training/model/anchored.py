# SPDX-License-Identifier: Apache-2.0
"""Anchored blocks: many draft steps of a sequence in one forward of the draft.

    sequence      t0 t1 t2 t3 t4 t5 t6 t7 …          anchors 2 and 5, blocks of 3

    context rows  f0 f1 f2 f3 f4 …                   features, one for each position
    block rows    [t2  m  m] [t5  m  m]              m is the mask token
    positions      2   3  4   5   6  7
    see context    f0 f1      f0 … f4                what lies before their anchor
    see rows       own block  own block

The module, unmodified, is called twice, as the generator calls it: once over the
context of all sequences, which leaves K and V in our cache object, and once over all
blocks, each a row of the batch. So what the module does inside a block stays inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import torch
from torchax.interop import jax_view

from torchax_dflash.core.attention import MASKED, Attend, capped, sees
from torchax_dflash.core.draft import Draft


@dataclass(eq=False)
class ContextRows:
    """The draft's cache in the first call: keeps each layer's K and V.

    Attributes:
        length: S, context rows; rows behind them are the call's dummy block.
        layers: by layer, K and V, [B, H, S, K].
        windows: by layer that attended through us, its sliding window or None.
    """

    length: int
    layers: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps a layer's context rows."""
        key, value = jax_view(key_states), jax_view(value_states)
        self.layers[layer_idx] = (
            key[:, :, : self.length],
            value[:, :, : self.length],
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed explicitly."""
        return 0

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, how: Attend
    ) -> jax.Array:
        """Zeros: what comes of the dummy block is not wanted."""
        return jnp.zeros_like(query)


@dataclass(eq=False)
class AnchoredBlocks:
    """The draft's cache in the second call: blocks attend to the kept context.

    Attributes:
        context: from the first call.
        anchors: int32 [B, A], position of each block's first row.
        windows: by layer that attended through us, its sliding window or None.
    """

    context: ContextRows
    anchors: jax.Array
    windows: dict[int, int | None] = field(default_factory=dict)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is kept of blocks."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed explicitly."""
        return 0

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, how: Attend
    ) -> jax.Array:
        """Attention of block rows [B * A, N, Q, K]; see `anchored_attention`."""
        context = (*self.context.layers[how.layer_idx], self.anchors)
        # Scores are made again in the backward pass instead of being kept.
        attend = jax.checkpoint(partial(anchored_attention, how=how))
        return attend(query, key, value, *context)


def anchored_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    context_key: jax.Array,
    context_value: jax.Array,
    anchors: jax.Array,
    *,
    how: Attend,
) -> jax.Array:
    """Attends from blocks to the context before their anchor, and to themselves.

    Args:
        query: [B * A, N, Q, K].
        key: [B * A, H, Q, K], the block's own.
        value: [B * A, H, Q, K].
        context_key: [B, H, S, K], of positions 0 … S - 1, finite everywhere.
        context_value: [B, H, S, K].
        anchors: int32 [B, A]; a block's rows are at its anchor + 0 … Q - 1.
        how: the layer's way to attend.

    Returns:
        [B * A, N, Q, K] in the query's dtype. Softmax and sums are float32.
    """
    batch, kv_heads, context, _ = context_key.shape
    block_size = query.shape[2]

    def by_sequence(rows: jax.Array) -> jax.Array:  # [B, H, heads of a group, A, Q, K]
        rows = rows.reshape(
            batch, -1, kv_heads, rows.shape[1] // kv_heads, *rows.shape[2:]
        )
        return rows.transpose(0, 2, 3, 1, 4, 5)

    # In float32 throughout: on CPUs, XLA has no gradient of bfloat16 products with
    # float32 sums; on TPUs the precision of products is set apart from their type.
    queries = by_sequence(query.astype(jnp.float32) * how.scale)
    own_keys, own_values = (
        by_sequence(rows.astype(jnp.float32))[:, :, 0] for rows in (key, value)
    )
    keys, values = context_key.astype(jnp.float32), context_value.astype(jnp.float32)
    scores = jnp.concatenate(
        [
            jnp.einsum("bhgaqk,bhsk->bhgaqs", queries, keys),
            jnp.einsum("bhgaqk,bhark->bhgaqr", queries, own_keys),
        ],
        axis=-1,
    )
    visible = _visible(how, anchors, context, block_size)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, capped(how, scores), MASKED))
    out = jnp.einsum("bhgaqs,bhsk->bhgaqk", weights[..., :context], values)
    out += jnp.einsum("bhgaqr,bhark->bhgaqk", weights[..., context:], own_values)
    return out.astype(value.dtype).transpose(0, 3, 1, 2, 4, 5).reshape(query.shape)


def _visible(
    how: Attend, anchors: jax.Array, context: int, block_size: int
) -> jax.Array:
    """Which of S context rows and Q own rows each row sees, bool [B, A, Q, S + Q]."""
    rows = anchors[..., None] + jnp.arange(block_size)  # [B, A, Q]
    context_rows = jnp.broadcast_to(jnp.arange(context), (*anchors.shape, context))
    keys = jnp.concatenate([context_rows, rows], axis=-1)[:, :, None]  # [B, A, 1, S+Q]
    own = jnp.arange(context + block_size) >= context
    exists = own | (keys < anchors[..., None, None])
    return exists & sees(how, rows[..., None], keys)


def anchored_hidden_states(
    draft: Draft,
    features: jax.Array,
    noise_embedding: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """The module's output over anchored blocks.

    Args:
        draft: the model.
        features: [B, S, F], aux hidden states of positions 0 … S - 1; padding is
            finite.
        noise_embedding: [B, A, Q, D].
        anchors: int32 [B, A], positions 1 … S.

    Returns:
        [B, A, Q, D].
    """
    batch, num_blocks, block_size, hidden = noise_embedding.shape
    length, dummy = features.shape[1], draft.config.least_block_rows
    context = ContextRows(length)
    draft.module(
        draft.params,
        context,
        dtype=draft.dtype,
        target_hidden=features.astype(draft.dtype),
        noise_embedding=jnp.zeros((batch, dummy, hidden), draft.dtype),
        position_ids=jnp.pad(jnp.arange(length), (0, dummy))[None],
    )
    blocks = batch * num_blocks
    out = draft.module(
        draft.params,
        AnchoredBlocks(context, anchors),
        dtype=draft.dtype,
        target_hidden=jnp.zeros((blocks, 0, features.shape[2]), draft.dtype),
        noise_embedding=noise_embedding.reshape(blocks, block_size, hidden).astype(
            draft.dtype
        ),
        position_ids=anchors.reshape(-1, 1) + jnp.arange(block_size),
    )
    return jax_view(out).reshape(batch, num_blocks, block_size, hidden)
