# SPDX-License-Identifier: Apache-2.0
"""The decode loop on the device: ingest, draft, verify, accept, several times a visit.

One step for each request, whose last decided token (the anchor) is at `seq_len`:

    position      … seq_len-1 | seq_len   +1     +2    …
    target cache  … stored    | (this step stores the block)
    block                     | anchor   draft  draft …
    verified by target        | token    token  token … : the first that differ from the
                                                          drafts, and all after, fall
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from torchax_dflash.core import draft as draft_model
from torchax_dflash.core import target as target_model
from torchax_dflash.core.accept import accept_block, draft_block
from torchax_dflash.core.draft import DraftModel
from torchax_dflash.core.kv_cache import KVPool, slot_mapping_of
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.core.target import TargetModel
from torchax_dflash.generation.state import DecodeState, Steps


@partial(jax.jit, donate_argnames="state")
def prefill(
    target: TargetModel,
    draft: DraftModel | None,
    state: DecodeState,
    *,
    row: jax.Array,
    token_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    stop_ids: jax.Array,
    sampling: SamplingState,
    penalties: jax.Array,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Reads one chunk of one request's prompt; after its last chunk it is active.

    Args:
        target: the target.
        draft: the draft, or None.
        state: donated.
        row: int32 [], the request's row in the batch.
        token_ids: int32 [T], a chunk, padded.
        start: int32 [], position of its first token.
        length: int32 [], tokens that count.
        limit: int32 [], the request's limit, or 0 while more chunks follow.
        stop_ids: int32 [E].
        sampling: of the one request.
        penalties: float32 [3]: repetition, presence, frequency.

    Returns:
        The state, the token after the chunk, int32 [], and its log-probability.
    """
    block_table = state.block_table[row][None]
    context_lens, block_lens = start[None], length[None]
    target_pool, logits, features = target_model.forward(
        target,
        state.target_pool,
        token_ids[None],
        block_table=block_table,
        context_lens=context_lens,
        block_lens=block_lens,
        layer_ids=draft.config.target_layer_ids if draft else (),
        logits_row=jnp.maximum(length - 1, 0),
    )
    draft_pool = _ingest(
        draft,
        state.draft_pool,
        features=features,
        block_table=block_table,
        first=context_lens,
        count=block_lens,
    )
    seq_len = start + length
    said = state.penalties.read(
        row,
        jnp.where(jnp.arange(token_ids.size) < length, token_ids, -1),
        is_first=start == 0,
        settings=penalties,
    )
    first = accept_block(
        logits,
        jnp.zeros((1, 0), jnp.int32),
        jnp.zeros(1, jnp.int32),
        draft_probs=None,
        sampling=sampling,
        penalties=jax.tree.map(lambda all_: all_[row][None], said),
        # its first step's anchor is at seq_len
        positions=(seq_len - 1)[None],
    )
    token = first.token_ids[0, 0]
    spoken = (limit > 0).astype(jnp.int32)
    said = replace(said, in_output=said.in_output.at[row, token].add(spoken))
    active = (seq_len + 1 < limit) & ~(token == stop_ids).any()
    return (
        replace(
            state,
            target_pool=target_pool,
            draft_pool=draft_pool,
            anchors=state.anchors.at[row].set(token),
            seq_lens=state.seq_lens.at[row].set(seq_len),
            limits=state.limits.at[row].set(limit),
            stop_ids=state.stop_ids.at[row].set(stop_ids),
            active=state.active.at[row].set(active),
            num_new=state.num_new.at[row].set(0),
            sampling=jax.tree.map(
                lambda all_, one: all_.at[row].set(one[0]), state.sampling, sampling
            ),
            penalties=said,
        ),
        token,
        first.logprobs[0, 0],
    )


@partial(
    jax.jit,
    static_argnames=("num_speculative_tokens", "num_steps", "draft_sample_method"),
    donate_argnames="state",
)
def decode(
    target: TargetModel,
    draft: DraftModel | None,
    state: DecodeState,
    *,
    keep: jax.Array,
    num_speculative_tokens: int,
    num_steps: int,
    draft_sample_method: str = "greedy",
) -> tuple[DecodeState, Steps]:
    """Runs up to `num_steps` steps without the host; stops when no request is active.

    Args:
        target: the target.
        draft: the draft, or None for plain decoding (no speculative tokens then).
        state: donated.
        keep: bool [B], requests that the host still wants.
        num_speculative_tokens: drafts a step (static).
        num_steps: most steps (static).
        draft_sample_method: "greedy", drafts are the likeliest tokens, or
            "probabilistic", they are drawn as the request's tokens are (static).
    """
    batch_size = state.anchors.shape[0]
    active = state.active & keep
    state = replace(
        state,
        active=active,
        sampling=state.sampling.only(active),
        penalties=state.penalties.only(active),
    )
    shape = (num_steps, batch_size)
    steps = Steps(
        token_ids=jnp.zeros((*shape, num_speculative_tokens + 1), jnp.int32),
        num_tokens=jnp.zeros(shape, jnp.int32),
        num_accepted=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros((*shape, num_speculative_tokens + 1), jnp.float32),
    )

    def more(carry):
        index, state, _ = carry
        return (index < num_steps) & state.active.any()

    def body(carry):
        index, state, steps = carry
        state, step = _step(
            target, draft, state, num_speculative_tokens, draft_sample_method
        )
        steps = jax.tree.map(lambda all_, one: all_.at[index].set(one), steps, step)
        return index + 1, state, steps

    _, state, steps = jax.lax.while_loop(more, body, (0, state, steps))
    return state, steps


def _step(
    target: TargetModel,
    draft: DraftModel | None,
    state: DecodeState,
    num_speculative_tokens: int,
    draft_sample_method: str,
) -> tuple[DecodeState, Steps]:
    """Ingest, draft, verify, accept: one step of every active request."""
    # Near its limit a request verifies fewer rows; idle ones none, of no context.
    context_lens = jnp.where(state.active, state.seq_lens, 0)
    room = state.limits - state.seq_lens
    block_lens = jnp.where(
        state.active, jnp.minimum(num_speculative_tokens + 1, room), 0
    )
    draft_pool = _ingest(
        draft,
        state.draft_pool,
        features=state.features,
        block_table=state.block_table,
        first=state.seq_lens - state.num_new,
        count=state.num_new,
    )
    draft_token_ids, draft_probs = draft_block(
        draft,
        target,
        replace(state, draft_pool=draft_pool),
        context_lens=context_lens,
        block_lens=block_lens,
        num_speculative_tokens=num_speculative_tokens,
        draft_sample_method=draft_sample_method,
    )
    target_pool, logits, features = target_model.forward(
        target,
        state.target_pool,
        jnp.concatenate([state.anchors[:, None], draft_token_ids], axis=1),
        block_table=state.block_table,
        context_lens=context_lens,
        block_lens=block_lens,
        layer_ids=draft.config.target_layer_ids if draft else (),
    )
    accepted = accept_block(
        logits,
        draft_token_ids,
        block_lens - 1,
        draft_probs=draft_probs,
        sampling=state.sampling,
        penalties=state.penalties,
        positions=state.seq_lens,
    )
    num_tokens, stopped = _count_tokens(
        state, accepted.token_ids, accepted.num_accepted
    )

    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    anchors = jnp.take_along_axis(accepted.token_ids, last, axis=1)[:, 0]
    seq_lens = state.seq_lens + num_tokens
    state = replace(
        state,
        target_pool=target_pool,
        draft_pool=draft_pool,
        anchors=jnp.where(state.active, anchors, state.anchors),
        seq_lens=seq_lens,
        active=state.active & ~stopped & (seq_lens + 1 < state.limits),
        features=features,
        num_new=num_tokens,
        penalties=state.penalties.said(accepted.token_ids, num_tokens),
    )
    return state, Steps(
        token_ids=accepted.token_ids,
        num_tokens=num_tokens,
        num_accepted=jnp.minimum(accepted.num_accepted, num_tokens),
        logprobs=accepted.logprobs,
    )


def _count_tokens(
    state: DecodeState, token_ids: jax.Array, num_accepted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of a block's tokens count: up to the limit, and to a stop token.

    Returns:
        int32 [B] and whether a stop token was reached, bool [B].
    """
    room = state.limits - state.seq_lens - 1
    num_tokens = jnp.where(state.active, jnp.minimum(num_accepted + 1, room), 0)
    columns = jnp.arange(token_ids.shape[1])
    stops = (token_ids[:, :, None] == state.stop_ids[:, None, :]).any(-1)
    stops &= columns < num_tokens[:, None]
    stopped = stops.any(axis=1)
    return jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, num_tokens), stopped


def _ingest(
    draft: DraftModel | None,
    pool: KVPool | None,
    *,
    features: jax.Array,
    block_table: jax.Array,
    first: jax.Array,
    count: jax.Array,
) -> KVPool | None:
    """Ingests the first `count` rows of features [B, R, F], from position `first`."""
    if draft is None or pool is None:
        return None
    rows = jnp.arange(features.shape[1])
    positions = first[:, None] + rows
    slot_mapping = slot_mapping_of(pool, block_table, positions, rows < count[:, None])
    return draft_model.ingest(
        draft,
        pool,
        features.reshape(-1, features.shape[-1]),
        positions.reshape(-1),
        slot_mapping.reshape(-1),
    )
