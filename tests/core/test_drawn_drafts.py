# SPDX-License-Identifier: Apache-2.0
"""Drawn drafts come from what they are said to come from: the q of the accept rule."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from distributions import SMALL_VOCAB, p_value
from tiny_models import DFLASH2, make_torch_draft, make_torch_target

from torchax_dflash import DraftModel, TargetModel
from torchax_dflash.core.attention import Context
from torchax_dflash.core.drafting import draw_draft_tokens
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.core.vocabulary import OwnVocabulary, rows_of_tokens

COUNT, K, GREEDY = 6_000, 3, 7
KNOWN = np.array([1, 2, 3, 6])


@pytest.mark.parametrize("kind", ["DFlash", "DFlash-2", "reduced vocabulary"])
def test_drawn_drafts_follow_their_q(kind):
    """Requests that differ in their seeds only; one of them is greedy."""
    sizes = {"vocab_size": SMALL_VOCAB, "hidden_size": 32, "intermediate_size": 32}
    target = TargetModel.from_torch(make_torch_target("llama", tied=False, **sizes))
    second = {"dflash_config": DFLASH2} if kind == "DFlash-2" else {}
    draft = DraftModel.from_torch(make_torch_draft(**sizes, **second, layers=1))
    if kind == "reduced vocabulary":
        head = target.params["lm_head.weight"][:, KNOWN]
        rows = rows_of_tokens(KNOWN, SMALL_VOCAB)
        draft = replace(draft, own=OwnVocabulary(head=head, row_of_token=rows))
    nothing = jnp.zeros(COUNT, jnp.int32)
    tokens, probs = draw_draft_tokens(
        draft,
        target,
        KVPool.allocate(draft.config, num_pages=1, page_size=4, dtype=draft.dtype),
        nothing + 3,
        Context(nothing[:, None], context_lens=nothing, block_lens=nothing + K + 1),
        num_speculative_tokens=K,
        sampling=replace(
            SamplingState.greedy(COUNT),
            temperature=jnp.full(COUNT, 1.3).at[GREEDY].set(0),
            seed=jnp.arange(COUNT, dtype=jnp.uint32),
        ),
    )
    tokens, probs = np.asarray(tokens), np.asarray(probs, np.float64)
    assert (probs[GREEDY].max(-1) == 1).all()
    assert (probs[GREEDY].argmax(-1) == tokens[GREEDY]).all()
    tokens, probs = np.delete(tokens, GREEDY, 0), np.delete(probs, GREEDY, 0)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    if kind == "reduced vocabulary":
        assert set(np.unique(tokens)) <= set(KNOWN)
    tests = 0
    for place in range(K):
        # a selector's q depends on the token before, but on nothing earlier
        before = tokens[:, place - 1] * bool(place and kind == "DFlash-2")
        for group in np.unique(before):
            drawn = tokens[before == group, place]
            q = probs[before == group, place]
            np.testing.assert_allclose(q, np.broadcast_to(q[0], q.shape), atol=1e-5)
            if len(drawn) > 200:
                counts = np.bincount(drawn, minlength=SMALL_VOCAB)
                want = q[0] / q[0].sum()
                assert p_value(counts, want, least_groups=2) > 1e-4
                tests += 1
    assert tests >= K
