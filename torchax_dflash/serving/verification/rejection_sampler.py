# SPDX-License-Identifier: Apache-2.0
"""Which drafts are accepted: our accept rule in place of tpu-inference's sampler.

tpu-inference 0.32.0 verifies greedy batches correctly, and that code is kept. Its rule
for batches with sampled requests (`layers/jax/sample/rejection_sampler.py`) is not
lossless:

    `_compute_probs`:304  filters before the temperature, while `sample` does so after
                          it: with both, drafts are verified against another p
    the same, :315        divides by a greedy request's temperature, which is -1: beside
                          a sampled request it draws, preferring unlikely tokens
    the next, :459        accepts `ratio >= uniform`: a token of p = 0 where that is 0

and the runner passes no `draft_probs`. Here it is `accept` of the core, as offline.

The proposer keeps the q of the drafts in a buffer, in the row that the request had in
the last step. Requests come, go and change rows, so each step has to find out which row
its drafts are from:

    sync     a request's drafts are the last step's if the scheduler names them
    async    if the runner takes them from the last step's tokens on the device

Any other draft (a placeholder of the scheduler's, whatever is read in its place) is
verified as if it had been chosen, not drawn. That is lossless for every token that does
not depend on the draws of this step, and so for a draft that was drawn, too.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample.rejection_sampler import (
    PLACEHOLDER_TOKEN_ID,
    RejectionSampler,
)
from tpu_inference.runner.utils import SpecDecodeMetadata
from tpu_inference.utils import device_array

from torchax_dflash.serving.drafting.proposer import TorchaxDFlashProposer
from torchax_dflash.serving.verification.programs import (
    FlatDrafts,
    TargetRows,
    bonus_only,
    mask_beyond_limits,
    verify,
)


class DFlashRejectionSampler(RejectionSampler):
    """The runner's `rejection_sampler`; its `_prepare_inputs` announces each step.

    Attributes:
        draft_lengths: int32 [R], drafts of each row of this step's batch, padded.
        limits: int32 [R], how many leading drafts of a row may be accepted; None for
            all. The grammar's bitmask does not cover later ones.
    """

    def __init__(self, runner: Any, drafter: TorchaxDFlashProposer) -> None:
        super().__init__(runner.mesh)
        self._runner, self._drafter = runner, drafter
        self._original_prepare_inputs = runner._prepare_inputs
        self._original_indices = runner._prepare_async_token_substitution_indices
        self.draft_lengths: np.ndarray | None = None
        self.limits: np.ndarray | None = None
        self._q_rows: np.ndarray | None = None
        self._substituted_rows: frozenset[int] = frozenset()
        # The shape of this field distinguishes tpu-inference's programs with and
        # without log-probabilities in JAX's compilation cache; (2,) is "without".
        self._cache_key_without_logprobs = device_array(
            runner.mesh, np.zeros(2, np.int32)
        )
        self._by_row = NamedSharding(
            runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA)
        )
        sizes = {
            "num_speculative_tokens": drafter.num_speculative_tokens,
            "vocab_size": drafter.vocab_size,
        }
        self._verify = jax.jit(partial(verify, **sizes), out_shardings=self._by_row)
        self._bonus_only = jax.jit(
            bonus_only, static_argnames="rows", out_shardings=self._by_row
        )
        self._mask_beyond_limits = jax.jit(
            mask_beyond_limits, out_shardings=self._by_row
        )

    def install(self) -> None:
        """Puts itself into the runner."""
        runner = self._runner
        runner.rejection_sampler = self
        runner._prepare_inputs = self._prepare_inputs
        runner._prepare_async_token_substitution_indices = (
            self._prepare_async_token_substitution_indices
        )

    def warm_up(self) -> None:
        """Compiles the two small programs; `verify` is compiled by tpu-inference."""
        runner = self._runner
        replicated = NamedSharding(runner.mesh, PartitionSpec())
        for num_reqs, num_logits in itertools.product(
            runner.num_reqs_paddings, runner.num_logits_paddings
        ):
            by_request = np.zeros(num_reqs, np.int32)
            by_draft = np.zeros(num_logits, np.int32)
            self._bonus_only(jax.device_put(by_request, replicated), rows=num_logits)
            self._mask_beyond_limits(
                jax.device_put(by_draft, self._by_row),
                jax.device_put(by_request, self._by_row),
                jax.device_put(by_request),
            )

    def _prepare_async_token_substitution_indices(self, *args: Any) -> Any:
        """As the runner's; notes which rows take their drafts from the last step."""
        indices = self._original_indices(*args)
        _, of_last_step = indices
        block = self._drafter.num_speculative_tokens + 1
        self._substituted_rows = frozenset(index // block for index in of_last_step[0])
        return indices

    def _prepare_inputs(self, scheduler_output: Any) -> Any:
        """As the runner's; notes how many drafts there are, and the rows of their q."""
        self._substituted_rows = frozenset()
        inputs = self._original_prepare_inputs(scheduler_output)
        lengths = spec_decode_metadata_of(inputs).draft_lengths_cpu
        self.draft_lengths = lengths
        self.limits = None
        self._q_rows = self._find_q_rows(len(lengths), scheduler_output)
        return inputs

    def _find_q_rows(self, rows: int, scheduler_output: Any) -> np.ndarray:
        """Of each row of the batch, the row of its drafts' q, or -1; int32 [R]."""
        found, batch = np.full(rows, -1, np.int32), self._runner.input_batch
        drawn = self._drafter.drawn
        if drawn is not None:
            for index, req_id in enumerate(batch.req_ids[: batch.num_reqs]):
                row = drawn.rows.get(req_id)
                if row is not None and self._are_last_steps(
                    req_id, row, scheduler_output
                ):
                    found[index] = row
        return found

    def _are_last_steps(self, req_id: str, row: int, scheduler_output: Any) -> bool:
        """Whether a request's drafts in this step are the last step's."""
        if self._runner.scheduler_config.async_scheduling:
            return row in self._substituted_rows
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id, ())
        return len(drafts) > 0 and drafts[0] != PLACEHOLDER_TOKEN_ID

    # The parameters are tpu-inference's.
    def __call__(
        self,
        draft_token_ids: jax.Array,
        num_draft_tokens: jax.Array,
        draft_probs: jax.Array | None,
        target_logits: jax.Array,
        bonus_token_ids: jax.Array,
        sampling_metadata: Any,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Verifies the drafts of one step; called by the runner.

        Args:
            draft_token_ids: int32 [L], drafts of all rows in turn, then padding.
            num_draft_tokens: int32 [R].
            draft_probs: None; q comes from the proposer.
            target_logits: [L, V padded], masked by the grammar already.
            bonus_token_ids: int32 [R], drawn after each row's last draft.
            sampling_metadata: settings of the rows; with `do_sampling` False, none.
            key: of this step's draws.

        Returns:
            int32 [L + R]: accepted drafts and, where one was rejected, the token in its
            place; then the bonus tokens of rows whose drafts were all accepted; -1
            elsewhere.
        """
        rows = bonus_token_ids.shape[0]
        q_rows, self._q_rows = self._q_rows, None
        limits, self.limits = self.limits, None
        lengths, self.draft_lengths = self.draft_lengths, None
        if lengths is not None and not lengths.any():
            return self._bonus_only(bonus_token_ids, rows=draft_token_ids.shape[0])
        if not sampling_metadata.do_sampling:
            if limits is not None:
                draft_token_ids = self._mask_beyond_limits(
                    draft_token_ids, num_draft_tokens, jax.device_put(limits)
                )
            # One program, whether log-probabilities are asked for or not.
            sampling_metadata = replace(
                sampling_metadata,
                logprobs=False,
                _cache_collision_dummy=self._cache_key_without_logprobs,
            )
            return super().__call__(
                draft_token_ids,
                num_draft_tokens,
                None,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
                key,
            )
        if q_rows is None:
            q_rows = np.full(rows, -1, np.int32)
        if limits is None:
            limits = np.full(rows, self._drafter.num_speculative_tokens, np.int32)
        limits, q_rows = jax.device_put((limits, q_rows))
        drawn = self._drafter.drawn
        return self._verify(
            FlatDrafts(draft_token_ids, num_draft_tokens, limits, q_rows),
            TargetRows(
                target_logits,
                bonus_token_ids,
                sampling_metadata.temperature,
                sampling_metadata.top_k,
                sampling_metadata.top_p,
            ),
            None if drawn is None else drawn.probs,
            key,
        )


def spec_decode_metadata_of(inputs: tuple[Any, ...]) -> SpecDecodeMetadata:
    """The one among what the runner's `_prepare_inputs` returns."""
    (metadata,) = [item for item in inputs if isinstance(item, SpecDecodeMetadata)]
    return metadata
