# SPDX-License-Identifier: Apache-2.0
"""How a prompt goes to the device: in chunks of a few sizes, with its settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.generation.request import Request

CHUNK_SIZES = (16, 64, 256)
"""Rows of a prefill program; prompts are cut into these."""


def chunk_sizes(length: int) -> Iterator[int]:
    """Cuts a prompt into prefill chunks.

    The smallest that holds the rest, unless that wastes more than half of it and a
    smaller one could be filled first.
    """
    while length > 0:
        fitting = [size for size in CHUNK_SIZES if size >= length]
        smaller = [size for size in CHUNK_SIZES if size <= length]
        wasteful = bool(smaller) and (not fitting or fitting[0] > 2 * length)
        size = smaller[-1] if wasteful else fitting[0]
        yield size
        length -= size


def chunk_arguments(
    request: Request, *, row: int, start: int, size: int, count: int, limit: int
) -> dict[str, Any]:
    """Of `decoding.prefill`, on the device.

    Args:
        request: whose prompt it is.
        row: its row in the batch.
        start: position of the chunk's first token.
        size: rows of the program.
        count: tokens that count.
        limit: the request's, or 0 while more chunks follow.
    """
    params = request.params
    padded = np.zeros(size, np.int32)
    padded[:count] = request.output.prompt_token_ids[start : start + count]
    sampling = {
        "temperature": np.array([params.temperature], np.float32),
        "top_k": np.array([params.top_k], np.int32),
        "top_p": np.array([params.top_p], np.float32),
        "min_p": np.array([params.min_p], np.float32),
        "seed": np.array([request.seed], np.uint32),
        "logprobs": np.array([params.logprobs]),
    }
    penalties = (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    arguments: dict[str, Any] = {
        "row": np.int32(row),
        "token_ids": padded,
        "start": np.int32(start),
        "length": np.int32(count),
        "limit": np.int32(limit),
        "stop_ids": np.array(request.stop_ids, np.int32),
        "sampling": SamplingState(**sampling),
        "penalties": np.array(penalties, np.float32),
    }
    return jax.device_put(arguments)
