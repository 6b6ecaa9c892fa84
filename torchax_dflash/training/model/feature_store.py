# SPDX-License-Identifier: Apache-2.0
"""What the target thought of every sequence, kept on disk.

    features/about.json          which layers, which target
    features/00000.safetensors   of sequences 0 … 127, their rows one after the other:
                                 features bf16 [rows, F], choices int32 [rows, C],
                                 logprobs float32 [rows, C], lengths int32 [128]

A file is written whole or not at all; those that are there are not made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors import safe_open

from torchax_dflash.core.config import config_error
from torchax_dflash.core.target import Target
from torchax_dflash.training.data.padding import pad, padded_length
from torchax_dflash.training.data.sequences import TokenSequence
from torchax_dflash.training.data.storage import save_tensors, write_atomically
from torchax_dflash.training.model.teacher import think

_PER_FILE = 128
_ROWS = 1536  # rows that the target reads at a time


@dataclass(frozen=True)
class StoredThoughts:
    """Of one sequence of n tokens, as NumPy arrays.

    Attributes:
        features: bfloat16 [n, F].
        choices: int32 [n, C].
        logprobs: float32 [n, C].
    """

    features: np.ndarray
    choices: np.ndarray
    logprobs: np.ndarray


class FeatureStore:
    """The features of a data folder's sequences.

    Attributes:
        folder: where they lie.
    """

    def __init__(self, folder: Path, target: str, layer_ids: Sequence[int]) -> None:
        """Opens the folder, or makes it.

        Args:
            folder: `features` in the data folder.
            target: hash of the target, from `fingerprint`.
            layer_ids: tapped layers.

        Raises:
            ValueError: its features are of another target or of other layers.
        """
        self.folder = folder
        about = {"sha256": target, "target_layer_ids": list(layer_ids)}
        folder.mkdir(parents=True, exist_ok=True)
        recorded = folder / "about.json"
        if not recorded.is_file():
            write_atomically(recorded, json.dumps(about) + "\n")
        elif (found := json.loads(recorded.read_text())) != about:
            raise config_error(
                str(folder),
                f"features of {about}",
                found,
                "Remove this folder, or use other data.",
            )

    def __len__(self) -> int:
        """Sequences whose features are here: the first ones of the data folder."""
        count = 0
        for number in range(1 << 30):
            file = self._file(number)
            if not file.is_file():
                return count
            found = len(_lengths(file))
            count += found
            if found < _PER_FILE:
                return count
        raise AssertionError("unreachable")

    def add(
        self,
        target: Target,
        sequences: Sequence[TokenSequence],
        layer_ids: tuple[int, ...],
        on_file: Callable[[int, int], None],
    ) -> None:
        """Makes what is missing.

        Args:
            target: the target.
            sequences: all of the data folder.
            layer_ids: tapped layers.
            on_file: called with (sequences done, sequences in all).

        Raises:
            OSError: the disk is full; files that were there are unharmed.
        """
        for start in range(0, len(sequences), _PER_FILE):
            some = sequences[start : start + _PER_FILE]
            file = self._file(start // _PER_FILE)
            if not file.is_file() or len(_lengths(file)) < len(some):
                save_tensors(file, _as_tensors(_all_thoughts(target, some, layer_ids)))
            on_file(start + len(some), len(sequences))

    def read(self, index: int, length: int) -> StoredThoughts:
        """The thoughts of one sequence.

        Raises:
            ValueError: they are of a sequence of another length.
        """
        file = self._file(index // _PER_FILE)
        lengths, place = _lengths(file), index % _PER_FILE
        if lengths[place] != length:
            raise config_error(
                str(file),
                f"features of sequence {index}, of {length} tokens",
                int(lengths[place]),
                "The sequences have changed since: remove the folder and make the "
                "features again.",
            )
        first = int(lengths[:place].sum())
        rows = slice(first, first + length)
        tensors = _open(file, file.stat().st_mtime_ns)
        return StoredThoughts(
            features=tensors.get_slice("features")[rows],
            choices=tensors.get_slice("choices")[rows],
            logprobs=tensors.get_slice("logprobs")[rows],
        )

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"


def stored_features(
    folder: Path, target: str, layer_ids: Sequence[int], count: int
) -> FeatureStore | None:
    """The features of a data folder, if it has any.

    Args:
        folder: `features` in the data folder.
        target: hash of the target.
        layer_ids: tapped layers.
        count: sequences of the data folder.

    Raises:
        ValueError: features of another target or layers, or not of all sequences.
    """
    if not folder.is_dir():
        return None
    store = FeatureStore(folder, target, layer_ids)
    if len(store) < count:
        raise config_error(
            str(folder),
            f"features of all {count} sequences",
            f"those of {len(store)}",
            "Run `train_draft.py generate --num-prompts 0 --store-features`, or remove "
            "the folder to make them while training.",
        )
    return store


def _as_tensors(thoughts: list[StoredThoughts]) -> dict[str, np.ndarray]:
    return {
        "features": np.concatenate([t.features for t in thoughts]),
        "choices": np.concatenate([t.choices for t in thoughts]),
        "logprobs": np.concatenate([t.logprobs for t in thoughts]),
        "lengths": np.array([len(t.choices) for t in thoughts], np.int32),
    }


def _all_thoughts(
    target: Target, sequences: Sequence[TokenSequence], layer_ids: tuple[int, ...]
) -> list[StoredThoughts]:
    """In the order of `sequences`, computed in batches of similar length."""
    found: dict[int, StoredThoughts] = {}
    for indices, padded in _batches_by_length(sequences):
        token_ids, lengths = pad(
            [sequences[index] for index in indices], rows=max(1, _ROWS // padded)
        )
        thoughts = jax.device_get(
            think(target, token_ids, lengths, layer_ids=layer_ids)
        )
        for row, index in enumerate(indices):
            n = lengths[row]
            found[index] = StoredThoughts(
                features=thoughts.features[row, :n].astype(ml_dtypes.bfloat16),
                choices=thoughts.choices[row, :n],
                logprobs=thoughts.logprobs[row, :n],
            )
    return [found[index] for index in range(len(sequences))]


def _batches_by_length(
    sequences: Sequence[TokenSequence],
) -> Iterator[tuple[list[int], int]]:
    """Indices of sequences of one padded length, as many as are read at a time."""
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(padded_length(len(sequence.token_ids)), []).append(index)
    for padded, indices in sorted(groups.items()):
        rows = max(1, _ROWS // padded)
        for start in range(0, len(indices), rows):
            yield indices[start : start + rows], padded


@lru_cache(maxsize=4096)
def _open(file: Path, modified: int) -> safe_open:
    """Mapped into memory, and opened again only when it was written anew."""
    return safe_open(file, framework="numpy")


def _lengths(file: Path) -> np.ndarray:
    return _open(file, file.stat().st_mtime_ns).get_tensor("lengths")
