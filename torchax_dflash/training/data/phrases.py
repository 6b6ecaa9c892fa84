# SPDX-License-Identifier: Apache-2.0
"""The words of the built-in prompts, from phrases.toml."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

PHRASES: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("torchax_dflash.training.data")
    .joinpath("phrases.toml")
    .read_text(encoding="utf-8")
)
"""By section, then by name; lists of texts."""
