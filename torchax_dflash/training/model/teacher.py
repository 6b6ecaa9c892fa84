# SPDX-License-Identifier: Apache-2.0
"""What the target thinks of a sequence: tapped hidden states, and its own choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from torchax_dflash.core import target as target_model
from torchax_dflash.core.kv_cache import StaticKVCache
from torchax_dflash.core.target import TargetModel

NUM_CHOICES = 8
"""Most likely next tokens that are kept of each position."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Thoughts:
    """One teacher-forced pass over a batch of sequences; padding rows are zero.

    Attributes:
        features: [B, S, F], aux hidden states.
        choices: int32 [B, S, C], the likeliest tokens *after* each position, best
            first.
        logprobs: float32 [B, S, C] of them.
    """

    features: jax.Array
    choices: jax.Array
    logprobs: jax.Array


@partial(jax.jit, static_argnames=("layer_ids", "num_choices"))
def think(
    target: TargetModel,
    token_ids: jax.Array,
    lengths: jax.Array,
    *,
    layer_ids: tuple[int, ...],
    num_choices: int = NUM_CHOICES,
) -> Thoughts:
    """Runs the target over whole sequences.

    Args:
        target: the target.
        token_ids: int32 [B, S], padded.
        lengths: int32 [B], tokens that count.
        layer_ids: layers whose outputs are wanted (static).
        num_choices: C (static).
    """
    batch, length = token_ids.shape
    _, logits, features = target_model.forward(
        target,
        target.make_pool(num_pages=1, page_size=1),  # nothing is read from it
        token_ids,
        block_table=jnp.zeros((batch, 1), jnp.int32),
        context_lens=jnp.zeros(batch, jnp.int32),
        block_lens=lengths,
        layer_ids=layer_ids,
    )
    exists = (jnp.arange(length) < lengths[:, None])[..., None]
    logits = logits.astype(jnp.float32)  # XLA sorts bfloat16 ten times slower on CPUs
    best, choices = jax.lax.top_k(logits, num_choices)
    logprobs = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Thoughts(
        features=jnp.where(exists, features, 0),
        choices=jnp.where(exists, choices, 0),
        logprobs=jnp.where(exists, logprobs, 0.0),
    )


@dataclass(eq=False)
class _SizeRecorder(StaticKVCache):
    """Measures queries and keys on their way to attention.

    Attributes:
        sizes: by layer, root mean squares of queries and keys, [B, N, Q] and [B, H, Q].
    """

    sizes: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        layer_idx: int,
        **how: Any,
    ) -> jax.Array:
        self.sizes[layer_idx] = (_rms(query), _rms(key))
        return super().attend(query, key, value, layer_idx=layer_idx, **how)


@jax.jit
def query_key_sizes(
    target: TargetModel, token_ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Median root mean square of each layer's queries and keys, float32 [layers, 2].

    Args:
        target: the target.
        token_ids: int32 [B, S], padded.
        lengths: int32 [B].
    """
    batch, length = token_ids.shape
    cache = _SizeRecorder(
        pool=target.make_pool(num_pages=1, page_size=1),
        block_table=jnp.zeros((batch, 1), jnp.int32),
        context_lens=jnp.zeros(batch, jnp.int32),
        block_lens=lengths,
    )
    target.module(
        target.params,
        cache,
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
    """Typical size of each feature: its layer's median root mean square.

    Args:
        features: [B, S, F].
        lengths: int32 [B].
        num_taps: tapped layers.

    Returns:
        float32 [F].
    """
    batch, length, width = features.shape
    by_layer = _rms(features.reshape(batch, length, num_taps, -1))
    exists = jnp.arange(length) < lengths[:, None]
    by_layer = jnp.where(exists[..., None], by_layer, jnp.nan)
    typical = jnp.nanmedian(by_layer, axis=(0, 1))
    return jnp.repeat(typical, width // num_taps)


def _rms(states: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(states.astype(jnp.float32)), axis=-1))
