# SPDX-License-Identifier: Apache-2.0
"""DFlash in vLLM on TPUs, as a plugin of vLLM and tpu-inference.

    plugin/        what vLLM loads: the platform chooses our worker for
                   `"method": "dflash"`, the worker puts the parts below into
                   tpu-inference's model runner
    drafting/      the proposer: each step it ingests what the target accepted and
                   drafts, on the target's own block table
    verification/  the rejection sampler: which drafts are accepted
    upstream/      faults of tpu-inference and vLLM that are worked around, one file
                   each, to be deleted when upstream has fixed them
    cpu/           what the TPU stack needs to run on a CPU, for development
    flat_rows.py   tpu-inference's layout of rows, for all of them

Imports go plugin -> upstream -> verification -> drafting, and plugin -> cpu. This
folder is the only code that imports vllm or tpu_inference. `torchax_dflash.serving`
itself imports neither, so it can be imported without them.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

DISABLE_VARIABLE = "TORCHAX_DFLASH_DISABLE"
"""Set it to 1 to leave vLLM and tpu-inference as they are."""

_PLATFORM = "torchax_dflash.serving.plugin.platform.DFlashTpuPlatform"
_NEEDED = ("vllm", "tpu_inference", "libtpu")


@dataclass(frozen=True)
class PluginState:
    """Whether vLLM finds the plugin in this environment.

    Attributes:
        is_active: vLLM will use our platform.
        reason: why or why not, for a user.
    """

    is_active: bool
    reason: str


def plugin_state() -> PluginState:
    """Whether the plugin is active here; imports neither vllm nor tpu_inference."""
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return PluginState(False, f"switched off by {DISABLE_VARIABLE}")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return PluginState(False, f"not installed: {', '.join(missing)}")
    return PluginState(True, "vllm, tpu_inference and libtpu are installed")


def platform_plugin() -> str | None:
    """Entry point of `vllm.platform_plugins`: the name of our platform, or None.

    vLLM prefers it to tpu-inference's own platform where both apply, which is wherever
    libtpu is installed.
    """
    return _PLATFORM if plugin_state().is_active else None
