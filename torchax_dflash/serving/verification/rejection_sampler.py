# SPDX-License-Identifier: Apache-2.0
"""Which drafts stand: our accept rule in the place of tpu-inference's sampler.

tpu-inference 0.32.0 verifies greedy batches rightly, and that code is kept. Its rule
for batches with sampled requests (`layers/jax/sample/rejection_sampler.py`) is not
lossless:

    `_compute_probs`:304  filters before the temperature, while `sample` does after it:
                          with both, drafts are held against another p
    the same, :315        divides by a greedy request's temperature, which is -1: beside
                          a sampled request it draws, preferring unlikely tokens
    the next, :459        accepts `ratio >= uniform`: a token of p = 0 where that is 0

and the runner passes no `draft_probs`. Here it is `sampling.accept`, as offline.

A draft's q lies in the proposer's buffer in the row its request had in the last step.
Requests come, go and change places, so each step says from which row its drafts are:

    sync     a request's drafts are the last step's where the scheduler names them
    async    where the runner takes them from the last step's tokens on the device

Any other draft (the scheduler's placeholders, read from wherever they lie) is verified
as if it had been chosen, not drawn. That is lossless for every token that does not
depend on the draws of this step, and for a draft that was drawn, too.
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
from tpu_inference.spec_decode.jax.utils import extend_logits_simple
from tpu_inference.utils import device_array, to_jax_dtype

from torchax_dflash.serving.drafting.proposer import TorchaxDFlashProposer
from torchax_dflash.serving.verification.programs import limited, only_bonus, verify


class Verifier(RejectionSampler):
    """The runner's `rejection_sampler`, told by its `_prepare_inputs` about each step.

    Attributes:
        draft_lengths: int32 [R], drafts of each row of this step's batch, padded.
        limits: int32 [R], how many leading drafts of a row may be accepted; the
            grammar's bitmask knows nothing of later ones.
    """

    def __init__(self, runner: Any, drafter: TorchaxDFlashProposer) -> None:
        super().__init__(runner.mesh)
        self._runner, self._drafter = runner, drafter
        self._original_prepare_inputs = runner._prepare_inputs
        self._original_indices = runner._prepare_async_token_substitution_indices
        self.draft_lengths: np.ndarray | None = None
        self.limits: np.ndarray | None = None
        self._q_rows: np.ndarray | None = None
        self._rows_taken: frozenset[int] = frozenset()
        self._dummy = device_array(runner.mesh, np.zeros(2, np.int32))
        self._by_row = NamedSharding(
            runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA)
        )
        sizes = {
            "num_speculative_tokens": drafter.num_speculative_tokens,
            "vocab_size": drafter.vocab_size,
        }
        self._verify = jax.jit(partial(verify, **sizes), out_shardings=self._by_row)
        self._only_bonus = jax.jit(
            only_bonus, static_argnames="rows", out_shardings=self._by_row
        )
        self._limited = jax.jit(limited, out_shardings=self._by_row)

    def install(self) -> None:
        """Puts itself into the runner."""
        runner = self._runner
        runner.rejection_sampler = self
        runner._prepare_inputs = self._prepare_inputs
        runner._prepare_async_token_substitution_indices = self._note_rows_taken

    def warm_up(self) -> None:
        """Compiles what tpu-inference's own warm-up does not know.

        That is ours, and the logits of log-probabilities: those are compiled there for
        bfloat16 and one sharding only (`compilation_manager.py:1266`).
        """
        runner = self._runner
        mesh, dtype = runner.mesh, to_jax_dtype(runner.dtype)
        names = PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)
        replicated = NamedSharding(mesh, PartitionSpec())
        for rows, flat in itertools.product(
            runner.num_reqs_paddings, runner.num_logits_paddings
        ):
            of_rows, of_drafts = np.zeros(rows, np.int32), np.zeros(flat, np.int32)
            self._only_bonus(jax.device_put(of_rows, replicated), rows=flat)
            self._limited(
                jax.device_put(of_drafts, self._by_row),
                jax.device_put(of_rows, self._by_row),
                jax.device_put(of_rows),
            )
            for sharding in (replicated, NamedSharding(mesh, names)):
                logits = (np.zeros((n, runner.vocab_size), dtype) for n in (flat, rows))
                extend_logits_simple(*jax.device_put((*logits,), sharding), mesh)

    def _note_rows_taken(self, *args: Any) -> Any:
        """As the runner's; notes whose drafts come from the last step's tokens."""
        indices = self._original_indices(*args)
        _, of_last_step = indices
        block = self._drafter.num_speculative_tokens + 1
        self._rows_taken = frozenset(index // block for index in of_last_step[0])
        return indices

    def _prepare_inputs(self, scheduler_output: Any) -> Any:
        """As the runner's; notes how many drafts there are, and where their q lies."""
        self._rows_taken = frozenset()
        inputs = self._original_prepare_inputs(scheduler_output)
        (metadata,) = [x for x in inputs if isinstance(x, SpecDecodeMetadata)]
        lengths = metadata.draft_lengths_cpu
        self.draft_lengths = lengths
        self.limits = None
        self._q_rows = self._find_q(len(lengths), scheduler_output)
        if not lengths.any():
            # Without drafts the runner takes log-probabilities from the first rows
            # (`tpu_runner.py:642`), so let these be the requests' own.
            indices = metadata.target_logits_indices
            own = np.arange(indices.shape[0], dtype=np.int32)
            metadata.target_logits_indices = jax.device_put(own, indices.sharding)
        return inputs

    def _find_q(self, rows: int, scheduler_output: Any) -> np.ndarray:
        """Of each row of the batch, the row of its drafts' q, or -1; int32 [R]."""
        found, batch = np.full(rows, -1, np.int32), self._runner.input_batch
        drawn = self._drafter.drawn
        if drawn is not None:
            for index, req_id in enumerate(batch.req_ids[: batch.num_reqs]):
                row = drawn.rows.get(req_id)
                if row is not None and self._are_last(req_id, row, scheduler_output):
                    found[index] = row
        return found

    def _are_last(self, req_id: str, row: int, scheduler_output: Any) -> bool:
        """Whether a request's drafts in this step are the last step's."""
        if self._runner.scheduler_config.async_scheduling:
            return row in self._rows_taken
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id, ())
        return len(drafts) > 0 and drafts[0] != PLACEHOLDER_TOKEN_ID

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
            bonus_token_ids: int32 [R], drawn behind each row's last draft.
            sampling_metadata: settings of the rows; with `do_sampling` False, none.
            key: of this step's draws.

        Returns:
            int32 [L + R]: accepted drafts and, where one fell, the token in its place;
            then the bonus tokens of rows whose drafts all stand; -1 elsewhere.
        """
        rows = bonus_token_ids.shape[0]
        q_rows, self._q_rows = self._q_rows, None
        limits, self.limits = self.limits, None
        lengths, self.draft_lengths = self.draft_lengths, None
        if lengths is not None and not lengths.any():
            return self._only_bonus(bonus_token_ids, rows=draft_token_ids.shape[0])
        if not sampling_metadata.do_sampling:
            if limits is not None:
                draft_token_ids = self._limited(
                    draft_token_ids, num_draft_tokens, jax.device_put(limits)
                )
            # One program, whether log-probabilities are asked for or not.
            plain = replace(
                sampling_metadata, logprobs=False, _cache_collision_dummy=self._dummy
            )
            return super().__call__(
                draft_token_ids,
                num_draft_tokens,
                None,
                target_logits,
                bonus_token_ids,
                plain,
                key,
            )
        q_rows = np.full(rows, -1, np.int32) if q_rows is None else q_rows
        if limits is None:
            limits = np.full(rows, self._drafter.num_speculative_tokens, np.int32)
        return self._verify(
            draft_token_ids,
            num_draft_tokens,
            target_logits,
            bonus_token_ids,
            sampling_metadata.temperature,
            sampling_metadata.top_k,
            sampling_metadata.top_p,
            key,
            None if self._drafter.drawn is None else self._drafter.drawn.probs,
            *jax.device_put((q_rows, limits)),
        )
