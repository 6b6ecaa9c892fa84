# SPDX-License-Identifier: Apache-2.0
"""A generator's runs: streams, interruptions, bfloat16, and what it counts."""

import copy

import pytest
import torch
from generators import generators
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
    """Each token is the float32 target's best, or as near to it as bfloat16 can tell.

    That is: nearer than the errors of PyTorch's own bfloat16 on the same text, on two
    tokens, could make them.
    """
    target = TargetModel.from_torch(tiny.torch_target, dtype="bfloat16")
    draft = DraftModel.from_torch(tiny.torch_draft, dtype="bfloat16")
    generator = Generator(target, draft, max_model_len=80, max_num_seqs=2)
    generator.warm_up()
    prompts = random_prompts(6, seed=20, longest=30)
    outputs = generator.generate(prompts, SamplingParams(max_tokens=30))
    assert generator.stats.recompilations == 0
    rounded = copy.deepcopy(tiny.torch_target).to(torch.bfloat16)
    count = 0
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            exact = tiny.torch_target(ids).logits[0]
            error = (rounded(ids).logits[0].float() - exact).abs().max()
        rows = exact[len(output.prompt_token_ids) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (rows.max(-1).values - chosen).max() <= 2 * error
        count += len(chosen)
    assert count > 100
    lengths = [n for output in outputs for n in output.acceptance_lengths]
    assert sum(lengths) > 1.05 * len(lengths)  # drafts are accepted, too


def test_stats_count_what_the_outputs_hold(tiny):
    dflash, _ = generators(tiny, batch=2)
    outputs = dflash.generate(random_prompts(5), SamplingParams(max_tokens=17))
    assert dflash.stats.decode_tokens == sum(len(o.token_ids) - 1 for o in outputs)
    assert dflash.stats.decode_seconds > 0
    assert dflash.stats.prefill_seconds > 0
