# SPDX-License-Identifier: Apache-2.0
"""What a batch of requests keeps on the device between host visits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from torchax_dflash.core.accept import Accepted
from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.core.target import Target
from torchax_dflash.generation.penalties import Penalties

PAGE_SIZE = 128
"""Rows of a page offline, where a request owns one contiguous run of pages."""

NUM_STOP_IDS = 16
"""E, stop-token slots of a request; unused ones hold -1."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Everything a batch of requests keeps on the device between host visits.

    Attributes:
        target_pool: the target's K/V.
        draft_pool: the draft's K/V of the same rows, or None without a draft.
        block_table: int32 [B, pages].
        anchors: int32 [B], last decided token, not yet in any cache.
        seq_lens: int32 [B], tokens before the anchor.
        limits: int32 [B], the most tokens of prompt and output together.
        stop_ids: int32 [B, E].
        active: bool [B].
        aux_hidden_states: [B, Q, F], of the last verified block.
        num_new: int32 [B], rows of `aux_hidden_states` that were accepted and not yet
            ingested.
        sampling: how each request's tokens are drawn.
        penalties: each request's penalties.
    """

    target_pool: KVPool
    draft_pool: KVPool | None
    block_table: jax.Array
    anchors: jax.Array
    seq_lens: jax.Array
    limits: jax.Array
    stop_ids: jax.Array
    active: jax.Array
    aux_hidden_states: jax.Array
    num_new: jax.Array
    sampling: SamplingState
    penalties: Penalties

    @classmethod
    def idle(
        cls,
        target: Target,
        draft: Draft | None,
        *,
        batch_size: int,
        max_model_len: int,
        num_speculative_tokens: int,
        page_size: int = PAGE_SIZE,
    ) -> DecodeState:
        """Allocates the state of `batch_size` idle requests."""
        pages = -(-max_model_len // page_size)
        num_pages = batch_size * pages

        def pool_of(model: Target | Draft) -> KVPool:
            return KVPool.allocate(
                model.config,
                num_pages=num_pages,
                page_size=page_size,
                dtype=model.dtype,
            )

        def integers(*shape: int) -> jax.Array:
            return jnp.zeros(shape, jnp.int32)

        block = num_speculative_tokens + 1
        width = draft.config.feature_size if draft else 0
        table = jnp.arange(num_pages, dtype=jnp.int32)
        return cls(
            target_pool=pool_of(target),
            draft_pool=draft and pool_of(draft),
            block_table=table.reshape(batch_size, pages),
            anchors=integers(batch_size),
            seq_lens=integers(batch_size),
            limits=integers(batch_size),
            stop_ids=integers(batch_size, NUM_STOP_IDS),
            active=jnp.zeros(batch_size, bool),
            aux_hidden_states=jnp.zeros((batch_size, block, width), target.dtype),
            num_new=integers(batch_size),
            sampling=SamplingState.greedy(batch_size),
            penalties=Penalties.none(batch_size, target.config.vocab_size),
        )

    def only(self, kept: jax.Array) -> DecodeState:
        """The same state with only the requests in `kept`, bool [B], active."""
        active = self.active & kept
        return replace(
            self,
            active=active,
            sampling=self.sampling.only(active),
            penalties=self.penalties.only(active),
        )

    def context(self, num_speculative_tokens: int) -> Context:
        """What this step's blocks follow, and how many rows of each are verified.

        Near its limit a request verifies fewer rows; idle ones verify none.
        """
        wanted = jnp.minimum(num_speculative_tokens + 1, self.limits - self.seq_lens)
        return Context(
            block_table=self.block_table,
            context_lens=jnp.where(self.active, self.seq_lens, 0),
            block_lens=jnp.where(self.active, wanted, 0),
        )

    def advance(
        self,
        accepted: Accepted,
        *,
        target_pool: KVPool,
        draft_pool: KVPool | None,
        aux_hidden_states: jax.Array,
    ) -> tuple[DecodeState, Steps]:
        """The state after a verified block, and the step's tokens."""
        num_tokens, stopped = self._count_tokens(accepted)
        last = jnp.maximum(num_tokens - 1, 0)[:, None]
        anchors = jnp.take_along_axis(accepted.token_ids, last, axis=1)[:, 0]
        seq_lens = self.seq_lens + num_tokens
        state = replace(
            self,
            target_pool=target_pool,
            draft_pool=draft_pool,
            anchors=jnp.where(self.active, anchors, self.anchors),
            seq_lens=seq_lens,
            active=self.active & ~stopped & (seq_lens + 1 < self.limits),
            aux_hidden_states=aux_hidden_states,
            num_new=num_tokens,
            penalties=self.penalties.add_output(accepted.token_ids, num_tokens),
        )
        return state, Steps(
            token_ids=accepted.token_ids,
            num_tokens=num_tokens,
            num_accepted=jnp.minimum(accepted.num_accepted, num_tokens),
            logprobs=accepted.logprobs,
        )

    def _count_tokens(self, accepted: Accepted) -> tuple[jax.Array, jax.Array]:
        """How many of a block's tokens count: up to the limit, and to a stop token.

        Returns:
            int32 [B] and whether a stop token was reached, bool [B].
        """
        room = self.limits - self.seq_lens - 1
        most = jnp.minimum(accepted.num_accepted + 1, room)
        num_tokens = jnp.where(self.active, most, 0)
        token_ids = accepted.token_ids
        stops = (token_ids[:, :, None] == self.stop_ids[:, None, :]).any(-1)
        stops &= jnp.arange(token_ids.shape[1]) < num_tokens[:, None]
        stopped = stops.any(axis=1)
        return jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, num_tokens), stopped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steps:
    """What the steps of one host visit produced, with S steps at most.

    Attributes:
        token_ids: int32 [S, B, Q]; the first `num_tokens` of each row count.
        num_tokens: int32 [S, B], the acceptance length; 0 for idle requests.
        num_accepted: int32 [S, B], how many of them were drafts.
        logprobs: float32 [S, B, Q], of `token_ids`, where they were requested.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    num_accepted: jax.Array
    logprobs: jax.Array

    @classmethod
    def none(cls, num_steps: int, batch_size: int, rows: int) -> Steps:
        """Before the first step; `rows` is Q."""
        shape = (num_steps, batch_size)
        return cls(
            token_ids=jnp.zeros((*shape, rows), jnp.int32),
            num_tokens=jnp.zeros(shape, jnp.int32),
            num_accepted=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros((*shape, rows), jnp.float32),
        )

    def with_step(self, index: jax.Array, step: Steps) -> Steps:
        """The same with one step, without a dimension S, in its place."""
        return jax.tree.map(lambda all_, one: all_.at[index].set(one), self, step)
