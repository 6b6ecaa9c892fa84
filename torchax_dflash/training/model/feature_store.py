# SPDX-License-Identifier: Apache-2.0
"""The teacher's outputs for every sequence, stored on disk.

    features/about.json          which layers, which target
    features/00000.safetensors   sequences 0 … 127, their rows one after the other:
                                 features bf16 [rows, F], choices int32 [rows, C],
                                 logprobs float32 [rows, C], lengths int32 [128]

A file is written whole or not at all; existing files are not computed again.
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
from torchax_dflash.training.model.teacher import teacher_outputs

_PER_FILE = 128
_ROWS_PER_PASS = 1536  # of the target


@dataclass(frozen=True)
class StoredOutputs:
    """The teacher's outputs for one sequence of n tokens, as NumPy arrays.

    Attributes:
        features: bfloat16 [n, F].
        choices: int32 [n, C].
        logprobs: float32 [n, C].
    """

    features: np.ndarray
    choices: np.ndarray
    logprobs: np.ndarray


class FeatureStore:
    """The stored outputs for the sequences of a data folder.

    Attributes:
        folder: of the files.
    """

    def __init__(self, folder: Path, target: str, layer_ids: Sequence[int]) -> None:
        """Opens the folder, or creates it.

        Args:
            folder: `features` in the data folder.
            target: the target's fingerprint.
            layer_ids: tapped layers.

        Raises:
            ValueError: the folder holds features of another target or other layers.
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
        """How many sequences, from the data folder's first one on, are stored."""
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
        """Computes and stores what is missing.

        Args:
            target: the target.
            sequences: all sequences of the data folder.
            layer_ids: tapped layers.
            on_file: called with (sequences done, sequences in total).

        Raises:
            OSError: the disk is full; existing files are unharmed.
        """
        for start in range(0, len(sequences), _PER_FILE):
            some = sequences[start : start + _PER_FILE]
            file = self._file(start // _PER_FILE)
            if not file.is_file() or len(_lengths(file)) < len(some):
                save_tensors(file, _as_tensors(_compute(target, some, layer_ids)))
            on_file(start + len(some), len(sequences))

    def read(self, index: int, length: int) -> StoredOutputs:
        """The outputs for one sequence.

        Raises:
            ValueError: the stored sequence has another length.
        """
        file = self._file(index // _PER_FILE)
        lengths, place = _lengths(file), index % _PER_FILE
        if lengths[place] != length:
            raise config_error(
                str(file),
                f"features of sequence {index}, of {length} tokens",
                int(lengths[place]),
                "The sequences have changed since. Remove the folder and store the "
                "features again.",
            )
        first = int(lengths[:place].sum())
        rows = slice(first, first + length)
        tensors = _open(file, file.stat().st_mtime_ns)
        return StoredOutputs(
            features=tensors.get_slice("features")[rows],
            choices=tensors.get_slice("choices")[rows],
            logprobs=tensors.get_slice("logprobs")[rows],
        )

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"


def stored_features(
    folder: Path, target: str, layer_ids: Sequence[int], count: int
) -> FeatureStore | None:
    """The stored features of a data folder, or None if it has none.

    Args:
        folder: `features` in the data folder.
        target: the target's fingerprint.
        layer_ids: tapped layers.
        count: number of sequences in the data folder.

    Raises:
        ValueError: the features are of another target or other layers, or do not
            cover all sequences.
    """
    if not folder.is_dir():
        return None
    store = FeatureStore(folder, target, layer_ids)
    if len(store) < count:
        raise config_error(
            str(folder),
            f"features of all {count} sequences",
            f"those of {len(store)}",
            "Run the step `generate --num-prompts 0 --store-features`, or remove the "
            "folder to compute features while training.",
        )
    return store


def _as_tensors(outputs: list[StoredOutputs]) -> dict[str, np.ndarray]:
    return {
        "features": np.concatenate([o.features for o in outputs]),
        "choices": np.concatenate([o.choices for o in outputs]),
        "logprobs": np.concatenate([o.logprobs for o in outputs]),
        "lengths": np.array([len(o.choices) for o in outputs], np.int32),
    }


def _compute(
    target: Target, sequences: Sequence[TokenSequence], layer_ids: tuple[int, ...]
) -> list[StoredOutputs]:
    """In the order of `sequences`, computed in batches of one padded length."""
    found: dict[int, StoredOutputs] = {}
    for indices, padded in _batches_by_length(sequences):
        token_ids, lengths = pad(
            [sequences[index] for index in indices],
            rows=max(1, _ROWS_PER_PASS // padded),
        )
        outputs = jax.device_get(
            teacher_outputs(target, token_ids, lengths, layer_ids=layer_ids)
        )
        for row, index in enumerate(indices):
            n = lengths[row]
            found[index] = StoredOutputs(
                features=outputs.features[row, :n].astype(ml_dtypes.bfloat16),
                choices=outputs.choices[row, :n],
                logprobs=outputs.logprobs[row, :n],
            )
    return [found[index] for index in range(len(sequences))]


def _batches_by_length(
    sequences: Sequence[TokenSequence],
) -> Iterator[tuple[list[int], int]]:
    """Indices of sequences of one padded length, as many as fit into one pass."""
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(padded_length(len(sequence.token_ids)), []).append(index)
    for padded, indices in sorted(groups.items()):
        rows = max(1, _ROWS_PER_PASS // padded)
        for start in range(0, len(indices), rows):
            yield indices[start : start + rows], padded


@lru_cache(maxsize=4096)
def _open(file: Path, modified: int) -> safe_open:
    """The memory-mapped file; opened again when its time of modification changes."""
    return safe_open(file, framework="numpy")


def _lengths(file: Path) -> np.ndarray:
    return _open(file, file.stat().st_mtime_ns).get_tensor("lengths")
