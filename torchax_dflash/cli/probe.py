# SPDX-License-Identifier: Apache-2.0
"""Imports what `generate` needs and asks JAX for its devices, for `doctor`.

It runs in a process of its own, so that `doctor` survives a native library that crashes
or hangs, and holds no device. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

MODULES = {
    "jax": "jax",
    "torch": "torch",
    "torchax": "torchax",
    "transformers": "transformers",
    "dflash": "dflash.model",
    "torchax-dflash": "torchax_dflash.generation.generator",
}
"""By package, what `generate` imports of it; each needs those before it."""


def probe() -> dict[str, Any]:
    """`errors` by what failed, and what JAX runs on."""
    errors: dict[str, str] = {}
    for name, module in MODULES.items():
        try:
            import_module(module)
        except Exception as error:  # whatever it is, it is what is to be reported
            errors[name] = _line(error)
            break
    devices: list[str] = []
    backend = None
    if "jax" not in errors:
        import jax

        try:
            devices = [str(device) for device in jax.devices()]
            backend = jax.default_backend()
        except RuntimeError as error:
            errors["JAX"] = _line(error)
    return {"backend": backend, "devices": devices, "errors": errors}


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    print(json.dumps(probe()))
