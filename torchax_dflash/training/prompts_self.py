# SPDX-License-Identifier: Apache-2.0
"""Questions that the target writes itself, for when there are no prompts at hand.

An instruction-tuned model that is given its chat template up to where the user speaks
goes on as a user: with the sort of questions it was tuned on. (Xu et al. 2024,
"Magpie: Alignment Data Synthesis from Scratch".)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchax_dflash.config import config_error
from torchax_dflash.generator import Generator
from torchax_dflash.request import SamplingParams
from torchax_dflash.training.prompts import TrainingPrompt, read_prompts
from torchax_dflash.training.storage import cut_torn_line

_MARK = "QUESTION"
_LONGEST, _SHORTEST = 96, 4  # tokens of a question
_TRIES = 8  # sampled for each question asked for, before giving up


def write_prompts(
    generator: Generator,
    number: int,
    file: Path,
    *,
    seed: int,
    on_prompt: Callable[[int, int], None] = lambda done, total: None,
) -> list[TrainingPrompt]:
    """Lets the target write questions until there are `number` of them.

    Args:
        generator: of the target, with its tokenizer.
        number: of questions, with those that `file` already holds.
        file: JSON lines that `read_prompts` reads; each question is on disk as soon as
            it is finished, and an interrupted run goes on behind the last.
        seed: of everything random.
        on_prompt: called with (questions there, questions wanted).

    Returns:
        The questions, each once: those that came to their end, of 4 to 96 tokens.

    Raises:
        ValueError: the target has no chat template, or hardly ever ends a question.
    """
    opening = user_turn(generator.tokenizer)
    longest = min(_LONGEST, generator.max_model_len - len(opening))
    written = []
    if file.is_file():
        cut_torn_line(file)
        lines = file.read_text(encoding="utf-8").splitlines()
        written = [json.loads(line) for line in lines]
    seen = {line["prompt"] for line in written}
    first = max((line["seed"] for line in written), default=-1) + 1
    end = first + _TRIES * number + generator.max_num_seqs
    while len(seen) < number and first < end:
        count = max(generator.max_num_seqs, math.ceil(1.2 * (number - len(seen))))
        params = [
            SamplingParams(
                max_tokens=longest,
                temperature=1.0,
                top_p=0.9,
                seed=_mixed(seed, first + index),
            )
            for index in range(min(count, end - first))
        ]
        for event in generator.stream([opening] * len(params), params):
            output = event.output
            if output.finish_reason != "stop" or len(output.token_ids) < _SHORTEST:
                continue
            text = output.text.strip()
            if not text or text in seen or len(seen) >= number:
                continue
            seen.add(text)
            line = {"prompt": text, "kind": "self", "seed": first + event.index}
            with file.open("a", encoding="utf-8") as lines_of_file:
                lines_of_file.write(json.dumps(line, ensure_ascii=False) + "\n")
            on_prompt(len(seen), number)
        first += len(params)
    if len(seen) < number:
        raise config_error(
            "--self-prompts",
            f"a target that writes {number} questions",
            f"{len(seen)} in {end} tries",
            "Give prompts with --prompts, or ask for fewer.",
        )
    return list(read_prompts([file]))[:number]


def user_turn(tokenizer: Any) -> list[int]:
    """The chat template's tokens, up to where the user speaks.

    Raises:
        ValueError: the tokenizer has no chat template, or one that hides the question.
    """
    template = tokenizer.chat_template
    text = template and tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False
    )
    opening, found, _ = (text or "").partition(_MARK)
    if not (opening and found):
        raise config_error(
            "--self-prompts",
            "a target whose chat template shows where the user speaks",
            "no chat template" if not template else template[:80],
            "Give prompts with --prompts.",
        )
    return tokenizer(opening, add_special_tokens=False).input_ids


def _mixed(seed: int, index: int) -> int:
    return (seed * 1_000_003 + index) % (1 << 31)
