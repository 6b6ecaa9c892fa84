# SPDX-License-Identifier: Apache-2.0
"""tpu-inference applies one grammar bitmask to each request, not to each draft.

Version: 0.32.0, `StructuredDecodingManager.prepare_structured_decoding_input`,
runner/structured_decoding_manager.py:65.

vLLM sends a bitmask row for each draft of a structured request and one more, requests
in an order of its own. tpu-inference takes one row for each request, in the order of
sorted names, and applies it to the logits row of the request's number. With drafts,
each request has several rows of logits:

    drafts of the batch's requests     2, 0, 1
    logits rows                        a a a | b | c c
    bitmask rows, for c and a alone    c c | a a a

Delete this file when tpu-inference lays the rows out like the logits and honours
`num_acceptable_drafts`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.runner.structured_decoding_manager import StructuredDecodingManager
from tpu_inference.utils import device_array, to_jax_dtype

from torchax_dflash.serving.verification.rejection_sampler import (
    DFlashRejectionSampler,
)


class DFlashStructuredDecoding(StructuredDecodingManager):
    """The runner's manager, with a bitmask row for each row of logits."""

    def __init__(self, runner: Any, sampler: DFlashRejectionSampler) -> None:
        super().__init__(runner)
        self._sampler = sampler

    def prepare_structured_decoding_input(
        self, logits: jax.Array, grammar_output: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lays the bitmask out like the logits, and limits what may be accepted.

        Args:
            logits: [L, V].
            grammar_output: vLLM's, with `num_acceptable_drafts` of each request: later
                drafts have no mask of their own.

        Returns:
            Bool [L, 1], rows to mask; int32 [L, words]; int32 [32].
        """
        lengths = self._sampler.draft_lengths
        assert lengths is not None, "no step was prepared"
        words = self.runner.grammar_bitmask_cpu.shape[1]
        required = np.zeros((logits.shape[0], 1), np.bool_)
        bitmask = np.zeros((logits.shape[0], words), np.int32)
        limits = np.full(len(lengths), lengths.max(), np.int32)
        starts = np.cumsum(lengths + 1) - (lengths + 1)
        given, first = grammar_output.grammar_bitmask, 0
        names = grammar_output.structured_output_request_ids
        acceptable = grammar_output.num_acceptable_drafts or [0] * len(names)
        for name, limit in zip(names, acceptable, strict=True):
            index = self.runner.input_batch.req_id_to_index[name]
            count, start = lengths[index] + 1, starts[index]
            required[start : start + count] = True
            bitmask[start : start + count, : given.shape[1]] = given[
                first : first + count
            ]
            limits[index] = limit
            first += count
        assert first == len(given), "bitmask rows do not match the drafts"
        self._sampler.limits = limits
        return device_array(
            self.runner.mesh,
            (required, bitmask, self.runner.structured_decode_arange),
        )

    def warm_up(self) -> None:
        """Compiles the mask for every padded number of logits."""
        runner = self.runner
        words = runner.grammar_bitmask_cpu.shape[1]
        sharding = NamedSharding(
            runner.mesh,
            PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR),
        )
        for rows in runner.num_logits_paddings:
            logits = np.zeros((rows, runner.vocab_size), np.float32)
            logits = jnp.asarray(logits, to_jax_dtype(runner.dtype))
            required, bitmask, arange = device_array(
                runner.mesh,
                (
                    np.zeros((rows, 1), np.bool_),
                    np.zeros((rows, words), np.int32),
                    runner.structured_decode_arange,
                ),
            )
            self.structured_decode_fn(
                required, bitmask, jax.device_put(logits, sharding), arange
            )
