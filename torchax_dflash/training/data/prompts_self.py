# SPDX-License-Identifier: Apache-2.0
"""Questions that the target writes itself, for when there are no prompts at hand.

An instruction-tuned model that is given its chat template up to where the user speaks
goes on as a user: with the sort of questions it was tuned on. (Xu et al. 2024,
"Magpie: Alignment Data Synthesis from Scratch".)
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchax_dflash.core.config import config_error
from torchax_dflash.generation.generator import Generator
from torchax_dflash.generation.request import SamplingParams
from torchax_dflash.training.data.prompts import TrainingPrompt, lines_of, read_prompts
from torchax_dflash.training.data.storage import cut_torn_line

_MARK = "QUESTION"
_SHORTEST, _LONGEST = 4, 96  # tokens of a question, with its end
_TRIES = 8  # for each question wanted, before giving up
_PORTION = 1024  # tries that the generator is given at a time


@dataclass(frozen=True)
class UserTurn:
    """The part of a chat template where the user speaks.

    Attributes:
        opening: its tokens up to there.
        stop_token_ids: what ends the turn, where that is a special token.
        stop: what ends the turn as text, where it is none.
    """

    opening: list[int]
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


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
    turn = user_turn(generator.tokenizer)
    longest = min(_LONGEST, generator.max_model_len - len(turn.opening))
    if longest < _SHORTEST:
        raise config_error(
            "--max-model-len",
            f"at least {len(turn.opening) + _SHORTEST}, for a question",
            generator.max_model_len,
            "Choose a larger one.",
        )
    seen, first = _written(file)
    start, end = first, first + _TRIES * number + generator.max_num_seqs
    while len(seen) < number and first < end:
        wanted = math.ceil(1.2 * (number - len(seen)))
        count = min(max(generator.max_num_seqs, wanted), _PORTION, end - first)
        params = [
            SamplingParams(
                max_tokens=longest,
                temperature=1.0,
                top_p=0.9,
                seed=(seed * 1_000_003 + first + index) % 2**32,
                stop_token_ids=turn.stop_token_ids,
                stop=turn.stop,
            )
            for index in range(count)
        ]
        events = generator.stream([turn.opening] * count, params)
        with contextlib.closing(events):
            for event in events:
                output, text = event.output, event.output.text.strip()
                ended = output.finish_reason == "stop"
                if not ended or len(output.token_ids) < _SHORTEST:
                    continue
                if not text or text in seen:
                    continue
                seen.add(text)
                line = {"prompt": text, "kind": "self", "seed": first + event.index}
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(line, ensure_ascii=False) + "\n")
                on_prompt(len(seen), number)
                if len(seen) >= number:
                    break
        first += count
    if len(seen) < number:
        raise config_error(
            "--self-prompts",
            f"a target that writes {number} questions",
            f"{len(seen)} after {first - start} tries",
            "Give prompts with --prompts, or ask for fewer.",
        )
    return list(read_prompts([file]))[:number]


def user_turn(tokenizer: Any) -> UserTurn:
    """Where the user speaks in a tokenizer's chat template.

    Raises:
        ValueError: it has no chat template, or one that hides the question.
    """
    template = tokenizer.chat_template
    text = template and tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    opening, found, closing = (text or "").partition(_MARK)
    if not (opening and found):
        raise config_error(
            "--self-prompts",
            "a target whose chat template shows where the user speaks",
            "no chat template" if not template else template[:80],
            "Give prompts with --prompts.",
        )
    token_ids = tokenizer(opening, add_special_tokens=False).input_ids
    ending = tokenizer(closing.strip(), add_special_tokens=False).input_ids[:1]
    added = tokenizer.added_tokens_decoder
    if ending and ending[0] in added and added[ending[0]].special:
        return UserTurn(token_ids, stop_token_ids=(ending[0],))
    # Not its whole text: what follows the end may be up to the assistant.
    words = closing.split()
    return UserTurn(token_ids, stop=(words[0],) if words else ())


def _written(file: Path) -> tuple[set[str], int]:
    """The questions of a file, and the first try that is not behind them."""
    if not file.is_file():
        return set(), 0
    cut_torn_line(file)
    seen, tried = set(), -1
    for number, line in enumerate(lines_of(file), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            seen.add(fields["prompt"])
            tried = max(tried, int(fields.get("seed", -1)))
        except (json.JSONDecodeError, TypeError, KeyError, ValueError) as error:
            raise config_error(
                f"{file}:{number}",
                'a JSON object like {"prompt": "Why?", "seed": 3}',
                line[:80],
                "Correct the line or remove it.",
            ) from error
    return seen, tried + 1
