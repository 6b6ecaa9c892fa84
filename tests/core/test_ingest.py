# SPDX-License-Identifier: Apache-2.0
"""ingest reads only weights that context rows pass through, and keeps the same rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DRAFTS, make_torch_draft

from torchax_dflash import DraftModel
from torchax_dflash.core.draft import ingest, keeps_context_apart
from torchax_dflash.core.draft_weights import linear_layer
from torchax_dflash.core.int8 import Int8Weight
from torchax_dflash.core.kv_cache import KVPool

ROWS = 64


def ingested(draft: DraftModel) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    states = rng.standard_normal((ROWS, draft.config.feature_size), np.float32)
    pool = ingest(
        draft, empty_pool(draft), jnp.array(states), jnp.arange(ROWS), jnp.arange(ROWS)
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(pool)]


def empty_pool(draft: DraftModel) -> KVPool:
    return KVPool.allocate(draft.config, num_pages=8, page_size=16, dtype=draft.dtype)


def spoilt(draft: DraftModel) -> DraftModel:
    """With NaN in every weight of the noise path."""

    def spoil(name, weight):
        layer = linear_layer(name)
        if layer is None or layer.noise_path is None:
            return weight
        if isinstance(weight, Int8Weight):
            return replace(weight, scale=jnp.full_like(weight.scale, np.nan))
        return jnp.full_like(weight, np.nan)

    return replace(draft, params={n: spoil(n, w) for n, w in draft.params.items()})


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_weights_of_the_noise_path_are_not_read(kind, quantization):
    """They may hold NaN, and the rows are the same to the bit."""
    module = make_torch_draft(**DRAFTS[kind])
    draft = DraftModel.from_torch(module, quantization=quantization)
    assert keeps_context_apart(draft)
    want, got = ingested(draft), ingested(spoilt(draft))
    assert np.isfinite(want).all()
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_module_that_mixes_both_is_noticed():
    """One whose later layers read context rows that went through an MLP."""
    module = make_torch_draft()

    class Mixing(type(module)):
        def forward(self, *, target_hidden, **others):
            if target_hidden.shape[1]:
                target_hidden = target_hidden + 1e-3 * self.mixed(target_hidden)
            return super().forward(target_hidden=target_hidden, **others)

        def mixed(self, states):
            width = self.config.hidden_size
            mixed = self.layers[0].mlp(states[..., :width])
            return mixed.repeat(1, 1, states.shape[-1] // width)

    mixing = Mixing(module.config).eval()
    mixing.load_state_dict(module.state_dict())
    assert keeps_context_apart(DraftModel.from_torch(module))
    assert not keeps_context_apart(DraftModel.from_torch(mixing))
