# SPDX-License-Identifier: Apache-2.0
"""One prompt on its way through the generator: what is asked, checked, and answered."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchax_dflash.core.config import TargetConfig, config_error
from torchax_dflash.generation.state import NUM_STOP_IDS
from torchax_dflash.generation.text import TextStream

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings are vLLM's, but for the defaults.

    Attributes:
        max_tokens: most new tokens.
        temperature: 0 takes the likeliest token, 1 draws as the target says.
        top_k: draw among the k likeliest tokens only; 0 for all.
        top_p: draw among the likeliest tokens that together reach p.
        min_p: draw among tokens at least this fraction of the likeliest.
        seed: the same seed gives the same output, whatever else runs; None for another
            one each time.
        repetition_penalty: above 1, tokens of prompt and output become less likely.
        presence_penalty: above 0, tokens of the output become less likely.
        frequency_penalty: the same, for each time they are there.
        logprobs: give the log-probability of each output token.
        stop: texts that end the output; they are no part of its text, though their
            tokens are of its tokens. One alone may be given as it is.
        stop_token_ids: tokens that end the output, besides the target's EOS; they are
            part of it.
        ignore_eos: go on after the target's EOS.
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
        """For several prompts: the same, but with seeds that follow each other."""
        self.check()
        if self.seed is None:
            return [self] * count
        return [replace(self, seed=(self.seed + i) % 2**32) for i in range(count)]

    def check(self) -> None:
        """Raises ValueError if a field is out of its range."""
        for name, expected, is_good, remedy in (
            ("max_tokens", "at least 1", self.max_tokens >= 1, "Ask for a token."),
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


@dataclass
class GenerationOutput:
    """One prompt's continuation.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the output, an ending stop token included.
        from_draft: for each of them, whether it was an accepted draft.
        logprobs: for each of them, its log-probability under the target's logits as
            they come, without temperature or penalties; empty unless asked for.
        acceptance_lengths: tokens that each target pass after the prefill gave.
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
    """News of one prompt.

    Attributes:
        index: which prompt.
        segments: new text, each with whether an accepted draft completed it.
        output: everything so far, one object that grows; final when its `finish_reason`
            is set.
    """

    index: int
    segments: list[tuple[str, bool]]
    output: GenerationOutput


@dataclass
class Request:
    """A prompt and its output so far.

    Attributes:
        index: which of the caller's prompts.
        params: how it is to be continued.
        seed: of its random draws.
        output: grows with each `add`.
        limit: most tokens of prompt and output.
        stop_ids: E ids, unused ones -1.
        stream: turns tokens to text, or None without a tokenizer.
    """

    index: int
    params: SamplingParams
    seed: int
    output: GenerationOutput
    limit: int
    stop_ids: list[int]
    stream: TextStream | None

    @classmethod
    def make(
        cls,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        target: TargetConfig,
        tokenizer: Any,
        max_model_len: int,
    ) -> Request:
        """Checks one prompt and its parameters.

        Raises:
            ValueError: they cannot be served.
        """
        name = f"prompts[{index}]"
        ids = _token_ids(name, prompt, tokenizer)
        outside = [token for token in ids if not 0 <= token < target.vocab_size]
        if outside:
            raise config_error(
                name,
                f"token ids 0 to {target.vocab_size - 1}",
                outside[:3],
                "Use the target's own tokenizer.",
            )
        if len(ids) >= max_model_len:
            raise config_error(
                name,
                f"fewer tokens than max_model_len, {max_model_len}",
                len(ids),
                "Shorten the prompt or raise max_model_len.",
            )
        params.check()
        if params.stop_texts and tokenizer is None:
            raise config_error(
                "stop",
                "no stop texts without a tokenizer",
                params.stop,
                "Give the Generator a tokenizer, or use stop_token_ids.",
            )
        return cls(
            index=index,
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            output=GenerationOutput(prompt_token_ids=ids),
            limit=min(len(ids) + params.max_tokens, max_model_len),
            stop_ids=_stop_ids(params, target),
            stream=TextStream(tokenizer, params.stop_texts) if tokenizer else None,
        )

    def add(
        self,
        token_ids: list[int],
        logprobs: list[float],
        *,
        num_accepted: int,
        is_step: bool,
    ) -> StreamEvent:
        """Appends the tokens of one target pass, up to a stop text.

        Args:
            token_ids: at least one; the first `num_accepted` were drafts.
            logprobs: of them.
            num_accepted: see there.
            is_step: the pass was a decode step, not the prefill.
        """
        output, segments, count = self.output, [], 0
        for count, token in enumerate(token_ids, start=1):
            output.token_ids.append(token)
            output.from_draft.append(count <= num_accepted)
            if self.params.logprobs:
                output.logprobs.append(logprobs[count - 1])
            if self.stream is not None:
                segments += self.stream.push(token, from_draft=count <= num_accepted)
                if self.stream.stopped:
                    output.finish_reason = "stop"
                    break
        if is_step:
            output.acceptance_lengths.append(count)
        if output.finish_reason is None:
            total = len(output.prompt_token_ids) + len(output.token_ids)
            if output.token_ids[-1] in self.stop_ids:
                output.finish_reason = "stop"
            elif total >= self.limit:
                output.finish_reason = "length"
        if self.stream is not None:
            if output.finish_reason:
                segments += self.stream.flush()
            output.text = self.stream.text
        return StreamEvent(self.index, segments, output)


def _token_ids(name: str, prompt: Prompt, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        ids = [int(token) for token in prompt]
    elif tokenizer is None:
        raise config_error(
            name, "token ids without a tokenizer", prompt, "Give a tokenizer."
        )
    else:
        ids = tokenizer(prompt).input_ids
    if not ids:
        raise config_error(name, "at least one token", prompt, "Write a prompt.")
    return ids


def _stop_ids(params: SamplingParams, target: TargetConfig) -> list[int]:
    stop_ids = list(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids += target.eos_token_ids
    room = NUM_STOP_IDS - len(stop_ids)
    if room < 0:
        raise config_error(
            "stop_token_ids",
            f"at most {NUM_STOP_IDS}, the target's EOS included",
            len(stop_ids),
            "Use fewer.",
        )
    return stop_ids + [-1] * room
