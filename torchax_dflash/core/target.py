# SPDX-License-Identifier: Apache-2.0
"""The offline target: an unmodified Hugging Face model on our cache and attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from transformers import AutoConfig, GenerationConfig

from torchax_dflash.checkpoints.weights import (
    build_module,
    find_checkpoint,
    load_params,
    params_of,
)
from torchax_dflash.core.bridge import Params, TorchModule
from torchax_dflash.core.config import TargetConfig, config_error
from torchax_dflash.core.kv_cache import KVPool, StaticKVCache, slot_mapping_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetModel:
    """A target and its weights; a pytree, so it goes into jitted functions as it is.

    Attributes:
        params: weights by name, the only copy.
        module: the unmodified module (static).
        config: what drafting needs to know (static).
    """

    params: Params
    module: TorchModule = field(metadata={"static": True})
    config: TargetConfig = field(metadata={"static": True})

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str = "float32",
    ) -> TargetModel:
        """Loads a causal language model of transformers.

        Args:
            name_or_path: a checkpoint folder or a hub id.
            dtype: of weights, cache and computation. float32 is where speculative
                decoding is lossless to the token; bfloat16 is for speed.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: an architecture or config that is not supported.
        """
        folder = find_checkpoint(name_or_path)
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        generation_config = None
        if (folder / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(folder)
        config = TargetConfig.from_hf(hf_config, generation_config)
        built = _build(hf_config)
        return cls(
            params=load_params(built, folder, jnp.dtype(dtype)),
            module=built,
            config=config,
        )

    @classmethod
    def from_torch(cls, model: Any, *, dtype: str = "float32") -> TargetModel:
        """Copies the weights of a transformers model that is already in memory."""
        hf_config = type(model.config).from_dict(model.config.to_dict())
        hf_config.architectures = [type(model).__name__]
        config = TargetConfig.from_hf(hf_config, model.generation_config)
        built = _build(hf_config)
        return cls(
            params=params_of(built, model, jnp.dtype(dtype)),
            module=built,
            config=config,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights, cache and computation."""
        name = _weight_name(self.module, "get_input_embeddings")
        return self.params[name].dtype

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Raw embeddings, int32 [...] -> [..., D], without any scale of the target."""
        name = _weight_name(self.module, "get_input_embeddings")
        weight = self.params[name]
        if name in self.module.linear_weights:  # tied, and laid out for the head
            weight = weight.T
        return jnp.take(weight, token_ids, axis=0)

    def project(self, hidden: jax.Array) -> jax.Array:
        """Raw logits, [..., D] -> [..., V], without any scale or cap of the target."""
        name = _weight_name(self.module, "get_output_embeddings")
        return hidden @ self.params[dict(self.module.tied).get(name, name)]

    def project_to(self, hidden: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Raw logits of some tokens only, [..., D] and int32 [R] -> [..., R]."""
        name = _weight_name(self.module, "get_output_embeddings")
        weight = self.params[dict(self.module.tied).get(name, name)]
        return hidden @ jnp.take(weight, token_ids, axis=1)

    def make_pool(self, *, num_pages: int, page_size: int) -> KVPool:
        """An empty cache for this model."""
        return KVPool.zeros(
            num_layers=self.config.num_hidden_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )


def forward(
    target: TargetModel,
    pool: KVPool,
    token_ids: jax.Array,
    *,
    block_table: jax.Array,
    context_lens: jax.Array,
    block_lens: jax.Array,
    layer_ids: tuple[int, ...] = (),
    logits_row: jax.Array | None = None,
) -> tuple[KVPool, jax.Array, jax.Array]:
    """One causal pass over new rows: prefill, verification or plain decoding.

    Args:
        target: the model.
        pool: its cache; donate it.
        token_ids: int32 [B, Q].
        block_table: int32 [B, pages].
        context_lens: int32 [B], rows before these.
        block_lens: int32 [B], rows that exist; the others are padding, never stored.
        layer_ids: layers whose outputs are wanted.
        logits_row: the one row to give logits for, or None for all.

    Returns:
        The pool with these rows, logits [B, Q or 1, V], and aux hidden states [B, Q, F]
        (HF's `hidden_states[id + 1]`, concatenated; F is 0 without layer ids).
    """
    rows = jnp.arange(token_ids.shape[1])
    positions = context_lens[:, None] + rows
    exists = rows < block_lens[:, None]
    cache = StaticKVCache(
        pool=pool,
        slot_mapping=slot_mapping_of(pool, block_table, positions, exists).reshape(-1),
        block_table=block_table,
        context_lens=context_lens,
        block_lens=block_lens,
    )
    outputs = target.module(
        target.params,
        cache,
        input_ids=token_ids,
        position_ids=positions,
        output_hidden_states=bool(layer_ids),
        logits_to_keep=0 if logits_row is None else logits_row[None],
    )
    logits = outputs["logits"].jax()
    if layer_ids:
        states = outputs["hidden_states"]
        features = jnp.concatenate([states[i + 1].jax() for i in layer_ids], axis=-1)
    else:
        features = jnp.zeros((*token_ids.shape, 0), logits.dtype)
    return cache.pool, logits, features


def _build(hf_config: Any) -> TorchModule:
    architecture = (hf_config.architectures or [""])[0]
    known = hasattr(transformers, architecture) if architecture else False
    if not known or not architecture.endswith("ForCausalLM"):
        raise config_error(
            "architectures",
            "a causal language model of transformers, like LlamaForCausalLM",
            hf_config.architectures,
            "Targets with code of their own are not supported offline.",
        )
    built = build_module(getattr(transformers, architecture), hf_config)
    if not hf_config.get_text_config().tie_word_embeddings:
        return built
    # One array for both, laid out for the head; embeddings are gathered columns.
    embedding = _weight_name(built, "get_input_embeddings")
    head = _weight_name(built, "get_output_embeddings")
    return replace(
        built,
        linear_weights=built.linear_weights - {head} | {embedding},
        tied=((head, embedding),),
    )


def _weight_name(built: TorchModule, getter: str) -> str:
    layer = getattr(built.module, getter)()
    for name, submodule in built.module.named_modules():
        if submodule is layer:
            return f"{name}.weight"
    raise AssertionError(f"{getter} returned no submodule")
