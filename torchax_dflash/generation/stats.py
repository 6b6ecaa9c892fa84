# SPDX-License-Identifier: Apache-2.0
"""What a run cost: seconds, tokens, compilations."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax


@dataclass
class RunStats:
    """Counts of one `generate` or `stream` run; seconds are wall-clock time.

    Attributes:
        prefill_seconds: reading prompts, each of which yields its first output token.
        decode_seconds: decode steps.
        decode_tokens: tokens from decode steps.
        recompilations: programs compiled during the run; 0 after `warm_up`.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    recompilations: int = 0

    @property
    def decode_tokens_per_second(self) -> float:
        """For all requests together; 0.0 if nothing was decoded."""
        seconds = self.decode_seconds
        return self.decode_tokens / seconds if seconds else 0.0


class Compilations:
    """Counts the programs that JAX compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@functools.cache
def compilations() -> Compilations:
    """The counter of this process; JAX's listeners cannot be removed."""
    return Compilations()
