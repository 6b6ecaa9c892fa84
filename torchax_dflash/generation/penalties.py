# SPDX-License-Identifier: Apache-2.0
"""Repetition, presence and frequency penalties, for each row of a block.

A row follows the drafts before it, so it is penalised for them as well:

    rows of a block      tokens that count against row i
    0  (anchor)          prompt and output so far
    1                    … and draft 1
    2                    … and drafts 1, 2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalties:
    """Each request's penalties and the tokens that they count, on the device.

    Attributes:
        repetition: float32 [B]; positive logits of tokens in prompt or output are
            divided by it, negative ones multiplied; 1 changes nothing.
        presence: float32 [B]; subtracted from logits of tokens in the output.
        frequency: float32 [B]; the same, once for each occurrence.
        in_prompt: bool [B, V].
        in_output: int32 [B, V], occurrences.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    in_prompt: jax.Array
    in_output: jax.Array

    @classmethod
    def none(cls, batch_size: int, vocab_size: int) -> Penalties:
        """For requests without tokens and without penalties."""
        return cls(
            repetition=jnp.ones(batch_size, jnp.float32),
            presence=jnp.zeros(batch_size, jnp.float32),
            frequency=jnp.zeros(batch_size, jnp.float32),
            in_prompt=jnp.zeros((batch_size, vocab_size), bool),
            in_output=jnp.zeros((batch_size, vocab_size), jnp.int32),
        )

    def only(self, active: jax.Array) -> Penalties:
        """Settings of bool [B] `active` requests; idle ones are not penalised."""
        return replace(
            self,
            repetition=jnp.where(active, self.repetition, 1),
            presence=jnp.where(active, self.presence, 0),
            frequency=jnp.where(active, self.frequency, 0),
        )

    @property
    def active(self) -> jax.Array:
        """Bool [B]: the request has a penalty."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    def add_prompt(
        self,
        row: jax.Array,
        token_ids: jax.Array,
        *,
        is_first: jax.Array,
        settings: jax.Array,
    ) -> Penalties:
        """Adds a chunk of a request's prompt.

        Args:
            row: int32 [], the request's.
            token_ids: int32 [T]; -1 is padding.
            is_first: bool []; the tokens of the row's last request are forgotten.
            settings: float32 [3]: repetition, presence, frequency.
        """
        kept, size = ~is_first, self.in_prompt.shape[1]
        token_ids = jnp.where(token_ids < 0, size, token_ids)
        in_prompt = self.in_prompt.at[row].set(self.in_prompt[row] & kept)
        return Penalties(
            repetition=self.repetition.at[row].set(settings[0]),
            presence=self.presence.at[row].set(settings[1]),
            frequency=self.frequency.at[row].set(settings[2]),
            in_prompt=in_prompt.at[row, token_ids].set(True, mode="drop"),
            in_output=self.in_output.at[row].set(
                jnp.where(kept, self.in_output[row], 0)
            ),
        )

    def add_output(self, token_ids: jax.Array, num_tokens: jax.Array) -> Penalties:
        """Counts the first `num_tokens` [B] of int32 [B, R] as output."""
        batch, size = self.in_output.shape
        counts = jnp.arange(token_ids.shape[1]) < num_tokens[:, None]
        token_ids = jnp.where(counts, token_ids, size)
        rows = jnp.arange(batch)[:, None]
        return replace(
            self, in_output=self.in_output.at[rows, token_ids].add(1, mode="drop")
        )

    def apply(self, logits: jax.Array, draft_token_ids: jax.Array) -> jax.Array:
        """Penalised logits, float32 [B, Q, V].

        Args:
            logits: [B, Q, V]; row i follows the anchor and i drafts.
            draft_token_ids: int32 [B, Q - 1].
        """
        logits = logits.astype(jnp.float32)
        drafts = jax.nn.one_hot(draft_token_ids, logits.shape[-1], dtype=jnp.int32)
        before = jnp.pad(jnp.cumsum(drafts, axis=1), ((0, 0), (1, 0), (0, 0)))
        in_output = self.in_output[:, None] + before
        seen = self.in_prompt[:, None] | (in_output > 0)
        factor = self.repetition[:, None, None]
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen, repeated, logits)
        logits -= self.frequency[:, None, None] * in_output.astype(jnp.float32)
        return logits - jnp.where(in_output > 0, self.presence[:, None, None], 0)
