# SPDX-License-Identifier: Apache-2.0
"""Programs of the rejection sampler: the accept rule on flat rows, and two small ones.

The runner gives the drafts of all requests in turn, [L], and how many each has, [R].
Accepted tokens are returned in the same places, the bonus tokens after them:

    num_draft_tokens   3, 0, 2
    token_ids          a a a | c c | padding …
    returned           a a a | c c | padding … | bonus a, b, c
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from tpu_inference.layers.jax.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from torchax_dflash.core.accept import accept_sampled, count_leading
from torchax_dflash.core.sampling import SamplingState, probabilities
from torchax_dflash.serving.flat_rows import FlatRows, flat_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatDrafts:
    """The drafts of a step; a pytree.

    Attributes:
        token_ids: int32 [L], of all requests in turn, then padding.
        lengths: int32 [R], drafts of each request.
        limits: int32 [R], how many leading drafts of a request may be accepted; the
            grammar's bitmask does not cover later ones.
        q_rows: int32 [R], rows of the buffer of draft probabilities that the drafts
            were drawn from; -1 for drafts that were not drawn.
    """

    token_ids: jax.Array
    lengths: jax.Array
    limits: jax.Array
    q_rows: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetRows:
    """The target's logits at the drafts of a step, and how to sample; a pytree.

    Attributes:
        logits: [L, V padded], at the place of each draft.
        bonus_token_ids: int32 [R], drawn after each request's last draft.
        temperature: float32 [R]; negative for greedy requests.
        top_k: int32 [R]; 0 or less keeps all.
        top_p: float32 [R].
    """

    logits: jax.Array
    bonus_token_ids: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array

    def sampling(self, key: jax.Array) -> SamplingState:
        """Settings of the accept rule, with seeds drawn from this step's key."""
        rows = self.top_p.shape[0]
        return SamplingState(
            temperature=self.temperature,
            top_k=jnp.maximum(self.top_k, 0),
            top_p=self.top_p,
            min_p=jnp.zeros_like(self.top_p),
            seed=jax.random.bits(key, (rows,), jnp.uint32),
            logprobs=jnp.zeros(rows, jnp.bool_),
        )


def verify(
    drafts: FlatDrafts,
    target: TargetRows,
    draft_probs: jax.Array | None,
    key: jax.Array,
    *,
    num_speculative_tokens: int,
    vocab_size: int,
) -> jax.Array:
    """The accept rule of the core (`accept`), on the runner's flat rows.

    Args:
        drafts: of this step.
        target: of this step.
        draft_probs: float32 [B, K, V] of the last step's drafts, or None.
        key: of this step's draws.
        num_speculative_tokens: K (static).
        vocab_size: V without padding (static).

    Returns:
        int32 [L + R], see `DFlashRejectionSampler.__call__`.
    """
    rows, flat = drafts.lengths.shape[0], drafts.token_ids.shape[0]
    sampling = target.sampling(key)
    place = jnp.arange(num_speculative_tokens)
    starts = jnp.cumsum(drafts.lengths) - drafts.lengths
    index = jnp.clip(starts[:, None] + place, 0, flat - 1)
    token_ids = drafts.token_ids[index]
    probs = probabilities(target.logits[:, :vocab_size][index], sampling)

    # A placeholder is no token, and no draft after it can be accepted.
    exists = place < jnp.minimum(drafts.lengths, drafts.limits)[:, None]
    exists &= (token_ids >= 0) & (token_ids < vocab_size)
    num_drafts = count_leading(exists)

    q = jax.nn.one_hot(token_ids, vocab_size)
    if draft_probs is not None:
        was_drawn = (drafts.q_rows >= 0)[:, None, None]
        q = jnp.where(was_drawn, draft_probs[drafts.q_rows], q)

    # The runner has drawn the token after a request's last draft.
    last = jnp.arange(num_speculative_tokens + 1) == drafts.lengths[:, None]
    bonus = jax.nn.one_hot(target.bonus_token_ids, vocab_size)[:, None]
    probs = jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))
    accepted = accept_sampled(
        jnp.where(last[..., None], bonus, probs),
        token_ids,
        num_drafts,
        draft_probs=q,
        sampling=sampling,
        positions=jnp.zeros(rows, jnp.int32),
    )
    request, place, exists = _rows(drafts.lengths, flat)
    main = accepted.token_ids[request, jnp.minimum(place, num_speculative_tokens)]
    is_kept = exists & (place <= accepted.num_accepted[request])
    all_accepted = accepted.num_accepted == drafts.lengths
    return jnp.concatenate(
        [
            jnp.where(is_kept, main, PLACEHOLDER_TOKEN_ID),
            jnp.where(all_accepted, target.bonus_token_ids, PLACEHOLDER_TOKEN_ID),
        ]
    )


def _rows(lengths: jax.Array, flat: int) -> FlatRows:
    """Whose the flat drafts [L] are."""
    query_start_loc = jnp.pad(jnp.cumsum(lengths), (1, 0))
    return flat_rows(query_start_loc, lengths.shape[0], rows=flat)


def mask_beyond_limits(
    draft_token_ids: jax.Array, num_draft_tokens: jax.Array, limits: jax.Array
) -> jax.Array:
    """Drafts [L] that may not be accepted become -1, which no target chooses."""
    rows = _rows(num_draft_tokens, draft_token_ids.shape[0])
    may_be_accepted = rows.place < limits[rows.request]
    return jnp.where(may_be_accepted, draft_token_ids, PLACEHOLDER_TOKEN_ID)


def bonus_only(bonus_token_ids: jax.Array, *, rows: int) -> jax.Array:
    """The output of a step without drafts.

    The first rows repeat the bonus tokens, because the runner reads log-probabilities
    there (see `upstream/logprobs.py`).
    """
    padding = max(0, rows - bonus_token_ids.shape[0])
    main = jnp.pad(bonus_token_ids, (0, padding))[:rows]
    return jnp.concatenate([main, bonus_token_ids]).astype(jnp.int32)
