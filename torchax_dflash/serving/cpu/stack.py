# SPDX-License-Identifier: Apache-2.0
"""What tpu-inference 0.32.0 needs to run on JAX's CPU backend, for development.

Nothing here affects a TPU run: `apply` is called only if `is_wanted()`, that is, if
`JAX_PLATFORMS=cpu` is set. All of it replaces module-level names of tpu-inference
or JAX, since nothing there can be subclassed; this file is the one place for that. It
imports tpu_inference inside its functions only: the platform is chosen while vllm is
still being imported.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import jax
import numpy as np

logger = logging.getLogger(__name__)

MEMORY_VARIABLE = "TORCHAX_DFLASH_CPU_GIB"
"""Memory for KV caches that a CPU device reports, in GiB (default 0.25)."""


def is_wanted() -> bool:
    """Whether JAX is told to run on CPUs; asks no backend, which would claim a TPU."""
    return os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"


def prepare_environment() -> None:
    """Stops look-ups of a TPU's metadata that is not there."""
    for name, value in (
        ("TPU_ACCELERATOR_TYPE", "v6e-1"),
        ("TPU_NAME", "cpu"),
        ("TPU_WORKER_ID", "0"),
    ):
        os.environ.setdefault(name, value)


@functools.cache
def apply() -> None:
    """Makes this process's tpu-inference run on CPU devices."""
    logger.warning(
        "torchax-dflash: running tpu-inference on a CPU, with reference attention. "
        "This is for development and tests only."
    )
    prepare_environment()
    _drop_tpu_compiler_options()
    _copy_host_buffers()
    _report_memory()
    _make_plain_meshes()
    _use_plain_attention()
    _use_plain_experts()
    _clone_weights_before_conversion()


def _drop_tpu_compiler_options() -> None:
    """The CPU compiler refuses `xla_tpu_…` (`models/common/compiler_options.py`)."""
    from jax._src import compiler

    original = compiler.get_compile_options

    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("env_options_overrides") or {}
        kwargs["env_options_overrides"] = {
            name: value
            for name, value in options.items()
            if not name.startswith("xla_tpu")
        }
        return original(*args, **kwargs)

    compiler.get_compile_options = get_compile_options


def _copy_host_buffers() -> None:
    """On a CPU, `device_put` may alias a NumPy array, and the runner reuses its own."""
    original = jax.device_put

    def device_put(x: Any, *args: Any, **kwargs: Any) -> Any:
        def copied(leaf: Any) -> Any:
            return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

        return original(jax.tree.map(copied, x), *args, **kwargs)

    jax.device_put = device_put


def _report_memory() -> None:
    """CPU devices have no memory statistics (`utils.py:200`)."""
    from tpu_inference import utils

    limit = int(float(os.environ.get(MEMORY_VARIABLE, "0.25")) * 2**30)
    utils.hbm_usage_bytes = lambda devices: [(0, limit) for _ in devices]


def _make_plain_meshes() -> None:
    """CPU devices have no coordinates to order them by (`utils.py:399`)."""
    from tpu_inference import utils
    from tpu_inference.runner import tpu_runner

    def make_mesh(axis_shapes: Any, axis_names: Any, *, devices: Any = None) -> Any:
        devices = jax.devices() if devices is None else devices
        count = int(np.prod(axis_shapes))
        grid = np.array(devices[:count]).reshape(axis_shapes)
        return jax.sharding.Mesh(grid, axis_names)

    utils.make_optimized_mesh = make_mesh
    tpu_runner.make_optimized_mesh = make_mesh


def _use_plain_attention() -> None:
    """The kernels are Pallas programs for TPUs (`attention_interface.py:62,65`)."""
    from tpu_inference.layers.common import attention_interface

    from torchax_dflash.serving.cpu import attention

    attention_interface.ragged_paged_attention = attention.ragged_paged_attention
    attention_interface.ragged_paged_attention_hd64 = (
        attention.ragged_paged_attention_hd64
    )


def _use_plain_experts() -> None:
    """As above, for mixtures of experts (`fused_moe_gmm.py:23,27`)."""
    from tpu_inference.kernels.sparse_core.dense_gather_reduce import _jax_fallback
    from tpu_inference.layers.common import fused_moe_gmm

    from torchax_dflash.serving.cpu import experts

    fused_moe_gmm.gmm_v2 = experts.gmm_v2
    fused_moe_gmm.dense_gather_reduce = _jax_fallback


def _clone_weights_before_conversion() -> None:
    """A view by `.numpy()` pins the storage it then resizes (`unquantized.py:380`)."""
    from tpu_inference.layers.vllm.quantization import unquantized

    original = unquantized.t2j

    def t2j(tensor: Any, use_dlpack: bool = True) -> Any:
        return original(tensor.clone(), use_dlpack=use_dlpack)

    unquantized.t2j = t2j
