# SPDX-License-Identifier: Apache-2.0
"""The loss at each position, and how much each position of a block counts.

Everything is computed from the few tokens whose probabilities under the target are
known, best first. They may sum to less than 1; how the rest is spread over the other
tokens is unknown. `Objective` says which loss and which weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from torchax_dflash.training.model.objective import Objective

_LK_DECAY = 3.0  # the best one in the paper
_LEAST_ACCEPTANCE = 1e-5  # below it the logarithm is cut off
_LEAST_SUM = 1e-6


@dataclass(frozen=True)
class DraftLogits:
    """What the draft says about the known tokens.

    Attributes:
        logits: float32 [..., C]; finite, also those of tokens that it cannot say.
        total: float32 [...], log-sum-exp over all tokens that it can say.
        can_say: bool [..., C], False for tokens outside its softmax, which count for
            nothing; None if it can say all of them.
    """

    logits: jax.Array
    total: jax.Array
    can_say: jax.Array | None = None

    @property
    def probs(self) -> jax.Array:
        """Its probabilities of the known tokens, [..., C]."""
        probs = jnp.exp(self.logits - self.total[..., None])
        return probs if self.can_say is None else jnp.where(self.can_say, probs, 0)


@dataclass(frozen=True)
class TargetProbs:
    """What the target says about the known tokens.

    Attributes:
        scaled: float32 [..., C], its probabilities, scaled to sum to 1.
        known: float32 [...], what they sum to before they are scaled.
    """

    scaled: jax.Array
    known: jax.Array

    @property
    def probs(self) -> jax.Array:
        """Its probabilities of the known tokens, [..., C]."""
        return self.scaled * self.known[..., None]


def position_losses(
    objective: Objective, of_label: jax.Array, draft: DraftLogits, target: TargetProbs
) -> jax.Array:
    """The loss at each position, float32 [...].

    Args:
        objective: which loss.
        of_label: float32 [...], the draft's logit of the target's choice.
        draft: its logits of the known tokens.
        target: the target's probabilities of them.
    """
    soft_loss = distribution_loss(objective.loss, draft, target)
    hard_loss = draft.total - of_label
    return (1 - objective.soft) * hard_loss + objective.soft * soft_loss


def position_weights(
    objective: Objective, hits: jax.Array, counts: jax.Array
) -> jax.Array:
    """The weight of each position, float32 [..., J], 0 where it does not count.

    Args:
        objective: which weights.
        hits: float32 [..., J], the draft's probability of the target's choice.
        counts: bool [..., J], whether the position counts.
    """
    if objective.position_weights == "dpace":
        return dpace_weights(hits, counts, objective.smoothing)
    return jnp.where(counts, decay_weights(counts.shape[-1], objective.gamma), 0)


def distribution_loss(name: str, draft: DraftLogits, target: TargetProbs) -> jax.Array:
    """A loss that compares the draft's distribution with the target's, float32 [...].

    Args:
        name: one of `LOSSES`.
        draft: its logits of the known tokens.
        target: the target's probabilities of them.
    """
    if name == "kl":
        return cross_entropy(draft, target)
    alpha = acceptance(draft, target)
    if name == "tv":
        return 1 - alpha
    if name == "accept":
        return -jnp.log(jnp.maximum(alpha, _LEAST_ACCEPTANCE))
    weight = jnp.exp(-_LK_DECAY * jax.lax.stop_gradient(alpha))
    divergence = cross_entropy(draft, target) - _entropy(_among_known(draft, target))
    return weight * divergence + (1 - weight) * (1 - alpha)


def cross_entropy(draft: DraftLogits, target: TargetProbs) -> jax.Array:
    """-sum(p log q) over known tokens that the draft can say, p scaled to sum to 1."""
    p = _among_known(draft, target)
    return draft.total * p.sum(-1) - (p * draft.logits).sum(-1)


def acceptance(draft: DraftLogits, target: TargetProbs) -> jax.Array:
    """Alpha, what rejection sampling accepts, if all unknown tokens were one token.

    The true value is lower by no more than the target's probability of unknown tokens.
    """
    q = draft.probs
    rest = jnp.minimum(_rest(target.known), _rest(q.sum(-1)))
    return jnp.minimum(target.probs, q).sum(-1) + rest


def decay_weights(positions: int, gamma: float) -> jax.Array:
    """exp(-(j - 1) / gamma) for drafts j = 1 … J, float32 [J] (arXiv 2602.06036)."""
    return jnp.exp(-jnp.arange(positions, dtype=jnp.float32) / gamma)


def dpace_weights(hits: jax.Array, counts: jax.Array, smoothing: float) -> jax.Array:
    """Weights by the probability of reaching a position (D-PACE, arXiv 2605.18810).

    The expected number of accepted draft tokens is the sum, over positions k, of the
    product c_1 … c_k, where c_i is the probability that draft token i is right. The
    weight of a position is the part of this sum that it has a share in: all k >= j.

    Args:
        hits: float32 [..., J], the draft's probability of each right token.
        counts: bool [..., J]; the positions that count come first.
        smoothing: c = (1 - smoothing) * hits + smoothing; with 1 the weights fall
            evenly to the end of the block, whatever the draft says.

    Returns:
        float32 [..., J]; no gradient goes through it.
    """
    chance = (1 - smoothing) * jax.lax.stop_gradient(hits) + smoothing
    reached = jnp.cumprod(jnp.where(counts, chance, 1), axis=-1)
    reached = jnp.where(counts, reached, 0)
    shares = jnp.cumsum(reached[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(counts, shares, 0)


def _among_known(draft: DraftLogits, target: TargetProbs) -> jax.Array:
    """The target's probabilities of tokens that the draft can say, scaled to sum to 1.

    All are 0 where the draft can say none of them.
    """
    if draft.can_say is None:
        return target.scaled
    p = jnp.where(draft.can_say, target.scaled, 0)
    return p / jnp.maximum(p.sum(-1, keepdims=True), _LEAST_SUM)


def _entropy(probs: jax.Array) -> jax.Array:
    return -(probs * jnp.log(jnp.where(probs > 0, probs, 1))).sum(-1)


def _rest(known: jax.Array) -> jax.Array:
    return jnp.maximum(1 - known, 0)
