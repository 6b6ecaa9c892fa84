# SPDX-License-Identifier: Apache-2.0
"""From an anchor to draft tokens: one pass of the draft, and a choice at each place.

Plain drafts choose at each place by itself. DFlash-2's candidate selector walks along
the block: among the likeliest tokens of a place it chooses the one that fits best to
the token chosen before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.interop import jax_view, torch_view

from torchax_dflash.core.draft import DraftModel, draft_hidden_states, head_logits
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.sampling import SamplingState, draw, probabilities
from torchax_dflash.core.vocabulary import TargetHead


@partial(jax.jit, static_argnames="num_speculative_tokens")
def draft_tokens(
    draft: DraftModel,
    target: TargetHead,
    pool: KVPool,
    anchors: jax.Array,
    *,
    block_table: jax.Array,
    context_lens: jax.Array,
    block_lens: jax.Array,
    num_speculative_tokens: int,
) -> jax.Array:
    """Drafts a block for each request in one pass: the likeliest tokens.

    Args:
        draft: the model.
        target: lends its embedding and head.
        pool: the draft's cache; read only.
        anchors: int32 [B], the last decided tokens, at position `context_lens`.
        block_table: int32 [B, pages].
        context_lens: int32 [B], ingested rows.
        block_lens: int32 [B], 1 + the number of drafts wanted of each row. A shorter
            block is not a prefix of a longer one: the missing rows are not attended to.
        num_speculative_tokens: K, drafts per row, 1 to block_size - 1 (static).

    Returns:
        int32 [B, K]; those past `block_lens - 1` mean nothing.
    """
    hidden, logits = draft_logits(
        draft,
        target,
        pool,
        anchors,
        block_table=block_table,
        context_lens=context_lens,
        block_lens=block_lens,
        num_speculative_tokens=num_speculative_tokens,
    )
    return _choose(draft, anchors, hidden, logits)


@partial(jax.jit, static_argnames="num_speculative_tokens")
def draw_draft_tokens(
    draft: DraftModel,
    target: TargetHead,
    pool: KVPool,
    anchors: jax.Array,
    *,
    sampling: SamplingState,
    **block: Any,
) -> tuple[jax.Array, jax.Array]:
    """Drafts drawn as each request's own tokens are; of greedy requests the likeliest.

    Args:
        draft: the model.
        target: lends its embedding and head.
        pool: the draft's cache; read only.
        anchors: int32 [B].
        sampling: of the requests; candidate selectors heed its temperature only.
        block: the other arguments of `draft_tokens`.

    Returns:
        int32 [B, K], and what they were drawn from, float32 [B, K, V]: the q of the
        accept rule. It means nothing, and may be zero, where no request draws.
    """
    hidden, logits = draft_logits(draft, target, pool, anchors, **block)
    choices = _choose(draft, anchors, hidden, logits)

    def drawn() -> tuple[jax.Array, jax.Array]:
        keys = sampling.keys(block["context_lens"], 0)
        if not draft.config.has_selector:
            probs = probabilities(logits, sampling)
            return draw(probs, keys), probs
        tokens, probs = _draw_path(draft, anchors, hidden, logits, sampling, keys)
        draws = sampling.draws[:, None]
        chosen = jax.nn.one_hot(choices, logits.shape[-1])
        return (
            jnp.where(draws, tokens, choices),
            jnp.where(draws[..., None], probs, chosen),
        )

    def chosen() -> tuple[jax.Array, jax.Array]:
        return choices, jnp.zeros(logits.shape, jnp.float32)

    return jax.lax.cond(sampling.draws.any(), drawn, chosen)


def draft_logits(
    draft: DraftModel,
    target: TargetHead,
    pool: KVPool,
    anchors: jax.Array,
    *,
    num_speculative_tokens: int,
    **context: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The module's output at the K mask tokens, [B, K, D], and logits [B, K, V].

    Tokens that the draft does not know have -inf. Arguments as of `draft_tokens`.
    """
    rows = max(num_speculative_tokens, draft.config.least_block_rows - 1)
    masks = jnp.full((anchors.shape[0], rows), draft.config.mask_token_id, jnp.int32)
    block = jnp.concatenate([anchors[:, None], masks], axis=1)
    noise = draft.own.embed(block, target).astype(draft.dtype)
    noise *= draft.config.input_embedding_scale
    hidden = draft_hidden_states(draft, pool, noise, **context)
    hidden = hidden[:, 1 : num_speculative_tokens + 1]
    return hidden, head_logits(draft, target, hidden)


def _choose(
    draft: DraftModel, anchors: jax.Array, hidden: jax.Array, logits: jax.Array
) -> jax.Array:
    """The draft's choice at each place, int32 [B, K]."""
    if not draft.config.has_selector:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    path, _, _ = _select(draft, anchors, hidden, logits, temperature=0.0)
    return path


def _draw_path(
    draft: DraftModel,
    anchors: jax.Array,
    hidden: jax.Array,
    logits: jax.Array,
    sampling: SamplingState,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Drawn by the candidate selector: int32 [B, K] and its q, float32 [B, K, V].

    A selector knows one temperature and one random state for all rows. Its scores are
    linear in logits and hidden states, so each row brings these divided by its own
    temperature, in a call of its own.
    """
    temperature = jnp.where(sampling.draws, sampling.temperature, 1)
    size = logits.shape[-1]

    def one_row(anchor, hidden, logits, temperature, key):
        scaled = logits.astype(jnp.float32) / temperature
        states = (hidden / temperature).astype(hidden.dtype)
        with torchax.default_env().override_property(prng=key):
            path, candidates, probs = _select(
                draft, anchor[None], states[None], scaled[None], temperature=1.0
            )
        dense = jnp.zeros((path.shape[1], size), jnp.float32)
        places = jnp.arange(path.shape[1])[:, None]
        return path[0], dense.at[places, candidates[0]].add(probs[0])

    return jax.vmap(one_row)(anchors, hidden, logits, temperature, keys)


def _select(
    draft: DraftModel,
    anchors: jax.Array,
    hidden: jax.Array,
    logits: jax.Array,
    *,
    temperature: float,
) -> tuple[jax.Array, jax.Array, Any]:
    """The module's own selector: path [B, K], candidates and q [B, K, candidates]."""
    # The target's embedding may be padded further than the selector's codebooks.
    known = logits[..., : draft.config.vocab_size]

    def select(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return module.candidate_selector.select(
            *torch_view((hidden, known, anchors)), temperature
        )

    path, candidates, probs = draft.module.apply(draft.selector_params, select)
    return (
        jax_view(path).astype(jnp.int32),
        jax_view(candidates),
        None if probs is None else jax_view(probs),
    )
