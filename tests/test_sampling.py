# SPDX-License-Identifier: Apache-2.0
"""Sampling is lossless: the output has the target's distribution, whatever is drafted.

The distribution is computed from transformers' own model and logits processors, and
held against many samples of our decode loop by a chi-square test.
"""

from dataclasses import replace

import broken_rules
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import pair, random_prompts
from dflash.model import dflash_generate
from distributions import LENGTH, SMALL_VOCAB, exact_distribution, p_value, small
from scipy.stats import chi2_contingency

from torchax_dflash import (
    Generator,
    SamplingParams,
    accepting,
    attention,
    decode_state,
    decoding,
)

SAMPLES = 50_000
PROMPT = [1, 3, 5, 1, 7]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    """Each of many samples has its own pool, so let it be small."""
    monkeypatch.setattr(decode_state, "PAGE_SIZE", 16)
    monkeypatch.setattr(attention, "_TILE", 16)


def sampled_counts(models, params: SamplingParams, method: str) -> np.ndarray:
    """How often each continuation of the prompt came, [V ** LENGTH]."""
    generator = Generator(
        models.target, models.draft, max_model_len=16, num_speculative_tokens=3
    )
    *prompt, anchor = PROMPT
    # the prefill draws the anchor, so it is put into its place by hand
    generator.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    state = generator._state
    output = jnp.zeros((1, SMALL_VOCAB), jnp.int32).at[0, anchor].set(1)
    settings = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
    state = replace(
        state,
        anchors=jnp.array([anchor], jnp.int32),
        limits=jnp.array([16], jnp.int32),
        active=jnp.array([True]),
        sampling=replace(
            state.sampling,
            **{
                name: jnp.full_like(getattr(state.sampling, name), value)
                for name, value in settings.items()
            },
        ),
        penalties=replace(
            state.penalties,
            repetition=jnp.array([params.repetition_penalty], jnp.float32),
            presence=jnp.array([params.presence_penalty], jnp.float32),
            frequency=jnp.array([params.frequency_penalty], jnp.float32),
            in_output=output,
        ),
    )

    @jax.jit
    @jax.vmap
    def run(seed):
        seeded = replace(state, sampling=replace(state.sampling, seed=seed[None]))
        _, steps = decoding.decode.__wrapped__(
            models.target,
            models.draft,
            seeded,
            keep=jnp.array([True]),
            num_speculative_tokens=3,
            num_steps=LENGTH,
            draft_sample_method=method,
        )
        return steps.token_ids[:, 0], steps.num_tokens[:, 0]

    counts, batch = np.zeros(SMALL_VOCAB**LENGTH, int), 1_000
    for first in range(0, SAMPLES, batch):
        tokens, numbers = jax.device_get(
            run(jnp.arange(first, first + batch, dtype=jnp.uint32))
        )
        is_output = np.arange(tokens.shape[2]) < numbers[..., None]
        order = np.argsort(~is_output.reshape(batch, -1), axis=1, kind="stable")
        said = np.take_along_axis(tokens.reshape(batch, -1), order, 1)[:, :LENGTH]
        code = said @ (SMALL_VOCAB ** np.arange(LENGTH)[::-1])
        counts += np.bincount(code, minlength=len(counts))
    return counts


SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6, top-k": SamplingParams(temperature=0.6, top_k=4),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "all filters": SamplingParams(temperature=0.9, top_k=6, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
    ),
}


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_targets_distribution(name, method):
    models, params = small("trained"), SETTINGS[name]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, method), probs) > 1e-3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_targets_distribution_with_a_draft_that_knows_nothing(method):
    models, params = small("untrained"), SETTINGS["temperature 1"]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, method), probs) > 1e-3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_targets_distribution_with_a_candidate_selector(method):
    """Its q is over the candidates; filters of the target's p are not in it."""
    models, params = small("DFlash-2"), SETTINGS["all filters"]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, method), probs) > 1e-3


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


@pytest.mark.parametrize(
    "broken",
    [
        broken_rules.accepts_all,
        broken_rules.keeps_what_was_rejected,
        broken_rules.takes_another_q,
    ],
)
def test_this_test_notices_a_broken_rule(broken, monkeypatch):
    monkeypatch.setattr(accepting, "accept", broken)
    models, params = small("trained"), SETTINGS["temperature 1"]
    probs = exact_distribution(models.torch_target, PROMPT, params)
    assert p_value(sampled_counts(models, params, "probabilistic"), probs) < 1e-6


DRAWN = SamplingParams(max_tokens=24, temperature=1.0, seed=11, ignore_eos=True)


def answers(models, prompts, params, **options) -> list:
    generator = Generator(models.target, models.draft, max_model_len=96, **options)
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
    greedy = Generator(models.target, max_model_len=96).generate(
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
    got = answers(models, prompts, params, max_num_seqs=3)
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
    generator = Generator(tiny.target, tiny.draft, max_num_seqs=2, max_model_len=128)
    special = SamplingParams(
        max_tokens=3, temperature=1.0, top_k=3, logprobs=True, presence_penalty=1.0
    )
    generator.generate(
        random_prompts(2), [special, SamplingParams(max_tokens=60, ignore_eos=True)]
    )
    state = generator._state
    for idle in (state.sampling.draws, state.sampling.logprobs, state.penalties.active):
        assert not idle.any()
