# SPDX-License-Identifier: Apache-2.0
"""The verifier's programs: the accept rule on flat rows, and two small ones.

The runner gives drafts of all rows one after the other, [L], and says how many each row
has, [R]; tokens that are accepted come back in the same places, bonus tokens behind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tpu_inference.layers.jax.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from torchax_dflash.core.accept import accept
from torchax_dflash.core.sampling import SamplingState, probabilities


def verify(
    draft_token_ids: jax.Array,
    num_draft_tokens: jax.Array,
    target_logits: jax.Array,
    bonus_token_ids: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    key: jax.Array,
    draft_probs: jax.Array | None,
    q_rows: jax.Array,
    limits: jax.Array,
    *,
    num_speculative_tokens: int,
    vocab_size: int,
) -> jax.Array:
    """`sampling.accept` on the runner's flat rows.

    Args:
        draft_token_ids: see `Verifier.__call__`, as for those up to `key`.
        num_draft_tokens: as above.
        target_logits: as above.
        bonus_token_ids: as above.
        temperature: float32 [R]; negative for greedy rows.
        top_k: int32 [R]; 0 or less keeps all.
        top_p: float32 [R].
        key: of this step.
        draft_probs: float32 [B, K, V] of the last step's rows, or None.
        q_rows: int32 [R], rows of `draft_probs`; -1 for drafts that were not drawn.
        limits: int32 [R], see `Verifier`.
        num_speculative_tokens: K (static).
        vocab_size: V without padding (static).
    """
    rows, flat = num_draft_tokens.shape[0], draft_token_ids.shape[0]
    settings = SamplingState(
        temperature=temperature,
        top_k=jnp.maximum(top_k, 0),
        top_p=top_p,
        min_p=jnp.zeros_like(top_p),
        seed=jax.random.bits(key, (rows,), jnp.uint32),
        logprobs=jnp.zeros(rows, jnp.bool_),
    )
    place = jnp.arange(num_speculative_tokens)
    starts = jnp.cumsum(num_draft_tokens) - num_draft_tokens
    index = jnp.clip(starts[:, None] + place, 0, flat - 1)
    drafts = draft_token_ids[index]
    probs = probabilities(target_logits[:, :vocab_size][index], settings)

    # A placeholder is no token, and behind it nothing follows from the text.
    exists = place < jnp.minimum(num_draft_tokens, limits)[:, None]
    exists &= (drafts >= 0) & (drafts < vocab_size)
    num_drafts = jnp.cumprod(exists.astype(jnp.int32), axis=1).sum(axis=1)

    q = jax.nn.one_hot(drafts, vocab_size)
    if draft_probs is not None:
        q = jnp.where((q_rows >= 0)[:, None, None], draft_probs[q_rows], q)

    # The runner has drawn what follows a row's last draft.
    last = jnp.arange(num_speculative_tokens + 1) == num_draft_tokens[:, None]
    bonus = jax.nn.one_hot(bonus_token_ids, vocab_size)[:, None]
    probs = jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))
    accepted = accept(
        jnp.where(last[..., None], bonus, probs),
        drafts,
        num_drafts,
        draft_probs=q,
        settings=settings,
        positions=jnp.zeros(rows, jnp.int32),
    )
    row, place, is_draft = _rows_of_drafts(num_draft_tokens, flat)
    main = accepted.token_ids[row, jnp.minimum(place, num_speculative_tokens)]
    stands = is_draft & (place <= accepted.num_accepted[row])
    return jnp.concatenate(
        [
            jnp.where(stands, main, PLACEHOLDER_TOKEN_ID),
            jnp.where(
                accepted.num_accepted == num_draft_tokens,
                bonus_token_ids,
                PLACEHOLDER_TOKEN_ID,
            ),
        ]
    )


def _rows_of_drafts(
    num_draft_tokens: jax.Array, flat: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of flat drafts: their rows, their places there, and whether they exist, [L]."""
    ends = jnp.cumsum(num_draft_tokens)
    rows = jnp.repeat(
        jnp.arange(num_draft_tokens.shape[0]),
        num_draft_tokens,
        total_repeat_length=flat,
    )
    at = jnp.arange(flat)
    return rows, at - (ends - num_draft_tokens)[rows], at < ends[-1]


def limited(
    draft_token_ids: jax.Array, num_draft_tokens: jax.Array, limits: jax.Array
) -> jax.Array:
    """Drafts [L] that may not be accepted become -1, which no target chooses."""
    rows, place, _ = _rows_of_drafts(num_draft_tokens, draft_token_ids.shape[0])
    return jnp.where(place < limits[rows], draft_token_ids, PLACEHOLDER_TOKEN_ID)


def only_bonus(bonus_token_ids: jax.Array, *, rows: int) -> jax.Array:
    """A step without drafts; the first rows say the same, for log-probabilities."""
    padding = max(0, rows - bonus_token_ids.shape[0])
    main = jnp.pad(bonus_token_ids, (0, padding))[:rows]
    return jnp.concatenate([main, bonus_token_ids]).astype(jnp.int32)
