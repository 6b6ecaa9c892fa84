# SPDX-License-Identifier: Apache-2.0
"""The phrases of the built-in prompts, from phrases.toml."""

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

CODE_QUESTION = (
    "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\n{}\n```"
)
"""How the benchmark of the `dflash` package asks for a function."""

MATH_QUESTION = (
    "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)
"""How the benchmark of the `dflash` package asks a mathematical question."""
