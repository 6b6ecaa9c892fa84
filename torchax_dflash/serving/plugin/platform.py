# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's platform, with our worker where DFlash is asked for."""

from __future__ import annotations

from typing import Any

from tpu_inference.platforms.tpu_platform import TpuPlatform

from torchax_dflash.core.config import config_error
from torchax_dflash.serving.cpu import stack
from torchax_dflash.serving.plugin import options, request_checks, versions
from torchax_dflash.serving.upstream import draft_model_config, request_validation

_WORKER = "torchax_dflash.serving.plugin.worker.DFlashWorker"
_CPU_WORKER = "torchax_dflash.serving.plugin.worker.CpuWorker"


class DFlashTpuPlatform(TpuPlatform):
    """TpuPlatform, but for the worker class and what requests may ask for.

    `additional_config={"torchax_dflash": false}` switches it off for one engine. It
    keeps no state: one platform serves all engines of a process.
    """

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Chooses the worker, after tpu-inference has set its own.

        Raises:
            ValueError: a feature that DFlash cannot be combined with.
            RuntimeError: a version of tpu-inference that does not fit.
        """
        if stack.is_wanted():
            stack.prepare_environment()
        super().check_and_update_config(vllm_config)
        if stack.is_wanted():
            vllm_config.parallel_config.worker_cls = _CPU_WORKER
        if not options.is_enabled(vllm_config):
            return
        versions.check()
        _refuse_unsupported(vllm_config)
        draft_model_config.show_as_plain_dflash(vllm_config.speculative_config)
        request_validation.install(request_checks.check)
        vllm_config.parallel_config.worker_cls = _WORKER


def _refuse_unsupported(vllm_config: Any) -> None:
    """Features that would fail during a request, or draft from the wrong rows."""
    options.draft_quantization(vllm_config)
    if (method := vllm_config.speculative_config.quantization) is not None:
        raise config_error(
            "speculative_config.quantization",
            "none with DFlash",
            method,
            "For int8 weights, give --additional-config "
            '\'{"torchax_dflash": {"draft_quantization": "int8"}}\'.',
        )
    parallel, sharding = vllm_config.parallel_config, vllm_config.sharding_config
    sizes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        # of requests and of attention; tpu-inference moves it out of parallel_config
        "data parallelism": sharding.total_dp_size,
        "prefill_context_parallel_size": sharding.prefill_cp_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
    }
    for name, size in sizes.items():
        if size != 1:
            raise config_error(name, "1 with DFlash", size, "Set it to 1.")
    speculative = vllm_config.speculative_config
    if speculative.rejection_sample_method != "standard":
        raise config_error(
            "speculative_config.rejection_sample_method",
            "standard with DFlash",
            speculative.rejection_sample_method,
            "Leave it out.",
        )
    logprobs_mode = vllm_config.model_config.logprobs_mode
    if logprobs_mode.startswith("processed"):
        raise config_error(
            "logprobs_mode", "a raw one with DFlash", logprobs_mode, "Leave it out."
        )
    unsupported = {
        "enable_continue_decode": (vllm_config.additional_config or {}).get(
            "enable_continue_decode"
        ),
        "enable_lora": vllm_config.lora_config is not None,
        "multimodal target": vllm_config.model_config.is_multimodal_model,
        "multi-axis RoPE (M-RoPE)": vllm_config.model_config.uses_mrope,
        "speculative_config.revision": speculative.revision,
    }
    for name, value in unsupported.items():
        if value:
            raise config_error(name, "none with DFlash", value, "Leave it out.")
