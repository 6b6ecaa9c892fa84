# SPDX-License-Identifier: Apache-2.0
"""Chat prompts: open questions about everyday subjects, and passages to work on."""

from __future__ import annotations

import ast
import pydoc_data.topics
import random
import re
from collections.abc import Iterator

from torchax_dflash.training.data.phrases import PHRASES

_PHRASES = PHRASES["chat"]


def prompts(seed: int) -> Iterator[str]:
    """Endless: six open questions, then one passage to work on."""
    rng = random.Random(f"chat {seed}")
    passages = _passages()
    while True:
        for _ in range(6):
            yield _question(rng)
        yield rng.choice(_PHRASES["passage_forms"]).format(rng.choice(passages))


def _question(rng: random.Random) -> str:
    (a, b), (p, q) = (
        rng.sample(_PHRASES["subjects"], 2),
        rng.sample(_PHRASES["people"], 2),
    )
    return rng.choice(_PHRASES["forms"]).format(
        a=a, b=b, p=p, q=q, l=rng.choice(_PHRASES["places"])
    )


def _passages() -> list[str]:
    """Paragraphs of Python's own language reference and docstrings of its modules."""
    texts = [*pydoc_data.topics.topics.values(), ast.__doc__ or "", re.__doc__ or ""]
    paragraphs = [
        " ".join(part.split()) for text in texts for part in text.split("\n\n")
    ]
    plain = [p for p in paragraphs if 150 < len(p) < 600 and p[0].isalpha()]
    return sorted(set(plain))
