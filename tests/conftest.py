# SPDX-License-Identifier: Apache-2.0
"""Fixtures, and what every test process needs before JAX is imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Each tiny model is a module of its own to JAX, so the same programs are compiled again
# and again. Workers and subprocesses inherit this folder; entries go by content.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import time
from types import SimpleNamespace

import dflash.model
import jax
import pytest
import torch
from breadth import mostly_slow
from dflash.model import DFlashDraftModel
from tiny_models import PAIRS, pair
from transformers import AutoModelForCausalLM

from torchax_dflash import DraftModel, TargetModel

# The environment of serving has no training packages; its tests are marked `vllm`.
SERVING = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = ["training/*"] if SERVING else []

# What promotes dtypes implicitly is an error here; tpu-inference does in many places.
if not SERVING:
    jax.config.update("jax_numpy_dtype_promotion", "strict")

# JAX's threads and PyTorch's would fight for the same cores.
torch.set_num_threads(1)


@pytest.fixture(params=mostly_slow(PAIRS, fast=["llama-untied", "qwen3-tied"]))
def any_pair(request):
    family, head = request.param.split("-")
    return pair(family, head == "tied")


@pytest.fixture(autouse=True, scope="session")
def _cpu_clock():
    """`dflash_generate` reads its clock after a CUDA synchronisation."""
    original, dflash.model._cuda_time = dflash.model._cuda_time, time.perf_counter
    yield
    dflash.model._cuda_time = original


@pytest.fixture(autouse=True)
def _forget_programs():
    """XLA maps each compiled program into memory, and Linux allows 65,530 mappings.

    One process for all tests would come near that, and then it crashes.
    """
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2():
    """The demo pair, as anyone gets it: in PyTorch and in ours."""
    from transformers import AutoTokenizer

    from torchax_dflash.checkpoints.demo import demo_target

    folder = demo_target()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    draft_folder = os.path.join(root, "examples", "smollm2-135m-dflash")
    return SimpleNamespace(
        folder=folder,
        draft_folder=draft_folder,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        torch_target=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        torch_draft=DFlashDraftModel.from_pretrained(draft_folder, dtype=torch.float32),
        target=TargetModel.from_pretrained(folder),
        draft=DraftModel.from_pretrained(draft_folder),
    )
