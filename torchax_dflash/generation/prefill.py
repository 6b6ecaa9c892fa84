# SPDX-License-Identifier: Apache-2.0
"""Prefill: prompts are read in chunks of a few static sizes, one program for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from torchax_dflash.core.accept import accept_block
from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import Draft, ingest_rows
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.core.target import Target, forward
from torchax_dflash.generation.request import Request
from torchax_dflash.generation.state import DecodeState

CHUNK_SIZES = (16, 64, 256)
"""Rows of a prefill program; prompts are cut into these."""


def chunk_sizes(length: int) -> Iterator[int]:
    """Cuts a prompt into prefill chunks.

    Takes the smallest size that holds the rest, unless more than half of it would be
    padding and a smaller size can be filled first.
    """
    while length > 0:
        fitting = [size for size in CHUNK_SIZES if size >= length]
        smaller = [size for size in CHUNK_SIZES if size <= length]
        wasteful = bool(smaller) and (not fitting or fitting[0] > 2 * length)
        size = smaller[-1] if wasteful else fitting[0]
        yield size
        length -= size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A piece of one request's prompt, and how to continue the request.

    Attributes:
        row: int32 [], the request's row in the batch.
        token_ids: int32 [T], padded.
        start: int32 [], position of the first token.
        length: int32 [], tokens that count.
        limit: int32 [], the request's limit, or 0 while more chunks follow.
        stop_ids: int32 [E].
        sampling: of the one request.
        penalties: float32 [3]: repetition, presence, frequency.
    """

    row: jax.Array
    token_ids: jax.Array
    start: jax.Array
    length: jax.Array
    limit: jax.Array
    stop_ids: jax.Array
    sampling: SamplingState
    penalties: jax.Array

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        row: int,
        start: int,
        size: int,
        count: int,
        limit: int,
    ) -> Chunk:
        """Sends a chunk to the device.

        Args:
            request: whose prompt it is.
            row: its row in the batch.
            start: position of the chunk's first token.
            size: T, rows of the program.
            count: tokens that count.
            limit: the request's, or 0 while more chunks follow.
        """
        params = request.params
        padded = np.zeros(size, np.int32)
        padded[:count] = request.output.prompt_token_ids[start : start + count]
        sampling = {
            "temperature": np.array([params.temperature], np.float32),
            "top_k": np.array([params.top_k], np.int32),
            "top_p": np.array([params.top_p], np.float32),
            "min_p": np.array([params.min_p], np.float32),
            "seed": np.array([request.seed], np.uint32),
            "logprobs": np.array([params.logprobs]),
        }
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        fields = {
            "row": np.int32(row),
            "token_ids": padded,
            "start": np.int32(start),
            "length": np.int32(count),
            "limit": np.int32(limit),
            "stop_ids": np.array(request.stop_ids, np.int32),
            "sampling": SamplingState(**sampling),
            "penalties": np.array(penalties, np.float32),
        }
        return cls(**jax.device_put(fields))


@partial(jax.jit, donate_argnames="state")
def prefill(
    target: Target, draft: Draft | None, state: DecodeState, chunk: Chunk
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Reads one chunk of one request's prompt; after its last chunk it is active.

    Args:
        target: the target.
        draft: the draft, or None.
        state: donated.
        chunk: the piece to read.

    Returns:
        The state, the token after the chunk, int32 [], and its log-probability.
    """
    row = chunk.row
    context = Context(
        block_table=state.block_table[row][None],
        context_lens=chunk.start[None],
        block_lens=chunk.length[None],
    )
    target_pool, logits, aux_hidden_states = forward(
        target,
        state.target_pool,
        chunk.token_ids[None],
        context,
        layer_ids=draft.config.target_layer_ids if draft else (),
        logits_row=jnp.maximum(chunk.length - 1, 0),
    )
    draft_pool = state.draft_pool
    if draft is not None and draft_pool is not None:
        draft_pool = ingest_rows(
            draft,
            draft_pool,
            aux_hidden_states,
            context.block_table,
            first=context.context_lens,
            count=context.block_lens,
        )
    counts = jnp.arange(chunk.token_ids.size) < chunk.length
    penalties = state.penalties.add_prompt(
        row,
        jnp.where(counts, chunk.token_ids, -1),
        is_first=chunk.start == 0,
        settings=chunk.penalties,
    )
    seq_len = chunk.start + chunk.length
    accepted = accept_block(
        logits,
        jnp.zeros((1, 0), jnp.int32),
        jnp.zeros(1, jnp.int32),
        draft_probs=None,
        sampling=chunk.sampling,
        # The first decode step draws at seq_len; this draw needs another position.
        positions=(seq_len - 1)[None],
        logits_processor=jax.tree.map(lambda all_: all_[row][None], penalties),
    )
    token = accepted.token_ids[0, 0]
    is_last = (chunk.limit > 0).astype(jnp.int32)
    penalties = replace(
        penalties, in_output=penalties.in_output.at[row, token].add(is_last)
    )
    active = (seq_len + 1 < chunk.limit) & ~(token == chunk.stop_ids).any()
    state = replace(
        state,
        target_pool=target_pool,
        draft_pool=draft_pool,
        anchors=state.anchors.at[row].set(token),
        seq_lens=state.seq_lens.at[row].set(seq_len),
        limits=state.limits.at[row].set(chunk.limit),
        stop_ids=state.stop_ids.at[row].set(chunk.stop_ids),
        active=state.active.at[row].set(active),
        num_new=state.num_new.at[row].set(0),
        sampling=jax.tree.map(
            lambda all_, one: all_.at[row].set(one[0]), state.sampling, chunk.sampling
        ),
        penalties=penalties,
    )
    return state, token, accepted.logprobs[0, 0]
