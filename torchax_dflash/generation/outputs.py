# SPDX-License-Identifier: Apache-2.0
"""A prompt's continuation: the final output, and events while it grows."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GenerationOutput:
    """One prompt's continuation.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the output, including the stop token that ended it.
        from_draft: for each of them, whether it was an accepted draft.
        logprobs: for each of them, its log-probability under the target's raw logits,
            before temperature and penalties; empty unless requested.
        acceptance_lengths: tokens that each target pass after the prefill yielded.
        text: the output as text, without special tokens; "" without a tokenizer.
        finish_reason: "stop" or "length"; None while unfinished.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tau, mean tokens per target pass (1.0 is plain decoding; 0.0: no pass)."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else 0.0


@dataclass(frozen=True)
class StreamEvent:
    """New text of one prompt.

    Attributes:
        index: position of the prompt among those of the call.
        segments: the new text, in pieces; each with whether an accepted draft completed
            it.
        output: everything so far; the same object in each event, final when its
            `finish_reason` is set.
    """

    index: int
    segments: list[tuple[str, bool]]
    output: GenerationOutput
