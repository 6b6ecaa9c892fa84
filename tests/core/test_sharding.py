# SPDX-License-Identifier: Apache-2.0
"""A draft split over virtual CPU devices: the same numbers, each with its share.

JAX fixes its number of devices when it starts, so each number is a process of its own.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"


@functools.cache
def found(devices: int, *names: str, quantization: str = "none") -> dict:
    """What sharding_case.py says of these cases."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    paths = [
        str(SUPPORT),
        str(SUPPORT.parent),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    done = subprocess.run(
        [sys.executable, SUPPORT / "sharding_case.py", *names, quantization],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ
        | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(paths),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for result in results.values():
        assert result["devices"] == devices
        assert result["hidden_states_error"] <= 1e-5
        assert result["same_drafts"]
        assert result["pool_stays"]
    return results


TWO = (2, "even", "KV heads that do not divide")
EIGHT = (8, "fewer heads than devices", "two axes")


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_each_device_has_its_share(devices):
    result = found(*(TWO if devices == 2 else (8, "even")))["even"]
    assert result["pool_share"] == pytest.approx(1 / devices)
    # norms, a few rows of them, are whole on each
    assert result["weights_share"] == pytest.approx(1 / devices, rel=0.05)
    assert result["sums_per_layer"] == 2  # after attention and after the MLP


def test_kv_heads_that_do_not_divide_by_the_devices():
    """Keys, values and the cache are whole on each; queries and the MLP are split."""
    result = found(*TWO)["KV heads that do not divide"]
    assert result["pool_share"] == result["key_share"] == 1
    assert result["query_share"] == result["mlp_share"] == pytest.approx(1 / 2)


def test_fewer_heads_than_devices():
    """All of attention is whole on each, and still the MLP is split."""
    result = found(*EIGHT)["fewer heads than devices"]
    assert result["pool_share"] == result["key_share"] == result["query_share"] == 1
    assert result["mlp_share"] == pytest.approx(1 / 8)


def test_one_axis_of_a_mesh_of_two():
    """Split along "model" in four, and the same along "data"."""
    result = found(*EIGHT)["two axes"]
    assert result["pool_share"] == pytest.approx(1 / 4)
    assert result["weights_share"] == pytest.approx(1 / 4, rel=0.05)
    assert result["sums_per_layer"] == 2


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_int8_and_an_own_vocabulary(devices):
    """int8 weights and their scales, and an own embedding and head."""
    result = found(devices, "even", quantization="int8")["even"]
    assert result["weights_share"] == pytest.approx(1 / devices, rel=0.25)
    assert result["own_share"] == pytest.approx(1 / devices)
