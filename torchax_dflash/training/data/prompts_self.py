# SPDX-License-Identifier: Apache-2.0
"""Prompts that the target writes itself.

Given its chat template up to the user's turn, an instruction-tuned model continues as
the user, with the kind of questions that it was tuned on (Xu et al. 2024, "Magpie:
Alignment Data Synthesis from Scratch").
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
from torchax_dflash.generation.sampling_params import SamplingParams
from torchax_dflash.training.data.prompts import TrainingPrompt, read_prompt_file
from torchax_dflash.training.data.storage import cut_torn_line

_MARK = "QUESTION"
_MIN_TOKENS, _MAX_TOKENS = 4, 96  # of a question, including the token that ends it
_MAX_ATTEMPTS = 8  # per question wanted
_CHUNK = 1024  # attempts handed to the generator at a time


@dataclass(frozen=True)
class UserTurn:
    """The user's turn in a chat template.

    Attributes:
        opening: token ids of the template up to the user's text.
        stop_token_ids: the special token that ends the turn, if one does.
        stop: otherwise the text that ends it.
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
        generator: runs the target, with its tokenizer.
        number: questions wanted, including those that `file` already holds.
        file: JSON lines, see `read_prompt_file`. Each question is on disk as soon as it
            is finished; an interrupted run continues after the last one.
        seed: for the sampling.
        on_prompt: called with (questions so far, questions wanted).

    Returns:
        Distinct questions of 4 to 96 tokens.

    Raises:
        ValueError: the target has no chat template, or rarely ends a question.
    """
    turn = user_turn(generator.tokenizer)
    max_tokens = min(_MAX_TOKENS, generator.max_model_len - len(turn.opening))
    if max_tokens < _MIN_TOKENS:
        raise config_error(
            "--max-model-len",
            f"at least {len(turn.opening) + _MIN_TOKENS}, for a question",
            generator.max_model_len,
            "Choose a larger one.",
        )
    seen, first = _read_existing(file)
    start, end = first, first + _MAX_ATTEMPTS * number + generator.max_num_seqs
    while len(seen) < number and first < end:
        wanted = math.ceil(1.2 * (number - len(seen)))
        count = min(max(generator.max_num_seqs, wanted), _CHUNK, end - first)
        params = [
            SamplingParams(
                max_tokens=max_tokens,
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
                if not ended or len(output.token_ids) < _MIN_TOKENS:
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
            f"{len(seen)} in {first - start} attempts",
            "Give prompts with --prompts, or ask for fewer.",
        )
    return list(read_prompt_file(file))[:number]


def user_turn(tokenizer: Any) -> UserTurn:
    """The user's turn in a tokenizer's chat template.

    Raises:
        ValueError: there is no chat template, or it does not show the user's text.
    """
    template = tokenizer.chat_template
    text = template and tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    opening, found, closing = (text or "").partition(_MARK)
    if not (opening and found):
        raise config_error(
            "--self-prompts",
            "a target whose chat template shows the user's text",
            "no chat template" if not template else template[:80],
            "Give prompts with --prompts.",
        )
    token_ids = tokenizer(opening, add_special_tokens=False).input_ids
    ending = tokenizer(closing.strip(), add_special_tokens=False).input_ids[:1]
    added = tokenizer.added_tokens_decoder
    if ending and ending[0] in added and added[ending[0]].special:
        return UserTurn(token_ids, stop_token_ids=(ending[0],))
    # Its first word only: the rest may belong to the assistant's turn.
    words = closing.split()
    return UserTurn(token_ids, stop=(words[0],) if words else ())


def _read_existing(file: Path) -> tuple[set[str], int]:
    """The questions that a file already holds, and the seed to continue from."""
    if not file.is_file():
        return set(), 0
    cut_torn_line(file)
    prompts = list(read_prompt_file(file))
    last = max((p.seed for p in prompts if p.seed is not None), default=-1)
    return {prompt.text for prompt in prompts}, last + 1
