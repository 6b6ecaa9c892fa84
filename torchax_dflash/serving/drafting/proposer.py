# SPDX-License-Identifier: Apache-2.0
"""The proposer: each engine step, ingest what the target accepted, then draft.

The runner's token layout is flat; ours is the same. For two requests, the first having
verified three drafts of which one fell, the second in the middle of its prompt:

    input_positions    7  8  9 10 | 0  1  2  3  4 | padding …
    query_start_loc    0            4               9
    seq_lens           11, 5        num_rejected_tokens  1, 0
    ingested rows      x  x  x  . | x  x  x  x  x | …
    context_lens       10, 5        anchors at positions 10 and 5

Rows go to the pages of the target's own block table, so a prefix-cache hit, a preempted
request or a reordered batch needs nothing done here.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.spec_decode.jax.dflash import DFlashProposer

from torchax_dflash.checkpoints.pretrained import DraftModel
from torchax_dflash.checkpoints.sharding import pool_sharding, shard_draft
from torchax_dflash.core.config import TargetConfig
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.serving.drafting.drawn_drafts import DrawnDrafts
from torchax_dflash.serving.drafting.programs import (
    draft_drawn_step,
    draft_step,
    ingest_step,
)
from torchax_dflash.serving.drafting.target_head import ServedHead


class TorchaxDFlashProposer(DFlashProposer):
    """tpu-inference's proposer interface over our programs.

    A subclass because the runner's manager asserts the class
    (`runner/speculative_decoding_manager.py`); nothing of the base is used.

    Attributes:
        drawn: what drafts were drawn from; None where all are chosen.
    """

    def __init__(
        self, vllm_config: Any, runner: Any, *, quantization: str | None = None
    ) -> None:
        self.runner = runner
        self.mesh = runner.mesh
        speculative = vllm_config.speculative_config
        self.num_speculative_tokens = speculative.num_speculative_tokens
        model = speculative.draft_model_config
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        draft = DraftModel.from_pretrained(
            model.model,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
            quantization=quantization,
        )
        target = TargetConfig.from_hf(vllm_config.model_config.hf_config)
        draft.config.check_target(target)
        draft.config.check_num_speculative_tokens(self.num_speculative_tokens)
        self.draft: Draft = shard_draft(draft, self.mesh, "model")
        self._pool_sharding = pool_sharding(
            config=draft.config, mesh=self.mesh, axis="model"
        )
        self._last_layer = target.num_hidden_layers - 1
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.drawn: DrawnDrafts | None = None
        if speculative.draft_sample_method == "probabilistic":
            self.drawn = DrawnDrafts(
                runner,
                num_speculative_tokens=self.num_speculative_tokens,
                vocab_size=self.vocab_size,
            )
        text = vllm_config.model_config.hf_config.get_text_config()
        self._tied: bool = text.tie_word_embeddings
        self.final_hidden_states: jax.Array | None = None
        self._pool: KVPool | None = None
        self._row_sizes = _powers_of_two(8, runner.max_num_reqs)
        self._head: ServedHead | None = None

    def load_model(self, target_model: Any) -> None:
        """Takes the target's embedding and head from the runner's state.

        Args:
            target_model: arrays by name (PyTorch path), or an `nnx.State`.
        """
        if isinstance(target_model, nnx.State):
            target_model = {
                ".".join(map(str, path)): variable.get_value()
                for path, variable in nnx.to_flat_state(target_model)
            }
        self._head = ServedHead.of(
            target_model,
            tied=self._tied,
            vocab_size=self.vocab_size,
            hidden_size=self.draft.config.hidden_size,
        )

    @property
    def target_layers(self) -> list[int]:
        """The draft's target layers, as vLLM gives them: in order, each once."""
        return sorted(set(self.draft.config.target_layer_ids))

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of the draft's pool, on all devices together."""
        pool = jax.eval_shape(lambda: self._make_pool(1, page_size))
        shares = (
            self._pool_sharding.shard_shape(x.shape) for x in jax.tree.leaves(pool)
        )
        return sum(map(math.prod, shares)) * self.draft.dtype.itemsize * self.mesh.size

    def _make_pool(self, num_pages: int, page_size: int) -> KVPool:
        return KVPool.allocate(
            self.draft.config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.draft.dtype,
            sharding=self._pool_sharding,
        )

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocates as many pages as the target's cache has, split by KV head."""
        try:
            if self.drawn is not None:
                self.drawn.allocate()
            self._pool = self._make_pool(num_pages, page_size)
        except jax.errors.JaxRuntimeError as error:
            drawn = self.drawn.num_bytes if self.drawn is not None else 0
            size = (num_pages * self.page_bytes(page_size) + drawn) / 2**30
            raise RuntimeError(
                f"draft KV cache: expected room for {num_pages} pages, {size:.2f} GiB, "
                f"got {error}. Lower gpu_memory_utilization."
            ) from error

    def prepare_inputs(
        self,
        attn_metadata: Any,
        input_ids: jax.Array,
        aux_hidden_states: tuple[jax.Array, ...],
        last_sampled_token_id: jax.Array,
        next_prompt_token_id: jax.Array,
        is_in_prefill: jax.Array,
        num_rejected_tokens: jax.Array,
        num_reqs_dp: jax.Array,
    ) -> tuple[Any, jax.Array, None, Any]:
        """Ingests the accepted rows of this step; called by the runner's manager.

        Args:
            attn_metadata: of the target's pass; `seq_lens` counts rejected rows, too.
            input_ids: int32 [T], not needed.
            aux_hidden_states: per tapped layer [T, D].
            last_sampled_token_id: int32 [B].
            next_prompt_token_id: int32 [B], for rows in mid-prompt.
            is_in_prefill: int32 [B], 1 for rows in mid-prompt.
            num_rejected_tokens: int32 [B].
            num_reqs_dp: int32 [1], requests in the batch.

        Returns:
            (block_table, context_lens), anchors, None, attn_metadata: what `propose`
            gets.
        """
        self._pool, block_table, context_lens, anchors = ingest_step(
            self.draft,
            self._pool,
            attn_metadata.input_positions,
            attn_metadata.block_tables,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            self._features(aux_hidden_states),
            last_sampled_token_id,
            next_prompt_token_id,
            is_in_prefill,
            num_rejected_tokens,
            num_reqs_dp,
        )
        return (block_table, context_lens), anchors, None, attn_metadata

    def _features(
        self, aux_hidden_states: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """What the draft was trained on: HF's `hidden_states[id + 1]`."""
        config = self.draft.config
        states = dict(zip(self.target_layers, aux_hidden_states, strict=True))
        if self._last_layer in states:
            assert self.final_hidden_states is not None
            states[self._last_layer] = self.final_hidden_states
        return tuple(states[layer] for layer in config.target_layer_ids)

    def warm_up(self) -> None:
        """Compiles every program for every padded number of tokens; stores nothing."""
        runner, hidden = self.runner, self.draft.config.hidden_size
        requests = runner.max_num_reqs
        # of a row: those of max_model_len, but at least K + 1
        pages = runner.input_batch.block_table[0].max_num_blocks_per_req
        replicated = NamedSharding(self.mesh, PartitionSpec())
        by_row = NamedSharding(self.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))
        states = NamedSharding(
            self.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA, None)
        )

        def integers(*shape: int) -> jax.Array:
            return jax.device_put(np.zeros(shape, np.int32), replicated)

        for tokens in runner.num_tokens_paddings:
            metadata = AttentionMetadata(
                input_positions=integers(tokens),
                block_tables=integers(requests * pages),
                seq_lens=integers(requests),
                query_start_loc=integers(requests + 1),
                request_distribution=integers(3),
                padded_num_reqs=runner.attn_num_reqs_paddings[-1],
            )
            empty = np.zeros((tokens, hidden), self.draft.dtype)
            self.final_hidden_states = jax.device_put(empty, states)
            aux = [jax.device_put(empty, states)] * len(self.target_layers)
            per_request = jax.device_put(np.zeros(requests, np.int32), by_row)
            context, anchors, _, _ = self.prepare_inputs(
                metadata,
                integers(tokens),
                tuple(aux),
                last_sampled_token_id=per_request,
                next_prompt_token_id=per_request,
                is_in_prefill=per_request,
                num_rejected_tokens=per_request,
                num_reqs_dp=jax.device_put(np.zeros(1, np.int32), by_row),
            )
            for rows in self._row_sizes:
                self._draft(anchors, context, rows=rows)
                if self.drawn is not None:
                    settings = self.drawn.greedy_settings(rows)
                    self._draft(anchors, context, rows=rows, settings=settings)

    def propose(
        self,
        kv_caches: list[jax.Array],
        input_ids: jax.Array,
        attn_metadata: Any,
        last_token_indices: None,
        target_hidden_states: tuple[jax.Array, jax.Array],
    ) -> tuple[list[jax.Array], jax.Array]:
        """Drafts for every request of the batch.

        Args:
            kv_caches: the target's, handed back untouched.
            input_ids: int32 [B], the anchors.
            attn_metadata: not needed.
            last_token_indices: not needed.
            target_hidden_states: (block_table [B, pages], context_lens [B]).

        Returns:
            kv_caches and draft_token_ids, int32 [B, num_speculative_tokens].
        """
        needed = self.runner.input_batch.num_reqs
        rows = next(size for size in self._row_sizes if size >= needed)
        settings = None if self.drawn is None else self.drawn.settings(rows)
        return kv_caches, self._draft(
            input_ids, target_hidden_states, rows=rows, settings=settings
        )

    def _draft(
        self,
        anchors: jax.Array,
        context: tuple[jax.Array, jax.Array],
        *,
        rows: int,
        settings: SamplingState | None = None,
    ) -> jax.Array:
        """The likeliest tokens, or by `settings` where there are any."""
        k = self.num_speculative_tokens
        block = (self.draft, self._head, self._pool, anchors, *context)
        if settings is None:
            return draft_step(*block, rows=rows, num_speculative_tokens=k)
        assert self.drawn is not None
        draft_token_ids, self.drawn.probs = draft_drawn_step(
            *block, settings, self.drawn.probs, num_speculative_tokens=k
        )
        return draft_token_ids


def _powers_of_two(first: int, last: int) -> list[int]:
    """Doubling from `first`, and `last` itself."""
    sizes = [first << i for i in range(last.bit_length()) if first << i < last]
    return [*sizes, last]
