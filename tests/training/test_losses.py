# SPDX-License-Identifier: Apache-2.0
"""Each loss and each weighting against a plain reading of its paper."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax_dflash.training.model.losses import (
    DraftLogits,
    TargetProbs,
    acceptance,
    decay_weights,
    distribution_loss,
    dpace_weights,
    position_losses,
    position_weights,
)
from torchax_dflash.training.model.objective import LOSSES, Objective

VOCAB, KNOWN = 11, 4


def distributions(rows=6, seed=0):
    """Draft logits [R, V], and the target's whole distribution [R, V]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, VOCAB)) * 2
    target = np.exp(rng.normal(size=(rows, VOCAB)) * 2)
    return logits, target / target.sum(-1, keepdims=True)


def paper_loss(name, q, p):
    """One position, p and q whole distributions."""
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    divergence = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    if name == "kl":
        return divergence
    if name == "tv":
        return 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
    if name == "accept":
        return -np.log(alpha)
    weight = np.exp(-3 * alpha)
    return weight * divergence + (1 - weight) * (1 - alpha)


def known_part(logits, target, count):
    """What is known: the target's likeliest tokens, and the draft's logits of them."""
    choices = np.argsort(-target, axis=-1)[:, :count]
    logits = jnp.array(logits, jnp.float32)
    draft = DraftLogits(
        jnp.take_along_axis(logits, jnp.array(choices), axis=-1),
        jax.nn.logsumexp(logits, axis=-1),
    )
    probs = np.take_along_axis(target, choices, axis=-1)
    known = probs.sum(-1, keepdims=True)
    scaled = jnp.array(probs / known, jnp.float32)
    return draft, TargetProbs(scaled, jnp.array(known[:, 0], jnp.float32))


@pytest.mark.parametrize("name", LOSSES)
def test_with_all_tokens_known_losses_are_the_papers(name):
    logits, target = distributions()
    draft, probs = known_part(logits, target, VOCAB)
    got = np.array(distribution_loss(name, draft, probs))
    if name == "kl":  # up to the target's entropy
        got += (target * np.log(target)).sum(-1)
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = [paper_loss(name, *pair) for pair in zip(q, target, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_unknown_tokens_count_as_one():
    logits, target = distributions()
    draft, probs = known_part(logits, target, KNOWN)
    order = np.argsort(-target, axis=-1)
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def merged(x):
        x = np.take_along_axis(x, order, axis=-1)
        return np.append(x[:, :KNOWN], x[:, KNOWN:].sum(-1, keepdims=True), axis=-1)

    want = np.minimum(merged(q), merged(target)).sum(-1)
    got = np.array(acceptance(draft, probs))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    true = np.minimum(q, target).sum(-1)
    rest = merged(target)[:, -1]
    assert (got >= true - 1e-6).all()
    assert (got <= true + rest + 1e-6).all()


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_the_draft_cannot_say_leave_losses_and_gradients_finite(name):
    logits, target = distributions()
    draft, probs = known_part(logits, target, KNOWN)
    cannot = np.zeros(draft.logits.shape, bool)
    cannot[0, 1], cannot[1, 0], cannot[2] = True, True, True

    def loss(logits, total):
        limited = DraftLogits(logits, total, jnp.array(~cannot))
        return distribution_loss(name, limited, probs).sum()

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(draft.logits, draft.total)
    assert np.isfinite(value)
    assert all(np.isfinite(np.array(grad)).all() for grad in grads)
    assert (np.array(grads[0])[cannot] == 0).all()


def test_kl_of_tokens_that_the_draft_can_say_is_scaled_to_them():
    logits, target = distributions()
    draft, probs = known_part(logits, target, KNOWN)
    can_say = np.ones(probs.scaled.shape, bool)
    can_say[0, 1], can_say[1, 0] = False, False
    limited = replace(draft, can_say=jnp.array(can_say))
    p = np.where(can_say, probs.scaled, 0)
    logprobs = np.array(draft.logits - draft.total[:, None])
    want = -(p / p.sum(-1, keepdims=True) * logprobs).sum(-1)
    np.testing.assert_allclose(distribution_loss("kl", limited, probs), want, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_target_that_is_certain_asks_for_its_choice(name):
    logits, _ = distributions()
    certain = np.eye(VOCAB)[np.arange(len(logits))]
    draft, probs = known_part(logits, certain, KNOWN)
    got = np.array(distribution_loss(name, draft, probs))
    q = np.array(draft.probs[:, 0])
    weight = np.exp(-3 * q)
    want = {
        "kl": -np.log(q),
        "tv": 1 - q,
        "accept": -np.log(q),
        "lk": -weight * np.log(q) + (1 - weight) * (1 - q),
    }[name]
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_lk_holds_its_weight_constant():
    logits, target = distributions()
    draft, probs = known_part(logits, target, KNOWN)

    def gradient(name):
        def loss(logits):
            return distribution_loss(name, replace(draft, logits=logits), probs).sum()

        return np.array(jax.grad(loss)(draft.logits))

    weight = np.exp(-3 * np.array(acceptance(draft, probs)))[:, None]
    want = weight * gradient("kl") + (1 - weight) * gradient("tv")
    np.testing.assert_allclose(gradient("lk"), want, rtol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_dpace_weights_are_the_share_in_the_expected_length(smoothing):
    rng = np.random.default_rng(1)
    hits = rng.uniform(size=(5, 7)).astype(np.float32)
    lengths = [7, 4, 1, 0, 6]
    counts = np.arange(7) < np.array(lengths)[:, None]
    got = np.array(dpace_weights(jnp.array(hits), jnp.array(counts), smoothing))
    for row, length in enumerate(lengths):
        chance = (1 - smoothing) * hits[row] + smoothing
        for j in range(7):
            want = sum(np.prod(chance[: k + 1]) for k in range(j, length))
            assert got[row, j] == pytest.approx(want if j < length else 0, abs=1e-5)


def test_dpace_weights_are_the_gradient_of_the_expected_length():
    hits = jnp.array([0.8, 0.5, 0.3], jnp.float32)

    def expected_length(log_hits):
        return jnp.cumprod(jnp.exp(log_hits)).sum()

    want = jax.grad(expected_length)(jnp.log(hits))
    got = dpace_weights(hits, jnp.ones(3, bool), 0.0)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_weights_pass_no_gradient():
    counts = jnp.ones(3, bool)
    of_hits = jax.grad(lambda hits: dpace_weights(hits, counts, 0.5).sum())
    assert (np.array(of_hits(jnp.full(3, 0.5))) == 0).all()


def test_an_objective_mixes_the_choice_and_the_distribution():
    logits, target = distributions()
    draft, probs = known_part(logits, target, KNOWN)
    objective = Objective(loss="tv", soft=0.9, gamma=2.0)
    got = position_losses(objective, draft.logits[:, 0], draft, probs)
    hard = draft.total - draft.logits[:, 0]
    want = 0.1 * hard + 0.9 * distribution_loss("tv", draft, probs)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    counts = jnp.array([True, True, False])
    weights = position_weights(objective, jnp.full(3, 0.5), counts)
    np.testing.assert_allclose(weights, [1, np.exp(-0.5), 0], rtol=1e-6)
    np.testing.assert_allclose(decay_weights(2, 2.0), [1, np.exp(-0.5)], rtol=1e-6)
