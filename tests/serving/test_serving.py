# SPDX-License-Identifier: Apache-2.0
"""DFlash in the real vLLM and tpu-inference, on JAX's CPU backend, offline.

Each engine answers the same batches, made to go wrong between requests. Its outputs
must be the target's own, and every draft it ever made that of the unmodified PyTorch
module: whatever prefix caching, chunking, preemption or scheduling did in between.
"""

import functools
import itertools

import pytest
from serving_jobs import (
    ACCEPTED,
    DRAFTED,
    LIMITS,
    batches,
    check_drafts,
    engine_arguments,
    offline,
    run_batches,
    save_pair,
    saved,
    served,
    token_ids,
)
from tiny_models import BLOCK, memorised_pair, pair, random_prompts

pytestmark = pytest.mark.vllm

PAIRS = [
    ("llama", True),
    ("llama", False),
    ("qwen2", False),
    ("qwen3", True),
    ("qwen3", False),
    ("granite", True),
    ("qwen3_moe", False),
    ("llama", False, "DFlash-2"),
    ("qwen3", True, "sliding and full"),
]


@pytest.mark.parametrize("name", batches())
@pytest.mark.parametrize("models", PAIRS)
def test_outputs_are_the_targets_and_drafts_the_oracles(models, name):
    tiny, engine = pair(*models), served(*models)
    batch, outputs = batches()[name], engine.outputs[name]
    assert outputs == token_ids(offline(tiny, batch))
    assert check_drafts(tiny, batch, outputs, engine.drafts[name]) > 20


def test_outputs_equal_the_engine_without_a_draft():
    without = served("llama", False, with_draft=False)
    assert served("llama", False).outputs == without.outputs


def test_the_cached_prefix_is_used():
    """What its drafts are is tested above; here, that nothing was computed twice."""
    metrics = served("llama", False).metrics
    hits = "vllm:prefix_cache_hits"
    first, second = metrics["shared prefix"], metrics["shared prefix, cached"]
    assert second[hits] - first[hits] > 5 * 48


@functools.cache
def served_in_step():
    """Without async scheduling, the engine's steps are the generator's."""
    target, draft = saved("llama", False)
    arguments = engine_arguments(target, draft, async_scheduling=False)
    return run_batches(arguments, batches())


def offline_steps(tiny, batch: dict) -> list[list[int]]:
    """Acceptance lengths of each request, up to the step that reaches its limit.

    Near a limit the generator drafts shorter blocks and the engine does not, so this
    generator's limits are farther away.
    """
    limit = batch["params"]["max_tokens"]
    longer = batch | {"params": batch["params"] | {"max_tokens": limit + BLOCK}}
    found = []
    for output in offline(
        tiny, longer, with_draft=True, max_model_len=LIMITS["max_model_len"] + BLOCK
    ):
        lengths, done = [], 1  # prefill gives the first token
        for length in output.acceptance_lengths:
            if done >= limit:
                break
            lengths.append(length)
            done += length
        found.append(lengths)
    return found


@pytest.mark.parametrize("name", batches())
def test_sync_scheduling_step_by_step_as_offline(name):
    """The same tokens drafted and accepted in each step of each request."""
    tiny, engine, batch = pair("llama", False), served_in_step(), batches()[name]
    assert engine.outputs[name] == token_ids(offline(tiny, batch))
    assert check_drafts(tiny, batch, engine.outputs[name], engine.drafts[name]) > 20
    for index, want in enumerate(offline_steps(tiny, batch)):
        first = len(batch["prompts"][index])
        positions = [d[1] for d in engine.drafts[name] if d[0] == index]
        positions = [position for position in positions if position >= first]
        lengths = [b - a for a, b in itertools.pairwise(positions)]
        # the last step's length cannot be seen where the request ended with it
        assert lengths[: len(want) - 1] == want[: len(lengths)][: len(want) - 1]
        assert name == "max_model_len" or len(lengths) >= len(want) - 1


def test_the_engines_counters_are_the_generators():
    tiny, batch = pair("llama", False), batches()["ragged"]
    steps = offline_steps(tiny, batch)
    metrics = served_in_step().metrics["ragged"]
    assert metrics[ACCEPTED] == sum(n - 1 for lengths in steps for n in lengths) > 50
    # the engine counts its first step of a one-token prompt as drafts, none accepted
    one_token = sum(len(prompt) == 1 for prompt in batch["prompts"])
    assert metrics[DRAFTED] == sum(map(len, steps)) + one_token


@functools.cache
def served_by_heart(async_scheduling: bool, dtype: str):
    """A draft that knows the texts it is asked for: a weak one could hide a fault."""
    tiny, prompts = memorised_pair()
    # 3 + 1 + 6 * 6 = 40 tokens: the texts it knows have 43
    batch = {"prompts": prompts, "params": {"max_tokens": 37, "ignore_eos": True}}
    arguments = engine_arguments(
        *save_pair(tiny),
        dtype=dtype,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=64,
    )
    engine = run_batches(
        arguments,
        {"known": batch},
        SKIP_JAX_PRECOMPILE="1",
        VLLM_XLA_CHECK_RECOMPILATION="0",
    )
    return batch, engine.outputs["known"], engine.metrics["known"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_draft_that_is_right_reaches_the_full_length(async_scheduling):
    batch, outputs, metrics = served_by_heart(async_scheduling, "float32")
    assert outputs == token_ids(offline(memorised_pair()[0], batch))
    assert metrics[DRAFTED] == len(outputs) * 6
    assert metrics[ACCEPTED] == len(outputs) * 6 * (BLOCK - 1)


def test_bfloat16_accepts_nearly_as_much():
    """Near-ties may round differently there, so texts may leave what is known."""
    _, outputs, metrics = served_by_heart(True, "bfloat16")
    assert metrics[ACCEPTED] > 0.7 * len(outputs) * 6 * (BLOCK - 1)


def test_fewer_drafts_than_the_block_many_requests_and_preemption():
    """K = 2; up to 12 requests, half of eight pages each, in a cache of 32 pages."""
    tiny = pair("llama", False)
    prompts = [(p * 64)[:60] for p in random_prompts(6, seed=34)]
    prompts += random_prompts(8, seed=36, longest=3)
    batch = {"prompts": prompts, "params": {"max_tokens": 60, "ignore_eos": True}}
    arguments = engine_arguments(
        *saved("llama", False),
        k=2,
        num_gpu_blocks_override=32,
        block_size=16,
        max_num_seqs=12,
        max_num_batched_tokens=64,
    )
    engine = run_batches(arguments, {"tight": batch})
    assert engine.outputs["tight"] == token_ids(offline(tiny, batch))
    assert engine.metrics["tight"]["vllm:num_preemptions"] > 0
    drafts = engine.drafts["tight"]
    assert check_drafts(tiny, batch, engine.outputs["tight"], drafts) > 20


@pytest.mark.smollm2
def test_the_demo_pair(smollm2):
    """A real model, whose head_dim of 64 takes the other attention kernel."""
    questions = ["What is the capital of France?", "Count from 1 to 20.", "def f(n):"]
    prompts = [smollm2.tokenizer(question).input_ids for question in questions]
    batch = {"prompts": prompts, "params": {"max_tokens": 48, "ignore_eos": True}}
    options = {"max_model_len": 256, "max_num_batched_tokens": 64}
    engine = run_batches(
        engine_arguments(smollm2.folder, smollm2.draft_folder, k=3, **options),
        {"questions": batch},
        # its many programs take minutes to compile: compile what is used
        SKIP_JAX_PRECOMPILE="1",
        VLLM_XLA_CHECK_RECOMPILATION="0",
    )
    outputs = engine.outputs["questions"]
    want = offline(
        smollm2,
        batch,
        with_draft=True,
        max_model_len=256,
        max_num_seqs=3,
        num_speculative_tokens=3,
    )
    assert outputs == token_ids(want)
    assert check_drafts(smollm2, batch, outputs, engine.drafts["questions"]) > 20
    accepted = sum(sum(output.from_draft) for output in want)
    assert 0 <= engine.metrics["questions"][ACCEPTED] - accepted <= 2 * len(prompts)


def test_tensor_parallel_on_two_devices():
    """Both models split over two virtual devices: all batches as on one."""
    target, draft = saved("llama", False)
    engine = run_batches(
        engine_arguments(target, draft, tensor_parallel_size=2),
        batches(),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert engine.outputs == served("llama", False).outputs
    for name, batch in batches().items():
        outputs, drafts = engine.outputs[name], engine.drafts[name]
        assert check_drafts(pair("llama", False), batch, outputs, drafts) > 20
