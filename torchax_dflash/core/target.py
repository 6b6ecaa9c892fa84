# SPDX-License-Identifier: Apache-2.0
"""The offline target: an unmodified Hugging Face model on our cache and attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from torchax_dflash.core.attention import Context
from torchax_dflash.core.bridge import Params, TorchModule
from torchax_dflash.core.config import TargetConfig
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache, slot_mapping_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """A target and its weights; a pytree, so it goes into jitted functions as it is.

    Attributes:
        params: weights by name, the only copy.
        module: the unmodified module (static).
        config: what drafting needs to know (static).
        dtype: of weights, cache and computation (static).
    """

    params: Params
    module: TorchModule = field(metadata={"static": True})
    config: TargetConfig = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Raw embeddings, int32 [...] -> [..., D], without any scale of the target."""
        name = self.module.weight_name("get_input_embeddings")
        weight = self.params[name]
        if name in self.module.linear_weights:  # tied, and laid out for the head
            weight = weight.T
        return jnp.take(weight, token_ids, axis=0)

    def project(self, hidden: jax.Array) -> jax.Array:
        """Raw logits, [..., D] -> [..., V], without any scale or cap of the target."""
        return hidden @ self._head

    def project_to(self, hidden: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Raw logits of some tokens only, [..., D] and int32 [R] -> [..., R]."""
        return hidden @ jnp.take(self._head, token_ids, axis=1)

    @property
    def _head(self) -> jax.Array:
        """The output head, [D, V]."""
        name = self.module.weight_name("get_output_embeddings")
        return self.params[dict(self.module.tied).get(name, name)]


def forward(
    target: Target,
    pool: KVPool,
    token_ids: jax.Array,
    context: Context,
    *,
    layer_ids: tuple[int, ...] = (),
    logits_row: jax.Array | None = None,
) -> tuple[KVPool, jax.Array, jax.Array]:
    """One causal pass over new rows: prefill, verification or plain decoding.

    Args:
        target: the model.
        pool: its cache; donate it.
        token_ids: int32 [B, Q].
        context: the rows before these, and how many of these exist; the others are
            padding, never stored.
        layer_ids: layers whose outputs are wanted.
        logits_row: the one row to give logits for, or None for all.

    Returns:
        The pool with these rows, logits [B, Q or 1, V], and aux hidden states [B, Q, F]
        (HF's `hidden_states[id + 1]`, concatenated; F is 0 without layer ids).
    """
    rows = token_ids.shape[1]
    positions = context.positions(rows)
    exists = jnp.arange(rows) < context.block_lens[:, None]
    slots = slot_mapping_of(pool, context.block_table, positions, exists)
    cache = StaticKVCache(pool=pool, slot_mapping=slots.reshape(-1), context=context)
    outputs = target.module(
        target.params,
        cache,
        dtype=target.dtype,
        input_ids=token_ids,
        position_ids=positions,
        output_hidden_states=bool(layer_ids),
        logits_to_keep=0 if logits_row is None else logits_row[None],
    )
    logits = outputs["logits"].jax()
    if layer_ids:
        states = outputs["hidden_states"]
        tapped = [states[i + 1].jax() for i in layer_ids]
        aux_hidden_states = jnp.concatenate(tapped, axis=-1)
    else:
        aux_hidden_states = jnp.zeros((*token_ids.shape, 0), logits.dtype)
    return cache.pool, logits, aux_hidden_states
