# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding on JAX: original PyTorch modules, through torchax.

Names are imported when they are first used: vLLM imports this package in each of its
processes to look for a plugin, and most need nothing more of it. `SamplingParams` and
what a run gives back need neither torch nor JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_dflash.checkpoints.cache import keep_compiled_programs
    from torchax_dflash.checkpoints.demo import demo_draft, demo_target
    from torchax_dflash.checkpoints.finding import find_checkpoint
    from torchax_dflash.checkpoints.pretrained import DraftModel, TargetModel
    from torchax_dflash.core.attention import Context
    from torchax_dflash.core.config import DFlashConfig, TargetConfig
    from torchax_dflash.core.draft import ingest
    from torchax_dflash.core.drafting import draft_tokens
    from torchax_dflash.core.kv_cache import KVPool
    from torchax_dflash.generation.generator import Generator
    from torchax_dflash.generation.outputs import GenerationOutput, StreamEvent
    from torchax_dflash.generation.sampling_params import SamplingParams
    from torchax_dflash.generation.stats import RunStats
    from torchax_dflash.generation.text import chat_token_ids

    __version__: str

__all__ = [
    "Context",
    "DFlashConfig",
    "DraftModel",
    "GenerationOutput",
    "Generator",
    "KVPool",
    "RunStats",
    "SamplingParams",
    "StreamEvent",
    "TargetConfig",
    "TargetModel",
    "chat_token_ids",
    "demo_draft",
    "demo_target",
    "draft_tokens",
    "find_checkpoint",
    "ingest",
    "keep_compiled_programs",
]

_MODULE_OF = {
    "keep_compiled_programs": "checkpoints.cache",
    "Context": "core.attention",
    "DFlashConfig": "core.config",
    "DraftModel": "checkpoints.pretrained",
    "GenerationOutput": "generation.outputs",
    "Generator": "generation.generator",
    "KVPool": "core.kv_cache",
    "RunStats": "generation.stats",
    "SamplingParams": "generation.sampling_params",
    "StreamEvent": "generation.outputs",
    "TargetConfig": "core.config",
    "TargetModel": "checkpoints.pretrained",
    "chat_token_ids": "generation.text",
    "demo_draft": "checkpoints.demo",
    "demo_target": "checkpoints.demo",
    "draft_tokens": "core.drafting",
    "find_checkpoint": "checkpoints.finding",
    "ingest": "core.draft",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("torchax-dflash")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
