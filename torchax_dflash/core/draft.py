# SPDX-License-Identifier: Apache-2.0
"""The draft: one unmodified DFlash module, called in two ways.

The module's forward does two jobs at once: it turns context features into K/V, and it
drafts. Called twice, and with dead code removed by XLA, it becomes two programs:

    ingest   aux hidden states of newly accepted tokens -> K/V rows in the pool
             (with a dummy noise row, which feeds nothing that is kept: XLA drops its
             queries and attention, `_for_context` its MLPs and output projections)
    draft    anchor and mask tokens -> draft tokens, attending to the pool
             (an empty context: no aux hidden states, no writes); see drafting.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from torchax_dflash.core.bridge import Params, TorchModule
from torchax_dflash.core.config import DFlashConfig, config_error
from torchax_dflash.core.draft_weights import linear_layer
from torchax_dflash.core.int8 import Int8Weight, MaybeQuantized
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache, slot_mapping_of
from torchax_dflash.core.vocabulary import OwnVocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """A draft and its weights; a pytree, so it goes into jitted functions as it is.

    Attributes:
        params: weights by name, the only copy.
        module: the unmodified module (static).
        config: checked (static).
        dtype: of computation and cache, and of weights that are not quantised (static).
        own: its embedding and head, if they are not the target's.
    """

    params: MaybeQuantized
    module: TorchModule = field(metadata={"static": True})
    config: DFlashConfig = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})
    own: OwnVocabulary = field(default_factory=OwnVocabulary)

    @property
    def quantization(self) -> str | None:
        """How its linear weights are kept: "int8", or None for as they are."""
        kept = self.params.values()
        return "int8" if any(isinstance(w, Int8Weight) for w in kept) else None

    @property
    def plain_params(self) -> Params:
        """All params as plain arrays.

        Raises:
            ValueError: some are quantised.
        """
        if self.quantization is not None:
            expected = "a draft with weights as they are"
            remedy = "Load it without quantization."
            raise config_error("quantization", expected, self.quantization, remedy)
        return self.arrays()

    def arrays(self, prefix: str = "") -> Params:
        """The params that are not quantised and whose names begin with `prefix`."""
        return {
            name: weight
            for name, weight in self.params.items()
            if name.startswith(prefix) and not isinstance(weight, Int8Weight)
        }

    @property
    def num_bytes(self) -> int:
        """Memory of its weights, own embedding and head included."""
        return sum(array.nbytes for array in jax.tree.leaves((self.params, self.own)))


@partial(jax.jit, donate_argnames="pool")
def ingest(
    draft: Draft,
    pool: KVPool,
    aux_hidden_states: jax.Array,
    positions: jax.Array,
    slot_mapping: jax.Array,
) -> KVPool:
    """Stores the draft's K/V of new context rows, of all requests in one flat run.

    Args:
        draft: the model.
        pool: its cache, donated.
        aux_hidden_states: [T, F] of any floating dtype, the target's tapped layers at
            accepted tokens.
        positions: int32 [T].
        slot_mapping: int32 [T]; rows at `pool.num_slots` are padding and dropped.

    Returns:
        The pool with these rows.
    """
    params = _for_context(draft)
    pool = _store_context(
        draft, params, pool, aux_hidden_states, positions, slot_mapping
    )
    return pool.constrained()


def ingest_rows(
    draft: Draft,
    pool: KVPool,
    aux_hidden_states: jax.Array,
    block_table: jax.Array,
    *,
    first: jax.Array,
    count: jax.Array,
) -> KVPool:
    """As `ingest`, of a batch: each request's first `count` rows, from `first` on.

    Args:
        draft: the model.
        pool: its cache; donate it.
        aux_hidden_states: [B, R, F].
        block_table: int32 [B, pages].
        first: int32 [B], position of each request's first row.
        count: int32 [B], rows that count; the others are padding.
    """
    batch, rows, width = aux_hidden_states.shape
    positions = first[:, None] + jnp.arange(rows)
    slot_mapping = slot_mapping_of(
        pool, block_table, positions, jnp.arange(rows) < count[:, None]
    )
    return ingest(
        draft,
        pool,
        aux_hidden_states.reshape(batch * rows, width),
        positions.reshape(-1),
        slot_mapping.reshape(-1),
    )


def keeps_context_apart(draft: Draft) -> bool:
    """Whether the module's context rows do without the weights that `ingest` cuts.

    True of DFlash; of a module that a checkpoint brings it has to be seen: with NaN in
    those weights, the rows of a few random states must be finite.
    """
    rows = jnp.arange(4)
    shape = (len(rows), draft.config.feature_size)
    states = jax.random.normal(jax.random.key(0), shape, draft.dtype)

    def spoilt(name: str, weight: jax.Array | Int8Weight) -> jax.Array | Int8Weight:
        layer = linear_layer(name)
        if layer is None or layer.noise_path is None:
            return weight
        return jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan) if x.dtype != jnp.int8 else x, weight
        )

    @jax.jit
    def stored(params: MaybeQuantized) -> KVPool:
        params = {name: spoilt(name, weight) for name, weight in params.items()}
        pool = KVPool.allocate(
            draft.config, num_pages=1, page_size=len(rows), dtype=draft.dtype
        )
        return _store_context(draft, params, pool, states, rows, rows)

    pool = stored(draft.params)
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(pool))


def _store_context(
    draft: Draft,
    params: MaybeQuantized,
    pool: KVPool,
    aux_hidden_states: jax.Array,
    positions: jax.Array,
    slot_mapping: jax.Array,
) -> KVPool:
    """`ingest` with the params given: the module over context rows and a dummy row."""
    rows, hidden = draft.config.least_block_rows, draft.config.hidden_size
    cache = StaticKVCache(pool=pool, slot_mapping=slot_mapping)
    draft.module(
        params,
        cache,
        dtype=draft.dtype,
        target_hidden=aux_hidden_states[None].astype(draft.dtype),
        noise_embedding=jnp.zeros((1, rows, hidden), draft.dtype),
        position_ids=jnp.pad(positions, (0, rows))[None],
    )
    return cache.pool


def _for_context(draft: Draft) -> MaybeQuantized:
    """The params, without weights that context rows do not pass through.

    A module computes K and V of context and noise rows together, so to XLA the kept
    rows depend on the noise path, and it would read all of its weights for one dummy
    row. Here MLPs have no inner width, and output projections are zero constants.
    """

    def replaced(name: str, weight: jax.Array | Int8Weight) -> jax.Array | Int8Weight:
        layer = linear_layer(name)
        if layer is None or layer.noise_path is None:
            return weight
        shape = list(jax.tree.leaves(weight)[0].shape)
        if layer.noise_path == "mlp" and (layer.split == "out" or len(shape) == 2):
            in_out = len(shape) == 1 or name in draft.module.linear_weights
            shape[-1 if (layer.split == "out") == in_out else 0] = 0
        return jnp.zeros(shape, draft.dtype)

    return {name: replaced(name, weight) for name, weight in draft.params.items()}
