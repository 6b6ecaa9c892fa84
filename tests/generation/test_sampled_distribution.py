# SPDX-License-Identifier: Apache-2.0
"""Sampling is lossless: the output has the target's distribution, whatever is drafted.

The distribution is computed from transformers' own model and logits processors, and
held against many samples of our decode loop by a chi-square test.
"""

from dataclasses import replace
from types import SimpleNamespace

import broken_rules
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dflash.model import dflash_generate
from distributions import (
    LENGTH,
    PROMPT,
    SETTINGS,
    SMALL_VOCAB,
    exact_distribution,
    p_value,
    sampled_counts,
    small,
)
from scipy.stats import chi2_contingency

from torchax_dflash import SamplingParams
from torchax_dflash.core import accept as accepting
from torchax_dflash.core.vocabulary import OwnVocabulary, rows_of_tokens
from torchax_dflash.generation.sampling_params import DRAFT_SAMPLE_METHODS

WHOLE = {("penalties", "greedy"), ("all filters", "probabilistic")}
"""These are always run; the rule itself is tested in tests/core/test_accept.py."""


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(
            name, method, marks=[] if (name, method) in WHOLE else pytest.mark.slow
        )
        for name in SETTINGS
        for method in DRAFT_SAMPLE_METHODS
    ],
)
def test_the_targets_distribution(name, method):
    models, params = small("trained"), SETTINGS[name]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, method), probs) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFT_SAMPLE_METHODS)
@pytest.mark.parametrize(
    ("draft", "name"), [("untrained", "temperature 1"), ("DFlash-2", "all filters")]
)
def test_the_targets_distribution_with_other_drafts(draft, name, method):
    """One that knows nothing; one whose q is over candidates, without p's filters."""
    models, params = small(draft), SETTINGS[name]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, method), probs) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFT_SAMPLE_METHODS)
def test_the_targets_distribution_with_a_reduced_vocabulary(method):
    """Tokens that the draft never proposes still come as often as they should."""
    models, params = small("trained"), SETTINGS["all filters"]
    known = np.array([1, 2, 3, 6])
    head = models.torch_target.lm_head.weight.detach().numpy()[known].T
    own = OwnVocabulary(
        head=jnp.array(head), row_of_token=rows_of_tokens(known, SMALL_VOCAB)
    )
    reduced = SimpleNamespace(
        target=models.target, draft=replace(models.draft, own=own)
    )
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(reduced, params, method), probs) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["trained", "DFlash-2"])
def test_the_packages_own_sampling(draft):
    """Its loop, which draws its drafts, and ours: one distribution, by a chi-square."""
    models = small(draft)
    params = SamplingParams(temperature=0.9, top_k=6, top_p=0.9)
    ours = sampled_counts(models, params, "probabilistic")
    theirs, place = np.zeros_like(ours), SMALL_VOCAB ** np.arange(LENGTH)[::-1]
    torch.manual_seed(0)
    for _ in range(2_000):
        output = dflash_generate(
            models.torch_draft,
            models.torch_target,
            torch.tensor([PROMPT]),
            LENGTH,
            None,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            block_size=4,
        )
        theirs[output[0, len(PROMPT) :].numpy() @ place] += 1
    often = theirs >= 10
    table = [[*counts[often], counts[~often].sum()] for counts in (ours, theirs)]
    assert often.sum() > 10
    assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        broken_rules.accepts_all,
        broken_rules.keeps_what_was_rejected,
        broken_rules.takes_another_q,
    ],
)
def test_this_test_notices_a_broken_rule(broken, monkeypatch):
    monkeypatch.setattr(accepting, "accept_sampled", broken)
    models, params = small("trained"), SETTINGS["temperature 1"]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, "probabilistic"), probs) < 1e-6
