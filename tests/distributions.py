# SPDX-License-Identifier: Apache-2.0
"""The exact distribution of a tiny target's next tokens, and samples against it."""

import functools
from types import SimpleNamespace

import numpy as np
import torch
from conftest import (
    DFLASH2,
    continuations,
    make_torch_draft,
    make_torch_target,
    train_draft,
)
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchax_dflash import DraftModel, SamplingParams, TargetModel

SMALL_VOCAB, LENGTH = 8, 3


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


def exact_distribution(torch_target, prompt: list[int], params: SamplingParams):
    """Probability of each continuation, [V ** LENGTH]."""
    warpers = LogitsProcessorList()
    if params.repetition_penalty != 1:
        warpers.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    texts, probs = torch.tensor([prompt]), torch.ones(1)
    said = torch.zeros(1, SMALL_VOCAB)
    said[0, prompt[-1]] = 1  # the anchor is output
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = torch_target(texts, use_cache=False).logits[:, -1]
        logits = RepetitionFirst(warpers, params, said)(texts, logits)
        step = torch.softmax(logits, dim=-1)
        probs = (probs[:, None] * step).flatten()
        tokens = torch.arange(SMALL_VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(SMALL_VOCAB, 0), tokens], dim=1)
        said = said.repeat_interleave(SMALL_VOCAB, 0)
        said = said + torch.nn.functional.one_hot(tokens[:, 0], SMALL_VOCAB)
    return probs.double().numpy()


class RepetitionFirst:
    """Penalties (transformers has not all of them), then the rest."""

    def __init__(self, warpers, params: SamplingParams, said: torch.Tensor) -> None:
        self.warpers, self.params, self.said = warpers, params, said

    def __call__(self, texts, logits):
        warpers = list(self.warpers)
        if self.params.repetition_penalty != 1:
            logits = warpers.pop(0)(texts, logits)
        logits = logits - self.params.frequency_penalty * self.said
        logits = logits - self.params.presence_penalty * (self.said > 0)
        for warper in warpers:
            logits = warper(texts, logits)
        return logits


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of the chi-square test; rare continuations are taken together."""
    assert counts[probs == 0].sum() == 0, "a token that the filters exclude"
    expected = probs * counts.sum()
    rare = expected < 10
    groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
    groups.append((counts[rare].sum(), expected[rare].sum()))
    if groups[-1][1] < 10:
        (last, wanted), (more, wanted_more) = groups.pop(), groups.pop()
        groups.append((last + more, wanted + wanted_more))
    observed, wanted = map(np.array, zip(*groups, strict=True))
    assert len(observed) > 5
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
