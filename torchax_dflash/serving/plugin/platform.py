# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's platform, with our worker where DFlash is asked for."""

from __future__ import annotations

import copy
from typing import Any

from tpu_inference.platforms.tpu_platform import TpuPlatform

from torchax_dflash.core.config import config_error
from torchax_dflash.serving.cpu import stack as cpu
from torchax_dflash.serving.plugin import options
from torchax_dflash.serving.plugin import request_checks as requests
from torchax_dflash.serving.plugin import versions as compatibility

_WORKER = "torchax_dflash.serving.plugin.worker.DFlashWorker"
_CPU_WORKER = "torchax_dflash.serving.plugin.worker.CpuWorker"


class DFlashTpuPlatform(TpuPlatform):
    """Everything is TpuPlatform's but the worker class and what requests may ask for.

    `additional_config={"torchax_dflash": false}` switches it off for one engine.
    """

    _drafts = False

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Chooses the worker, after tpu-inference has set its own.

        Raises:
            ValueError: a feature that DFlash cannot be combined with.
            RuntimeError: a version of tpu-inference that does not fit.
        """
        if cpu.is_wanted():
            cpu.prepare_environment()
        super().check_and_update_config(vllm_config)
        if cpu.is_wanted():
            vllm_config.parallel_config.worker_cls = _CPU_WORKER
        speculative = vllm_config.speculative_config
        is_dflash = speculative is not None and speculative.method == "dflash"
        cls._drafts = is_dflash and options.is_enabled(vllm_config)
        if not cls._drafts:
            return
        compatibility.check()
        _refuse_unsupported(vllm_config)
        _hide_kind_of_draft(speculative)
        vllm_config.parallel_config.worker_cls = _WORKER

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuses what tpu-inference would ignore, or die of, in mid-request.

        Raises:
            ValueError: a setting that is not served.
        """
        # not above: the platform is chosen while vllm is still being imported
        from vllm.sampling_params import SamplingParams

        if cls._drafts and isinstance(params, SamplingParams):
            requests.check(params)
        super().validate_request(processed_inputs, params)


def _hide_kind_of_draft(speculative: Any) -> None:
    """Lets vLLM start with drafts that its own runner could not run.

    After this hook, vLLM refuses DFlash-2 and drafts with both sliding and full
    attention (`config/vllm.py:2999`). They are read from their folder by us, and have
    no cache of vLLM's.
    """
    model = speculative.draft_model_config = copy.copy(speculative.draft_model_config)
    hf_config = model.hf_config = copy.copy(model.hf_config)
    hf_config.architectures = ["DFlashDraftModel"]
    hf_config.layer_types = ["full_attention"] * hf_config.num_hidden_layers
    model.model_arch_config = copy.copy(model.model_arch_config)
    model.model_arch_config.architectures = hf_config.architectures


def _refuse_unsupported(vllm_config: Any) -> None:
    """What would fail in mid-request, or draft from the wrong rows without a word."""
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
