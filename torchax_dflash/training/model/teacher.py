# SPDX-License-Identifier: Apache-2.0
"""The target as teacher: hidden states and likeliest tokens of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from torchax_dflash.core.attention import Attend, Context
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache
from torchax_dflash.core.target import Target, forward

NUM_CHOICES = 8
"""How many of the likeliest next tokens are kept for each position."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeacherOutputs:
    """The target's outputs for a batch of sequences; zero in padding rows.

    Attributes:
        features: [B, S, F], aux hidden states.
        choices: int32 [B, S, C], the likeliest tokens *after* each position, best
            first.
        logprobs: float32 [B, S, C], their log-probabilities.
    """

    features: jax.Array
    choices: jax.Array
    logprobs: jax.Array


@partial(jax.jit, static_argnames=("layer_ids", "num_choices"))
def teacher_outputs(
    target: Target,
    token_ids: jax.Array,
    lengths: jax.Array,
    *,
    layer_ids: tuple[int, ...],
    num_choices: int = NUM_CHOICES,
) -> TeacherOutputs:
    """Runs the target over whole sequences, teacher-forced.

    Args:
        target: the target.
        token_ids: int32 [B, S], padded.
        lengths: int32 [B].
        layer_ids: layers whose outputs become features (static).
        num_choices: C (static).
    """
    pool, context = _no_context(target, lengths)
    _, logits, features = forward(target, pool, token_ids, context, layer_ids=layer_ids)
    length = token_ids.shape[1]
    exists = (jnp.arange(length) < lengths[:, None])[..., None]
    logits = logits.astype(jnp.float32)  # XLA sorts bfloat16 ten times slower on CPUs
    best, choices = jax.lax.top_k(logits, num_choices)
    logprobs = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return TeacherOutputs(
        features=jnp.where(exists, features, 0),
        choices=jnp.where(exists, choices, 0),
        logprobs=jnp.where(exists, logprobs, 0.0),
    )


@dataclass(eq=False)
class _SizeRecorder(StaticKVCache):
    """Records the size of queries and keys on their way to attention.

    Attributes:
        sizes: by layer, root mean squares of queries and keys, [B, N, Q] and [B, H, Q].
    """

    sizes: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, how: Attend
    ) -> jax.Array:
        self.sizes[how.layer_idx] = (_rms(query), _rms(key))
        return super().attend(query, key, value, how)


@jax.jit
def query_key_sizes(
    target: Target, token_ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Median root mean square of each layer's queries and keys, float32 [layers, 2].

    Args:
        target: the target.
        token_ids: int32 [B, S], padded.
        lengths: int32 [B].
    """
    pool, context = _no_context(target, lengths)
    cache = _SizeRecorder(pool=pool, context=context)
    length = token_ids.shape[1]
    target.module(
        target.params,
        cache,
        dtype=target.dtype,
        input_ids=token_ids,
        position_ids=jnp.broadcast_to(jnp.arange(length), token_ids.shape),
    )
    exists = jnp.arange(length) < lengths[:, None]

    def typical(sizes: jax.Array) -> jax.Array:
        sizes = sizes.swapaxes(1, 2)
        return jnp.nanmedian(jnp.where(exists[..., None], sizes, jnp.nan))

    rows = [[typical(s) for s in cache.sizes[layer]] for layer in sorted(cache.sizes)]
    return jnp.array(rows)


def feature_sizes(features: jax.Array, lengths: jax.Array, num_taps: int) -> jax.Array:
    """The typical size of each feature: its layer's median root mean square.

    Args:
        features: [B, S, F].
        lengths: int32 [B].
        num_taps: number of tapped layers.

    Returns:
        float32 [F].
    """
    batch, length, width = features.shape
    by_layer = _rms(features.reshape(batch, length, num_taps, -1))
    exists = jnp.arange(length) < lengths[:, None]
    by_layer = jnp.where(exists[..., None], by_layer, jnp.nan)
    typical = jnp.nanmedian(by_layer, axis=(0, 1))
    return jnp.repeat(typical, width // num_taps)


def _no_context(target: Target, lengths: jax.Array) -> tuple[KVPool, Context]:
    """A pool that nothing is read from: each sequence is one block of its own."""
    pool = KVPool.allocate(target.config, num_pages=1, page_size=1, dtype=target.dtype)
    none = jnp.zeros_like(lengths)
    return pool, Context(none[:, None], context_lens=none, block_lens=lengths)


def _rms(states: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(states.astype(jnp.float32)), axis=-1))
