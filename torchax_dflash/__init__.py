# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding on JAX: original PyTorch modules, through torchax.

Names are imported when they are first used: vLLM imports this package in each of its
processes to look for a plugin, and most need nothing more of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_dflash.config import DFlashConfig, TargetConfig
    from torchax_dflash.draft_model import DraftModel
    from torchax_dflash.generator import Generator
    from torchax_dflash.request import GenerationOutput, SamplingParams, StreamEvent
    from torchax_dflash.stats import RunStats
    from torchax_dflash.target_model import TargetModel

__all__ = [
    "DFlashConfig",
    "DraftModel",
    "GenerationOutput",
    "Generator",
    "RunStats",
    "SamplingParams",
    "StreamEvent",
    "TargetConfig",
    "TargetModel",
]

_HOME = {
    "DFlashConfig": "config",
    "DraftModel": "draft_model",
    "GenerationOutput": "request",
    "Generator": "generator",
    "RunStats": "stats",
    "SamplingParams": "request",
    "StreamEvent": "request",
    "TargetConfig": "config",
    "TargetModel": "target_model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
