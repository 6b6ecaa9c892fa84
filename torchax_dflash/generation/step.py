# SPDX-License-Identifier: Apache-2.0
"""The decode step, and the loop that runs several of them without the host.

One step for each request, whose last decided token (the anchor) is at `seq_len`:

    position      … seq_len-1 | seq_len   +1     +2    …
    target cache  … stored    | (this step stores the block)
    block                     | anchor   draft  draft …
    verified by target        | token    token  token … : kept up to and including
                                                          the first that differs from
                                                          its draft
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from torchax_dflash.core.accept import accept_block
from torchax_dflash.core.draft import Draft, ingest_rows
from torchax_dflash.core.drafting import draft_tokens, draw_draft_tokens
from torchax_dflash.core.target import Target, forward
from torchax_dflash.generation.state import DecodeState, Steps


def decode_step(
    target: Target,
    draft: Draft | None,
    state: DecodeState,
    *,
    num_speculative_tokens: int,
    draft_sample_method: str,
) -> tuple[DecodeState, Steps]:
    """One step of every active request: ingest, draft, verify, accept."""
    context = state.context(num_speculative_tokens)
    draft_pool, draft_token_ids, draft_probs = state.draft_pool, _no_drafts(state), None
    if draft is not None and draft_pool is not None:
        draft_pool = ingest_rows(
            draft,
            draft_pool,
            state.aux_hidden_states,
            state.block_table,
            first=state.seq_lens - state.num_new,
            count=state.num_new,
        )
        block = (draft, target, draft_pool, state.anchors, context)
        k = num_speculative_tokens
        if draft_sample_method == "greedy":
            draft_token_ids = draft_tokens(*block, num_speculative_tokens=k)
        else:
            draft_token_ids, draft_probs = draw_draft_tokens(
                *block, num_speculative_tokens=k, sampling=state.sampling
            )
    target_pool, logits, aux_hidden_states = forward(
        target,
        state.target_pool,
        jnp.concatenate([state.anchors[:, None], draft_token_ids], axis=1),
        context,
        layer_ids=draft.config.target_layer_ids if draft else (),
    )
    accepted = accept_block(
        logits,
        draft_token_ids,
        context.block_lens - 1,
        draft_probs=draft_probs,
        sampling=state.sampling,
        positions=state.seq_lens,
        logits_processor=state.penalties,
    )
    return state.advance(
        accepted,
        target_pool=target_pool,
        draft_pool=draft_pool,
        aux_hidden_states=aux_hidden_states,
    )


@partial(
    jax.jit,
    static_argnames=("num_speculative_tokens", "num_steps", "draft_sample_method"),
    donate_argnames="state",
)
def decode(
    target: Target,
    draft: Draft | None,
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
        num_steps: the most steps to run (static).
        draft_sample_method: "greedy" drafts the likeliest tokens,
            "probabilistic" draws them as the request's tokens are drawn (static).
    """
    state = state.only(keep)
    steps = Steps.none(num_steps, len(state.anchors), num_speculative_tokens + 1)

    def more(carry):
        index, state, _ = carry
        return (index < num_steps) & state.active.any()

    def body(carry):
        index, state, steps = carry
        state, step = decode_step(
            target,
            draft,
            state,
            num_speculative_tokens=num_speculative_tokens,
            draft_sample_method=draft_sample_method,
        )
        return index + 1, state, steps.with_step(index, step)

    _, state, steps = jax.lax.while_loop(more, body, (0, state, steps))
    return state, steps


def _no_drafts(state: DecodeState) -> jax.Array:
    """Plain decoding: int32 [B, 0]."""
    return jnp.zeros((len(state.anchors), 0), jnp.int32)
