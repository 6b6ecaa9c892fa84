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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.spec_decode.jax.dflash import DFlashProposer

from torchax_dflash.config import TargetConfig
from torchax_dflash.draft_model import DraftModel, ingest
from torchax_dflash.drafting import draft_tokens
from torchax_dflash.kv_cache import KVPool, slots_of
from torchax_dflash.serving.head import ServedHead
from torchax_dflash.serving.options import draft_quantization


class TorchaxDFlashProposer(DFlashProposer):
    """tpu-inference's proposer interface over our two programs.

    A subclass because the runner's manager asserts the class
    (`runner/speculative_decoding_manager.py`); nothing of the base is used.
    """

    def __init__(self, vllm_config: Any, runner: Any) -> None:
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
            quantization=draft_quantization(vllm_config),
        )
        target = TargetConfig.from_hf(vllm_config.model_config.hf_config)
        draft.config.check_target(target)
        draft.config.check_num_speculative_tokens(self.num_speculative_tokens)
        self.draft = draft.shard(self.mesh, "model")
        self._last_layer = target.num_hidden_layers - 1
        self._vocab_size = vllm_config.model_config.get_vocab_size()
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
            vocab_size=self._vocab_size,
            hidden_size=self.draft.config.hidden_size,
        )

    @property
    def tapped_layers(self) -> list[int]:
        """The draft's target layers, as vLLM gives them: in order, each once."""
        return sorted(set(self.draft.config.target_layer_ids))

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of the draft's pool, on all devices together."""
        pool = jax.eval_shape(
            partial(self.draft.make_pool, num_pages=1, page_size=page_size)
        )
        sharding = self.draft.pool_sharding
        assert sharding is not None
        shares = (sharding.shard_shape(x.shape) for x in jax.tree.leaves(pool))
        return sum(map(math.prod, shares)) * self.draft.dtype.itemsize * self.mesh.size

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocates as many pages as the target's cache has, split by KV head."""
        try:
            self._pool = self.draft.make_pool(num_pages=num_pages, page_size=page_size)
        except jax.errors.JaxRuntimeError as error:
            size = num_pages * self.page_bytes(page_size) / 2**30
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
            (page_table, context_lens), anchors, None, attn_metadata: what `propose`
            gets.
        """
        self._pool, page_table, context_lens, anchors = _ingest_step(
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
        return (page_table, context_lens), anchors, None, attn_metadata

    def _features(
        self, aux_hidden_states: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """What the draft was trained on: HF's `hidden_states[id + 1]`."""
        config = self.draft.config
        states = dict(zip(self.tapped_layers, aux_hidden_states, strict=True))
        if self._last_layer in states:
            assert self.final_hidden_states is not None
            states[self._last_layer] = self.final_hidden_states
        return tuple(states[layer] for layer in config.target_layer_ids)

    def warm_up(self) -> None:
        """Compiles both programs for every padded number of tokens; stores nothing."""
        runner, hidden = self.runner, self.draft.config.hidden_size
        requests = runner.max_num_reqs
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
                block_tables=integers(requests * runner.max_num_blocks_per_req),
                seq_lens=integers(requests),
                query_start_loc=integers(requests + 1),
                request_distribution=integers(3),
                padded_num_reqs=runner.attn_num_reqs_paddings[-1],
            )
            empty = np.zeros((tokens, hidden), self.draft.dtype)
            self.final_hidden_states = jax.device_put(empty, states)
            aux = [jax.device_put(empty, states)] * len(self.tapped_layers)
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
            target_hidden_states: (page_table [B, pages], context_lens [B]).

        Returns:
            kv_caches and draft_token_ids, int32 [B, num_speculative_tokens].
        """
        needed = self.runner.input_batch.num_reqs
        rows = next(size for size in self._row_sizes if size >= needed)
        return kv_caches, self._draft(input_ids, target_hidden_states, rows=rows)

    def _draft(
        self, anchors: jax.Array, context: tuple[jax.Array, jax.Array], *, rows: int
    ) -> jax.Array:
        page_table, context_lens = context
        return _draft_step(
            self.draft,
            self._head,
            self._pool,
            anchors,
            page_table,
            context_lens,
            rows=rows,
            num_speculative_tokens=self.num_speculative_tokens,
        )


@partial(jax.jit, donate_argnames="pool")
def _ingest_step(
    draft: DraftModel,
    pool: KVPool,
    positions: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    aux_hidden_states: tuple[jax.Array, ...],
    last_sampled_token_id: jax.Array,
    next_prompt_token_id: jax.Array,
    is_in_prefill: jax.Array,
    num_rejected_tokens: jax.Array,
    num_reqs_dp: jax.Array,
) -> tuple[KVPool, jax.Array, jax.Array, jax.Array]:
    """The whole of `prepare_inputs` in one program."""
    batch = seq_lens.shape[0]
    page_table = block_tables.reshape(batch, -1)
    num_reqs = num_reqs_dp[0]
    in_batch = jnp.arange(batch) < num_reqs
    rejected = num_rejected_tokens[:batch]
    context_lens = jnp.where(in_batch, seq_lens - rejected, 0)

    # Which request a row belongs to: the first whose end lies behind it.
    rows = jnp.arange(positions.shape[0])
    ends = jnp.where(in_batch, query_start_loc[1 : batch + 1], 2**31 - 1)
    request = jnp.clip(jnp.searchsorted(ends, rows, side="right"), 0, batch - 1)
    accepted = positions < context_lens[request]
    accepted &= rows < query_start_loc[num_reqs]
    slots = slots_of(pool, page_table[request], positions[:, None], accepted[:, None])[
        :, 0
    ]
    pool = ingest(
        draft, pool, jnp.concatenate(aux_hidden_states, axis=-1), positions, slots
    )
    anchors = jnp.where(is_in_prefill, next_prompt_token_id, last_sampled_token_id)
    return pool, page_table, context_lens, anchors[:batch]


@partial(jax.jit, static_argnames=("rows", "num_speculative_tokens"))
def _draft_step(
    draft: DraftModel,
    head: ServedHead,
    pool: KVPool,
    anchors: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    *,
    rows: int,
    num_speculative_tokens: int,
) -> jax.Array:
    """The whole of `propose` in one program: the first `rows` of the batch draft."""
    batch = anchors.shape[0]
    context_lens = context_lens[:rows]
    draft_token_ids = draft_tokens(
        draft,
        head,
        pool,
        anchors[:rows],
        page_table=page_table[:rows],
        context_lens=context_lens,
        block_lens=jnp.where(context_lens > 0, num_speculative_tokens + 1, 0),
        num_speculative_tokens=num_speculative_tokens,
    )
    return jnp.pad(draft_token_ids, ((0, batch - rows), (0, 0)))


def _powers_of_two(first: int, last: int) -> list[int]:
    """Doubling from `first`, and `last` itself."""
    sizes = [first << i for i in range(last.bit_length()) if first << i < last]
    return [*sizes, last]
