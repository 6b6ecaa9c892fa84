# SPDX-License-Identifier: Apache-2.0
"""Sampled requests: seeds, neighbours in the batch, penalties, log-probabilities."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from generators import MAX_LEN
from tiny_models import pair, random_prompts

from torchax_dflash import Generator, SamplingParams

DRAWN = SamplingParams(max_tokens=24, temperature=1.0, seed=11, ignore_eos=True)


def answers(models, prompts, params, **options) -> list:
    generator = Generator(models.target, models.draft, max_model_len=MAX_LEN, **options)
    return generator.generate(prompts, params)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_seed_gives_its_output_whatever_runs_beside_it(method):
    models, prompts = pair("llama", False), random_prompts(5, seed=41)
    params = [replace(DRAWN, seed=100 + i) for i in range(len(prompts))]
    params[2] = replace(params[2], temperature=0.0)
    options = {"draft_sample_method": method}
    together = answers(models, prompts, params, max_num_seqs=4, **options)
    again = answers(models, prompts, params, max_num_seqs=2, **options)
    alone = [
        answers(models, [prompt], [own], **options)[0]
        for prompt, own in zip(prompts, params, strict=True)
    ]
    want = [output.token_ids for output in alone]
    assert [output.token_ids for output in together] == want
    assert [output.token_ids for output in again] == want
    greedy = Generator(models.target, max_model_len=MAX_LEN).generate(
        [prompts[2]], replace(DRAWN, temperature=0.0)
    )
    assert want[2] == greedy[0].token_ids


def test_seeds_differ_and_none_is_another_one_each_time():
    models = pair("llama", False)
    same = answers(models, [[5, 6]] * 4, DRAWN, max_num_seqs=4)
    assert len({tuple(output.token_ids) for output in same}) == 4
    free = replace(DRAWN, seed=None)
    first, second = (answers(models, [[5, 6]], free)[0].token_ids for _ in range(2))
    assert first != second


def test_a_temperature_near_zero_is_greedy():
    models, prompts = pair("llama", False), random_prompts(4, seed=42)
    cold = answers(models, prompts, replace(DRAWN, temperature=2e-5), max_num_seqs=4)
    greedy = answers(models, prompts, replace(DRAWN, temperature=0), max_num_seqs=4)
    assert [o.token_ids for o in cold] == [o.token_ids for o in greedy]


def test_greedy_with_a_repetition_penalty_equals_transformers():
    models, prompts = pair("llama", False), random_prompts(6, seed=43)
    params = SamplingParams(max_tokens=40, repetition_penalty=1.3, ignore_eos=True)
    got = answers(models, prompts, params, max_num_seqs=4)
    assert sum(sum(output.from_draft) for output in got) > 5
    for prompt, output in zip(prompts, got, strict=True):
        want = models.torch_target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            repetition_penalty=1.3,
            eos_token_id=None,
        )
        assert output.token_ids == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets(temperature):
    models, (prompt,) = pair("llama", False), random_prompts(1, seed=44)
    params = replace(DRAWN, logprobs=True, temperature=temperature)
    (output,) = answers(models, [prompt], params)
    with torch.no_grad():
        ids = torch.tensor([prompt + output.token_ids])
        logits = models.torch_target(ids, use_cache=False).logits[0]
    all_ = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    want = all_.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(output.logprobs, want, atol=1e-4)


def test_drawn_drafts_are_accepted_more_often_than_likeliest_ones():
    models, prompts = pair("llama", False), random_prompts(8, seed=45) * 4
    params = replace(DRAWN, temperature=1.5, max_tokens=48)

    def accepted(method: str) -> int:
        outputs = answers(
            models, prompts, params, max_num_seqs=8, draft_sample_method=method
        )
        return sum(sum(output.from_draft) for output in outputs)

    assert accepted("probabilistic") > accepted("greedy")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    generator = Generator(pair("llama", False).target, max_model_len=32)
    with pytest.raises(ValueError, match=f"{field}: expected .*got {value}"):
        generator.generate([[1]], SamplingParams(**{field: value}))


def test_params_of_another_number_and_unknown_methods_are_refused():
    models = pair("llama", False)
    with pytest.raises(ValueError, match="params: expected one, or one for each of 2"):
        answers(models, [[1], [2]], [DRAWN])
    with pytest.raises(ValueError, match="draft_sample_method: expected greedy or"):
        answers(models, [[1]], DRAWN, draft_sample_method="beam")


def test_idle_rows_ask_for_nothing():
    """Else a greedy batch does the work of a drawn one until the row is taken again."""
    tiny = pair("llama", False)
    generator = Generator(
        tiny.target, tiny.draft, max_num_seqs=2, max_model_len=MAX_LEN
    )
    special = SamplingParams(
        max_tokens=3, temperature=1.0, top_k=3, logprobs=True, presence_penalty=1.0
    )
    generator.generate(
        random_prompts(2), [special, SamplingParams(max_tokens=60, ignore_eos=True)]
    )
    state = generator._state
    for idle in (state.sampling.draws, state.sampling.logprobs, state.penalties.active):
        assert not idle.any()
