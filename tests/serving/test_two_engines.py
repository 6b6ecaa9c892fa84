# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, one with DFlash and one without.

vLLM has one platform for both, so nothing of one engine may be remembered there.
"""

import functools

import pytest
from serving_jobs import LAZY, engine_arguments, offline, run_engine, saved
from tiny_models import pair, random_prompts

pytestmark = pytest.mark.vllm

FREE = {"max_tokens": 12, "ignore_eos": True}
PENALTY = FREE | {"repetition_penalty": 1.1}
"""tpu-inference ignores it; DFlash refuses it."""
BATCHES = [
    {"prompts": random_prompts(3, seed=5), "params": FREE},
    {"prompts": random_prompts(3, seed=5), "params": PENALTY},
]


@functools.cache
def engines(dflash_first: bool) -> dict[str, dict]:
    """What both engines answer, by "dflash" and "plain"."""
    target, draft = saved("llama", False)
    arguments = {
        "dflash": engine_arguments(target, draft, gpu_memory_utilization=0.4),
        "plain": engine_arguments(target, None, gpu_memory_utilization=0.4),
    }
    names = sorted(arguments, reverse=not dflash_first)
    jobs = [{"engine": arguments[name], "batches": BATCHES} for name in names]
    results = run_engine({"together": jobs, "environment": LAZY})["together"]
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("dflash_first", [True, False])
def test_each_engine_checks_its_own_requests(dflash_first):
    both = engines(dflash_first)
    assert both["plain"]["errors"] == [None, None]
    free, penalty = both["dflash"]["errors"]
    assert free is None
    assert "repetition_penalty: expected 1 with DFlash" in penalty


@pytest.mark.parametrize("dflash_first", [True, False])
def test_both_engines_answer_as_offline(dflash_first):
    both = engines(dflash_first)
    want = [output.token_ids for output in offline(pair("llama", False), BATCHES[0])]
    assert both["dflash"]["outputs"][0] == both["plain"]["outputs"][0] == want
