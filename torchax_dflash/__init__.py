# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding on JAX: original PyTorch modules, through torchax.

Names are imported when they are first used: vLLM imports this package in each of its
processes to look for a plugin, and most need nothing more of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_dflash.checkpoints.pretrained import DraftModel, TargetModel
    from torchax_dflash.core.config import DFlashConfig, TargetConfig
    from torchax_dflash.generation.generator import Generator
    from torchax_dflash.generation.outputs import GenerationOutput, StreamEvent
    from torchax_dflash.generation.sampling_params import SamplingParams
    from torchax_dflash.generation.stats import RunStats

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
    "DFlashConfig": "core.config",
    "DraftModel": "checkpoints.pretrained",
    "GenerationOutput": "generation.outputs",
    "Generator": "generation.generator",
    "RunStats": "generation.stats",
    "SamplingParams": "generation.sampling_params",
    "StreamEvent": "generation.outputs",
    "TargetConfig": "core.config",
    "TargetModel": "checkpoints.pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
