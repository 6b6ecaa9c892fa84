# SPDX-License-Identifier: Apache-2.0
"""Sampled requests in the real engine keep the target's distribution.

It is computed from transformers' own model and filters. Requests of all settings run in
one batch with greedy ones, which must give the greedy text.
"""

import functools
import re

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
SAMPLES, FEW = 5_000, 2_000
"""Of each of the settings, together 10,000 sequences of each way to draft. A fault that
moves one continuation of probability 1/10 by a tenth is then more than two standard
deviations off, and a wrong rule moves all of them: p < 1e-6 with the few."""


REGEXES = [r"(\[\]|\{\}){1,6}", '"[:,]{1,3}"']


ELSEWHERE = {
    "DFlash-2": {"kind": "DFlash-2"},
    "two devices, all precompiled": {
        "environment": {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "SKIP_JAX_PRECOMPILE": "0",
            "VLLM_XLA_CHECK_RECOMPILATION": "1",
        },
        "tensor_parallel_size": 2,
    },
    "a JAX-native target": {"environment": {"MODEL_IMPL_TYPE": "flax_nnx"}},
    "a JAX-native target, DFlash-2": {
        "kind": "DFlash-2",
        "environment": {"MODEL_IMPL_TYPE": "flax_nnx"},
    },
}
"""Ways to serve the same target, as arguments of `sampled`."""


def sampled(
    method: str,
    samples: int,
    broken: str | None = None,
    *,
    kind: str = "trained",
    environment: dict[str, str] | None = None,
    **options,
):
    """Continuations of one prompt, all settings and greedy rows in one batch.

    Args:
        method: draft_sample_method.
        samples: of each setting.
        broken: see `serving_engine.py`.
        kind: of draft, see `small`.
        environment: changes to it.
        options: further ones of the engine.

    Returns:
        Those drawn, by setting, each [samples, LENGTH]; the greedy ones, [., LENGTH];
        and the engine, which, if not broken, has also answered a batch for its
        log-probabilities and one of two grammars.
    """
    tiny = small(kind)
    arguments = engine_arguments(
        *characters(tiny.torch_target, tiny.torch_draft, SMALL_VOCAB),
        k=3,
        sample_method=method,
        max_num_seqs=64,
        max_num_batched_tokens=192,
        max_model_len=32,
        num_gpu_blocks_override=200,
        block_size=16,
        max_logprobs=4,  # at most the vocabulary
        **options,
    )
    common = {"max_tokens": LENGTH, "ignore_eos": True}
    params = [common | setting for setting in SETTINGS.values()] * samples
    params += [common] * (samples // 20)
    order = np.random.default_rng(0).permutation(len(params))
    batch = {"prompts": [PROMPT] * len(params), "params": [params[i] for i in order]}
    others = {
        "logprobs": {
            "prompts": [PROMPT[:n] for n in (2, 3, 4)],
            "params": common | {"logprobs": 2},
        },
        "structured": {
            "prompts": [PROMPT[:2], PROMPT[:3]] * 4,
            "params": [
                {"max_tokens": 16, "structured_outputs": {"regex": regex}}
                for regex in REGEXES * 4
            ],
        },
    }
    engine = run_batches(
        arguments,
        {"sampled": batch} | ({} if broken else others),
        options={"silent": True, "broken": broken},
        **(LAZY | (environment or {})),
    )
    assert engine.errors["sampled"] is None
    outputs = np.array(engine.outputs["sampled"])[np.argsort(order)]
    greedy = outputs[samples * len(SETTINGS) :]
    drawn = {
        name: outputs[i : samples * len(SETTINGS) : len(SETTINGS)]
        for i, name in enumerate(SETTINGS)
    }
    return drawn, greedy, engine


right = functools.cache(lambda method: sampled(method, SAMPLES))


def served_p_value(drawn: dict, name: str) -> float:
    codes = drawn[name] @ (SMALL_VOCAB ** np.arange(LENGTH)[::-1])
    counts = np.bincount(codes, minlength=SMALL_VOCAB**LENGTH)
    target, params = small("trained").torch_target, SamplingParams(**SETTINGS[name])
    return p_value(counts, exact_distribution(target, PROMPT, params))


def next_logprobs(ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = small("trained").torch_target(torch.tensor([ids]), use_cache=False)
    return torch.log_softmax(logits.logits[0, -1], dim=-1)


def greedy_text() -> list[int]:
    ids = list(PROMPT)
    for _ in range(LENGTH):
        ids.append(int(next_logprobs(ids).argmax()))
    return ids[len(PROMPT) :]


def logprobs_error(engine) -> float:
    """How far the engine's are from the target's, at most."""
    errors = []
    batch = engine.jobs["logprobs"]["prompts"]
    for prompt, output, given in zip(
        batch, engine.outputs["logprobs"], engine.logprobs["logprobs"], strict=True
    ):
        for index, token in enumerate(output):
            want = next_logprobs(prompt + output[:index])[token]
            logprob = given[index].get(str(token), -100.0)
            errors.append(abs(logprob - float(want)))
    return max(errors)


def structured_are_valid(engine) -> bool:
    texts = engine.texts["structured"]
    return all(map(re.fullmatch, REGEXES * 4, texts))


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_targets_distribution(name, method):
    drawn, _, _ = right(method)
    assert served_p_value(drawn, name) > 1e-3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_beside_and_after_sampled_requests(method):
    _, greedy, engine = right(method)
    assert (greedy == greedy_text()).all()
    assert logprobs_error(engine) < 1e-4
    assert structured_are_valid(engine)


def test_drawn_drafts_are_accepted_more_often():
    accepted = {
        method: right(method)[2].metrics["sampled"][ACCEPTED]
        for method in ("greedy", "probabilistic")
    }
    assert accepted["probabilistic"] > 1.05 * accepted["greedy"]


@pytest.mark.parametrize("way", ELSEWHERE)
def test_drawn_drafts_elsewhere(way):
    """Another kind of draft, of device mesh, or of target: the same distribution."""
    drawn, greedy, engine = sampled("probabilistic", FEW, **ELSEWHERE[way])
    assert min(served_p_value(drawn, name) for name in SETTINGS) > 1e-3
    assert engine.metrics["sampled"][ACCEPTED] > FEW  # some drafts are accepted
    assert (greedy == greedy_text()).all()
    assert logprobs_error(engine) < 1e-4
    assert structured_are_valid(engine)


def test_a_wrong_rule_is_noticed():
    drawn, _, _ = sampled("probabilistic", FEW, broken="keeps_what_was_rejected")
    assert max(served_p_value(drawn, name) for name in SETTINGS) < 1e-6


def test_tpu_inferences_own_rule_is_noticed():
    """If this fails, it is fixed there, and ours can be deleted."""
    drawn, greedy, _ = sampled("greedy", FEW, broken="tpu_inference")
    assert served_p_value(drawn, "filters") < 1e-6
    assert (greedy != greedy_text()).any()
