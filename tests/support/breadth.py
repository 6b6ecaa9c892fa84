# SPDX-License-Identifier: Apache-2.0
"""Parameters of which a few are always run, and the others by `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *, fast: Iterable[Any]) -> list:
    """All values as parameters; those that are not in `fast` are marked slow."""
    values, fast = list(values), list(fast)
    assert all(value in values for value in fast)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in fast else [pytest.mark.slow],
        )
        for value in values
    ]
