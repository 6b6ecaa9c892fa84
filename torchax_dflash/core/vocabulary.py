# SPDX-License-Identifier: Apache-2.0
"""Embedding and head of a draft: its target's, or its own.

A draft's own head may know fewer tokens than the target. Its logits are put where the
target's would be, and tokens that it does not know get -inf, so their probability
is 0 at any temperature. With 4 tokens of which the head knows 1 and 3:

    head's logits    a  b            row_of_token   [2, 0, 2, 1]
    over the target  -inf  a  -inf  b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class TargetHead(Protocol):
    """What a draft borrows from its target; a pytree."""

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Raw embeddings, int32 [...] -> [..., D]."""
        ...

    def project(self, hidden: jax.Array) -> jax.Array:
        """Raw logits, [..., D] -> [..., V], without any scale or cap of the target."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnVocabulary:
    """What a draft has of its own instead of borrowing it; a pytree.

    Attributes:
        embedding: [V, D], for its noise blocks, or None.
        head: [D, number of tokens it knows], or None.
        row_of_token: int32 [V], where the head has a token, or the number of tokens it
            knows; None without a head.
    """

    embedding: jax.Array | None = None
    head: jax.Array | None = None
    row_of_token: jax.Array | None = None

    @property
    def is_empty(self) -> bool:
        """Both are the target's."""
        return self.embedding is None and self.head is None

    def embed(self, token_ids: jax.Array, target: TargetHead) -> jax.Array:
        """Raw embeddings, int32 [...] -> [..., D]."""
        if self.embedding is None:
            return target.embed(token_ids)
        # A target's padding may have more ids than the embedding has rows.
        return jnp.take(self.embedding, token_ids, axis=0, mode="clip")

    def project(self, hidden: jax.Array, target: TargetHead) -> jax.Array:
        """Raw logits, [..., D] -> [..., tokens that the head knows]."""
        return target.project(hidden) if self.head is None else hidden @ self.head

    def over_target(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """The head's logits at the target's tokens, [..., V].

        Args:
            logits: [..., tokens that the head knows], scaled and capped already.
            vocab_size: V, as many logits as the target gives (padding included).
        """
        if self.row_of_token is None:
            return logits
        known = logits.shape[-1]
        rows = self.row_of_token[:vocab_size]
        padding = vocab_size - rows.shape[0]
        rows = jnp.pad(rows, (0, padding), constant_values=known)
        return jnp.take(logits, rows, axis=-1, mode="fill", fill_value=-jnp.inf)


def rows_of_tokens(token_ids: np.ndarray, vocab_size: int) -> jax.Array:
    """The inverse of `token_ids`, which are distinct: int32 [vocab_size]."""
    rows = np.full(vocab_size, len(token_ids), np.int32)
    rows[token_ids] = np.arange(len(token_ids))
    return jnp.array(rows)
