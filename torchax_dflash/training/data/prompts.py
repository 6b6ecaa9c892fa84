# SPDX-License-Identifier: Apache-2.0
"""What to ask a target: prompts of files, or an endless built-in mix.

The built-in mix needs nothing but this machine: functions of the installed Python
packages to implement, small synthetic functions, word problems and puzzles of
`reasoning-gym`, questions about everyday things. The same seed gives the same prompts
as long as the same packages are installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchax_dflash.core.config import config_error
from torchax_dflash.training.data import prompts_chat, prompts_code, prompts_math

# Four of code, three of mathematics, three of chat; any stretch has the mix.
_PATTERN = ("code", "math", "chat", "code", "math", "code", "chat", "code", "math")
_PATTERN += ("chat",)


@dataclass(frozen=True)
class TrainingPrompt:
    """One question.

    Attributes:
        kind: what sort it is, for reports ("code", "math", "chat", a file's name).
        text: the question, without chat template.
    """

    kind: str
    text: str


def builtin_mix(seed: int = 0) -> Iterator[TrainingPrompt]:
    """Endless prompts: code, mathematics and chat in turns, without repetition."""
    sources = {
        "code": prompts_code.prompts(seed),
        "math": prompts_math.prompts(seed),
        "chat": prompts_chat.prompts(seed),
    }
    seen: set[str] = set()
    while True:
        for kind in _PATTERN:
            text = next(sources[kind])
            while text in seen:
                text = next(sources[kind])
            seen.add(text)
            yield TrainingPrompt(kind, text)


def read_prompts(files: list[Path]) -> Iterator[TrainingPrompt]:
    """Prompts of files: JSON lines with a field "prompt", or one prompt a line.

    Args:
        files: `.jsonl` (fields "prompt" and, if wanted, "kind"), others are plain text.

    Raises:
        ValueError: a line that holds no prompt, or files without any.
        OSError: a file that cannot be read.
    """
    count = 0
    for file in files:
        for number, line in enumerate(lines_of(file), start=1):
            if line.strip():
                count += 1
                yield _parse(file, number, line)
    if not count:
        raise config_error(
            "--prompts",
            "files with at least one prompt",
            [str(file) for file in files],
            'Write one prompt a line, or JSON lines like {"prompt": "Why?"}.',
        )


def lines_of(file: Path) -> list[str]:
    """Lines of a UTF-8 file; other line breaks of Unicode may stand inside of them.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise config_error(
            str(file), "a text in UTF-8", str(error), "Convert it or leave it out."
        ) from error


def _parse(file: Path, number: int, line: str) -> TrainingPrompt:
    if file.suffix != ".jsonl":
        return TrainingPrompt(file.stem, line.strip())
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        fields = None
    text = fields.get("prompt") if isinstance(fields, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise config_error(
            f"{file}:{number}",
            'a JSON object with a text in its field "prompt"',
            line[:80],
            "Correct the line or remove it.",
        )
    assert isinstance(fields, dict)
    return TrainingPrompt(str(fields.get("kind", file.stem)), text)
