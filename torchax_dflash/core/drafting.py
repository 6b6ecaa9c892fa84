# SPDX-License-Identifier: Apache-2.0
"""From an anchor to draft tokens: one pass of the draft, and a choice at each position.

    block           [anchor, mask, mask, …]       one for each request
    hidden states   the unmodified module over the block, attending to the pool
    logits          its rows after the anchor, through the head
    drafts          the likeliest tokens, or tokens drawn as the request's own are

Plain drafts choose each position independently. DFlash-2's candidate selector walks
along the block: among a position's likeliest tokens it chooses the one that best fits
the token chosen before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.interop import jax_view, torch_view

from torchax_dflash.core.attention import Context
from torchax_dflash.core.bridge import tracing
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.draft_weights import SELECTOR
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache
from torchax_dflash.core.sampling import SamplingState, draw, probabilities
from torchax_dflash.core.vocabulary import TargetHead


@partial(jax.jit, static_argnames="num_speculative_tokens")
def draft_tokens(
    draft: Draft,
    target: TargetHead,
    pool: KVPool,
    anchors: jax.Array,
    context: Context,
    *,
    num_speculative_tokens: int,
) -> jax.Array:
    """Drafts a block for each request in one pass: the likeliest tokens.

    Args:
        draft: the model.
        target: lends its embedding and head.
        pool: the draft's cache; read only.
        anchors: int32 [B], the last decided tokens, at position `context_lens`.
        context: ingested rows of each request, and `block_lens`: 1 + the number of
            drafts wanted. A shorter block is not a prefix of a longer one: the missing
            rows are not attended to.
        num_speculative_tokens: J, drafts per row, 1 to block_size - 1 (static).

    Returns:
        int32 [B, J]; those past `block_lens - 1` mean nothing.
    """
    hidden, logits = draft_logits(
        draft,
        target,
        pool,
        anchors,
        context,
        num_speculative_tokens=num_speculative_tokens,
    )
    return _choose(draft, anchors, hidden, logits)


@partial(jax.jit, static_argnames="num_speculative_tokens")
def draw_draft_tokens(
    draft: Draft,
    target: TargetHead,
    pool: KVPool,
    anchors: jax.Array,
    context: Context,
    *,
    num_speculative_tokens: int,
    sampling: SamplingState,
) -> tuple[jax.Array, jax.Array]:
    """Drafts drawn as each request's own tokens are; of greedy requests the likeliest.

    Args:
        draft: see `draft_tokens`, as for the next five.
        target: lends its embedding and head.
        pool: the draft's cache; read only.
        anchors: int32 [B].
        context: ingested rows of each request, and `block_lens`.
        num_speculative_tokens: J (static).
        sampling: of the requests; candidate selectors use its temperature only.

    Returns:
        int32 [B, J], and what they were drawn from, float32 [B, J, V]: the q of the
        accept rule. It means nothing, and may be zero, where no request draws.
    """
    hidden, logits = draft_logits(
        draft,
        target,
        pool,
        anchors,
        context,
        num_speculative_tokens=num_speculative_tokens,
    )
    choices = _choose(draft, anchors, hidden, logits)

    def drawn() -> tuple[jax.Array, jax.Array]:
        keys = sampling.keys(context.context_lens, 0)
        if not draft.config.has_selector:
            probs = probabilities(logits, sampling)
            return draw(probs, keys), probs
        tokens, probs = _draw_path(draft, anchors, hidden, logits, sampling, keys=keys)
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
    draft: Draft,
    target: TargetHead,
    pool: KVPool,
    anchors: jax.Array,
    context: Context,
    *,
    num_speculative_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """The module's output at the J mask tokens, [B, J, D], and logits [B, J, V].

    Tokens that the draft does not know have -inf. Arguments as of `draft_tokens`.
    """
    rows = max(num_speculative_tokens, draft.config.least_block_rows - 1)
    noise = noise_embedding_of(draft, target, anchors, num_masks=rows)
    hidden = draft_hidden_states(draft, pool, noise, context)
    hidden = hidden[:, 1 : num_speculative_tokens + 1]
    return hidden, head_logits(draft, target, hidden)


def noise_embedding_of(
    draft: Draft, target: TargetHead, anchors: jax.Array, *, num_masks: int
) -> jax.Array:
    """What the module reads of a block: its anchor and masks, embedded and scaled.

    Args:
        draft: the model; gives the mask token and the scale.
        target: lends its embedding, unless the draft has its own.
        anchors: int32 [...].
        num_masks: mask tokens after each anchor (static).

    Returns:
        [..., 1 + num_masks, D] in the draft's dtype.
    """
    masks = jnp.full((*anchors.shape, num_masks), draft.config.mask_token_id, jnp.int32)
    block = jnp.concatenate([anchors[..., None], masks], axis=-1)
    noise = draft.own.embed(block, target).astype(draft.dtype)
    return noise * draft.config.input_embedding_scale


def draft_hidden_states(
    draft: Draft, pool: KVPool, noise_embedding: jax.Array, context: Context
) -> jax.Array:
    """The module's output over noise blocks, [B, Q, D] -> [B, Q, D]."""
    batch, rows, _ = noise_embedding.shape
    hidden = draft.module(
        draft.params,
        StaticKVCache(pool=pool, context=context),
        dtype=draft.dtype,
        target_hidden=jnp.zeros((batch, 0, draft.config.feature_size), draft.dtype),
        noise_embedding=noise_embedding,
        position_ids=context.positions(rows),
    )
    return jax_view(hidden)


def head_logits(draft: Draft, target: TargetHead, hidden: jax.Array) -> jax.Array:
    """Through the head, by the module's own `compute_logits` if it has one.

    Args:
        draft: the model.
        target: lends its head, unless the draft has its own.
        hidden: [..., D], the module's output.

    Returns:
        [..., V], or as many as `target.project` gives.
    """
    module: Any = draft.module.module

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch_view(draft.own.project(jax_view(rows), target))

    with tracing(draft.dtype):
        rows = torch_view(hidden)
        if hasattr(module, "compute_logits"):
            logits = jax_view(module.compute_logits(rows, head))
        else:
            logits = jax_view(head(rows))
    vocab_size = jax.eval_shape(target.project, hidden).shape[-1]
    return draft.own.over_target(logits, vocab_size)


def _choose(
    draft: Draft, anchors: jax.Array, hidden: jax.Array, logits: jax.Array
) -> jax.Array:
    """The draft's choice at each position, int32 [B, J]."""
    if not draft.config.has_selector:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    path, _, _ = _select(draft, anchors, hidden, logits, temperature=0.0)
    return path


def _draw_path(
    draft: Draft,
    anchors: jax.Array,
    hidden: jax.Array,
    logits: jax.Array,
    sampling: SamplingState,
    *,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Drawn by the candidate selector: int32 [B, J] and its q, float32 [B, J, V].

    A selector knows one temperature and one random state for all rows. Its scores are
    linear in logits and hidden states, so each row passes these divided by its own
    temperature, in a call of its own.
    """
    temperature = jnp.where(sampling.draws, sampling.temperature, 1)
    size = logits.shape[-1]

    def one_row(anchor, hidden, logits, temperature, key):
        scaled = logits.astype(jnp.float32) / temperature
        states = (hidden.astype(jnp.float32) / temperature).astype(hidden.dtype)
        with (
            tracing(draft.dtype),
            torchax.default_env().override_property(prng=key),
        ):
            path, candidates, probs = _select(
                draft, anchor[None], states[None], scaled[None], temperature=1.0
            )
        dense = jnp.zeros((path.shape[1], size), jnp.float32)
        places = jnp.arange(path.shape[1])[:, None]
        return path[0], dense.at[places, candidates[0]].add(probs[0])

    return jax.vmap(one_row)(anchors, hidden, logits, temperature, keys)


def _select(
    draft: Draft,
    anchors: jax.Array,
    hidden: jax.Array,
    logits: jax.Array,
    *,
    temperature: float,
) -> tuple[jax.Array, jax.Array, Any]:
    """The module's own selector: path [B, J], candidates and q [B, J, candidates]."""
    # The target's embedding may be padded further than the selector's codebooks.
    known = logits[..., : draft.config.vocab_size]

    def select(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return module.candidate_selector.select(
            *torch_view((hidden, known, anchors)), temperature
        )

    path, candidates, probs = draft.module.apply(
        draft.arrays(SELECTOR), select, dtype=draft.dtype
    )
    return (
        jax_view(path).astype(jnp.int32),
        jax_view(candidates),
        None if probs is None else jax_view(probs),
    )
