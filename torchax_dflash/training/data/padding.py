# SPDX-License-Identifier: Apache-2.0
"""Sequences as rows of one array: few static shapes for all lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchax_dflash.training.data.sequences import TokenSequence

_GRAIN = 64  # lengths are padded to multiples: fewer programs


def padded_length(length: int) -> int:
    """The static length of the program that handles so many tokens."""
    return -(-length // _GRAIN) * _GRAIN


def pad(
    sequences: Sequence[TokenSequence], *, rows: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32 [rows, padded length], and lengths, int32 [rows].

    Args:
        sequences: at least one.
        rows: of the arrays, those left over being empty; None for as many as needed.
    """
    lengths = np.zeros(rows or len(sequences), np.int32)
    lengths[: len(sequences)] = [len(sequence.token_ids) for sequence in sequences]
    token_ids = np.zeros((len(lengths), padded_length(int(lengths.max()))), np.int32)
    for row, sequence in enumerate(sequences):
        token_ids[row, : lengths[row]] = sequence.token_ids
    return token_ids, lengths
