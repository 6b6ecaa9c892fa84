# SPDX-License-Identifier: Apache-2.0
"""Static key/value storage, and the cache object that PyTorch modules see.

A module asks its cache for one thing, `update(k, v, layer_idx)`. Ours writes rows
into a fixed JAX buffer instead of growing a tensor:

    KVPool, one layer              block_table [B, 3]     context_lens [B]
    page 0  | r r r r |            request 0: 3 1 0      request 0: 9
    page 1  | r r r r |            request 1: 2 4 5      request 1: 5
    page 2  | s s s s |
    page 3  | r r r r |            position p of request b lies at slot
    page 4  | s . . . |            block_table[b, p // page_size] * page_size
    page 5  | . . . . |                + p % page_size

Nothing else is kept about a sequence: rejecting drafts means not counting their
rows, and rows that are not counted may hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import torch
from torchax.interop import jax_view

from torchax_dflash.core.attention import paged_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Paged K and V of every layer, allocated once and donated through each step.

    Attributes:
        layers: per layer (K, V), each [P, page_size, H, K] in the model's dtype.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]

    @classmethod
    def zeros(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
    ) -> KVPool:
        """Allocates 2 * L * P * page_size * H * K elements."""
        shape = (num_pages, page_size, num_kv_heads, head_dim)

        def buffer() -> jax.Array:
            return jnp.zeros(shape, dtype)

        return cls(tuple((buffer(), buffer()) for _ in range(num_layers)))

    @property
    def page_size(self) -> int:
        """Rows of one page."""
        return self.layers[0][0].shape[1]

    @property
    def num_slots(self) -> int:
        """Rows of the whole pool; also the slot number that means "drop"."""
        return self.layers[0][0].shape[0] * self.page_size


def slot_mapping_of(
    pool: KVPool,
    block_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """Slots of `positions`; rows that are not valid get the slot that is dropped.

    Args:
        pool: the pool they lie in.
        block_table: int32 [B, pages].
        positions: int32 [B, R].
        valid: bool [B, R].

    Returns:
        int32 [B, R], in 0 … num_slots (that last one drops the row).
    """
    page_index = jnp.clip(positions // pool.page_size, 0, block_table.shape[1] - 1)
    pages = jnp.take_along_axis(block_table, page_index, axis=1)
    slot_mapping = pages * pool.page_size + positions % pool.page_size
    return jnp.where(valid, slot_mapping, pool.num_slots)


@dataclass(eq=False)
class StaticKVCache:
    """What an unmodified module gets as `past_key_values`; lives for one trace.

    The module's own rows go back to it unchanged: attention joins them to the context
    that `block_table` points to. If `slot_mapping` is given, the first `slot_mapping.size` of the
    rows are also stored.

    Attributes:
        pool: replaced by `update`, so that afterwards it is the new pool.
        slot_mapping: int32 [R] where to store rows, or None to store nothing.
        block_table: int32 [B, pages] of the context to attend to, or None for a module
            call whose attention output is not wanted.
        context_lens: int32 [B] stored rows that are visible.
        block_lens: int32 [B] own rows that are visible.
        heads_are_split: over several devices.
        windows: by layer that attended through us, its sliding window or None.
    """

    pool: KVPool
    slot_mapping: jax.Array | None = None
    block_table: jax.Array | None = None
    context_lens: jax.Array | None = None
    block_lens: jax.Array | None = None
    heads_are_split: bool = False
    windows: dict[int, int | None] = field(default_factory=dict)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores rows of K and V, [B, H, R, K]; returns both as they came."""
        if self.slot_mapping is not None:
            layers = list(self.pool.layers)
            layers[layer_idx] = tuple(
                _store(pages, jax_view(rows), self.slot_mapping)
                for pages, rows in zip(
                    layers[layer_idx], (key_states, value_states), strict=True
                )
            )
            self.pool = KVPool(tuple(layers))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed explicitly, never counted from the cache."""
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
        """Attention of own rows to the stored context and each other.

        See `paged_attention`; without a page table, zeros.
        """
        if self.block_table is None:
            return jnp.zeros_like(query)
        assert self.context_lens is not None
        assert self.block_lens is not None
        return paged_attention(
            query,
            key,
            value,
            pages=self.pool.layers[layer_idx],
            block_table=self.block_table,
            context_lens=self.context_lens,
            block_lens=self.block_lens,
            scale=scale,
            is_causal=is_causal,
            sliding_window=sliding_window,
            softcap=softcap,
            may_fold=not self.heads_are_split,
        )


@jax.jit
def _store(pages: jax.Array, rows: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Writes the first `slot_mapping.size` rows of [B, H, R, K]; drops out-of-range slots."""
    num_pages, page_size, heads, head_dim = pages.shape
    rows = rows.swapaxes(1, 2).reshape(-1, heads, head_dim)[: slot_mapping.size]
    flat = pages.reshape(num_pages * page_size, heads, head_dim)
    flat = flat.at[slot_mapping].set(rows.astype(pages.dtype), mode="drop")
    return flat.reshape(pages.shape)
