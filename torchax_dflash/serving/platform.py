# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's platform, with our worker where DFlash is asked for."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

from tpu_inference.platforms.tpu_platform import TpuPlatform

from torchax_dflash.config import config_error
from torchax_dflash.serving import cpu

logger = logging.getLogger(__name__)

_WORKER = "torchax_dflash.serving.worker.DFlashWorker"
_CPU_WORKER = "torchax_dflash.serving.worker.CpuWorker"
_OPTION = "torchax_dflash"
_TESTED = {"tpu-inference": "0.32.0"}


class DFlashTpuPlatform(TpuPlatform):
    """Everything is TpuPlatform's but the worker class.

    `additional_config={"torchax_dflash": false}` switches it off for one engine.
    """

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Chooses the worker, after tpu-inference has set its own.

        Raises:
            ValueError: a feature that DFlash cannot be combined with.
        """
        if cpu.is_wanted():
            cpu.prepare_environment()
        super().check_and_update_config(vllm_config)
        if cpu.is_wanted():
            vllm_config.parallel_config.worker_cls = _CPU_WORKER
        speculative = vllm_config.speculative_config
        enabled = (vllm_config.additional_config or {}).get(_OPTION, True)
        if speculative is None or speculative.method != "dflash" or not enabled:
            return
        for package, tested in _TESTED.items():
            installed = metadata.version(package)
            if installed != tested:
                logger.warning(
                    "torchax-dflash is tested with %s %s, found %s.",
                    package,
                    tested,
                    installed,
                )
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, name) != 1:
                raise config_error(
                    name, "1 with DFlash", getattr(parallel, name), "Set it to 1."
                )
        parallel.worker_cls = _WORKER
