# SPDX-License-Identifier: Apache-2.0
"""Offline generation: prompts in, texts out, with or without a draft.

The host admits prompts to free rows of the batch, lets the device run a few steps, and
reads the tokens; nothing else is exchanged between the two.
"""

from __future__ import annotations

import time
from collections import abc, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from torchax_dflash.core.config import config_error
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.target import Target
from torchax_dflash.generation.outputs import GenerationOutput, StreamEvent
from torchax_dflash.generation.prefill import CHUNK_SIZES, Chunk, chunk_sizes, prefill
from torchax_dflash.generation.request import Prompt, Request
from torchax_dflash.generation.sampling_params import (
    DRAFT_SAMPLE_METHODS,
    SamplingParams,
)
from torchax_dflash.generation.state import PAGE_SIZE, DecodeState, Steps
from torchax_dflash.generation.stats import RunStats, compilations
from torchax_dflash.generation.step import decode


class Generator:
    """Generates with a target and, if one is given, a draft.

    Attributes:
        stats: counts and times of the latest run.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        tokenizer: Any = None,
        max_model_len: int = 2048,
        max_num_seqs: int = 1,
        num_speculative_tokens: int | None = None,
        draft_sample_method: str = "greedy",
        steps_per_visit: int = 8,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """Allocates the caches.

        Args:
            target: the target.
            draft: the draft, or None for plain decoding.
            tokenizer: a fast one of transformers; needed for prompts, outputs and stops
                as text.
            max_model_len: the most tokens of a prompt and its output together.
            max_num_seqs: B, the most prompts that run at the same time.
            num_speculative_tokens: drafts per step, 1 to block_size - 1 (the default).
            draft_sample_method: for requests with a temperature: "greedy" proposes the
                draft's likeliest tokens, "probabilistic" draws them, which is accepted
                more often the higher the temperature is.
            steps_per_visit: the most decode steps before the host reads their tokens.
            page_size: rows of a page of the caches.

        Raises:
            ValueError: the draft does not fit the target, or a size is out of range.
        """
        sizes = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "steps_per_visit": steps_per_visit,
            "page_size": page_size,
        }
        for name, value in sizes.items():
            if value < 1:
                raise config_error(name, "at least 1", value, "Raise it.")
        if draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise config_error(
                "draft_sample_method",
                " or ".join(DRAFT_SAMPLE_METHODS),
                draft_sample_method,
                "Choose one.",
            )
        self.num_speculative_tokens = _num_drafts(target, draft, num_speculative_tokens)
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.draft_sample_method = draft_sample_method
        self.steps_per_visit = steps_per_visit
        self.page_size = page_size
        self.stats = RunStats()
        self._state: DecodeState | None = self._make_state()
        self._running = False

    def warm_up(self, on_program: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program, so that no later run compiles anything.

        Args:
            on_program: called with (programs done, programs in all), first with 0.
        """
        self._refuse_while_running()
        longest = self.max_model_len - 1
        shortest, *_ = CHUNK_SIZES
        chunks = [n for n in CHUNK_SIZES if n == shortest or n < 2 * longest]
        total = len(chunks) + 1
        report = on_program or (lambda done, total: None)
        report(0, total)
        nothing = Request.make(
            0,
            [0],
            SamplingParams(seed=0),
            target=self.target.config,
            tokenizer=None,
            max_model_len=2,
        )
        for done, size in enumerate(chunks, start=1):
            self._prefill(nothing, row=0, start=0, size=size, count=0, limit=0)
            report(done, total)
        self._decode([False] * self.max_num_seqs)
        report(total, total)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Continues each prompt (text or token ids); outputs in the same order.

        Args:
            prompts: any number.
            params: one for all (the first prompt gets its seed, the second seed + 1,
                and so on), or one for each.

        Raises:
            ValueError: a prompt or parameter is invalid; nothing runs then.
        """
        outputs: dict[int, GenerationOutput] = {}
        for event in self.stream(prompts, params):
            outputs[event.index] = event.output
        return [outputs[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> abc.Generator[StreamEvent]:
        """Like `generate`, but yields new text after each host visit.

        Close the iterator to end the run early.
        """
        requests = Request.make_all(
            prompts,
            params,
            target=self.target.config,
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
        )
        self._refuse_while_running()
        return self._run(requests)

    def _refuse_while_running(self) -> None:
        if self._running:
            raise RuntimeError(
                "Generator: expected one run at a time, got a second one. Finish or "
                "close the first, give all prompts to one call, or make another "
                "Generator."
            )

    def _run(self, requests: list[Request]) -> abc.Generator[StreamEvent]:
        self._refuse_while_running()  # one may have started since `stream` was called
        self._running = True
        self.stats = RunStats()
        try:
            waiting = deque(requests)
            rows: list[Request | None] = [None] * self.max_num_seqs
            while waiting or any(rows):
                for row, request in enumerate(rows):
                    if request is None and waiting:
                        rows[row] = request = waiting.popleft()
                        yield self._admit(row, request)
                        if request.output.finish_reason:
                            rows[row] = None
                if any(rows):
                    yield from self._visit(rows)
        finally:
            self._running = False

    def _admit(self, row: int, request: Request) -> StreamEvent:
        """Prefills one prompt; the last chunk gives the first token."""
        started = time.perf_counter()
        length = len(request.output.prompt_token_ids)
        start, first = 0, None
        for size in chunk_sizes(length):
            count = min(size, length - start)
            limit = request.limit if start + count == length else 0
            first = self._prefill(
                request, row=row, start=start, size=size, count=count, limit=limit
            )
            start += count
        token, logprob = jax.device_get(first)
        self.stats.prefill_seconds += time.perf_counter() - started
        return request.add(
            [int(token)], [float(logprob)], num_accepted=0, is_step=False
        )

    def _visit(self, rows: list[Request | None]) -> Iterator[StreamEvent]:
        """Lets the device run some steps; yields one event for each request."""
        started = time.perf_counter()
        steps = self._decode([request is not None for request in rows])
        self.stats.decode_seconds += time.perf_counter() - started
        for row, request in enumerate(rows):
            if request is None:
                continue
            segments: list[tuple[str, bool]] = []
            for step in range(self.steps_per_visit):
                count = int(steps.num_tokens[step, row])
                if count == 0 or request.output.finish_reason:
                    break
                event = request.add(
                    steps.token_ids[step, row, :count].tolist(),
                    steps.logprobs[step, row, :count].tolist(),
                    num_accepted=int(steps.num_accepted[step, row]),
                    is_step=True,
                )
                segments += event.segments
                self.stats.decode_tokens += request.output.acceptance_lengths[-1]
            if not steps.num_tokens[0, row]:
                raise RuntimeError(
                    f"row {row} is active on the host but not on the device"
                )
            yield StreamEvent(request.index, segments, request.output)
            if request.output.finish_reason:
                rows[row] = None

    def _prefill(self, request: Request, **chunk: int) -> list[jax.Array]:
        """The token after a chunk and its log-probability, still on the device."""
        return self._on_state(partial(prefill, chunk=Chunk.of(request, **chunk)))

    def _decode(self, keep: list[bool]) -> Steps:
        program = partial(
            decode,
            keep=jax.device_put(np.array(keep)),
            num_speculative_tokens=self.num_speculative_tokens,
            num_steps=self.steps_per_visit,
            draft_sample_method=self.draft_sample_method,
        )
        (steps,) = self._on_state(program)
        return jax.device_get(steps)

    def _on_state(self, program: Callable[..., Any]) -> list[Any]:
        """Runs a program on the state and counts what it compiled."""
        before = compilations().count
        # The state is donated: if the program is interrupted, it is lost.
        state, self._state = self._state or self._make_state(), None
        self._state, *result = program(self.target, self.draft, state)
        self.stats.recompilations += compilations().count - before
        return result

    def _make_state(self) -> DecodeState:
        return DecodeState.idle(
            self.target,
            self.draft,
            batch_size=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
            page_size=self.page_size,
        )


def _num_drafts(
    target: Target, draft: Draft | None, num_speculative_tokens: int | None
) -> int:
    """Checks that a draft fits its target; returns the drafts a step, 0 without one."""
    if draft is None:
        if num_speculative_tokens:
            raise config_error(
                "num_speculative_tokens",
                "None without a draft",
                num_speculative_tokens,
                "Give a draft, or leave it out.",
            )
        return 0
    draft.config.check_target(target.config)
    if draft.dtype != target.dtype:
        raise config_error(
            "dtype",
            f"the target's, {target.dtype}",
            str(draft.dtype),
            "Load both with the same dtype.",
        )
    return draft.config.check_num_speculative_tokens(num_speculative_tokens)
