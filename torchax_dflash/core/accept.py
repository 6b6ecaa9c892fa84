# SPDX-License-Identifier: Apache-2.0
"""A step's two decisions: which drafts to propose, and which of them stand.

Each does no more work than the settings of the requests in its batch ask for.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from torchax_dflash.core.draft import DraftModel
from torchax_dflash.core.drafting import draft_tokens, draw_draft_tokens
from torchax_dflash.core.sampling import (
    Accepted,
    SamplingState,
    accept,
    accept_greedy,
    probabilities,
)
from torchax_dflash.core.target import TargetModel
from torchax_dflash.generation.penalties import Penalties
from torchax_dflash.generation.state import DecodeState


def draft_block(
    draft: DraftModel | None,
    target: TargetModel,
    state: DecodeState,
    *,
    context_lens: jax.Array,
    block_lens: jax.Array,
    num_speculative_tokens: int,
    draft_sample_method: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Draft tokens, int32 [B, K], and what they were drawn from, [B, K, V] or None."""
    if draft is None or state.draft_pool is None:
        return jnp.zeros((state.anchors.shape[0], 0), jnp.int32), None
    block = {
        "block_table": state.block_table,
        "context_lens": context_lens,
        "block_lens": block_lens,
        "num_speculative_tokens": num_speculative_tokens,
    }
    pool = state.draft_pool
    if draft_sample_method == "greedy":
        return draft_tokens(draft, target, pool, state.anchors, **block), None
    return draw_draft_tokens(
        draft, target, pool, state.anchors, sampling=state.sampling, **block
    )


def accept_block(
    logits: jax.Array,
    draft_token_ids: jax.Array,
    num_drafts: jax.Array,
    *,
    draft_probs: jax.Array | None,
    sampling: SamplingState,
    penalties: Penalties,
    positions: jax.Array,
) -> Accepted:
    """The accept rule, and no more work than the batch's settings ask for."""

    def by_rule() -> Accepted:
        meant = penalties.apply(logits, draft_token_ids)
        q = draft_probs
        if q is None:
            q = jax.nn.one_hot(draft_token_ids, logits.shape[-1])
        return accept(
            probabilities(meant, sampling),
            draft_token_ids,
            num_drafts,
            draft_probs=q,
            settings=sampling,
            positions=positions,
        )

    def greedily() -> Accepted:
        return accept_greedy(logits, draft_token_ids, num_drafts)

    special = (sampling.draws | penalties.active).any()
    accepted = jax.lax.cond(special, by_rule, greedily)

    def logprobs() -> jax.Array:
        all_ = jax.nn.log_softmax(logits.astype(jnp.float32))
        of_token = accepted.token_ids[..., None]
        return jnp.take_along_axis(all_, of_token, axis=-1)[..., 0]

    return replace(
        accepted,
        logprobs=jax.lax.cond(
            sampling.logprobs.any(), logprobs, lambda: accepted.logprobs
        ),
    )
