# SPDX-License-Identifier: Apache-2.0
"""Drawn drafts: which requests have them, and the q that they were drawn from.

Only with `draft_sample_method` "probabilistic". q is kept on the device until the
drafts are verified, in one buffer of max_num_seqs * K * V float32, replicated on every
device.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from torchax_dflash.core.sampling import GREEDY_BELOW, SamplingState


class DrawnDrafts:
    """The drafts of the last step.

    Attributes:
        rows: request ids with drawn drafts -> their rows in `probs`.
        probs: float32 [max_num_seqs, K, V], what they were drawn from; None until
            `allocate`.
    """

    def __init__(self, runner: Any, *, num_speculative_tokens: int, vocab_size: int):
        self.rows: dict[str, int] = {}
        self.probs: jax.Array | None = None
        self._runner = runner
        self._shape = (runner.max_num_reqs, num_speculative_tokens, vocab_size)
        self._replicated = NamedSharding(runner.mesh, PartitionSpec())
        self._seeds = np.random.default_rng(runner.model_config.seed)

    @property
    def num_bytes(self) -> int:
        """Of `probs`, on all devices together."""
        return 4 * math.prod(self._shape) * self._runner.mesh.size

    def allocate(self) -> None:
        """Makes room for `probs`."""
        zeros = jnp.zeros(self._shape, jnp.float32)
        self.probs = jax.device_put(zeros, self._replicated)

    def settings(self, rows: int) -> SamplingState | None:
        """How to draw this step's drafts; None where no request of the batch draws.

        Drafts of structured requests are chosen: the scheduler drops what the grammar
        does not allow, and what is left has another distribution than it was drawn
        from.

        Args:
            rows: B, at least the requests of the batch.
        """
        batch = self._runner.input_batch
        temperature = np.zeros(rows, np.float32)
        self.rows = {}
        for index, req_id in enumerate(batch.req_ids[: batch.num_reqs]):
            params = self._runner.requests[req_id].sampling_params
            drawn = batch.temperature_cpu[index] >= GREEDY_BELOW
            if drawn and params.structured_outputs is None:
                temperature[index] = batch.temperature_cpu[index]
                self.rows[req_id] = index
        if not self.rows:
            return None
        settings = {
            "temperature": temperature,
            "top_k": np.maximum(batch.top_k_cpu[:rows], 0),
            "top_p": batch.top_p_cpu[:rows].copy(),
            "min_p": np.zeros(rows, np.float32),
            "seed": self._seeds.integers(0, 2**32, rows, np.uint32),
            "logprobs": np.zeros(rows, np.bool_),
        }
        return SamplingState(**jax.device_put(settings, self._replicated))

    def greedy_settings(self, rows: int) -> SamplingState:
        """Of the same shape, for a warm-up."""
        settings = asdict(SamplingState.greedy(rows))
        return SamplingState(**jax.device_put(settings, self._replicated))
