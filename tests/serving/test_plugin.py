# SPDX-License-Identifier: Apache-2.0
"""What vLLM sees of this package before it is asked for DFlash."""

import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest

import torchax_dflash
from torchax_dflash import serving


def test_looking_for_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, torchax_dflash.serving as s; s.platform_plugin(); "
        "heavy = {'jax', 'torch', 'transformers', 'dflash', 'vllm', 'tpu_inference'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in torchax_dflash.__all__:
        assert getattr(torchax_dflash, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torchax_dflash.no_such_name


def test_the_state_of_the_plugin(monkeypatch):
    monkeypatch.setenv(serving.DISABLE_VARIABLE, "1")
    state = serving.plugin_state()
    assert not state.is_active
    assert serving.DISABLE_VARIABLE in state.reason
    monkeypatch.setenv(serving.DISABLE_VARIABLE, "0")
    state = serving.plugin_state()
    needed = ("vllm", "tpu_inference", "libtpu")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    assert state.is_active == (not missing)
    assert all(name in state.reason for name in missing or needed)
    assert (serving.platform_plugin() is None) == bool(missing)


@pytest.mark.vllm
def test_the_plugin_is_found_and_can_be_switched_off(monkeypatch):
    (entry,) = metadata.entry_points(
        group="vllm.platform_plugins", name="torchax_dflash"
    )
    assert entry.load() is serving.platform_plugin
    monkeypatch.delenv(serving.DISABLE_VARIABLE, raising=False)
    assert serving.platform_plugin().endswith("DFlashTpuPlatform")
    monkeypatch.setenv(serving.DISABLE_VARIABLE, "1")
    assert serving.platform_plugin() is None
