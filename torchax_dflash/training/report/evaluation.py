# SPDX-License-Identifier: Apache-2.0
"""How much of a draft its target accepts, through the real generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchax_dflash.core.config import config_error
from torchax_dflash.generation.generator import Generator
from torchax_dflash.generation.outputs import GenerationOutput
from torchax_dflash.generation.sampling_params import SamplingParams
from torchax_dflash.generation.text import chat_token_ids
from torchax_dflash.training.data.prompts import TrainingPrompt


@dataclass(frozen=True)
class Acceptance:
    """The acceptance on one set of questions.

    Attributes:
        prompts: number of questions.
        tokens: tokens generated, without each answer's first one.
        passes: target passes, without the prefills.
        accepted: by position, the share of passes in which this draft was accepted.
    """

    prompts: int
    tokens: int
    passes: int
    accepted: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Mean tokens per target pass; plain decoding gives 1.0."""
        return self.tokens / self.passes if self.passes else 0.0

    def to_json(self) -> dict[str, Any]:
        """As in report.json."""
        return {
            "tau": round(self.tau, 4),
            "accepted": [round(share, 4) for share in self.accepted],
            "prompts": self.prompts,
            "tokens": self.tokens,
            "passes": self.passes,
        }


def measure(
    generator: Generator,
    questions: list[TrainingPrompt],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    on_answer: Callable[[int, int], None] = lambda done, total: None,
) -> Acceptance:
    """Answers questions with the draft and counts accepted tokens.

    Args:
        generator: has target, draft and tokenizer.
        questions: asked in the chat template.
        max_tokens: the most tokens in an answer.
        temperature: 0 for greedy answers.
        on_answer: called with (answers finished, questions).

    Raises:
        ValueError: there are no questions, or the target has no chat template.
    """
    if not questions:
        raise config_error(
            "--sets", "at least one question", questions, "Name other sets."
        )
    prompts = [chat_token_ids(generator.tokenizer, q.text) for q in questions]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index)
        for index in range(len(prompts))
    ]
    outputs: dict[int, GenerationOutput] = {}
    finished = 0
    for event in generator.stream(prompts, params):
        outputs[event.index] = event.output
        if event.output.finish_reason:
            finished += 1
            on_answer(finished, len(prompts))
    lengths = [n for output in outputs.values() for n in output.acceptance_lengths]
    positions = range(1, generator.num_speculative_tokens + 1)
    return Acceptance(
        prompts=len(outputs),
        tokens=sum(lengths),
        passes=len(lengths),
        accepted=tuple(
            sum(n > position for n in lengths) / max(1, len(lengths))
            for position in positions
        ),
    )
