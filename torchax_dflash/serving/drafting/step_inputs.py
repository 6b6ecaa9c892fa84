# SPDX-License-Identifier: Apache-2.0
"""What the runner tells the proposer about a step, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from torchax_dflash.core.attention import Context
from torchax_dflash.core.kv_cache import KVPool, slot_mapping_of
from torchax_dflash.serving.flat_rows import flat_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """A step's rows, as the target has computed and verified them; a pytree.

    Attributes:
        positions: int32 [T], of the rows of all requests in turn.
        block_tables: int32 [B * pages], the target's.
        seq_lens: int32 [B], rows of each request, rejected drafts included.
        query_start_loc: int32 [B + 1], first rows of the requests among the T.
        aux_hidden_states: for each of the draft's target layers [T, D].
        last_sampled_token_id: int32 [B].
        next_prompt_token_id: int32 [B], of requests that are still in their prompt.
        is_in_prefill: int32 [B], 1 for these.
        num_rejected_tokens: int32 [B].
        num_reqs: int32 [1], requests in the batch.
    """

    positions: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    aux_hidden_states: tuple[jax.Array, ...]
    last_sampled_token_id: jax.Array
    next_prompt_token_id: jax.Array
    is_in_prefill: jax.Array
    num_rejected_tokens: jax.Array
    num_reqs: jax.Array

    def context(self, num_speculative_tokens: int) -> Context:
        """What each request's block follows: its rows that were not rejected.

        A place of the batch without a request has no context and no block.
        """
        batch = self.seq_lens.shape[0]
        in_batch = jnp.arange(batch) < self.num_reqs[0]
        kept = self.seq_lens - self.num_rejected_tokens[:batch]
        context_lens = jnp.where(in_batch, kept, 0)
        return Context(
            block_table=self.block_tables.reshape(batch, -1),
            context_lens=context_lens,
            block_lens=jnp.where(context_lens > 0, num_speculative_tokens + 1, 0),
        )

    def slot_mapping(self, pool: KVPool, context: Context) -> jax.Array:
        """Where the rows go, int32 [T]; rejected rows and padding are dropped."""
        batch, num_rows = self.seq_lens.shape[0], self.positions.shape[0]
        rows = flat_rows(
            self.query_start_loc[: batch + 1], self.num_reqs[0], rows=num_rows
        )
        accepted = self.positions < context.context_lens[rows.request]
        slots = slot_mapping_of(
            pool,
            context.block_table[rows.request],
            self.positions[:, None],
            (accepted & rows.exists)[:, None],
        )
        return slots[:, 0]

    def anchors(self) -> jax.Array:
        """The last decided token of each request, int32 [B]; it has no row yet."""
        batch = self.seq_lens.shape[0]
        anchors = jnp.where(
            self.is_in_prefill, self.next_prompt_token_id, self.last_sampled_token_id
        )
        return anchors[:batch]
