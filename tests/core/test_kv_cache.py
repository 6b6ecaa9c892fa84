# SPDX-License-Identifier: Apache-2.0
"""Writing rows to pages: right slots, padding dropped and never clamped."""

import jax.numpy as jnp
import numpy as np
from torchax.interop import torch_view

from torchax_dflash.core.config import TargetConfig
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache, slot_mapping_of

PAGES, PAGE_SIZE, HEADS, DIM = 6, 4, 2, 3
CONFIG = TargetConfig(
    vocab_size=1,
    hidden_size=1,
    num_hidden_layers=2,
    num_key_value_heads=HEADS,
    head_dim=DIM,
)


def empty_pool() -> KVPool:
    return KVPool.allocate(
        CONFIG,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        dtype=jnp.dtype("float32"),
    )


def test_slots_follow_the_page_table_and_padding_is_out_of_range():
    table = jnp.array([[3, 1], [2, 4]])
    positions = jnp.array([[0, 5, 99], [3, 4, 7]])
    valid = jnp.array([[True, True, False], [True, True, True]])
    slots = slot_mapping_of(empty_pool(), table, positions, valid)
    assert slots.tolist() == [[12, 5, PAGES * PAGE_SIZE], [11, 16, 19]]


def test_update_stores_leading_rows_only_and_drops_padding():
    rows = jnp.arange(2.0 * HEADS * 3 * DIM).reshape(2, HEADS, 3, DIM) + 1
    slots = jnp.array(
        [0, PAGES * PAGE_SIZE, 23, 7, 8]
    )  # of 6 rows: the last is not kept
    cache = StaticKVCache(pool=empty_pool(), slot_mapping=slots)
    key, value = torch_view(rows), torch_view(-rows)
    got_key, got_value = cache.update(key, value, 1)
    assert got_key is key
    assert got_value is value
    flat = np.asarray(rows).swapaxes(1, 2).reshape(6, HEADS, DIM)
    want = np.zeros((PAGES * PAGE_SIZE, HEADS, DIM), np.float32)
    want[[0, 23, 7, 8]] = flat[[0, 2, 3, 4]]
    keys, values = cache.pool.layers[1]
    np.testing.assert_array_equal(keys.reshape(want.shape), want)
    np.testing.assert_array_equal(values.reshape(want.shape), -want)
    assert not np.any(cache.pool.layers[0][0])


def test_without_slots_nothing_is_stored():
    pool = empty_pool()
    cache = StaticKVCache(pool=pool)
    rows = torch_view(jnp.ones((1, HEADS, 3, DIM)))
    cache.update(rows, rows, 0)
    assert cache.pool is pool
