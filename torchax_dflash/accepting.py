# SPDX-License-Identifier: Apache-2.0
"""A step's two decisions: which drafts to propose, and which of them stand.

Each does no more work than the settings of the requests in its batch ask for.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from torchax_dflash import draft_model
from torchax_dflash.decode_state import DecodeState
from torchax_dflash.draft_model import DraftModel
from torchax_dflash.penalties import Penalties
from torchax_dflash.sampling import (
    Accepted,
    SamplingState,
    accept,
    accept_greedy,
    draw,
    probabilities,
)
from torchax_dflash.target_model import TargetModel


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
    logits = draft_model.draft_logits(
        draft,
        target,
        state.draft_pool,
        state.anchors,
        page_table=state.page_table,
        context_lens=context_lens,
        block_lens=block_lens,
        num_speculative_tokens=num_speculative_tokens,
    )
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if draft_sample_method == "greedy":
        return choices, None

    def drawn() -> tuple[jax.Array, jax.Array]:
        return draw_drafts(logits, state.sampling, state.seq_lens)

    def chosen() -> tuple[jax.Array, jax.Array]:
        return choices, jnp.zeros(logits.shape, jnp.float32)

    return jax.lax.cond(state.sampling.draws.any(), drawn, chosen)


def draw_drafts(
    logits: jax.Array, sampling: SamplingState, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws drafts, or takes the likeliest where a request decodes greedily.

    Args:
        logits: [B, K, V] of the draft.
        sampling: of the requests.
        positions: int32 [B], of the anchors.

    Returns:
        Draft tokens, int32 [B, K], and what they were drawn from, float32 [B, K, V].
    """
    probs = probabilities(logits, sampling)
    return draw(probs, sampling.keys(positions, 0)), probs


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
