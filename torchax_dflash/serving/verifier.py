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

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample.rejection_sampler import (
    PLACEHOLDER_TOKEN_ID,
    RejectionSampler,
)
from tpu_inference.runner.utils import SpecDecodeMetadata

from torchax_dflash.sampling import SamplingState, accept, probabilities
from torchax_dflash.serving.proposer import TorchaxDFlashProposer


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
        self._by_row = NamedSharding(
            runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA)
        )
        sizes = {
            "num_speculative_tokens": drafter.num_speculative_tokens,
            "vocab_size": drafter.vocab_size,
        }
        self._verify = jax.jit(partial(_verify, **sizes), out_shardings=self._by_row)
        self._only_bonus = jax.jit(
            _only_bonus, static_argnames="rows", out_shardings=self._by_row
        )
        self._limited = jax.jit(_limited, out_shardings=self._by_row)

    def install(self) -> None:
        """Puts itself into the runner."""
        runner = self._runner
        runner.rejection_sampler = self
        runner._prepare_inputs = self._prepare_inputs
        runner._prepare_async_token_substitution_indices = self._note_rows_taken

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
            return super().__call__(
                draft_token_ids,
                num_draft_tokens,
                None,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
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


def _verify(
    draft_token_ids: jax.Array,
    num_draft_tokens: jax.Array,
    target_logits: jax.Array,
    bonus_token_ids: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    key: jax.Array,
    draft_probs: jax.Array | None,
    q_rows: jax.Array,
    limits: jax.Array,
    *,
    num_speculative_tokens: int,
    vocab_size: int,
) -> jax.Array:
    """`sampling.accept` on the runner's flat rows.

    Args:
        draft_token_ids: see `Verifier.__call__`, as for those up to `key`.
        num_draft_tokens: as above.
        target_logits: as above.
        bonus_token_ids: as above.
        temperature: float32 [R]; negative for greedy rows.
        top_k: int32 [R]; 0 or less keeps all.
        top_p: float32 [R].
        key: of this step.
        draft_probs: float32 [B, K, V] of the last step's rows, or None.
        q_rows: int32 [R], rows of `draft_probs`; -1 for drafts that were not drawn.
        limits: int32 [R], see `Verifier`.
        num_speculative_tokens: K (static).
        vocab_size: V without padding (static).
    """
    rows, flat = num_draft_tokens.shape[0], draft_token_ids.shape[0]
    settings = SamplingState(
        temperature=temperature,
        top_k=jnp.maximum(top_k, 0),
        top_p=top_p,
        min_p=jnp.zeros_like(top_p),
        seed=jax.random.bits(key, (rows,), jnp.uint32),
        logprobs=jnp.zeros(rows, jnp.bool_),
    )
    place = jnp.arange(num_speculative_tokens)
    starts = jnp.cumsum(num_draft_tokens) - num_draft_tokens
    index = jnp.clip(starts[:, None] + place, 0, flat - 1)
    drafts = draft_token_ids[index]
    probs = probabilities(target_logits[:, :vocab_size][index], settings)

    # A placeholder is no token, and behind it nothing follows from the text.
    exists = place < jnp.minimum(num_draft_tokens, limits)[:, None]
    exists &= (drafts >= 0) & (drafts < vocab_size)
    num_drafts = jnp.cumprod(exists.astype(jnp.int32), axis=1).sum(axis=1)

    q = jax.nn.one_hot(drafts, vocab_size)
    if draft_probs is not None:
        q = jnp.where((q_rows >= 0)[:, None, None], draft_probs[q_rows], q)

    # The runner has drawn what follows a row's last draft.
    last = jnp.arange(num_speculative_tokens + 1) == num_draft_tokens[:, None]
    bonus = jax.nn.one_hot(bonus_token_ids, vocab_size)[:, None]
    probs = jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))
    accepted = accept(
        jnp.where(last[..., None], bonus, probs),
        drafts,
        num_drafts,
        draft_probs=q,
        settings=settings,
        positions=jnp.zeros(rows, jnp.int32),
    )
    row, place, is_draft = _rows_of_drafts(num_draft_tokens, flat)
    main = accepted.token_ids[row, jnp.minimum(place, num_speculative_tokens)]
    stands = is_draft & (place <= accepted.num_accepted[row])
    return jnp.concatenate(
        [
            jnp.where(stands, main, PLACEHOLDER_TOKEN_ID),
            jnp.where(
                accepted.num_accepted == num_draft_tokens,
                bonus_token_ids,
                PLACEHOLDER_TOKEN_ID,
            ),
        ]
    )


def _rows_of_drafts(
    num_draft_tokens: jax.Array, flat: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of flat drafts: their rows, their places there, and whether they exist, [L]."""
    ends = jnp.cumsum(num_draft_tokens)
    rows = jnp.repeat(
        jnp.arange(num_draft_tokens.shape[0]),
        num_draft_tokens,
        total_repeat_length=flat,
    )
    at = jnp.arange(flat)
    return rows, at - (ends - num_draft_tokens)[rows], at < ends[-1]


def _limited(
    draft_token_ids: jax.Array, num_draft_tokens: jax.Array, limits: jax.Array
) -> jax.Array:
    """Drafts [L] that may not be accepted become -1, which no target chooses."""
    rows, place, _ = _rows_of_drafts(num_draft_tokens, draft_token_ids.shape[0])
    return jnp.where(place < limits[rows], draft_token_ids, PLACEHOLDER_TOKEN_ID)


def _only_bonus(bonus_token_ids: jax.Array, *, rows: int) -> jax.Array:
    """A step without drafts; the first rows say the same, for log-probabilities."""
    padding = max(0, rows - bonus_token_ids.shape[0])
    main = jnp.pad(bonus_token_ids, (0, padding))[:rows]
    return jnp.concatenate([main, bonus_token_ids]).astype(jnp.int32)
