# SPDX-License-Identifier: Apache-2.0
"""Prompt files: JSON lines, or plain text with one prompt per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchax_dflash.core.config import config_error


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt for the target.

    Attributes:
        kind: its category, for reports ("code", "math", "chat", a file's name).
        text: the question, without chat template.
        seed: the seed with which the target wrote it, if it did.
    """

    kind: str
    text: str
    seed: int | None = None


def read_prompts(files: list[Path]) -> Iterator[TrainingPrompt]:
    """The prompts of all files.

    Args:
        files: see `read_prompt_file`.

    Raises:
        ValueError: a line without a prompt, or no prompts at all.
        OSError: a file cannot be read.
    """
    count = 0
    for file in files:
        for prompt in read_prompt_file(file):
            count += 1
            yield prompt
    if not count:
        raise config_error(
            "--prompts",
            "files with at least one prompt",
            [str(file) for file in files],
            'Write one prompt per line, or JSON lines like {"prompt": "Why?"}.',
        )


def read_prompt_file(file: Path) -> Iterator[TrainingPrompt]:
    """The prompts of one file, which may be none; empty lines are skipped.

    Args:
        file: `.jsonl` with the field "prompt" and, optionally, "kind" and "seed"; any
            other file is plain text with one prompt per line.

    Raises:
        ValueError: a line without a prompt, or a file that is not UTF-8.
        OSError: the file cannot be read.
    """
    try:
        # Not `splitlines`: prompts may contain Unicode's other line separators.
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise config_error(
            str(file), "text in UTF-8", str(error), "Convert it or leave it out."
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if file.suffix == ".jsonl":
            yield _parse(line, f"{file}:{number}", kind=file.stem)
        else:
            yield TrainingPrompt(file.stem, line.strip())


def _parse(line: str, place: str, *, kind: str) -> TrainingPrompt:
    """The prompt of a JSON line; `kind` is used where the line has none."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    text, seed = fields.get("prompt"), fields.get("seed")
    if not isinstance(text, str) or not text.strip():
        raise config_error(
            place,
            'a JSON object with a text in its field "prompt"',
            line[:80],
            "Correct the line or remove it.",
        )
    return TrainingPrompt(
        kind=str(fields.get("kind", kind)),
        text=text,
        seed=seed if isinstance(seed, int) else None,
    )
