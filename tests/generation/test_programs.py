# SPDX-License-Identifier: Apache-2.0
"""Static shapes: few programs, all compiled by warm_up, no host inside the loop."""

import re

import jax
import numpy as np
import pytest
from generators import MAX_LEN
from tiny_models import BLOCK, make_torch_draft, make_torch_target, random_prompts

from torchax_dflash import (
    DraftModel,
    Generator,
    SamplingParams,
    TargetModel,
)
from torchax_dflash.generation import step as decoding
from torchax_dflash.generation.prefill import prefill


@pytest.fixture
def fresh():
    """Models that nothing was compiled for yet."""
    return (
        TargetModel.from_torch(make_torch_target("llama", tied=True, seed=7)),
        DraftModel.from_torch(make_torch_draft(seed=8)),
    )


@pytest.mark.parametrize("with_draft", [True, False])
def test_no_compilation_after_warm_up(fresh, with_draft):
    target, draft = fresh
    before = prefill._cache_size() + decoding.decode._cache_size()
    generator = Generator(
        target, draft if with_draft else None, max_model_len=600, max_num_seqs=3
    )
    reported = []
    generator.warm_up(lambda done, total: reported.append((done, total)))
    assert reported == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert generator.stats.recompilations > 0  # the counter counts
    prompts = [[1] * n for n in (1, 15, 16, 17, 40, 64, 65, 130, 256, 257, 500)]
    for count in (1, 2, len(prompts)):
        for max_tokens in (1, 7, 40):
            generator.generate(prompts[-count:], SamplingParams(max_tokens=max_tokens))
            assert generator.stats.recompilations == 0
    after = prefill._cache_size() + decoding.decode._cache_size()
    assert after - before == 4  # three prefill sizes, one decode program


def test_no_implicit_transfer_in_a_run(fresh):
    """Tokens go in by explicit copies only. (Coming out, a CPU guards nothing: there
    the tests of the device loop and of host visits stand in.)
    """
    generator = Generator(*fresh, max_model_len=MAX_LEN, max_num_seqs=4)
    generator.warm_up()
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match=r"[Dd]isallowed"):
            jax.jit(lambda x: x + 1)(np.ones(3))  # the guard guards
        outputs = generator.generate(random_prompts(5), SamplingParams(max_tokens=20))
    assert all(output.token_ids for output in outputs)


def decode_arguments(target, draft):
    generator = Generator(target, draft, max_model_len=MAX_LEN)
    options = {"num_speculative_tokens": BLOCK - 1, "num_steps": 8}
    return (target, draft, generator._state), options | {"keep": np.array([True])}


def test_no_callback_in_the_device_loop(fresh):
    arguments, options = decode_arguments(*fresh)
    text = str(decoding.decode.trace(*arguments, **options).jaxpr)
    assert "while" in text
    for word in ("callback", "infeed", "outfeed", "device_put"):
        assert word not in text


def test_several_steps_for_each_host_visit(fresh):
    prompts, params = [[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True)
    counts = {}
    for steps in (1, 8):
        generator = Generator(*fresh, max_model_len=MAX_LEN, steps_per_visit=steps)
        events = list(generator.stream(prompts, params))
        passes = len(events[-1].output.acceptance_lengths)
        counts[steps] = len(events)
        assert len(events) == 1 + -(-passes // steps)
    assert counts[1] > counts[8] + 1


def test_weights_are_arguments_not_constants(fresh):
    arguments, options = decode_arguments(*fresh)
    text = decoding.decode.lower(*arguments, **options).as_text()
    constants = re.findall(r"dense<([^>]*)>", text)
    assert constants
    assert max(map(len, constants)) < 200
