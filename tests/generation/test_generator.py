# SPDX-License-Identifier: Apache-2.0
"""Generation is lossless, and step by step what the package's own loop does."""

import dataclasses
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from breadth import mostly_slow
from generators import MAX_LEN, assert_lossless, generators
from tiny_models import (
    BLOCK,
    MASK_ID,
    PAIRS,
    pair,
    random_prompts,
    reference_generate,
)

from torchax_dflash import Generator, SamplingParams


def test_equals_plain_decoding(any_pair):
    dflash, plain = generators(any_pair)
    prompts = random_prompts(56)
    params = SamplingParams(max_tokens=64)
    ours, want = dflash.generate(prompts, params), plain.generate(prompts, params)
    lengths = [n for output in ours for n in output.acceptance_lengths]
    assert max(lengths) == BLOCK  # whole blocks are accepted, too
    for output, reference in zip(ours, want, strict=True):
        assert_lossless(any_pair.torch_target, output, reference)
        assert sum(output.acceptance_lengths) == len(output.token_ids) - 1
        assert output.finish_reason == reference.finish_reason


def test_plain_decoding_equals_transformers(any_pair):
    _, plain = generators(any_pair)
    prompts = random_prompts(8)
    for output in plain.generate(prompts, SamplingParams(max_tokens=32)):
        ids = torch.tensor([output.prompt_token_ids])
        want = any_pair.torch_target.generate(ids, max_new_tokens=32, do_sample=False)
        assert output.token_ids == want[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("k", mostly_slow([None, 1, 3], fast=[None, 3]))
def test_equals_the_packages_own_loop_step_by_step(any_pair, k):
    dflash, _ = generators(any_pair, k=k)
    prompts = random_prompts(16)
    outputs = dflash.generate(prompts, SamplingParams(max_tokens=50))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, lengths = reference_generate(
            any_pair.torch_draft,
            any_pair.torch_target,
            prompt,
            50,
            stop_ids=list(any_pair.target.config.eos_token_ids),
            block_size=None if k is None else k + 1,
        )
        assert output.token_ids == tokens
        assert output.acceptance_lengths == lengths


@pytest.fixture(params=mostly_slow(PAIRS, fast=["llama-untied"]))
def one_pair(request):
    """For claims that hardly depend on the family."""
    family, head = request.param.split("-")
    return pair(family, head == "tied")


@pytest.fixture(scope="module")
def tiny():
    return pair("llama", False)


@pytest.fixture(scope="module")
def long_outputs(tiny):
    """Outputs of prompts, long enough to end them anywhere."""
    dflash, _ = generators(tiny)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    return dflash.generate(random_prompts(12), params)


def test_stop_token_anywhere_in_a_block(tiny, long_outputs):
    """Also as the first token, and inside a block: same tokens, same steps."""
    dflash, _ = generators(tiny)
    inside = 0
    for output in long_outputs[:6]:
        for stop in dict.fromkeys(output.token_ids[:24]):
            end = output.token_ids.index(stop) + 1
            params = SamplingParams(
                max_tokens=48, stop_token_ids=(stop,), ignore_eos=True
            )
            got = dflash.generate([output.prompt_token_ids], params)[0]
            assert got.token_ids == output.token_ids[:end]
            assert got.finish_reason == "stop"
            tokens, lengths = reference_generate(
                tiny.torch_draft, tiny.torch_target, output.prompt_token_ids, 48, [stop]
            )
            assert (got.token_ids, got.acceptance_lengths) == (tokens, lengths)
            inside += (
                got.acceptance_lengths != output.acceptance_lengths[: len(lengths)]
            )
    assert inside  # some blocks were really cut


def test_eos_of_the_target_and_ignore_eos(tiny, long_outputs):
    config = tiny.target.config
    eos = long_outputs[0].token_ids[3]
    target = replace(tiny.target, config=replace(config, eos_token_ids=(eos,)))
    generator = Generator(target, tiny.draft, max_model_len=MAX_LEN)
    prompt = [long_outputs[0].prompt_token_ids]
    got = generator.generate(prompt, SamplingParams(max_tokens=48))[0]
    end = long_outputs[0].token_ids.index(eos) + 1
    assert got.token_ids == long_outputs[0].token_ids[:end]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    assert generator.generate(prompt, params)[0].token_ids == long_outputs[0].token_ids


@pytest.mark.parametrize(
    "max_tokens", mostly_slow(range(1, 14), fast=[1, 2, 5, 6, 7, 13])
)
def test_max_tokens_in_mid_block(tiny, long_outputs, max_tokens):
    dflash, _ = generators(tiny)
    prompts = [output.prompt_token_ids for output in long_outputs]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for got, output in zip(dflash.generate(prompts, params), long_outputs, strict=True):
        assert got.token_ids == output.token_ids[:max_tokens]
        assert got.finish_reason == "length"
        reference = reference_generate(
            tiny.torch_draft, tiny.torch_target, output.prompt_token_ids, max_tokens
        )
        assert (got.token_ids, got.acceptance_lengths) == reference


@pytest.mark.parametrize("index", mostly_slow(range(4), fast=[0]))
@pytest.mark.parametrize("room", mostly_slow([1, 2, 3, 5, 8], fast=[1, 3, 8]))
def test_max_model_len_in_mid_block(tiny, long_outputs, room, index):
    """Down to a prompt that leaves room for one token."""
    output = long_outputs[index]
    prompt = output.prompt_token_ids
    generator = Generator(tiny.target, tiny.draft, max_model_len=len(prompt) + room)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    got = generator.generate([prompt], params)[0]
    assert got.token_ids == output.token_ids[:room]
    assert got.finish_reason == "length"


def test_one_token_prompts(tiny):
    dflash, plain = generators(tiny)
    prompts = [[token] for token in range(12)]
    params = SamplingParams(max_tokens=40)
    for got, want in zip(
        dflash.generate(prompts, params), plain.generate(prompts, params), strict=True
    ):
        assert got.token_ids == want.token_ids


def test_long_prompts_in_several_chunks(one_pair):
    dflash, plain = generators(one_pair, batch=2, max_model_len=700)
    prompts = random_prompts(3, seed=13, longest=30)
    prompts = [
        (prompt * 600)[:n] for prompt, n in zip(prompts, (256, 417, 600), strict=True)
    ]
    params = SamplingParams(max_tokens=24)
    for got, want in zip(
        dflash.generate(prompts, params), plain.generate(prompts, params), strict=True
    ):
        assert_lossless(one_pair.torch_target, got, want)
        reference = reference_generate(
            one_pair.torch_draft,
            one_pair.torch_target,
            got.prompt_token_ids,
            24,
            stop_ids=list(one_pair.target.config.eos_token_ids),
        )
        assert (got.token_ids, got.acceptance_lengths) == reference


def test_mask_id_as_an_ordinary_token(tiny):
    """In prompts and as anchor it is a token like any other, and is never stripped."""
    dflash, plain = generators(tiny)
    prompts = [[MASK_ID], [MASK_ID] * 5, [1, MASK_ID, 3, MASK_ID]]
    params = SamplingParams(max_tokens=40)
    for prompt, got, want in zip(
        prompts,
        dflash.generate(prompts, params),
        plain.generate(prompts, params),
        strict=True,
    ):
        reference = reference_generate(
            tiny.torch_draft, tiny.torch_target, prompt, 40, [2]
        )
        assert got.token_ids == want.token_ids == reference[0]
        assert got.acceptance_lengths == reference[1]


def test_mask_id_inside_a_block_is_emitted():
    """A draft whose mask id is a token that the target really writes."""
    tiny = pair("qwen3", True)
    plain = Generator(tiny.target, max_model_len=MAX_LEN)
    prompts = random_prompts(6)
    want = plain.generate(prompts, SamplingParams(max_tokens=40))
    written = [token for output in want for token in output.token_ids]
    common = max(set(written), key=written.count)
    config = tiny.draft.config
    draft = replace(tiny.draft, config=replace(config, mask_token_id=common))
    generator = Generator(tiny.target, draft, max_model_len=MAX_LEN, max_num_seqs=3)
    got = generator.generate(prompts, SamplingParams(max_tokens=40))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]


def test_batch_equals_each_prompt_alone(one_pair):
    """More prompts than rows: rows are freed and filled again."""
    prompts = random_prompts(11, seed=14)
    params = SamplingParams(max_tokens=30)
    batch, _ = generators(one_pair, batch=4)
    single, _ = generators(one_pair, batch=1)
    for got, prompt in zip(batch.generate(prompts, params), prompts, strict=True):
        want = single.generate([prompt], params)[0]
        assert got.token_ids == want.token_ids
        assert got.acceptance_lengths == want.acceptance_lengths


def test_state_of_one_run_never_reaches_the_next(tiny):
    dflash, _ = generators(tiny, batch=2)
    prompts = random_prompts(6, seed=15)
    params = SamplingParams(max_tokens=30)
    single, _ = generators(tiny, batch=1)
    want = [single.generate([prompt], params) for prompt in prompts]
    # Poison everything the pools hold between runs.
    for prompt, expected in zip(prompts, want, strict=True):
        state = dflash._state
        pools = jax.tree.map(
            lambda x: jax.numpy.full_like(x, np.nan),
            (state.target_pool, state.draft_pool),
        )
        dflash._state = dataclasses.replace(
            state, target_pool=pools[0], draft_pool=pools[1]
        )
        got = dflash.generate([prompt], params)[0]
        assert got.token_ids == expected[0].token_ids
        assert got.acceptance_lengths == expected[0].acceptance_lengths
