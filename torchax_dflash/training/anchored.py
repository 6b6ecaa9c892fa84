# SPDX-License-Identifier: Apache-2.0
"""Anchored blocks: many draft steps of a sequence in one forward of the draft.

    sequence      t0 t1 t2 t3 t4 t5 t6 t7 …          anchors 2 and 5, blocks of 3

    context rows  f0 f1 f2 f3 f4 …                   features, one for each position
    block rows    [t2  m  m] [t5  m  m]              m is the mask token
    positions      2   3  4   5   6  7
    see context    f0 f1      f0 … f4                what lies before their anchor
    see rows       own block  own block

This is what the generator does at each anchor with `ingest` and `draft`, at once. The
module is the same, unmodified; only its cache and attention are others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import torch
from torchax.interop import jax_view

from torchax_dflash.draft_model import DraftModel

_MASKED = -1e30


@dataclass(eq=False)
class AnchoredBlocks:
    """What the draft gets as its cache while it trains; lives for one trace.

    Attributes:
        anchors: int32 [B, A], position of each block's first row.
        block_size: Q, rows of a block.
        windows: by layer that attended through us, its sliding window or None.
    """

    anchors: jax.Array
    block_size: int
    windows: dict[int, int | None] = field(default_factory=dict)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is kept: all rows of a sequence are there at once."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed explicitly."""
        return 0

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        layer_idx: int,
        scale: float,
        is_causal: bool,
        sliding_window: int | None,
        softcap: float | None,
    ) -> jax.Array:
        """Attention of block rows [B, N, A * Q, K]; see `anchored_attention`."""
        attend = partial(
            anchored_attention,
            block_size=self.block_size,
            scale=scale,
            is_causal=is_causal,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        # Scores are made again in the backward pass instead of being kept.
        return jax.checkpoint(attend)(query, key, value, self.anchors)


def anchored_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    anchors: jax.Array,
    *,
    block_size: int,
    scale: float,
    is_causal: bool,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attends from blocks to the context before their anchor, and to themselves.

    Args:
        query: [B, N, A * Q, K].
        key: [B, H, S + A * Q, K], S context rows at positions 0 … S - 1, then blocks.
        value: [B, H, S + A * Q, K], finite everywhere.
        anchors: int32 [B, A]; block a's rows are at anchors + 0 … Q - 1.
        block_size: Q.
        scale: factor on the scores.
        is_causal: row i of a block sees no later row of it.
        sliding_window: distance from which a key is no longer seen (before, and in
            non-causal layers after), or None.
        softcap: scores become softcap * tanh(scores / softcap), or None.

    Returns:
        [B, N, A * Q, K] in the query's dtype. Softmax and sums are float32.
    """
    batch, num_heads, _, width = query.shape
    kv_heads, num_blocks = key.shape[1], anchors.shape[1]
    context = key.shape[2] - num_blocks * block_size
    query = query.reshape(batch, kv_heads, -1, num_blocks, block_size, width)

    def split(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = rows[:, :, context:]
        own = own.reshape(batch, kv_heads, num_blocks, block_size, width)
        return rows[:, :, :context], own

    # In float32 throughout: on CPUs, XLA has no gradient of bfloat16 products with
    # float32 sums; on TPUs the precision of products is set apart from their type.
    query = query.astype(jnp.float32) * scale
    keys, own_keys = split(key.astype(jnp.float32))
    values, own_values = split(value.astype(jnp.float32))
    scores = jnp.concatenate(
        [
            jnp.einsum("bhgaqk,bhsk->bhgaqs", query, keys),
            jnp.einsum("bhgaqk,bhark->bhgaqr", query, own_keys),
        ],
        axis=-1,
    )
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = _visible(anchors, context, block_size, is_causal, sliding_window)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _MASKED))
    out = jnp.einsum("bhgaqs,bhsk->bhgaqk", weights[..., :context], values)
    out += jnp.einsum("bhgaqr,bhark->bhgaqk", weights[..., context:], own_values)
    return out.astype(value.dtype).reshape(batch, num_heads, -1, width)


def _visible(
    anchors: jax.Array,
    context: int,
    block_size: int,
    is_causal: bool,
    sliding_window: int | None,
) -> jax.Array:
    """Which of S context rows and Q own rows each row sees, bool [B, A, Q, S + Q]."""
    rows = anchors[..., None] + jnp.arange(block_size)  # [B, A, Q]
    context_rows = jnp.broadcast_to(jnp.arange(context), (*anchors.shape, context))
    keys = jnp.concatenate([context_rows, rows], axis=-1)[:, :, None]  # [B, A, 1, S+Q]
    own = jnp.arange(context + block_size) >= context
    visible = own | (keys < anchors[..., None, None])
    distance = rows[..., None] - keys
    if is_causal:
        visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
        if not is_causal:
            visible &= -distance < sliding_window
    return visible


def anchored_hidden_states(
    draft: DraftModel,
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
    context = jnp.arange(features.shape[1])
    rows = (anchors[..., None] + jnp.arange(block_size)).reshape(batch, -1)
    positions = jnp.concatenate(
        [jnp.broadcast_to(context, features.shape[:2]), rows], axis=1
    )
    out = draft.module(
        draft.params,
        AnchoredBlocks(anchors=anchors, block_size=block_size),
        target_hidden=features.astype(draft.dtype),
        noise_embedding=noise_embedding.reshape(batch, -1, hidden).astype(draft.dtype),
        position_ids=positions,
    )
    return jax_view(out).reshape(batch, num_blocks, block_size, hidden)
