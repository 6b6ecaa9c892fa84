# SPDX-License-Identifier: Apache-2.0
"""Token sequences to train on: one JSON line each, only ever appended.

    sequences.jsonl   {"prompt": "Why …?", "kind": "chat", "temperature": 0.0,
                       "num_prompt_tokens": 31, "token_ids": [1, 9690, …]}
    target.json       which model answered

A sequence is on disk as soon as it is finished. If a run was interrupted while writing,
the incomplete last line is removed when the folder is opened again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torchax_dflash.core.config import config_error
from torchax_dflash.training.data.storage import cut_torn_line, write_atomically

_SEQUENCES, _TARGET = "sequences.jsonl", "target.json"


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its answer, or a part of a text.

    Attributes:
        prompt: the question without chat template; for a text, its file and part.
        kind: category of the prompt, for reports.
        temperature: with which the answer was sampled; 0.0 means greedy.
        num_prompt_tokens: tokens before the answer; 1 for a text.
        token_ids: prompt and answer.
    """

    prompt: str
    kind: str
    temperature: float
    num_prompt_tokens: int
    token_ids: list[int]


class SequenceStore:
    """The sequences of a data folder.

    Attributes:
        folder: the data folder.
        target: fingerprint of the model that wrote or read them.
    """

    def __init__(self, folder: Path, target: str) -> None:
        """Opens a folder, or creates it.

        Args:
            folder: the data folder.
            target: from `fingerprint`.

        Raises:
            ValueError: the folder holds sequences of another target.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.target = folder, target
        self._file = folder / _SEQUENCES
        recorded = folder / _TARGET
        if recorded.is_file():
            found = json.loads(recorded.read_text())["sha256"]
            if found != target:
                raise config_error(
                    str(folder),
                    f"sequences of this target ({target[:12]})",
                    found[:12],
                    "Use another data folder for another target.",
                )
        else:
            write_atomically(recorded, json.dumps({"sha256": target}) + "\n")
        if self._file.is_file():
            cut_torn_line(self._file)

    def append(self, sequence: TokenSequence) -> None:
        """Adds one sequence; it is on disk when this returns.

        Raises:
            OSError: the disk is full; earlier sequences are unharmed.
        """
        line = json.dumps(asdict(sequence), ensure_ascii=False) + "\n"
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line)

    def __iter__(self) -> Iterator[TokenSequence]:
        """All sequences, in the order in which they were added."""
        if not self._file.is_file():
            return
        with self._file.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # else it is still being written
                    yield TokenSequence(**json.loads(line))


def fingerprint(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's config and weights, as hexadecimal digits."""
    digest = hashlib.sha256()
    files = [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
