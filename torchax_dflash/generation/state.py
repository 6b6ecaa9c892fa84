# SPDX-License-Identifier: Apache-2.0
"""What a batch of requests keeps on the device between host visits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from torchax_dflash.core.draft import DraftModel
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.core.target import TargetModel
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
        limits: int32 [B], most tokens (prompt and output) the request may have.
        stop_ids: int32 [B, E].
        active: bool [B].
        features: [B, Q, F], aux hidden states of the last verified block.
        num_new: int32 [B], rows of `features` that were accepted and not ingested.
        sampling: how each request's tokens are drawn.
        penalties: and what it is penalised for.
    """

    target_pool: KVPool
    draft_pool: KVPool | None
    block_table: jax.Array
    anchors: jax.Array
    seq_lens: jax.Array
    limits: jax.Array
    stop_ids: jax.Array
    active: jax.Array
    features: jax.Array
    num_new: jax.Array
    sampling: SamplingState
    penalties: Penalties


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steps:
    """What the steps of one host visit produced (S steps at most).

    Attributes:
        token_ids: int32 [S, B, Q]; the first `num_tokens` of each row count.
        num_tokens: int32 [S, B], the acceptance length; 0 for idle requests.
        num_accepted: int32 [S, B], how many of them were drafts.
        logprobs: float32 [S, B, Q], of `token_ids`, where they were asked for.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    num_accepted: jax.Array
    logprobs: jax.Array


def make_state(
    target: TargetModel,
    draft: DraftModel | None,
    *,
    batch_size: int,
    max_model_len: int,
    num_speculative_tokens: int,
) -> DecodeState:
    """Allocates the state of `batch_size` idle requests."""
    pages = -(-max_model_len // PAGE_SIZE)
    num_pages = batch_size * pages

    def integers(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    feature_size = draft.config.feature_size if draft else 0
    block = num_speculative_tokens + 1
    return DecodeState(
        target_pool=target.make_pool(num_pages=num_pages, page_size=PAGE_SIZE),
        draft_pool=draft and draft.make_pool(num_pages=num_pages, page_size=PAGE_SIZE),
        block_table=jnp.arange(num_pages, dtype=jnp.int32).reshape(batch_size, pages),
        anchors=integers(batch_size),
        seq_lens=integers(batch_size),
        limits=integers(batch_size),
        stop_ids=integers(batch_size, NUM_STOP_IDS),
        active=jnp.zeros(batch_size, bool),
        features=jnp.zeros((batch_size, block, feature_size), target.dtype),
        num_new=integers(batch_size),
        sampling=SamplingState.greedy(batch_size),
        penalties=Penalties.none(batch_size, target.config.vocab_size),
    )
