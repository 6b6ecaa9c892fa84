# SPDX-License-Identifier: Apache-2.0
"""A draft split over virtual CPU devices: the same numbers, each with its share.

JAX fixes its number of devices when it starts, so each case is a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
CASE = TESTS / "support" / "sharding_case.py"


@pytest.mark.parametrize("devices", [2, 8])
def test_the_same_numbers_and_each_device_its_share(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, CASE],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == devices
    assert found["hidden_states_error"] <= 1e-5
    assert found["same_drafts"]
    assert found["pool_share"] == pytest.approx(1 / devices)
    # norms, a few rows of them, are whole on each
    assert found["weights_share"] == pytest.approx(1 / devices, rel=0.05)
    assert found["pool_stays_split"]
    assert found["sums_per_layer"] == 2  # after attention and after the MLP
    # int8 weights and their scales, and an own embedding and head
    assert found["int8_error"] <= 1e-5
    assert found["int8_same_drafts"]
    assert found["int8_weights_share"] == pytest.approx(1 / devices, rel=0.25)
    assert found["own_share"] == pytest.approx(1 / devices)
