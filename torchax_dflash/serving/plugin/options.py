# SPDX-License-Identifier: Apache-2.0
"""This plugin's part of vLLM's `additional_config`, under the name "torchax_dflash".

    true                             the default
    false                            off: tpu-inference as it is
    {"draft_quantization": "int8"}   on; the draft's linear weights are kept as int8

`speculative_config.quantization` cannot be used for that: vLLM accepts only methods of
its own there, of which "int8" is none, and asks tpu-inference for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchax_dflash.checkpoints.quantization import check_quantization
from torchax_dflash.core.config import config_error

NAME = "torchax_dflash"
_QUANTIZATION = "draft_quantization"


def is_enabled(vllm_config: Any) -> bool:
    """Whether this engine drafts with DFlash, and with our parts."""
    speculative = vllm_config.speculative_config
    is_dflash = speculative is not None and speculative.method == "dflash"
    return is_dflash and _options(vllm_config) is not False


def draft_quantization(vllm_config: Any) -> str | None:
    """How the draft's linear weights are kept: "int8", or None for as they are.

    Raises:
        ValueError: an unknown option.
    """
    options = _options(vllm_config)
    if isinstance(options, bool):
        return None
    if not isinstance(options, Mapping) or set(options) - {_QUANTIZATION}:
        raise config_error(
            f"additional_config.{NAME}",
            f"true, false or {{{_QUANTIZATION!r}: 'int8'}}",
            options,
            "Correct it.",
        )
    quantization = options.get(_QUANTIZATION)
    check_quantization(quantization)
    return quantization


def _options(vllm_config: Any) -> Any:
    return (vllm_config.additional_config or {}).get(NAME, True)
