# SPDX-License-Identifier: Apache-2.0
"""The exact distribution of a tiny target's next tokens, and samples against it."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from scipy.stats import chisquare
from tiny_models import (
    DFLASH2,
    continuations,
    make_torch_draft,
    make_torch_target,
    train_draft,
)
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchax_dflash import (
    DraftModel,
    Generator,
    SamplingParams,
    TargetModel,
)
from torchax_dflash.generation import step as decoding

SMALL_VOCAB, LENGTH = 8, 3
PROMPT = [1, 3, 5, 1, 7]


@functools.cache
def small(draft: str) -> SimpleNamespace:
    """A target of eight tokens, and a draft.

    Args:
        draft: "trained", "untrained" (it knows nothing), or "DFlash-2" (trained).
    """
    sizes = {"vocab_size": SMALL_VOCAB, "hidden_size": 32, "intermediate_size": 32}
    torch_target = make_torch_target("llama", tied=False, **sizes)
    second = {"dflash_config": DFLASH2 if draft == "DFlash-2" else {}}
    torch_draft = make_torch_draft(**sizes, **second, layers=1)
    if draft != "untrained":
        ids = continuations(torch_target)
        train_draft(torch_draft, torch_target, ids, steps=60)
    return SimpleNamespace(
        torch_target=torch_target,
        torch_draft=torch_draft,
        target=TargetModel.from_torch(torch_target),
        draft=DraftModel.from_torch(torch_draft),
    )


def penalised_and_filtered(texts, logits, params: SamplingParams, in_output):
    """Logits [N, V] by transformers' own processors (and penalties, by vLLM's rule).

    Args:
        texts: int64 [N, T], prompt and output so far.
        logits: [N, V].
        params: the settings.
        in_output: [N, V], how often each token is in the output.
    """
    if params.repetition_penalty != 1:
        repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = repetition(texts, logits)
    logits = logits - params.frequency_penalty * in_output
    logits = logits - params.presence_penalty * (in_output > 0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(texts, logits)


def exact_distribution(torch_target, prompt: list[int], params: SamplingParams):
    """Probability of each continuation, [V ** LENGTH]."""
    texts, probs = torch.tensor([prompt]), torch.ones(1)
    in_output = torch.zeros(1, SMALL_VOCAB)
    in_output[0, prompt[-1]] = 1  # the anchor is output
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = torch_target(texts, use_cache=False).logits[:, -1]
        logits = penalised_and_filtered(texts, logits, params, in_output)
        step = torch.softmax(logits, dim=-1)
        probs = (probs[:, None] * step).flatten()
        tokens = torch.arange(SMALL_VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(SMALL_VOCAB, 0), tokens], dim=1)
        in_output = in_output.repeat_interleave(SMALL_VOCAB, 0)
        in_output = in_output + torch.nn.functional.one_hot(tokens[:, 0], SMALL_VOCAB)
    return probs.double().numpy()


def p_value(counts: np.ndarray, probs: np.ndarray, *, least_groups: int = 6) -> float:
    """Of the chi-square test; rare continuations are taken together."""
    assert counts[probs == 0].sum() == 0, "a token that the filters exclude"
    expected = probs * counts.sum()
    rare = expected < 10
    groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
    groups.append((counts[rare].sum(), expected[rare].sum()))
    if not rare[probs > 0].any():
        groups.pop()
    elif groups[-1][1] < 10:
        (last, wanted), (more, wanted_more) = groups.pop(), groups.pop()
        groups.append((last + more, wanted + wanted_more))
    observed, wanted = map(np.array, zip(*groups, strict=True))
    assert len(observed) >= least_groups
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


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


def sampled_counts(
    models, params: SamplingParams, method: str, *, samples: int = 50_000
) -> np.ndarray:
    """How often each continuation of the prompt came, [V ** LENGTH]."""
    generator = Generator(
        models.target,
        models.draft,
        max_model_len=16,
        num_speculative_tokens=3,
        page_size=16,  # each of many samples has its own pool
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
    for first in range(0, samples, batch):
        tokens, numbers = jax.device_get(
            run(jnp.arange(first, first + batch, dtype=jnp.uint32))
        )
        is_output = np.arange(tokens.shape[2]) < numbers[..., None]
        order = np.argsort(~is_output.reshape(batch, -1), axis=1, kind="stable")
        said = np.take_along_axis(tokens.reshape(batch, -1), order, 1)[:, :LENGTH]
        code = said @ (SMALL_VOCAB ** np.arange(LENGTH)[::-1])
        counts += np.bincount(code, minlength=len(counts))
    return counts
