# SPDX-License-Identifier: Apache-2.0
"""The loss of anchored blocks: the draft's tokens against the target's own choices.

A block drafts tokens at anchor + 1 … anchor + Q - 1. The label at anchor + j is the
target's likeliest token after the tokens up to anchor + j - 1, its *choice* there:

    tokens    t2 [t3] t4  t5  t6      anchor 3, blocks of 4
    choices   c2  c3  c4  c5          c3 is the target's token after t3
    labels         .  c3  c4  c5      c3 always counts, the others count as long as
    counts         .  yes t4=c3  t4=c3 and t5=c4    the text follows the choices

One rule thus serves greedy answers (where all positions count), sampled answers and
ordinary text, and every label is what greedy verification will ask for. An `Objective`
says what the loss at a position is and how much the position counts.
For DFlash-2 two losses are added: of the draft's own logits, and of the logits of its
candidate selector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from torchax_dflash.core.draft import Draft
from torchax_dflash.core.drafting import head_logits, noise_embedding_of
from torchax_dflash.core.vocabulary import TargetHead
from torchax_dflash.training.model.anchored import anchored_hidden_states
from torchax_dflash.training.model.losses import (
    DraftLogits,
    TargetProbs,
    position_losses,
    position_weights,
)
from torchax_dflash.training.model.objective import Objective
from torchax_dflash.training.model.selector_loss import EXCLUDED, candidate_logits


class TrainingHead(TargetHead, Protocol):
    """A target's embedding and head, where the head can be limited to some tokens."""

    def project_to(self, hidden: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Raw logits of these tokens only, [..., D] and int32 [R] -> [..., R]."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Sequences, the teacher's outputs for them, and the anchors to draft from.

    Attributes:
        token_ids: int32 [B, S]; padding is 0.
        lengths: int32 [B].
        features: [B, S, F]; padding is finite.
        choices: int32 [B, S, C], see `TeacherOutputs`.
        logprobs: float32 [B, S, C].
        anchors: int32 [B, A], positions 1 … length - 1; 0 for a padding block.
    """

    token_ids: jax.Array
    lengths: jax.Array
    features: jax.Array
    choices: jax.Array
    logprobs: jax.Array
    anchors: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary that the softmax is over.

    Attributes:
        token_ids: int32 [R], the tokens with logits.
        index: int32 [V], a token's index in `token_ids`, or -1.
        offsets: float32 [R], added to the logits, since a random token stands for many.
    """

    token_ids: jax.Array
    index: jax.Array
    offsets: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTargets:
    """What the J = Q - 1 drafts of each block are compared with.

    Attributes:
        labels: int32 [B, A, J], the target's choices.
        choices: int32 [B, A, J, C], the target's likeliest tokens.
        probs: float32 [B, A, J, C], their probabilities, scaled to sum to 1.
        known: float32 [B, A, J], what they sum to before they are scaled.
        counts: bool [B, A, J], whether a position counts.
    """

    labels: jax.Array
    choices: jax.Array
    probs: jax.Array
    known: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Score:
    """Sums over a batch.

    Attributes:
        loss: weighted sum of the losses.
        weight: sum of the weights.
        hits: float32 [J], blocks whose drafts are right up to and at this position.
        counts: float32 [J], blocks in which this position counts.
    """

    loss: jax.Array
    weight: jax.Array
    hits: jax.Array
    counts: jax.Array


def block_targets(batch: Batch, block_size: int) -> BlockTargets:
    """The labels of every block, and which of them count."""
    drafts = jnp.arange(1, block_size)
    rows = batch.anchors[..., None] + drafts - 1  # where the label was chosen
    inside = jnp.minimum(rows, batch.token_ids.shape[1] - 1)
    sequence = jnp.arange(len(batch.token_ids))[:, None, None]
    choices = batch.choices[sequence, inside]
    probs = jnp.exp(batch.logprobs[sequence, inside])
    known = probs.sum(-1)
    labels = choices[..., 0]
    exists = (rows < batch.lengths[:, None, None]) & (batch.anchors[..., None] > 0)
    # The label at anchor + j counts if tokens anchor + 1 … anchor + j - 1 were chosen.
    following = batch.token_ids[sequence, inside]
    agrees = (following[..., 1:] == labels[..., :-1]) & exists[..., 1:]
    first = jnp.ones_like(exists[..., :1])
    agrees = jnp.concatenate([first, agrees], axis=-1).astype(jnp.int32)
    return BlockTargets(
        labels=labels,
        choices=choices,
        probs=probs / known[..., None],
        known=known,
        counts=exists & (jnp.cumprod(agrees, axis=-1) > 0),
    )


def score(
    draft: Draft,
    target: TrainingHead,
    batch: Batch,
    vocabulary: Vocabulary | None = None,
    *,
    block_size: int,
    objective: Objective,
    logit_rows: int = 2048,
) -> Score:
    """Drafts every block of a batch and compares the drafts with the labels.

    Args:
        draft: the model; differentiate with respect to its params.
        target: lends its embedding and head.
        batch: the sequences.
        vocabulary: what the softmax is over, or None for all tokens.
        block_size: Q.
        objective: what the loss at a position is, and how much the position counts.
        logit_rows: the most rows whose logits are in memory at the same time.
    """
    first = jnp.take_along_axis(batch.token_ids, batch.anchors, axis=1)
    noise = noise_embedding_of(draft, target, first, num_masks=block_size - 1)
    hidden = anchored_hidden_states(draft, batch.features, noise, batch.anchors)
    wanted = block_targets(batch, block_size)
    before = jnp.concatenate([first[..., None], wanted.labels[..., :-1]], axis=-1)
    losses, right, hits = _compare(
        draft,
        target,
        wanted,
        hidden=hidden[:, :, 1:],
        before=before,
        vocabulary=vocabulary,
        objective=objective,
        logit_rows=logit_rows,
    )
    weights = position_weights(objective, hits, wanted.counts)
    if vocabulary is not None:  # a label outside it teaches nothing
        weights = jnp.where(vocabulary.index[wanted.labels] >= 0, weights, 0)
    prefix = jnp.cumprod((right & wanted.counts).astype(jnp.int32), axis=-1)
    return Score(
        loss=(losses * weights).sum(),
        weight=weights.sum(),
        hits=prefix.sum((0, 1)).astype(jnp.float32),
        counts=wanted.counts.sum((0, 1)).astype(jnp.float32),
    )


def _compare(
    draft: Draft,
    target: TrainingHead,
    wanted: BlockTargets,
    *,
    hidden: jax.Array,
    before: jax.Array,
    vocabulary: Vocabulary | None,
    objective: Objective,
    logit_rows: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The losses, whether each draft is right, and its probability of the label.

    They are float32, bool and float32, each [B, A, J]. `hidden` is [B, A, J, D];
    `before`, int32 [B, A, J], is the token before each draft.
    """
    head = target if vocabulary is None else _PartOfHead(target, vocabulary.token_ids)

    def compare(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden, before, labels, choices, probs, known = rows
        logits = head_logits(draft, head, hidden).astype(jnp.float32)
        if vocabulary is not None:
            logits += vocabulary.offsets
            labels, choices = vocabulary.index[labels], vocabulary.index[choices]
        total = jax.nn.logsumexp(logits, axis=-1)
        gathered = jnp.take_along_axis(
            logits, jnp.maximum(jnp.append(labels[:, None], choices, axis=1), 0), axis=1
        )
        of_label, of_choices = gathered[:, 0], gathered[:, 1:]
        can_say = None if vocabulary is None else choices >= 0
        losses = position_losses(
            objective,
            of_label,
            DraftLogits(of_choices, total, can_say),
            TargetProbs(probs, known),
        )
        hits = jnp.where(labels >= 0, jnp.exp(of_label - total), 0)
        if draft.config.has_selector:
            tokens = jnp.arange(logits.shape[-1])
            tokens = tokens if vocabulary is None else vocabulary.token_ids
            logits = candidate_logits(draft, hidden, before, logits, tokens)
            of_label = jnp.take_along_axis(
                logits, jnp.maximum(labels, 0)[:, None], axis=1
            )[:, 0]
            missed = jax.nn.logsumexp(logits, axis=-1) - of_label
            # A label that is not a candidate teaches the selector nothing.
            losses += jnp.where(of_label > EXCLUDED, missed, 0)
        right = of_label >= logits.max(-1)
        return losses, right & (labels >= 0), hits

    rows: tuple[jax.Array, ...] = (
        hidden.reshape(-1, hidden.shape[-1]).astype(draft.dtype),
        before.reshape(-1),
        wanted.labels.reshape(-1),
        wanted.choices.reshape(-1, wanted.choices.shape[-1]),
        wanted.probs.reshape(-1, wanted.probs.shape[-1]),
        wanted.known.reshape(-1),
    )
    if (count := rows[0].shape[0]) <= logit_rows:
        found = compare(rows)
    else:
        # Logits are by far the largest arrays: computed slice by slice, and once more
        # in the backward pass.
        slices = -(-count // logit_rows)
        padding = slices * logit_rows - count
        rows = tuple(jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in rows)
        cut = tuple(x.reshape(slices, logit_rows, *x.shape[1:]) for x in rows)
        found = jax.lax.map(jax.checkpoint(compare), cut)
    shape = wanted.labels.shape
    losses, right, hits = (x.reshape(-1)[:count].reshape(shape) for x in found)
    return losses, right, hits


@dataclass(frozen=True)
class _PartOfHead:
    """A head with logits of some tokens only."""

    target: TrainingHead
    token_ids: jax.Array

    def embed(self, token_ids: jax.Array) -> jax.Array:
        return self.target.embed(token_ids)

    def project(self, hidden: jax.Array) -> jax.Array:
        return self.target.project_to(hidden, self.token_ids)
