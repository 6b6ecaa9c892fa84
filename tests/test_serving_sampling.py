# SPDX-License-Identifier: Apache-2.0
"""Sampled requests in the real engine keep the target's distribution.

It is computed from transformers' own model and filters. Requests of all settings run in
one batch with greedy ones, which must give the greedy text.
"""

import functools

import numpy as np
import pytest
import torch
from distributions import LENGTH, SMALL_VOCAB, exact_distribution, p_value, small
from serving_jobs import ACCEPTED, LAZY, characters, engine_arguments, run_batches

from torchax_dflash import SamplingParams

pytestmark = pytest.mark.vllm

PROMPT = [1, 3, 5, 1, 7]
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "filters": {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
}
SAMPLES = 5_000
"""Of each of the settings. A fault that moves one continuation of probability 1/10 by a
tenth is then more than two standard deviations off, and a wrong rule moves all of them:
those below give p < 1e-6 on less than half as many."""


def sampled(method: str, samples: int, broken: str | None = None):
    """Continuations of one prompt, all settings and greedy rows in one batch."""
    tiny = small("trained")
    arguments = engine_arguments(
        *characters(tiny.torch_target, tiny.torch_draft, SMALL_VOCAB),
        k=3,
        sample_method=method,
        max_num_seqs=64,
        max_num_batched_tokens=192,
        max_model_len=32,
        num_gpu_blocks_override=200,
        block_size=16,
    )
    common = {"max_tokens": LENGTH, "ignore_eos": True}
    params = [common | setting for setting in SETTINGS.values()] * samples
    params += [common] * (samples // 20)
    order = np.random.default_rng(0).permutation(len(params))
    batch = {"prompts": [PROMPT] * len(params), "params": [params[i] for i in order]}
    engine = run_batches(
        arguments,
        {"sampled": batch},
        options={"silent": True, "broken": broken},
        **LAZY,
    )
    outputs = np.array(engine.outputs["sampled"])[np.argsort(order)]
    greedy = outputs[samples * len(SETTINGS) :]
    drawn = {
        name: outputs[i : samples * len(SETTINGS) : len(SETTINGS)]
        for i, name in enumerate(SETTINGS)
    }
    return drawn, greedy, engine.metrics["sampled"][ACCEPTED]


right = functools.cache(lambda method: sampled(method, SAMPLES))


def served_p_value(drawn: dict, name: str) -> float:
    codes = drawn[name] @ (SMALL_VOCAB ** np.arange(LENGTH)[::-1])
    counts = np.bincount(codes, minlength=SMALL_VOCAB**LENGTH)
    target, params = small("trained").torch_target, SamplingParams(**SETTINGS[name])
    return p_value(counts, exact_distribution(target, PROMPT, params))


def greedy_text() -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = small("trained").torch_target(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_targets_distribution(name, method):
    drawn, _, _ = right(method)
    assert served_p_value(drawn, name) > 1e-3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_greedy_rows_beside_sampled_ones(method):
    _, greedy, _ = right(method)
    assert (greedy == greedy_text()).all()


def test_drawn_drafts_are_accepted_more_often():
    assert right("probabilistic")[2] > 1.05 * right("greedy")[2]


@pytest.mark.parametrize("rule", ["keeps_what_was_rejected", "tpu_inference"])
def test_this_test_notices_a_wrong_rule(rule):
    method = "greedy" if rule == "tpu_inference" else "probabilistic"
    drawn, greedy, _ = sampled(method, SAMPLES * 2 // 5, broken=rule)
    assert min(served_p_value_or_zero(drawn, name) for name in SETTINGS) < 1e-6
    if rule == "tpu_inference":
        assert (greedy != greedy_text()).any()


def served_p_value_or_zero(drawn: dict, name: str) -> float:
    try:
        return served_p_value(drawn, name)
    except AssertionError:  # tokens that the filters exclude
        return 0.0
