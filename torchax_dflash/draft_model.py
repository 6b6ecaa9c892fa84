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
from typing import Any, Protocol

import dflash.model
import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from torchax.interop import jax_view, torch_view
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from torchax_dflash.bridge import Params, TorchModule
from torchax_dflash.config import DFlashConfig, config_error, remote_class
from torchax_dflash.kv_cache import KVPool, StaticKVCache
from torchax_dflash.sharding import param_sharding, pool_sharding
from torchax_dflash.weights import (
    build_module,
    find_checkpoint,
    load_params,
    params_of,
)

_ARCHITECTURES = {
    "DFlashDraftModel": dflash.model.DFlashDraftModel,
    "DFlash2DraftModel": dflash.model.DFlash2DraftModel,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModel:
    """A draft and its weights; a pytree, so it goes into jitted functions as it is.

    Attributes:
        params: weights by name, the only copy. Embedding and head are the target's.
        module: the unmodified module (static).
        config: checked (static).
        pool_sharding: where its cache lies, or None for the default device (static).
    """

    params: Params
    module: TorchModule = field(metadata={"static": True})
    config: DFlashConfig = field(metadata={"static": True})
    pool_sharding: NamedSharding | None = field(default=None, metadata={"static": True})

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str = "float32",
        trust_remote_code: bool = False,
    ) -> DraftModel:
        """Loads a DFlash draft.

        Args:
            name_or_path: a checkpoint folder or a hub id.
            dtype: of weights, cache and computation: the target's.
            trust_remote_code: run the module that the checkpoint brings, instead of
                the `dflash` package's class of the same name.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: an unknown architecture, or a config or weights that are broken.
        """
        folder = find_checkpoint(name_or_path)
        hf_config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        module_class, own_code = _module_class(hf_config, folder, trust_remote_code)
        config = DFlashConfig.from_hf(
            hf_config, has_selector=_has_selector(module_class), own_code=own_code
        )
        built = build_module(module_class, hf_config)
        return cls(
            params=load_params(built, folder, jnp.dtype(dtype)),
            module=built,
            config=config,
        )

    @classmethod
    def from_torch(cls, module: Any, *, dtype: str = "float32") -> DraftModel:
        """Copies the weights of a DFlash module that is already in memory."""
        hf_config = type(module.config).from_dict(module.config.to_dict())
        built = build_module(type(module), hf_config)
        return cls(
            params=params_of(built, module, jnp.dtype(dtype)),
            module=built,
            config=DFlashConfig.from_hf(
                hf_config, has_selector=_has_selector(type(module)), own_code=True
            ),
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights, cache and computation."""
        return self.params["fc.weight"].dtype

    @property
    def heads_are_split(self) -> bool:
        """Whether each device has only some heads of the cache."""
        lies = self.pool_sharding
        return lies is not None and not lies.is_fully_replicated

    def shard(self, mesh: Mesh, axis: str) -> DraftModel:
        """The same model, split over the devices along `axis` of the mesh.

        Weights and cache are split as `sharding.py` says.
        """
        params = {
            name: jax.device_put(
                array,
                param_sharding(
                    name, array.shape, config=self.config, mesh=mesh, axis=axis
                ),
            )
            for name, array in self.params.items()
        }
        pool = pool_sharding(config=self.config, mesh=mesh, axis=axis)
        return replace(self, params=params, pool_sharding=pool)

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
    slots: jax.Array,
) -> KVPool:
    """Stores the draft's K/V of new context rows, of all requests in one flat run.

    Args:
        draft: the model.
        pool: its cache, donated.
        features: [T, F], the target's aux hidden states of accepted tokens.
        positions: int32 [T].
        slots: int32 [T]; rows at `pool.num_slots` are padding and dropped.

    Returns:
        The pool with these rows.
    """
    rows, hidden = draft.config.least_block_rows, draft.config.hidden_size
    cache = StaticKVCache(pool=pool, slots=slots)
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
    page_table: jax.Array,
    context_lens: jax.Array,
    block_lens: jax.Array,
) -> jax.Array:
    """The module's output over noise blocks, [B, Q, D] -> [B, Q, D]."""
    batch, rows, _ = noise_embedding.shape
    cache = StaticKVCache(
        pool=pool,
        page_table=page_table,
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


class TargetHead(Protocol):
    """What a draft borrows from its target; a pytree."""

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Raw embeddings, int32 [...] -> [..., D]."""
        ...

    def project(self, hidden: jax.Array) -> jax.Array:
        """Raw logits, [..., D] -> [..., V], without any scale or cap of the target."""
        ...


def head_logits(draft: DraftModel, target: TargetHead, hidden: jax.Array) -> jax.Array:
    """Through the target's head, by the module's own `compute_logits` if it has one.

    Args:
        draft: the model.
        target: lends its head.
        hidden: [..., D], the module's output.

    Returns:
        [..., V], or as many as `target.project` gives.
    """
    module: Any = draft.module.module

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch_view(target.project(jax_view(rows)))

    with draft.module.running(draft.params):
        rows = torch_view(hidden)
        if hasattr(module, "compute_logits"):
            return jax_view(module.compute_logits(rows, head))
        return jax_view(head(rows))


def _module_class(
    hf_config: Any, folder: Path, trust_remote_code: bool
) -> tuple[type, bool]:
    """The class to build, and whether it is the checkpoint's own code."""
    architecture = (hf_config.architectures or [None])[0]
    own_code = remote_class(hf_config)
    if trust_remote_code and own_code:
        return get_class_from_dynamic_module(own_code, str(folder)), True
    if architecture in _ARCHITECTURES:
        return _ARCHITECTURES[architecture], False
    remedy = "Choose another draft."
    if own_code:
        remedy = (
            "The checkpoint brings code of its own: read it, then load with "
            "trust_remote_code=True."
        )
    raise config_error(
        "architectures", f"one of {sorted(_ARCHITECTURES)}", architecture, remedy
    )


def _has_selector(module_class: type) -> bool:
    """Whether it is a DFlash-2 module, which chooses among candidates."""
    return hasattr(module_class, "propose")
