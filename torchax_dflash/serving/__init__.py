# SPDX-License-Identifier: Apache-2.0
"""DFlash in vLLM on TPUs, as a plugin: `vllm.platform_plugins` finds `platform_plugin`.

    platform.py      chooses our worker for `"method": "dflash"`
    requests.py      what requests may ask for
    worker.py        puts our parts into tpu-inference's model runner
    proposer.py      ingests and drafts each step, on the target's block table
    programs.py      its programs
    drawn_drafts.py  what drafts were drawn from, until they are verified
    verifier.py      which drafts stand, in the place of tpu-inference's sampler
    verification.py  its programs
    structured.py    the grammar's masks, one for each draft
    runner_fix.py    two faults of tpu-inference under async scheduling, mended
    head.py          the target's embedding and output head, as the draft borrows them
    cpu.py           what the TPU stack needs to run on a CPU, for development

This folder is the only code that imports vllm or tpu_inference, and nothing outside
imports it.
"""

from __future__ import annotations

import importlib.util
import os

DISABLE_VARIABLE = "TORCHAX_DFLASH_DISABLE"
"""Set it to 1 to leave vLLM and tpu-inference as they are."""


def platform_plugin() -> str | None:
    """Entry point of `vllm.platform_plugins`: our platform's name, or None.

    vLLM prefers it to tpu-inference's own where both apply, which is where libtpu is.
    """
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return None
    for package in ("libtpu", "tpu_inference"):
        if importlib.util.find_spec(package) is None:
            return None
    return "torchax_dflash.serving.plugin.platform.DFlashTpuPlatform"
