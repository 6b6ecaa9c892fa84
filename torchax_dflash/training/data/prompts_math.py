# SPDX-License-Identifier: Apache-2.0
"""Mathematics prompts: word problems and puzzles of `reasoning-gym`, and our own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import reasoning_gym

from torchax_dflash.training.data.phrases import MATH_QUESTION, PHRASES

_PHRASES = PHRASES["math"]
_GYM_SUFFIX = " Give the result as your final answer. Do not include units."


def prompts(seed: int) -> Iterator[str]:
    """Endless: three parts GSM8K-like templates, two other puzzles, three stories."""
    rng = random.Random(f"math {seed}")
    while True:
        start = rng.randrange(1 << 30)
        symbolic = _gym("gsm_symbolic", start, 300)
        puzzles = [q for task in _PHRASES["gym_tasks"] for q in _gym(task, start, 8)]
        rng.shuffle(puzzles)
        stories = [_story(rng) for _ in range(300)]
        for index, problem in enumerate(symbolic):
            yield MATH_QUESTION.format(problem)
            if index % 3 < 2 and puzzles:
                puzzle = puzzles.pop()
                yield MATH_QUESTION.format(puzzle) if rng.random() < 0.7 else puzzle
            yield MATH_QUESTION.format(stories.pop())


def _gym(task: str, seed: int, size: int) -> list[str]:
    dataset = reasoning_gym.create_dataset(task, seed=seed, size=size)
    questions = [entry["question"].removesuffix(_GYM_SUFFIX) for entry in dataset]
    return [question for question in questions if len(question) < 900]


def _story(rng: random.Random) -> str:
    a, b, c = rng.sample(_PHRASES["names"], 3)
    return rng.choice(_PHRASES["stories"]).format(
        a=a,
        b=b,
        c=c,
        o=rng.choice(_PHRASES["things"]),
        x=rng.randint(3, 40),
        y=rng.randint(2, 30),
        z=rng.randint(2, 12),
        w=rng.choice((50, 60, 80, 100, 200)),
        s=rng.randint(3, 6),
        p=rng.choice((10, 20, 25, 30, 40, 50, 75)),
    )
