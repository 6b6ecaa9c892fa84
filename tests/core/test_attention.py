# SPDX-License-Identifier: Apache-2.0
"""paged_attention against PyTorch's attention with an explicit mask."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from breadth import mostly_slow

from torchax_dflash.core.attention import Attend, Context, paged_attention

N, H, K, Q = 4, 2, 16, 6
GARBAGE = {"nan": np.nan, "inf": np.inf, "huge": 1e30}


def make_case(seed: int, page_size: int, lens: list[int], garbage: float):
    """Contexts scattered over a pool of garbage, and the dense rows they hold."""
    rng = np.random.default_rng(seed)
    pages_per_row = -(-max([*lens, 1]) // page_size) + 2
    num_pages = pages_per_row * len(lens)
    pages = np.full((2, num_pages, page_size, H, K), garbage, np.float32)
    table = rng.permutation(num_pages).reshape(len(lens), pages_per_row)
    dense = rng.standard_normal((2, len(lens), max([*lens, 1]), H, K), np.float32)
    for b, length in enumerate(lens):
        for p in range(length):
            pages[:, table[b, p // page_size], p % page_size] = dense[:, b, p]
    shapes = [(len(lens), heads, Q, K) for heads in (N, H, H)]
    query, key, value = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    return query, key, value, pages, table.astype(np.int32), dense


def oracle(query, key, value, dense, context, block, *, causal, window):
    """One request, float64, from true positions; rows that see nothing are zero."""
    keys = np.concatenate([dense[0, :context].swapaxes(0, 1), key[:, :block]], axis=1)
    values = np.concatenate([dense[1, :context].swapaxes(0, 1), value[:, :block]], 1)
    distance = (context + np.arange(Q))[:, None] - np.arange(context + block)[None]
    visible = np.ones_like(distance, bool)
    if causal:
        visible &= distance >= 0
    if window:
        visible &= distance < window
        if not causal:
            visible &= -distance < window
    tensors = [
        torch.tensor(x, dtype=torch.float64)[None] for x in (query, keys, values)
    ]
    if context + block == 0:
        return np.zeros(query.shape)
    out = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.tensor(visible), enable_gqa=True
    )
    return torch.nan_to_num(out)[0].numpy()


@pytest.mark.parametrize("garbage", mostly_slow(GARBAGE, fast=["nan"]))
@pytest.mark.parametrize("page_size", mostly_slow([8, 128, 160], fast=[8, 160]))
@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, None), (True, None), (True, 5), (False, 5), (True, 150), (False, 150)],
)
def test_equals_pytorch_on_ragged_rows(causal, window, page_size, garbage):
    garbage = GARBAGE[garbage]
    lens, blocks = [0, 1, 40, 127, 128, 129, 300, 0], [6, 6, 1, 6, 3, 6, 6, 0]
    query, key, value, pages, table, dense = make_case(0, page_size, lens, garbage)
    for b, block in enumerate(blocks):
        key[b, :, block:] = garbage
        value[b, :, block:] = garbage
    got = paged_attention(
        jnp.array(query),
        jnp.array(key),
        jnp.array(value),
        pages=(jnp.array(pages[0]), jnp.array(pages[1])),
        context=Context(
            jnp.array(table),
            context_lens=jnp.array(lens),
            block_lens=jnp.array(blocks),
        ),
        how=Attend(0, K**-0.5, is_causal=causal, sliding_window=window),
    )
    for b, (length, block) in enumerate(zip(lens, blocks, strict=True)):
        want = oracle(
            query[b], key[b], value[b], dense[:, b], length, block,
            causal=causal, window=window,
        )  # fmt: skip
        rows = slice(None) if block in (0, Q) else slice(0, block)
        np.testing.assert_allclose(got[b][:, rows], want[:, rows], atol=2e-6)
    assert np.isfinite(got).all()


def test_softcap():
    query, key, value, pages, table, _ = make_case(1, 8, [0], 0.0)
    got = paged_attention(
        *map(jnp.array, (query, key, value)),
        pages=tuple(map(jnp.array, pages)),
        context=Context(
            jnp.array(table),
            context_lens=jnp.array([0]),
            block_lens=jnp.array([Q]),
        ),
        how=Attend(0, 1.0, is_causal=False, softcap=2.0),
    )
    scores = np.einsum("hgqk,hsk->hgqs", query[0].reshape(H, N // H, Q, K), key[0])
    weights = np.exp(2.0 * np.tanh(scores / 2.0))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("hgqs,hsk->hgqk", weights, value[0]).reshape(N, Q, K)
    np.testing.assert_allclose(got[0], want, atol=2e-6)
