# SPDX-License-Identifier: Apache-2.0
"""The draft of an engine: its weights, the target's head, and its cache."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx

from torchax_dflash.checkpoints.pretrained import DraftModel
from torchax_dflash.checkpoints.sharding import pool_sharding, shard_draft
from torchax_dflash.core.config import TargetConfig
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.serving.drafting.target_head import ServedHead

_AXIS = "model"  # tpu-inference's mesh axis of tensor parallelism


class ServedDraft:
    """A draft that fits the engine's target, on the engine's devices.

    Attributes:
        draft: the model.
        target_layers: the target's layers that it reads, in order, each once.
        head: the target's embedding and head; there after `take_head`.
        pool: the draft's K and V; there after `allocate`, donated in each step.
    """

    head: ServedHead
    pool: KVPool

    def __init__(
        self, vllm_config: Any, mesh: jax.sharding.Mesh, *, quantization: str | None
    ) -> None:
        """Loads the draft.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: a broken checkpoint, or one that does not fit the target.
        """
        speculative = vllm_config.speculative_config
        model, target = speculative.draft_model_config, vllm_config.model_config
        draft = DraftModel.from_pretrained(
            model.model,
            dtype=str(target.dtype).removeprefix("torch."),
            trust_remote_code=model.trust_remote_code,
            quantization=quantization,
        )
        config = draft.config
        target_config = TargetConfig.from_hf(target.hf_config)
        config.check_target(target_config)
        config.check_num_speculative_tokens(speculative.num_speculative_tokens)
        self.draft: Draft = shard_draft(draft, mesh, _AXIS)
        self.target_layers = sorted(set(config.target_layer_ids))
        self._last_layer = target_config.num_hidden_layers - 1
        self._vocab_size: int = target.get_vocab_size()
        self._is_tied: bool = target.hf_config.get_text_config().tie_word_embeddings
        self._sharding = pool_sharding(config=config, mesh=mesh, axis=_AXIS)
        self._num_devices = mesh.size

    def take_head(self, target_state: dict[str, jax.Array] | nnx.State) -> None:
        """Takes the target's embedding and head; they stay the target's.

        Args:
            target_state: arrays by name (PyTorch path), or an `nnx.State`.
        """
        if isinstance(target_state, nnx.State):
            target_state = {
                ".".join(map(str, path)): variable.get_value()
                for path, variable in nnx.to_flat_state(target_state)
            }
        self.head = ServedHead.of(
            target_state,
            tied=self._is_tied,
            vocab_size=self._vocab_size,
            hidden_size=self.draft.config.hidden_size,
        )

    def features(
        self, aux_hidden_states: tuple[jax.Array, ...], final_hidden_states: jax.Array
    ) -> tuple[jax.Array, ...]:
        """What the draft was trained on: Hugging Face's `hidden_states[id + 1]`.

        Args:
            aux_hidden_states: of each of `target_layers` [T, D].
            final_hidden_states: [T, D], the target's normalised output, used for its
                last layer (see `upstream/final_hidden_states.py`).

        Returns:
            Of each of the draft's `target_layer_ids` [T, D].
        """
        states = dict(zip(self.target_layers, aux_hidden_states, strict=True))
        if self._last_layer in states:
            states[self._last_layer] = final_hidden_states
        return tuple(states[layer] for layer in self.draft.config.target_layer_ids)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of the pool, on all devices together."""
        pool = jax.eval_shape(lambda: self._make_pool(1, page_size))
        shares = (self._sharding.shard_shape(x.shape) for x in jax.tree.leaves(pool))
        elements = sum(map(math.prod, shares))
        return elements * self.draft.dtype.itemsize * self._num_devices

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocates the pool, split by KV head."""
        self.pool = self._make_pool(num_pages, page_size)

    def _make_pool(self, num_pages: int, page_size: int) -> KVPool:
        return KVPool.allocate(
            self.draft.config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.draft.dtype,
            sharding=self._sharding,
        )
