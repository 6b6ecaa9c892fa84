# SPDX-License-Identifier: Apache-2.0
"""Word problems and puzzles: `reasoning-gym`'s, and some of our own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import reasoning_gym

ASK = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The wording of the `dflash` package's benchmark."""

_GYM_TASKS = (
    "basic_arithmetic chain_sum fraction_simplification gcd lcm leg_counting "
    "simple_equations time_intervals products prime_factorization simple_geometry "
    "calendar_arithmetic number_sequence syllogism family_relationships aiw coin_flip "
    "number_filtering letter_counting word_sorting polynomial_equations count_bits "
    "decimal_arithmetic dice"
).split()
_GYM_SUFFIX = " Give the result as your final answer. Do not include units."
_NAMES = (
    "Anna Ben Clara David Elena Felix Grace Henry Iris Jack Karen Leo Mia Noah Olivia "
    "Paul Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zack Amir Bella Carlos Dora"
).split()
_THINGS = (
    "apples marbles books pencils stickers oranges cookies tickets balloons eggs coins "
    "cards candles shells stamps flowers toys bottles sandwiches bricks"
).split()
_STORIES = (
    "{a} has {x} {o}. {a} buys {y} more and gives {z} to {b}. How many {o} does {a} "
    "have now?",
    "{a} reads {x} pages a day. How many pages does {a} read in {y} weeks?",
    "A shop sells {o} for ${z} each. {a} buys {y} {o} and pays with a ${w} bill. How "
    "much change does {a} get?",
    "{a} earns ${x} an hour and works {z} hours a day for {y} days. How much money "
    "does {a} earn in total?",
    "{a} is {x} years old. {b} is {y} years older than {a}. In {z} years, what will "
    "be the sum of their ages?",
    "There are {x} boxes with {y} {o} in each box. {a} takes {z} {o} away. How many "
    "{o} are left?",
    "A train travels at {x} miles an hour for {z} hours and then at {y} miles an hour "
    "for 2 hours. How far does it travel?",
    "{a} and {b} share {w} {o}. {a} gets {z} more than {b}. How many does {b} get?",
    "{a} bakes {x} trays of cookies with {y} cookies on each. If {z} friends share "
    "them equally, how many cookies does each friend get?",
    "A garden is {x} feet long and {y} feet wide. A fence around it costs ${z} a foot. "
    "How much does {a} pay for the fence?",
    "{a} saves ${x} in the first month and doubles the amount each month. How much has "
    "{a} saved after {s} months?",
    "A class has {w} students. {x}% of them play football, and half of the others play "
    "tennis. How many students play tennis?",
    "{a} drives {x} miles to work and {b} drives {y} miles more than that. How many "
    "miles do both drive there and back in {z} days?",
    "A farmer has {x} cows and {y} hens. Each cow gives {z} liters of milk a day, and "
    "each hen lays an egg a day. How many liters and eggs does he have after {s} days?",
)


def prompts(seed: int) -> Iterator[str]:
    """Endless: half GSM8K-like templates, a third other puzzles, some stories."""
    rng = random.Random(f"math {seed}")
    while True:
        start = rng.randrange(1 << 30)
        symbolic = _gym("gsm_symbolic", start, 300)
        puzzles = [q for task in _GYM_TASKS for q in _gym(task, start, 8)]
        rng.shuffle(puzzles)
        stories = [_story(rng) for _ in range(100)]
        for index, problem in enumerate(symbolic):
            yield ASK.format(problem)
            if index % 3 < 2 and puzzles:
                puzzle = puzzles.pop()
                yield ASK.format(puzzle) if rng.random() < 0.7 else puzzle
            if index % 3 == 2:
                yield ASK.format(stories.pop())


def _gym(task: str, seed: int, size: int) -> list[str]:
    dataset = reasoning_gym.create_dataset(task, seed=seed, size=size)
    questions = [entry["question"].removesuffix(_GYM_SUFFIX) for entry in dataset]
    return [question for question in questions if len(question) < 900]


def _story(rng: random.Random) -> str:
    a, b = rng.sample(_NAMES, 2)
    return rng.choice(_STORIES).format(
        a=a,
        b=b,
        o=rng.choice(_THINGS),
        x=rng.randint(3, 40),
        y=rng.randint(2, 30),
        z=rng.randint(2, 12),
        w=rng.choice((50, 60, 80, 100, 200)),
        s=rng.randint(3, 6),
    )
