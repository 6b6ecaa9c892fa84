# SPDX-License-Identifier: Apache-2.0
"""Static key/value storage, and the cache object that PyTorch modules see.

A module asks its cache for one thing, `update(k, v, layer_idx)`. Ours writes rows
into a fixed JAX buffer instead of growing a tensor:

    KVPool, one layer              block_table [B, 3]    context_lens [B]
    page 0  | r r r r |            request 0: 3 1 0      request 0: 9
    page 1  | r r r r |            request 1: 2 4 5      request 1: 5
    page 2  | s s s s |
    page 3  | r r r r |            position p of request b is in slot
    page 4  | s . . . |            block_table[b, p // page_size] * page_size
    page 5  | . . . . |                + p % page_size

Nothing else is kept about a sequence: rejecting drafts means not counting their
rows, and rows that are not counted may hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding
from torchax.interop import jax_view

from torchax_dflash.core.attention import Attend, Context, paged_attention
from torchax_dflash.core.config import DFlashConfig, TargetConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Paged K and V of every layer, allocated once and donated through each step.

    Attributes:
        layers: per layer (K, V), each [P, page_size, H, K] in the model's dtype.
        sharding: where they are, or None for the default device (static).
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    sharding: NamedSharding | None = field(default=None, metadata={"static": True})

    @classmethod
    def allocate(
        cls,
        config: DFlashConfig | TargetConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        sharding: NamedSharding | None = None,
    ) -> KVPool:
        """An empty pool for a model: 2 * layers * P * page_size * H * K elements.

        Args:
            config: of the draft or target whose rows it will hold.
            num_pages: P.
            page_size: rows of a page.
            dtype: of K and V.
            sharding: how to split each layer's pages over devices.
        """
        shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)

        def make() -> tuple[tuple[jax.Array, jax.Array], ...]:
            def buffer() -> jax.Array:
                return jnp.zeros(shape, dtype)

            return tuple((buffer(), buffer()) for _ in range(config.num_hidden_layers))

        # Jitted where it is split, so that no device ever holds more than its share.
        split = partial(jax.jit, out_shardings=sharding)
        return cls((make if sharding is None else split(make))(), sharding)

    @property
    def page_size(self) -> int:
        """Rows of one page."""
        return self.layers[0][0].shape[1]

    @property
    def num_slots(self) -> int:
        """Rows of the whole pool; also the slot number that means "drop"."""
        return self.layers[0][0].shape[0] * self.page_size

    @property
    def heads_are_split(self) -> bool:
        """Whether each device holds only some of the heads."""
        return self.sharding is not None and not self.sharding.is_fully_replicated

    def stored(
        self, layer_idx: int, key: jax.Array, value: jax.Array, slot_mapping: jax.Array
    ) -> KVPool:
        """The pool with the first `slot_mapping.size` rows of [B, H, R, K] in it."""
        layers = list(self.layers)
        keys, values = layers[layer_idx]
        layers[layer_idx] = (
            _store(keys, key, slot_mapping),
            _store(values, value, slot_mapping),
        )
        return replace(self, layers=tuple(layers))

    def constrained(self) -> KVPool:
        """Inside a jitted program: the pool, with its sharding kept."""
        if self.sharding is None:
            return self
        layers = jax.lax.with_sharding_constraint(self.layers, self.sharding)
        return replace(self, layers=layers)


def slot_mapping_of(
    pool: KVPool,
    block_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """Slots of `positions`; rows that are not valid get the slot that is dropped.

    Args:
        pool: the pool of these rows.
        block_table: int32 [B, pages].
        positions: int32 [B, R].
        valid: bool [B, R].

    Returns:
        int32 [B, R], in 0 … num_slots (that last one drops the row).
    """
    slots = slots_at(block_table, positions, pool.page_size)
    return jnp.where(valid, slots, pool.num_slots)


def slots_at(block_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Slots of `positions`, int32 [B, R], by a block table [B, pages]."""
    page_index = jnp.clip(positions // page_size, 0, block_table.shape[1] - 1)
    pages = jnp.take_along_axis(block_table, page_index, axis=1)
    return pages * page_size + positions % page_size


@dataclass(eq=False)
class StaticKVCache:
    """What an unmodified module gets as `past_key_values`; lives for one trace.

    The module's own rows go back to it unchanged: attention joins them to the context
    in the pool. If `slot_mapping` is given, the first `slot_mapping.size` of the rows
    are also stored.

    Attributes:
        pool: replaced by `update`, so that afterwards it is the new pool.
        slot_mapping: int32 [R], where to store rows, or None to store nothing.
        context: what to attend to, or None for a module call whose attention output
            is not wanted.
        windows: by layer that attended through us, its sliding window or None.
    """

    pool: KVPool
    slot_mapping: jax.Array | None = None
    context: Context | None = None
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
            rows = jax_view(key_states), jax_view(value_states)
            self.pool = self.pool.stored(layer_idx, *rows, self.slot_mapping)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed explicitly, never counted from the cache."""
        return 0

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, how: Attend
    ) -> jax.Array:
        """Attention of own rows to the stored context and each other.

        See `paged_attention`; without a context, zeros.
        """
        if self.context is None:
            return jnp.zeros_like(query)
        return paged_attention(
            query,
            key,
            value,
            self.pool.layers[how.layer_idx],
            self.context,
            how=how,
            may_fold=not self.pool.heads_are_split,
        )


@jax.jit
def _store(pages: jax.Array, rows: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Writes rows of [B, H, R, K] at their slots; slots out of range drop them."""
    num_pages, page_size, heads, head_dim = pages.shape
    rows = rows.swapaxes(1, 2).reshape(-1, heads, head_dim)[: slot_mapping.size]
    flat = pages.reshape(num_pages * page_size, heads, head_dim)
    flat = flat.at[slot_mapping].set(rows.astype(pages.dtype), mode="drop")
    return flat.reshape(pages.shape)
