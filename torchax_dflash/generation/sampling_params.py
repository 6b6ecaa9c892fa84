# SPDX-License-Identifier: Apache-2.0
"""How to continue a prompt. Imports neither torch nor JAX, to stay cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchax_dflash.core.config import config_error

DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
"""How drafts of sampled requests come: the likeliest tokens, or drawn ones."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings are vLLM's; some defaults differ.

    Attributes:
        max_tokens: the most new tokens.
        temperature: 0 takes the likeliest token, 1 samples the target's distribution.
        top_k: sample from the k likeliest tokens only; 0 for all.
        top_p: sample from the fewest likeliest tokens whose probabilities reach p.
        min_p: sample from tokens at least this fraction as likely as the likeliest.
        seed: the same seed gives the same output, whatever else is in the batch; None
            for a fresh one each time.
        repetition_penalty: above 1 makes tokens of prompt and output less likely.
        presence_penalty: above 0 makes tokens of the output less likely.
        frequency_penalty: the same, once for each occurrence.
        logprobs: return the log-probability of each output token.
        stop: strings that end the output, or one string. They are left out of its
            text, but not out of its tokens.
        stop_token_ids: tokens that end the output, in addition to the target's EOS;
            they are included in it.
        ignore_eos: continue after the target's EOS.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def of_each(self, count: int) -> list[SamplingParams]:
        """One for each of several prompts, with consecutive seeds."""
        self.check()
        if self.seed is None:
            return [self] * count
        return [replace(self, seed=(self.seed + i) % 2**32) for i in range(count)]

    def check(self) -> None:
        """Raises ValueError if a field is out of its range."""
        for name, expected, is_good, remedy in (
            ("max_tokens", "at least 1", self.max_tokens >= 1, "Ask for one token."),
            ("temperature", "at least 0", self.temperature >= 0, "0 is greedy."),
            ("top_k", "at least 0", self.top_k >= 0, "0 keeps all tokens."),
            ("top_p", "above 0, up to 1", 0 < self.top_p <= 1, "1 keeps all tokens."),
            ("min_p", "0 to 1", 0 <= self.min_p <= 1, "0 keeps all tokens."),
            (
                "repetition_penalty",
                "above 0",
                self.repetition_penalty > 0,
                "1 changes nothing.",
            ),
            (
                "presence_penalty",
                "-2 to 2",
                -2 <= self.presence_penalty <= 2,
                "0 changes nothing.",
            ),
            (
                "frequency_penalty",
                "-2 to 2",
                -2 <= self.frequency_penalty <= 2,
                "0 changes nothing.",
            ),
            (
                "seed",
                "None or 0 to 4294967295",
                self.seed is None or 0 <= self.seed < 2**32,
                "Choose another.",
            ),
        ):
            if not is_good:
                raise config_error(name, expected, vars(self)[name], remedy)
