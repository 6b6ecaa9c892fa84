# SPDX-License-Identifier: Apache-2.0
"""Self-distillation data: the target's own answers, from batched plain decoding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from torchax_dflash.core.config import config_error
from torchax_dflash.generation.generator import Generator
from torchax_dflash.generation.sampling_params import SamplingParams
from torchax_dflash.generation.text import chat_token_ids
from torchax_dflash.training.data.prompts import TrainingPrompt
from torchax_dflash.training.data.sequences import SequenceStore, TokenSequence

_CHUNK = 4096  # prompts handed to the generator at a time


@dataclass
class AnswerProgress:
    """Counts of the current run.

    Attributes:
        answers: finished answers.
        tokens: tokens in those answers.
        left_out: prompts that were too long or too close to an evaluation question.
    """

    answers: int = 0
    tokens: int = 0
    left_out: int = 0


def answer(
    generator: Generator,
    prompts: Iterable[TrainingPrompt],
    store: SequenceStore,
    *,
    max_tokens: int,
    sampled_share: float,
    temperature: float,
    refuse: Callable[[str], bool],
    on_answer: Callable[[AnswerProgress], None],
) -> AnswerProgress:
    """Answers every prompt that has no answer yet; stores each answer when it ends.

    Args:
        generator: runs the target, without a draft.
        prompts: may be endless if `on_answer` raises to stop the run.
        store: receives the answers; prompts that it already holds are skipped.
        max_tokens: the most tokens in an answer.
        sampled_share: share of the prompts whose answers are sampled; the others are
            answered greedily.
        temperature: of the sampled answers.
        refuse: tells whether a text must not be trained on.
        on_answer: called after each answer; an exception from it ends the run.

    Returns:
        The final counts.

    Raises:
        ValueError: the target has no chat template, or a number is out of range.
    """
    if not 0 <= sampled_share <= 1:
        raise config_error(
            "--sampled-share", "0 to 1", sampled_share, "With 0 all answers are greedy."
        )

    def params_of(prompt: TrainingPrompt) -> SamplingParams:
        # From its text, so that a prompt gets the same parameters in every run.
        digest = zlib.crc32(prompt.text.encode())
        sampled = digest % 1000 < 1000 * sampled_share
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if sampled else 0.0,
            seed=digest,
        )

    progress = AnswerProgress()
    known = {sequence.prompt for sequence in store}
    fresh = _new_prompts(
        generator,
        prompts,
        known,
        max_tokens=max_tokens,
        refuse=refuse,
        progress=progress,
    )
    while chunk := list(islice(fresh, _CHUNK)):
        # Sampled ones last: a batch without any is faster.
        chunk.sort(key=lambda item: params_of(item[0]).temperature)
        params = [params_of(prompt) for prompt, _ in chunk]
        stream = generator.stream([token_ids for _, token_ids in chunk], params)
        for event in stream:
            if event.output.finish_reason is None:
                continue
            prompt, token_ids = chunk[event.index]
            store.append(
                TokenSequence(
                    prompt=prompt.text,
                    kind=prompt.kind,
                    temperature=params[event.index].temperature,
                    num_prompt_tokens=len(token_ids),
                    token_ids=[*token_ids, *event.output.token_ids],
                )
            )
            progress.answers += 1
            progress.tokens += len(event.output.token_ids)
            on_answer(progress)
    return progress


def _new_prompts(
    generator: Generator,
    prompts: Iterable[TrainingPrompt],
    known: set[str],
    *,
    max_tokens: int,
    refuse: Callable[[str], bool],
    progress: AnswerProgress,
) -> Iterator[tuple[TrainingPrompt, list[int]]]:
    """Prompts that are new, allowed, and leave room for a full answer."""
    for prompt in prompts:
        if prompt.text in known:
            continue
        known.add(prompt.text)
        token_ids = chat_token_ids(generator.tokenizer, prompt.text)
        too_long = len(token_ids) + max_tokens > generator.max_model_len
        if too_long or refuse(prompt.text):
            progress.left_out += 1
            continue
        yield prompt, token_ids
