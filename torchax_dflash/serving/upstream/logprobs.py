# SPDX-License-Identifier: Apache-2.0
"""tpu-inference returns log-probabilities of the wrong rows in steps without drafts.

Version: 0.32.0, `_jax_logprobs_materialize`, runner/tpu_runner.py:665, and
`CompilationManager._precompile_extend_logits_simple`,
runner/compilation_manager.py:1266.

With a speculative config the runner computes log-probabilities over the rows of
`target_logits_indices`, then the bonus rows. Where no request of the batch has a draft,
it takes the first rows as if they were the requests' own; `target_logits_indices` is
all padding then. So it is filled with the requests' own rows.

Their programs are compiled at start-up for bfloat16 and one sharding only. Other
targets would compile them while serving, which
`VLLM_XLA_CHECK_RECOMPILATION` makes an error.

Delete `install` when log-probabilities of such steps are read from the bonus rows, and
`warm_up` when the runner's own warm-up uses the target's dtype and sharding.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.spec_decode.jax.utils import extend_logits_simple
from tpu_inference.utils import to_jax_dtype

from torchax_dflash.serving.verification.rejection_sampler import (
    spec_decode_metadata_of,
)


def install(runner: Any) -> None:
    """Wraps `_prepare_inputs` of this runner."""
    prepare_inputs = runner._prepare_inputs

    def prepare_inputs_with_own_rows(scheduler_output: Any) -> Any:
        inputs = prepare_inputs(scheduler_output)
        metadata = spec_decode_metadata_of(inputs)
        if not metadata.draft_lengths_cpu.any():
            indices = metadata.target_logits_indices
            own = np.arange(indices.shape[0], dtype=np.int32)
            metadata.target_logits_indices = jax.device_put(own, indices.sharding)
        return inputs

    runner._prepare_inputs = prepare_inputs_with_own_rows


def warm_up(runner: Any) -> None:
    """Compiles `extend_logits_simple` for the target's dtype and both shardings."""
    mesh, dtype = runner.mesh, to_jax_dtype(runner.dtype)
    axes = PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)
    for num_reqs, num_logits, spec in itertools.product(
        runner.num_reqs_paddings, runner.num_logits_paddings, (PartitionSpec(), axes)
    ):
        target, bonus = (
            np.zeros((rows, runner.vocab_size), dtype)
            for rows in (num_logits, num_reqs)
        )
        logits = jax.device_put((target, bonus), NamedSharding(mesh, spec))
        extend_logits_simple(*logits, mesh)
