# SPDX-License-Identifier: Apache-2.0
"""A generator's runs: streams, interruptions, bfloat16, and what it counts."""

import pytest
from generators import MAX_LEN, generators
from tiny_models import pair, random_prompts

from torchax_dflash import (
    DraftModel,
    Generator,
    SamplingParams,
    TargetModel,
)
from torchax_dflash.generation import generator


@pytest.fixture
def tiny():
    return pair("llama", False)


def test_an_abandoned_stream_leaves_the_generator_usable(tiny):
    dflash, _ = generators(tiny, batch=2)
    prompts = random_prompts(5, seed=16)
    params = SamplingParams(max_tokens=30)
    want = [o.token_ids for o in dflash.generate(prompts, params)]
    stream, second = dflash.stream(prompts, params), dflash.stream(prompts, params)
    next(stream)
    for clash in (
        lambda: dflash.generate(prompts, params),
        lambda: next(second),
        dflash.warm_up,
    ):
        with pytest.raises(RuntimeError, match="one run at a time"):
            clash()
    stream.close()
    assert [o.token_ids for o in dflash.generate(prompts, params)] == want


def test_losing_the_device_state_in_a_failed_run_is_repaired(tiny, monkeypatch):
    """An interrupt inside a program takes the donated state with it."""
    dflash, _ = generators(tiny)
    prompts = random_prompts(3, seed=17)
    want = [o.token_ids for o in dflash.generate(prompts)]
    real = generator.decode

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generator, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dflash.generate(prompts)
    assert [o.token_ids for o in dflash.generate(prompts)] == want


def test_streaming_gives_the_same_tokens_bit_by_bit(tiny):  # text: test_text.py
    dflash, _ = generators(tiny, steps_per_visit=2)
    prompts = random_prompts(5, seed=18)
    params = SamplingParams(max_tokens=30)
    want = dflash.generate(prompts, params)
    events, seen = 0, {}
    for event in dflash.stream(prompts, params):
        events += 1
        before = seen.get(event.index, [])
        assert event.output.token_ids[: len(before)] == before
        assert len(event.output.token_ids) > len(before)
        seen[event.index] = list(event.output.token_ids)
    assert seen == {i: o.token_ids for i, o in enumerate(want)}
    assert events > 2 * len(prompts)


def test_from_draft_marks_accepted_drafts(tiny):
    dflash, plain = generators(tiny)
    prompts = random_prompts(8, seed=19)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for output in dflash.generate(prompts, params):
        # Each pass ends with a token of its own, but the last, which the limit may cut.
        want = [False]
        for length in output.acceptance_lengths:
            want += [True] * (length - 1) + [False]
        assert output.from_draft[:-1] == want[:-1]
    assert not any(any(o.from_draft) for o in plain.generate(prompts, params))


def test_bfloat16_runs_without_compiling_anew(tiny):
    """Near-ties may fall otherwise than in one-row passes; everything else holds."""
    target = TargetModel.from_torch(tiny.torch_target, dtype="bfloat16")
    draft = DraftModel.from_torch(tiny.torch_draft, dtype="bfloat16")
    generator = Generator(target, draft, max_model_len=MAX_LEN, max_num_seqs=2)
    generator.warm_up()
    prompts = random_prompts(6, seed=20)
    outputs = generator.generate(prompts, SamplingParams(max_tokens=30))
    assert generator.stats.recompilations == 0
    exact, _ = generators(tiny)
    want = exact.generate(prompts, SamplingParams(max_tokens=30))
    first = [output.token_ids[:3] for output in outputs]
    assert sum(a == o.token_ids[:3] for a, o in zip(first, want, strict=True)) >= 4
    assert max(n for output in outputs for n in output.acceptance_lengths) > 1


def test_stats_count_what_the_outputs_hold(tiny):
    dflash, _ = generators(tiny, batch=2)
    outputs = dflash.generate(random_prompts(5), SamplingParams(max_tokens=17))
    assert dflash.stats.decode_tokens == sum(len(o.token_ids) - 1 for o in outputs)
    assert dflash.stats.decode_seconds > 0
    assert dflash.stats.prefill_seconds > 0
