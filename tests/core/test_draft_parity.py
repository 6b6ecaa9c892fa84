# SPDX-License-Identifier: Apache-2.0
"""ingest + draft against the unmodified module with DynamicCache, its own cache."""

import inspect
import re
from collections import Counter

import dflash.model
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from breadth import mostly_slow
from paged_requests import (
    VARIANTS,
    Oracle,
    Ours,
    bfloat16_errors,
    hidden_states,
    history,
)
from tiny_models import BLOCK, MASK_ID, make_torch_draft, pair

from torchax_dflash import DraftModel
from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import ingest
from torchax_dflash.core.drafting import draft_tokens
from torchax_dflash.core.kv_cache import KVPool

BREADTH = mostly_slow(VARIANTS, fast=["sliding", "DFlash-2"])


@pytest.mark.parametrize(
    "variant", mostly_slow(VARIANTS, fast=["sliding", "causal", "DFlash-2"])
)
def test_hidden_states_equal_the_module_with_dynamic_cache(variant):
    module = make_torch_draft(**VARIANTS[variant])
    batch = 3
    ours = Ours(DraftModel.from_torch(module), batch)
    oracles = [Oracle(module) for _ in range(batch)]
    rng = np.random.default_rng(4)
    for new, noise in history(rng, batch, 8, ours.draft.config.feature_size):
        ours.ingest(new)
        got = ours.hidden(noise)
        for b in range(batch):
            want = oracles[b].hidden(new[b], noise[b])
            np.testing.assert_allclose(got[b], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", BREADTH)
def test_bfloat16_is_as_exact_as_pytorchs(variant):
    """Both against float32, over 96 rows, with weights and rows that bfloat16 holds."""
    module = make_torch_draft(**VARIANTS[variant]).to(torch.bfloat16).float()
    draft = DraftModel.from_torch(module, dtype="bfloat16")
    ours, theirs = bfloat16_errors(draft, module)
    print(f"{variant}: error {ours:.5f}, PyTorch's {theirs:.5f}")
    assert 0 < ours <= 1.5 * theirs


@pytest.fixture
def module():
    return make_torch_draft(**VARIANTS["sliding"])


def test_cached_equals_recomputed_from_scratch(module):
    draft = DraftModel.from_torch(module)
    cached = Ours(draft, 2)
    rng = np.random.default_rng(5)
    seen = [np.zeros((0, draft.config.feature_size), np.float32)] * 2
    for new, noise in history(rng, 2, 6, draft.config.feature_size):
        seen = [np.concatenate(rows) for rows in zip(seen, new, strict=True)]
        cached.ingest(new)
        fresh = Ours(draft, 2)
        fresh.ingest(seen)
        got, want = cached.hidden(noise), fresh.hidden(noise)
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_batch_of_eight_ragged_rows_equals_eight_batches_of_one(module):
    draft = DraftModel.from_torch(module)
    together, alone = Ours(draft, 8), [Ours(draft, 1) for _ in range(8)]
    rng = np.random.default_rng(6)
    for new, noise in history(rng, 8, 3, draft.config.feature_size):
        together.ingest(new)
        got = together.hidden(noise)
        for b in range(8):
            alone[b].ingest(new[b : b + 1])
            want = alone[b].hidden(noise[b : b + 1])[0]
            np.testing.assert_allclose(got[b], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_padding_and_unused_pages_change_nothing(module, garbage):
    draft = DraftModel.from_torch(module)
    clean, dirty = Ours(draft, 2, 0.0), Ours(draft, 2, garbage)
    rng = np.random.default_rng(7)
    for new, noise in history(rng, 2, 3, draft.config.feature_size):
        clean.ingest(new, 0.0)
        dirty.ingest(new, garbage)
        np.testing.assert_array_equal(clean.hidden(noise), dirty.hidden(noise))


@pytest.mark.parametrize("k", mostly_slow([1, 2, BLOCK - 1], fast=[2]))
@pytest.mark.parametrize(
    "dflash_config",
    [
        {},
        {
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
        },
    ],
    ids=["plain", "scaled and softcapped"],
)
def test_draft_tokens_equal_the_modules_own(k, dflash_config):
    tiny = pair("llama", False)
    module = make_torch_draft(dflash_config=dflash_config)
    draft = DraftModel.from_torch(module)
    ours, oracle = Ours(draft, 1), Oracle(module)
    rng = np.random.default_rng(8)
    scale = dflash_config.get("input_embedding_scale", 1.0)
    for new, _ in history(rng, 1, 6, draft.config.feature_size):
        anchor = int(rng.integers(0, 32))
        ours.ingest(new)
        got = draft_tokens(
            draft,
            tiny.target,
            ours.pool,
            jnp.array([anchor]),
            context=Context(
                ours.table,
                context_lens=jnp.array(ours.lens),
                block_lens=jnp.array([k + 1]),
            ),
            num_speculative_tokens=k,
        )
        block = torch.tensor([anchor] + [MASK_ID] * k)
        noise = tiny.torch_target.get_input_embeddings().weight[block] * scale
        hidden = oracle.hidden(new[0], noise.detach().numpy())
        logits = module.compute_logits(
            torch.tensor(hidden)[1:], tiny.torch_target.lm_head
        )
        assert got[0].tolist() == logits.argmax(-1).tolist()


def test_a_shorter_block_in_a_longer_program_equals_a_short_block(module):
    draft = DraftModel.from_torch(module)
    ours, oracle = Ours(draft, 1), Oracle(module)
    rng = np.random.default_rng(9)
    new, noise = next(history(rng, 1, 1, draft.config.feature_size))
    ours.ingest(new)
    noise[0, 3:] = np.nan
    got = hidden_states(
        draft,
        ours.pool,
        jnp.array(noise),
        context=Context(
            ours.table,
            context_lens=jnp.array(ours.lens),
            block_lens=jnp.array([3]),
        ),
    )
    want = oracle.hidden(new[0], noise[0, :3])
    np.testing.assert_allclose(got[0, :3], want, atol=1e-5, rtol=0)


def test_ingest_compiles_to_context_projections_only(module):
    """Nothing but the context's projections is computed over its rows.

    Exact numbers: fewer are an improvement, which belongs here as well.
    """
    draft = DraftModel.from_torch(module)
    pool = KVPool.allocate(draft.config, num_pages=8, page_size=16, dtype=draft.dtype)
    rows = 64
    arguments = (
        jnp.zeros((rows, draft.config.feature_size)),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, jnp.int32),
    )
    text = ingest.lower(draft, pool, *arguments).compile().as_text()
    products = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", text)
    # fc, and K and V of each layer, over all rows …
    layers, width = draft.config.num_hidden_layers, draft.config.hidden_size
    kv_width = draft.config.num_key_value_heads * draft.config.head_dim
    over_rows = Counter(int(n) for count, n in products if int(count) == rows)
    assert over_rows == {width: 1, kv_width: 2 * layers}
    # … and what is left of the noise path, one row of it: K and V of each layer, and
    # one output projection, a product of constants that all layers share.
    others = Counter(int(n) for count, n in products if int(count) != rows)
    assert others == {kv_width: 2 * layers, width: 1}
    assert all(count in (str(rows), "1") for count, _ in products)
    assert "q_proj_weight" not in "".join(re.findall(r"dot\(.*", text))


def test_module_is_unmodified(module):
    """The class is the package's own, and so is everything in it."""
    draft = DraftModel.from_torch(module)
    ours = Ours(draft, 1)
    rng = np.random.default_rng(10)
    new, noise = next(history(rng, 1, 1, draft.config.feature_size))
    ours.ingest(new)
    ours.hidden(noise)
    built = draft.module.module
    assert type(built) is dflash.model.DFlashDraftModel
    installed = inspect.getsourcefile(dflash.model)
    for submodule in built.modules():
        assert not {"forward", "__call__"} & set(vars(submodule))
        if type(submodule).__module__.startswith("dflash"):
            assert inspect.getsourcefile(type(submodule)) == installed
