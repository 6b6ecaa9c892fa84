# SPDX-License-Identifier: Apache-2.0
"""The accept rule: which of a block's drafts are accepted, and the token after them.

Whatever the draft proposes, the output has the target's own distribution. With p the
target's probabilities after temperature and filters, and q those that a draft was
really drawn from:

    accept draft x with probability min(1, p(x) / q(x))
    at the first rejection draw from max(p - q, 0), normalised
    if all are accepted, draw one more from p

A draft that was chosen, not drawn, has a q of 1 at one token. Greedy decoding is the
same rule with a p of 1 at one token: the longest prefix that the target agrees with
(paper arXiv 2602.06036, section 3; the rule is of arXiv 2211.17192, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from torchax_dflash.core.sampling import SamplingState, draw, probabilities


class LogitsProcessor(Protocol):
    """What changes a target's logits before tokens are taken from them."""

    @property
    def active(self) -> jax.Array:
        """Bool [B]: the request's logits are changed."""
        ...

    def apply(self, logits: jax.Array, draft_token_ids: jax.Array) -> jax.Array:
        """Logits [B, Q, V] after drafts int32 [B, Q - 1] -> float32 [B, Q, V]."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """What one verified block yields.

    Attributes:
        token_ids: int32 [B, Q]; the first `num_accepted + 1` of a row are its next
            tokens: accepted drafts, then the target's own.
        num_accepted: int32 [B], accepted drafts.
        logprobs: float32 [B, Q], of these tokens under the target's raw logits,
            without temperature; 0 where they were not requested.
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    logprobs: jax.Array


def accept_block(
    logits: jax.Array,
    draft_token_ids: jax.Array,
    num_drafts: jax.Array,
    *,
    draft_probs: jax.Array | None,
    sampling: SamplingState,
    positions: jax.Array,
    logits_processor: LogitsProcessor,
) -> Accepted:
    """Verifies one block of each request.

    Penalties, sampling and log-probabilities are computed only if some request asks
    for them.

    Args:
        logits: [B, Q, V] of the target; row i follows the anchor and i drafts.
        draft_token_ids: int32 [B, Q - 1].
        num_drafts: int32 [B], drafts of a row that exist.
        draft_probs: [B, Q - 1, V], what the drafts were drawn from, or None for drafts
            that were chosen.
        sampling: of the requests.
        positions: int32 [B], of the anchors.
        logits_processor: penalties.
    """

    def by_rule() -> Accepted:
        processed = logits_processor.apply(logits, draft_token_ids)
        q = draft_probs
        if q is None:
            q = jax.nn.one_hot(draft_token_ids, logits.shape[-1])
        return accept_sampled(
            probabilities(processed, sampling),
            draft_token_ids,
            num_drafts,
            draft_probs=q,
            sampling=sampling,
            positions=positions,
        )

    def greedily() -> Accepted:
        return accept_greedy(logits, draft_token_ids, num_drafts)

    special = (sampling.draws | logits_processor.active).any()
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


def accept_greedy(
    logits: jax.Array, draft_token_ids: jax.Array, num_drafts: jax.Array
) -> Accepted:
    """Accepts the longest prefix of drafts that the target would have chosen.

    Args:
        logits: [B, Q, V] of the target; row i follows the anchor and i drafts.
        draft_token_ids: int32 [B, Q - 1].
        num_drafts: int32 [B], drafts of a row that exist.
    """
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    exists = jnp.arange(draft_token_ids.shape[1]) < num_drafts[:, None]
    agrees = (draft_token_ids == choices[:, :-1]) & exists
    # An accepted draft is the target's choice, so its choices are the output.
    return Accepted(
        token_ids=choices,
        num_accepted=count_leading(agrees),
        logprobs=jnp.zeros(choices.shape, jnp.float32),
    )


def accept_sampled(
    probs: jax.Array,
    draft_token_ids: jax.Array,
    num_drafts: jax.Array,
    *,
    draft_probs: jax.Array,
    sampling: SamplingState,
    positions: jax.Array,
) -> Accepted:
    """The rule at the top of this file.

    Args:
        probs: [B, Q, V], what the target's tokens are drawn from.
        draft_token_ids: int32 [B, Q - 1].
        num_drafts: int32 [B], drafts of a row that exist.
        draft_probs: [B, Q - 1, V], what the drafts were drawn from.
        sampling: of the requests.
        positions: int32 [B], of the anchors; each step of a request has another.

    Returns:
        The accepted tokens; `logprobs` is zero.
    """
    rows = draft_token_ids.shape[1]
    exists = jnp.arange(rows) < num_drafts[:, None]
    of_draft = draft_token_ids[..., None]
    p = jnp.take_along_axis(probs[:, :-1], of_draft, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft_probs, of_draft, axis=-1)[..., 0]
    chances = jax.vmap(lambda key: jax.random.uniform(key, (rows,)))(
        sampling.keys(positions, 1)
    )
    num_accepted = count_leading((chances * q < p) & exists)

    # What is drawn after the last accepted draft; after all drafts there is no q.
    draft_probs = jnp.where(exists[..., None], draft_probs, 0)
    draft_probs = jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0)))
    at = num_accepted[:, None, None]
    p = jnp.take_along_axis(probs, at, axis=1)
    rest = jnp.maximum(p - jnp.take_along_axis(draft_probs, at, axis=1), 0)
    rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p)  # zero by rounding only
    own = draw(rest, sampling.keys(positions, 2))[:, 0]
    token_ids = jnp.pad(draft_token_ids, ((0, 0), (0, 1)))
    token_ids = jnp.where(
        jnp.arange(rows + 1) < num_accepted[:, None], token_ids, own[:, None]
    )
    return Accepted(
        token_ids=token_ids,
        num_accepted=num_accepted,
        logprobs=jnp.zeros(token_ids.shape, jnp.float32),
    )


def count_leading(accepted: jax.Array) -> jax.Array:
    """How many of each row come before the first that is false, [B, J] -> [B]."""
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)
