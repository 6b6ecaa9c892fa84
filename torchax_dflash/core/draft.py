# SPDX-License-Identifier: Apache-2.0
"""The draft: one unmodified DFlash module, called in two ways.

The module's forward does two jobs at once: it turns context features into K/V, and it
drafts. Called twice, and with dead code removed by XLA, it becomes two programs:

    ingest   features of newly accepted tokens -> K/V rows in the pool
             (with one dummy noise row: its queries and attention feed nothing that is
             kept, and XLA drops them; one row of its MLPs stays)
    draft    anchor and mask tokens -> draft tokens, attending to the pool
             (an empty context: no features, no writes)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from torchax.interop import jax_view, torch_view

from torchax_dflash.checkpoints.formats import (
    EXTRA_TENSORS,
    has_selector,
    read_config,
    read_vocabulary,
)
from torchax_dflash.checkpoints.sharding import pool_sharding, shard_params, shard_table
from torchax_dflash.checkpoints.weights import (
    buffers,
    build_module,
    copy_params,
    find_checkpoint,
    read_params,
)
from torchax_dflash.core.bridge import Params, TorchModule
from torchax_dflash.core.config import DFlashConfig, config_error
from torchax_dflash.core.int8 import (
    Int8Weight,
    MaybeQuantized,
    check_quantization,
    kept_weights,
)
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache
from torchax_dflash.core.vocabulary import OwnVocabulary, TargetHead

_SELECTOR = "candidate_selector."


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModel:
    """A draft and its weights; a pytree, so it goes into jitted functions as it is.

    Attributes:
        params: weights by name, the only copy.
        module: the unmodified module (static).
        config: checked (static).
        pool_sharding: where its cache lies, or None for the default device (static).
        own: its embedding and head, if they are not the target's.
    """

    params: MaybeQuantized
    module: TorchModule = field(metadata={"static": True})
    config: DFlashConfig = field(metadata={"static": True})
    pool_sharding: NamedSharding | None = field(default=None, metadata={"static": True})
    own: OwnVocabulary = field(default_factory=OwnVocabulary)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str = "float32",
        trust_remote_code: bool = False,
        quantization: str | None = None,
    ) -> DraftModel:
        """Loads a DFlash draft of any format that `formats.py` knows.

        Args:
            name_or_path: a checkpoint folder or a hub id.
            dtype: of weights, cache and computation: the target's.
            trust_remote_code: run the module that the checkpoint brings, instead of
                the `dflash` package's class of the same name.
            quantization: "int8" keeps linear weights in a byte each.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: an unknown format, architecture or quantization, or a config or
                weights that are broken.
        """
        check_quantization(quantization)
        folder = find_checkpoint(name_or_path)
        checkpoint = read_config(folder, trust_remote_code=trust_remote_code)
        built = build_module(checkpoint.module_class, checkpoint.hf_config)
        weights = read_params(built, folder, elsewhere=EXTRA_TENSORS)
        return cls(
            params=kept_weights(weights, jnp.dtype(dtype), quantization)
            | buffers(built),
            module=built,
            config=checkpoint.config,
            own=read_vocabulary(built, folder, checkpoint.config, jnp.dtype(dtype)),
        )

    @classmethod
    def from_torch(
        cls, module: Any, *, dtype: str = "float32", quantization: str | None = None
    ) -> DraftModel:
        """Copies the weights of a DFlash module that is already in memory."""
        check_quantization(quantization)
        hf_config = type(module.config).from_dict(module.config.to_dict())
        built = build_module(type(module), hf_config)
        weights = copy_params(built, module)
        return cls(
            params=kept_weights(weights, jnp.dtype(dtype), quantization)
            | buffers(built),
            module=built,
            config=DFlashConfig.from_hf(
                hf_config, has_selector=has_selector(type(module)), own_code=True
            ),
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Of computation and cache, and of weights that are not quantised."""
        return self.params["fc.weight"].dtype

    @property
    def heads_are_split(self) -> bool:
        """Whether each device has only some heads of the cache."""
        lies = self.pool_sharding
        return lies is not None and not lies.is_fully_replicated

    @property
    def quantization(self) -> str | None:
        """How its linear weights are kept: "int8", or None for as they are."""
        kept = self.params.values()
        return "int8" if any(isinstance(w, Int8Weight) for w in kept) else None

    @property
    def plain_params(self) -> Params:
        """Its params, for those who need them as arrays.

        Raises:
            ValueError: some are quantised.
        """
        if self.quantization is not None:
            expected = "a draft with weights as they are"
            remedy = "Load it without quantization."
            raise config_error("quantization", expected, self.quantization, remedy)
        return self._arrays

    @property
    def selector_params(self) -> Params:
        """Those of DFlash-2's candidate selector, which are never quantised."""
        arrays = self._arrays.items()
        return {name: array for name, array in arrays if name.startswith(_SELECTOR)}

    @property
    def _arrays(self) -> Params:
        kept = self.params.items()
        return {name: a for name, a in kept if not isinstance(a, Int8Weight)}

    @property
    def num_bytes(self) -> int:
        """Memory of its weights, own embedding and head included."""
        return sum(array.nbytes for array in jax.tree.leaves((self.params, self.own)))

    def shard(self, mesh: Mesh, axis: str) -> DraftModel:
        """The same model, split over the devices along `axis` of the mesh.

        Weights and cache are split as `sharding.py` says.
        """
        return replace(
            self,
            params=shard_params(self.params, config=self.config, mesh=mesh, axis=axis),
            pool_sharding=pool_sharding(config=self.config, mesh=mesh, axis=axis),
            own=jax.tree.map(partial(shard_table, mesh=mesh, axis=axis), self.own),
        )

    def make_pool(self, *, num_pages: int, page_size: int) -> KVPool:
        """An empty cache of context rows for this model."""
        make = partial(
            KVPool.zeros,
            num_layers=self.config.num_hidden_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )
        if self.pool_sharding is None:
            return make()
        # Jitted, so that no device ever holds more than its share.
        return jax.jit(make, out_shardings=self.pool_sharding)()


@partial(jax.jit, donate_argnames="pool")
def ingest(
    draft: DraftModel,
    pool: KVPool,
    features: jax.Array,
    positions: jax.Array,
    slot_mapping: jax.Array,
) -> KVPool:
    """Stores the draft's K/V of new context rows, of all requests in one flat run.

    Args:
        draft: the model.
        pool: its cache, donated.
        features: [T, F], the target's aux hidden states of accepted tokens.
        positions: int32 [T].
        slot_mapping: int32 [T]; rows at `pool.num_slots` are padding and dropped.

    Returns:
        The pool with these rows.
    """
    rows, hidden = draft.config.least_block_rows, draft.config.hidden_size
    cache = StaticKVCache(pool=pool, slot_mapping=slot_mapping)
    draft.module(
        draft.params,
        cache,
        target_hidden=features[None].astype(draft.dtype),
        noise_embedding=jnp.zeros((1, rows, hidden), draft.dtype),
        position_ids=jnp.pad(positions, (0, rows))[None],
    )
    if draft.pool_sharding is None:
        return cache.pool
    return jax.lax.with_sharding_constraint(cache.pool, draft.pool_sharding)


def draft_hidden_states(
    draft: DraftModel,
    pool: KVPool,
    noise_embedding: jax.Array,
    *,
    block_table: jax.Array,
    context_lens: jax.Array,
    block_lens: jax.Array,
) -> jax.Array:
    """The module's output over noise blocks, [B, Q, D] -> [B, Q, D]."""
    batch, rows, _ = noise_embedding.shape
    cache = StaticKVCache(
        pool=pool,
        block_table=block_table,
        context_lens=context_lens,
        block_lens=block_lens,
        heads_are_split=draft.heads_are_split,
    )
    hidden = draft.module(
        draft.params,
        cache,
        target_hidden=jnp.zeros((batch, 0, draft.config.feature_size), draft.dtype),
        noise_embedding=noise_embedding,
        position_ids=context_lens[:, None] + jnp.arange(rows),
    )
    return jax_view(hidden)


def head_logits(draft: DraftModel, target: TargetHead, hidden: jax.Array) -> jax.Array:
    """Through the head, by the module's own `compute_logits` if it has one.

    Args:
        draft: the model.
        target: lends its head, unless the draft has its own.
        hidden: [..., D], the module's output.

    Returns:
        [..., V], or as many as `target.project` gives.
    """
    module: Any = draft.module.module

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch_view(draft.own.project(jax_view(rows), target))

    with draft.module.running(draft.params):
        rows = torch_view(hidden)
        if hasattr(module, "compute_logits"):
            logits = jax_view(module.compute_logits(rows, head))
        else:
            logits = jax_view(head(rows))
    vocab_size = jax.eval_shape(target.project, hidden).shape[-1]
    return draft.own.over_target(logits, vocab_size)
