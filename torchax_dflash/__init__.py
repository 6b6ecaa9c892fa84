# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding on JAX, with the original PyTorch modules unchanged."""

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
