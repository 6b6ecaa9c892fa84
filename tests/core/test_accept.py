# SPDX-License-Identifier: Apache-2.0
"""The accept rule, alone: outputs of a block against their exact distribution.

At five tokens every output of a block is enumerated; at a real vocabulary a few tokens
have most of the probability. Two settings run through the whole decode loop in
tests/generation/test_sampled_distribution.py, the others there are slow.
"""

import broken_rules
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from block_law import (
    DRAFTS,
    block_law,
    draft_probs,
    first_token,
    sampled_blocks,
    target_probs,
)
from distributions import SETTINGS, p_value, penalised_and_filtered

from torchax_dflash.core import accept as accepting
from torchax_dflash.core.sampling import SamplingState, draw, probabilities


def p_value_of(counts, law) -> float:
    return p_value(np.concatenate(counts), np.concatenate(law), least_groups=4)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_of_a_block_have_their_exact_distribution(name, method):
    p, q = target_probs(SETTINGS[name]), draft_probs(method)
    law = block_law(p, q)
    # the rule itself is lossless: whatever is drafted, the first token is the target's
    np.testing.assert_allclose(first_token(law), p[0][0], atol=1e-12)
    assert p_value_of(sampled_blocks(SETTINGS[name], method), law) > 1e-3


@pytest.mark.parametrize("num_drafts", range(DRAFTS))
def test_drafts_that_do_not_exist_are_not_looked_at(num_drafts):
    params = SETTINGS["temperature 1"]
    law = block_law(target_probs(params), draft_probs("probabilistic"), num_drafts)
    counts = sampled_blocks(params, "probabilistic", num_drafts)
    assert p_value(np.concatenate(counts), np.concatenate(law), least_groups=5) > 1e-3


@pytest.mark.parametrize(
    "broken",
    [
        broken_rules.accepts_all,
        broken_rules.keeps_what_was_rejected,
        broken_rules.takes_another_q,
    ],
)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_these_tests_notice_a_broken_rule(broken, method, monkeypatch):
    if broken is broken_rules.takes_another_q and method == "greedy":
        pytest.skip("a q of 1 at one token is its own square")
    monkeypatch.setattr(accepting, "accept_sampled", broken)
    params = SETTINGS["temperature 1"]
    law = block_law(target_probs(params), draft_probs(method))
    counts = np.concatenate(sampled_blocks(params, method))
    possible = np.concatenate(law) > 0
    if not counts[~possible].any():
        assert p_value(counts, np.concatenate(law)) < 1e-6


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "penalties"])
def test_probabilities_at_a_real_vocabulary_are_those_of_transformers(name):
    size, params = 151_936, SETTINGS[name]
    logits = 4 * np.random.default_rng(5).standard_normal((2, size), np.float32)
    text, nothing = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, size)
    want = penalised_and_filtered(text, torch.tensor(logits).double(), params, nothing)
    want = torch.softmax(want, -1).numpy()
    got = probabilities(jnp.array(logits)[None], settings_of(params, 1))[0]
    np.testing.assert_array_equal(np.asarray(got) > 1e-12, want > 1e-12)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-9)


def settings_of(params, batch: int) -> SamplingState:
    """Of requests that differ in nothing but their seeds."""
    state = SamplingState.greedy(batch)
    return SamplingState(
        temperature=jnp.full_like(state.temperature, params.temperature),
        top_k=jnp.full_like(state.top_k, params.top_k),
        top_p=jnp.full_like(state.top_p, params.top_p),
        min_p=jnp.full_like(state.min_p, params.min_p),
        seed=jnp.arange(batch, dtype=jnp.uint32),
        logprobs=state.logprobs,
    )


VOCAB, PEAKS, ROUNDS, BATCH = 32_000, 5, 64, 64


def peaked(rng, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [VOCAB] of few likely tokens, and their sum by group.

    The first groups are one likely token each, the last one is all others.
    """
    likely = rng.dirichlet(4 * np.ones(PEAKS)) * (1 - tail)
    probs = np.full(VOCAB, tail / (VOCAB - PEAKS))
    probs[PLACES] = likely
    return probs, np.append(likely, tail)


PLACES = np.array([3, 700, 16_384, 16_385, VOCAB - 1])
GROUP = np.full(VOCAB, PEAKS)
GROUP[PLACES] = np.arange(PEAKS)


def test_the_rule_at_a_real_vocabulary():
    """The first token has p's distribution, whatever was drafted; so has the second."""
    rng = np.random.default_rng(6)
    (p, by_group), (q, _), (after, after_by_group) = (
        peaked(rng, tail) for tail in (0.2, 0.1, 0.3)
    )
    probs = jnp.array(np.stack([p, after]), jnp.float32)
    drafts = rng.choice(VOCAB, (ROUNDS, BATCH, 1), p=q).astype(np.int32)

    @jax.jit
    def run(drafts, index):
        seeds = index * BATCH + jnp.arange(BATCH)
        settings = SamplingState.greedy(BATCH)
        return accepting.accept_sampled(
            jnp.broadcast_to(probs, (BATCH, *probs.shape)),
            drafts,
            jnp.ones(BATCH, jnp.int32),
            draft_probs=jnp.broadcast_to(jnp.array(q, jnp.float32), (BATCH, 1, VOCAB)),
            sampling=SamplingState(
                **vars(settings) | {"seed": seeds.astype(jnp.uint32)}
            ),
            positions=jnp.full(BATCH, 9, jnp.int32),
        )

    rounds = [run(jnp.array(drafts[i]), jnp.int32(i)) for i in range(ROUNDS)]
    tokens = np.concatenate([np.asarray(one.token_ids) for one in rounds])
    accepted = np.concatenate([np.asarray(one.num_accepted) for one in rounds])

    def groups(tokens: np.ndarray) -> np.ndarray:
        return np.bincount(GROUP[tokens], minlength=PEAKS + 1)

    assert p_value(groups(tokens[:, 0]), by_group) > 1e-3
    assert p_value(groups(tokens[accepted == 1, 1]), after_by_group) > 1e-3
    chance = np.minimum(p, q).sum()
    stands = np.array([1 - chance, chance])
    assert p_value(np.bincount(accepted), stands, least_groups=2) > 1e-3
    assert len(set(tokens[:, 0])) > 500  # others are many, not one


def test_draws_at_a_real_vocabulary():
    p, by_group = peaked(np.random.default_rng(7), 0.2)
    keys = jax.vmap(jax.random.key)(jnp.arange(64, dtype=jnp.uint32))
    probs = jnp.broadcast_to(jnp.array(p, jnp.float32), (64, 32, VOCAB))
    tokens = np.asarray(jax.jit(draw)(probs, keys)).ravel()
    assert p_value(np.bincount(GROUP[tokens], minlength=PEAKS + 1), by_group) > 1e-3
