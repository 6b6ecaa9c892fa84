# SPDX-License-Identifier: Apache-2.0
"""Token sequences as rows of one array, with few static shapes for all lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchax_dflash.training.data.sequences import TokenSequence

_GRANULARITY = 64  # lengths are rounded up to a multiple, so fewer programs compile


def padded_length(length: int) -> int:
    """The static length of the program that handles `length` tokens."""
    return -(-length // _GRANULARITY) * _GRANULARITY


def pad(
    sequences: Sequence[TokenSequence], *, rows: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32 [rows, padded length], and lengths, int32 [rows].

    Args:
        sequences: at least one.
        rows: number of rows, those left over being empty; None means one for each
            sequence.
    """
    lengths = np.zeros(rows or len(sequences), np.int32)
    lengths[: len(sequences)] = [len(sequence.token_ids) for sequence in sequences]
    token_ids = np.zeros((len(lengths), padded_length(int(lengths.max()))), np.int32)
    for row, sequence in enumerate(sequences):
        token_ids[row, : lengths[row]] = sequence.token_ids
    return token_ids, lengths
