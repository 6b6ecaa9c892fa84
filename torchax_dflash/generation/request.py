# SPDX-License-Identifier: Apache-2.0
"""A prompt inside the generator: its checked parameters and its output so far."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchax_dflash.core.config import TargetConfig, config_error
from torchax_dflash.generation.outputs import GenerationOutput, StreamEvent
from torchax_dflash.generation.sampling_params import SamplingParams
from torchax_dflash.generation.state import NUM_STOP_IDS
from torchax_dflash.generation.text import TextStream

Prompt = str | Sequence[int]


@dataclass
class Request:
    """A prompt and its output so far.

    Attributes:
        index: position among the caller's prompts.
        params: how to continue it.
        seed: of its random draws.
        output: grows with each `add`.
        limit: the most tokens of prompt and output together.
        stop_ids: E ids; unused slots are -1.
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
            ValueError: one of them is invalid.
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
                "none without a tokenizer",
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

    @classmethod
    def make_all(
        cls,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        target: TargetConfig,
        tokenizer: Any,
        max_model_len: int,
    ) -> list[Request]:
        """Checks all prompts of a call, with one `params` for all or one for each.

        Raises:
            ValueError: one of them is invalid.
        """
        if isinstance(prompts, str) or any(isinstance(p, int) for p in prompts):
            raise config_error(
                "prompts",
                "a list of prompts, each a string or a list of token ids",
                prompts,
                "Put a single prompt into a list.",
            )
        params = params or SamplingParams()
        if isinstance(params, SamplingParams):
            params = params.of_each(len(prompts))
        if len(params) != len(prompts):
            raise config_error(
                "params",
                f"one, or one for each of {len(prompts)} prompts",
                len(params),
                "Give one for all prompts, or one for each.",
            )
        return [
            cls.make(
                index,
                prompt,
                params[index],
                target=target,
                tokenizer=tokenizer,
                max_model_len=max_model_len,
            )
            for index, prompt in enumerate(prompts)
        ]

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
