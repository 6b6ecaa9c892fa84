# SPDX-License-Identifier: Apache-2.0
"""The proposer's three programs: ingest, draft, and draft by drawing."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import Draft, ingest
from torchax_dflash.core.drafting import draft_tokens, draw_draft_tokens
from torchax_dflash.core.kv_cache import KVPool, slot_mapping_of
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.serving.drafting.target_head import ServedHead


@partial(jax.jit, donate_argnames="pool")
def ingest_step(
    draft: Draft,
    pool: KVPool,
    positions: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    aux_hidden_states: tuple[jax.Array, ...],
    last_sampled_token_id: jax.Array,
    next_prompt_token_id: jax.Array,
    is_in_prefill: jax.Array,
    num_rejected_tokens: jax.Array,
    num_reqs_dp: jax.Array,
) -> tuple[KVPool, jax.Array, jax.Array, jax.Array]:
    """The whole of the proposer's `prepare_inputs`."""
    batch = seq_lens.shape[0]
    block_table = block_tables.reshape(batch, -1)
    num_reqs = num_reqs_dp[0]
    in_batch = jnp.arange(batch) < num_reqs
    rejected = num_rejected_tokens[:batch]
    context_lens = jnp.where(in_batch, seq_lens - rejected, 0)

    # Which request a row belongs to: the first whose end lies behind it.
    rows = jnp.arange(positions.shape[0])
    ends = jnp.where(in_batch, query_start_loc[1 : batch + 1], 2**31 - 1)
    request = jnp.clip(jnp.searchsorted(ends, rows, side="right"), 0, batch - 1)
    accepted = positions < context_lens[request]
    accepted &= rows < query_start_loc[num_reqs]
    slots = slot_mapping_of(
        pool, block_table[request], positions[:, None], accepted[:, None]
    )
    aux = jnp.concatenate(aux_hidden_states, axis=-1)
    pool = ingest(draft, pool, aux, positions, slots[:, 0])
    anchors = jnp.where(is_in_prefill, next_prompt_token_id, last_sampled_token_id)
    return pool, block_table, context_lens, anchors[:batch]


@partial(jax.jit, static_argnames=("rows", "num_speculative_tokens"))
def draft_step(
    draft: Draft,
    head: ServedHead,
    pool: KVPool,
    anchors: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    *,
    rows: int,
    num_speculative_tokens: int,
) -> jax.Array:
    """The whole of its `propose`: the first `rows` of the batch draft."""
    batch, k = anchors.shape[0], num_speculative_tokens
    context = _context(block_table[:rows], context_lens[:rows], k)
    draft_token_ids = draft_tokens(
        draft, head, pool, anchors[:rows], context, num_speculative_tokens=k
    )
    return jnp.pad(draft_token_ids, ((0, batch - rows), (0, 0)))


@partial(
    jax.jit, static_argnames="num_speculative_tokens", donate_argnames="draft_probs"
)
def draft_drawn_step(
    draft: Draft,
    head: ServedHead,
    pool: KVPool,
    anchors: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    settings: SamplingState,
    draft_probs: jax.Array,
    *,
    num_speculative_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """As `draft_step`, but drawn, and q written into `draft_probs`."""
    batch, rows = anchors.shape[0], settings.seed.shape[0]
    k = num_speculative_tokens
    context = _context(block_table[:rows], context_lens[:rows], k)
    draft_token_ids, probs = draw_draft_tokens(
        draft,
        head,
        pool,
        anchors[:rows],
        context,
        num_speculative_tokens=k,
        sampling=settings,
    )
    probs = probs[..., : head.vocab_size]
    draft_token_ids = jnp.pad(draft_token_ids, ((0, batch - rows), (0, 0)))
    assert pool.sharding is not None
    replicated = NamedSharding(pool.sharding.mesh, PartitionSpec())
    return draft_token_ids, jax.lax.with_sharding_constraint(
        draft_probs.at[:rows].set(probs), replicated
    )


def _context(block_table: jax.Array, context_lens: jax.Array, k: int) -> Context:
    """Of both ways to draft; a row without context (no request) has no block."""
    block_lens = jnp.where(context_lens > 0, k + 1, 0)
    return Context(block_table, context_lens=context_lens, block_lens=block_lens)
