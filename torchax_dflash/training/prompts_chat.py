# SPDX-License-Identifier: Apache-2.0
"""Open questions: templates over everyday subjects, and passages to work on."""

from __future__ import annotations

import ast
import pydoc_data.topics
import random
import re
from collections.abc import Iterator

_SUBJECTS = (
    "rivers|bread|volcanoes|chess|the moon|bicycles|tea|gardening|bees|photography|"
    "dreams|the stock market|trains|coffee|whales|music|mathematics|the Roman Empire|"
    "sleep|honesty|deserts|cooking|dinosaurs|football|inflation|electric cars|poetry|"
    "vaccines|castles|migration of birds|the internet|glass|friendship|swimming|"
    "libraries|democracy|rainbows|elephants|robots|fashion|the human heart|yoga|maps|"
    "earthquakes|chocolate|jazz|learning a language|renewable energy|ancient Egypt|"
    "camping|painting|black holes|public speaking|cats|recycling|time management|"
    "tourism|the printing press|mushrooms|architecture|climate|running|money|islands|"
    "theatre|salt|clocks|steam engines|coral reefs|meditation|folk tales|bridges|"
    "nutrition|astronomy|wolves|genetics|video games|paper|forests|leadership|soap|"
    "the ocean|pottery|airplanes|trade|sculpture|winter|dance|batteries|farming|"
    "logic|teamwork|storms|privacy|horses|cinema|the brain|wine|bamboo|journalism|"
    "education|space travel|spices|law|computers|mountains|silk|family|statistics|"
    "museums|ants|insurance|opera|plastic|cities|writing|medicine|sailing|sharks|"
    "quantum physics|ice cream|budgeting|kites|email|neighbors|hiking|olive oil|"
    "gravity|the Silk Road|penguins|habits|probability|electricity|puzzles|rain"
).split("|")
_PLACES = (
    "a small village|Paris|a space station|a farm|the desert|an old library|Tokyo|"
    "a hospital|a school|the seaside|a busy kitchen|a castle|the year 2100|a forest|"
    "New York|a train|an island|a museum|a laboratory|a mountain hut"
).split("|")
_PEOPLE = (
    "a beginner|a child|a retired teacher|a tired nurse|a young engineer|a shy student|"
    "a chef|a sailor|an old king|a detective|a busy parent|a poet|a new manager|"
    "a traveler|a scientist|a musician|a shopkeeper|a gardener|two friends|a robot"
).split("|")
_FORMS = (
    "What should {p} know about {a}?",
    "Explain {a} to {p}.",
    "Write a short story about {p} and {a}, set in {l}.",
    "Write a poem about {a} and {b}.",
    "What do {a} and {b} have in common, and how do they differ?",
    "Give me five tips about {a} for {p}.",
    "How does {a} affect {b}?",
    "Write an email to a colleague about {a}.",
    "Describe {l} as seen by {p}.",
    "Why is {a} important for {p}?",
    "List ten facts about {a}.",
    "What are the advantages and disadvantages of {a}?",
    "Write a dialogue between {p} and {q} about {a}.",
    "Give a brief history of {a}.",
    "How can {p} learn more about {a}?",
    "Write a short essay about {a} and {b}.",
    "I want to write an article about {a}. Suggest an outline.",
    "Create a plan for a project on {a} in {l}.",
    "Write a product description that has to do with {a}, for {p}.",
    "What are common misconceptions about {a}?",
    "Write a letter from {p} to {q} about {a}.",
    "What would happen without {a}?",
    "Recommend a weekend in {l} for {p} who likes {a}.",
    "Write a speech about {a} for {p}.",
    "Summarize what you know about {a} in three sentences.",
    "Write a joke about {a}.",
    "Write the first paragraph of a novel about {p} in {l}.",
    "Which questions about {a} are still open?",
    "Make a table that compares {a} with {b}.",
    "Write a quiz of five questions about {a}, with answers.",
)
_PASSAGE_FORMS = (
    "Summarize the following text in one sentence:\n\n{}",
    "Rewrite this for a beginner:\n\n{}",
    "Explain the following passage with an example:\n\n{}",
    "What is the main idea of this passage?\n\n{}",
    "List the key points of this text:\n\n{}",
    "{}\n\nWhat does this mean?",
)


def prompts(seed: int) -> Iterator[str]:
    """Endless: six open questions, then one passage to work on."""
    rng = random.Random(f"chat {seed}")
    passages = _passages()
    while True:
        for _ in range(6):
            yield _question(rng)
        yield rng.choice(_PASSAGE_FORMS).format(rng.choice(passages))


def _question(rng: random.Random) -> str:
    (a, b), (p, q) = rng.sample(_SUBJECTS, 2), rng.sample(_PEOPLE, 2)
    return rng.choice(_FORMS).format(a=a, b=b, p=p, q=q, l=rng.choice(_PLACES))


def _passages() -> list[str]:
    """Paragraphs of Python's own language reference and docstrings of its modules."""
    texts = [*pydoc_data.topics.topics.values(), ast.__doc__ or "", re.__doc__ or ""]
    paragraphs = [
        " ".join(part.split()) for text in texts for part in text.split("\n\n")
    ]
    plain = [p for p in paragraphs if 150 < len(p) < 600 and p[0].isalpha()]
    return sorted(set(plain))
