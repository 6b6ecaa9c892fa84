# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: what a request's tokens are drawn from, and the draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy decoding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Each request's settings, on the device.

    Attributes:
        temperature: float32 [B]; below `GREEDY_BELOW`, the likeliest token.
        top_k: int32 [B]; only the k likeliest tokens; 0 for all.
        top_p: float32 [B]; only the likeliest tokens that together reach p.
        min_p: float32 [B]; only tokens at least this fraction of the likeliest.
        seed: uint32 [B].
        logprobs: bool [B]; log-probabilities of the output are wanted.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    logprobs: jax.Array

    @classmethod
    def greedy(cls, batch_size: int) -> SamplingState:
        """Settings of a batch that decodes greedily."""

        def all_(value: float, dtype: type) -> jax.Array:
            return jnp.full(batch_size, value, dtype)

        return cls(
            temperature=all_(0, jnp.float32),
            top_k=all_(0, jnp.int32),
            top_p=all_(1, jnp.float32),
            min_p=all_(0, jnp.float32),
            seed=all_(0, jnp.uint32),
            logprobs=all_(False, jnp.bool_),
        )

    def only(self, active: jax.Array) -> SamplingState:
        """Settings of bool [B] `active` requests; idle ones ask for nothing."""
        idle = SamplingState.greedy(len(active))
        return jax.tree.map(partial(jnp.where, active), self, idle)

    @property
    def draws(self) -> jax.Array:
        """Bool [B]: the request's tokens are drawn, not chosen."""
        return self.temperature >= GREEDY_BELOW

    def keys(self, positions: jax.Array, purpose: int) -> jax.Array:
        """A random key of each request for its step at int32 [B] `positions`.

        It depends on nothing else, so a request's output does not depend on the others
        in its batch. `purpose` tells the draws of one step apart.
        """

        def one(seed: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.fold_in(key, purpose)

        return jax.vmap(one)(self.seed, positions)


def probabilities(logits: jax.Array, settings: SamplingState) -> jax.Array:
    """What tokens are drawn from: logits [B, R, V] -> float32 [B, R, V].

    Temperature, then min-p, top-k and top-p, in vLLM's order. Tokens that tie with the
    last one kept are kept.
    """
    logits = logits.astype(jnp.float32)
    draws = settings.draws[:, None, None]
    scaled = logits / jnp.where(draws, settings.temperature[:, None, None], 1)
    filtered = jax.lax.cond(
        ((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)).any(),
        lambda: _filtered(scaled, settings),
        lambda: scaled,
    )
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(draws, jax.nn.softmax(filtered), chosen)


def _filtered(logits: jax.Array, settings: SamplingState) -> jax.Array:
    """Logits of tokens that min-p, top-k and top-p exclude become -inf."""
    top_k, top_p, min_p = (
        setting[:, None, None]
        for setting in (settings.top_k, settings.top_p, settings.min_p)
    )
    probs = jax.nn.softmax(logits)
    enough = probs >= min_p * probs.max(-1, keepdims=True)
    logits = jnp.where(enough, logits, -jnp.inf)
    ones = jnp.ones(logits.shape, jnp.float32)
    in_k = _likeliest(logits, ones, top_k.astype(jnp.float32)) | (top_k == 0)
    logits = jnp.where(in_k, logits, -jnp.inf)
    in_p = _likeliest(logits, jax.nn.softmax(logits), top_p) | (top_p >= 1)
    return jnp.where(in_p, logits, -jnp.inf)


def _likeliest(logits: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """The fewest of the highest logits whose weights together reach `needed`.

    Instead of sorting a vocabulary, finds the lowest logit that is kept bit by bit: as
    unsigned numbers in the same order, the largest threshold that is reached.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    ordered = jnp.where(bits & sign, ~bits, bits | sign)

    def one_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (sign >> index.astype(jnp.uint32))
        weight = jnp.where(ordered >= higher, weights, 0).sum(-1, keepdims=True)
        return jnp.where(weight >= needed, higher, threshold)

    lowest = jnp.zeros((*logits.shape[:-1], 1), jnp.uint32)
    return ordered >= jax.lax.fori_loop(0, 32, one_bit, lowest)


def draw(probs: jax.Array, keys: jax.Array) -> jax.Array:
    """One token of each of a request's rows: [B, R, V], keys [B] -> int32 [B, R]."""
    shape = probs.shape[1:]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape))(keys)
    return jnp.argmax(jnp.log(probs) + noise, axis=-1).astype(jnp.int32)
