# SPDX-License-Identifier: Apache-2.0
"""An endless mix of built-in prompts, which needs no files and no network.

Code: functions of the installed Python packages to implement, and synthetic ones.
Mathematics: word problems and puzzles of `reasoning-gym`. Chat: questions about
everyday subjects. The same seed gives the same prompts as long as the same packages are
installed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchax_dflash.training.data import prompts_chat, prompts_code, prompts_math
from torchax_dflash.training.data.prompts import TrainingPrompt

# Four of code, three of mathematics, three of chat, interleaved.
_PATTERN = ("code", "math", "chat", "code", "math", "code", "chat", "code", "math")
_PATTERN += ("chat",)


def builtin_prompts(seed: int = 0) -> Iterator[TrainingPrompt]:
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
