# SPDX-License-Identifier: Apache-2.0
"""Compiles the proposer's programs at start-up.

tpu-inference's own warm-up knows the shapes of its own proposer only
(`compilation_manager.py:1777`).
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName

from torchax_dflash.serving.drafting.proposer import TorchaxDFlashProposer


def warm_up(proposer: TorchaxDFlashProposer) -> None:
    """Runs every program at every padded size, with no request; stores nothing."""
    runner, draft = proposer.runner, proposer.served.draft
    batch, mesh = runner.max_num_reqs, runner.mesh
    # of a request: those of max_model_len, but at least K + 1
    pages = runner.input_batch.block_table[0].max_num_blocks_per_req
    replicated = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))
    states = NamedSharding(mesh, PartitionSpec(ShardingAxisName.ATTN_DATA, None))

    def zeros(*shape: int, sharding: NamedSharding = replicated) -> jax.Array:
        return jax.device_put(np.zeros(shape, np.int32), sharding)

    for tokens in runner.num_tokens_paddings:
        metadata = AttentionMetadata(
            input_positions=zeros(tokens),
            block_tables=zeros(batch * pages),
            seq_lens=zeros(batch),
            query_start_loc=zeros(batch + 1),
            request_distribution=zeros(3),
            padded_num_reqs=runner.attn_num_reqs_paddings[-1],
        )
        hidden = np.zeros((tokens, draft.config.hidden_size), draft.dtype)
        proposer.final_hidden_states = jax.device_put(hidden, states)
        layers = len(proposer.served.target_layers)
        context, anchors, _, _ = proposer.prepare_inputs(
            metadata,
            zeros(tokens),
            (proposer.final_hidden_states,) * layers,
            last_sampled_token_id=zeros(batch, sharding=by_row),
            next_prompt_token_id=zeros(batch, sharding=by_row),
            is_in_prefill=zeros(batch, sharding=by_row),
            num_rejected_tokens=zeros(batch, sharding=by_row),
            num_reqs_dp=zeros(1, sharding=by_row),
        )
        for rows in proposer.row_sizes:
            proposer.draft_block(anchors, context, rows=rows)
            if proposer.drawn is not None:
                sampling = proposer.drawn.greedy_settings(rows)
                proposer.draft_block(anchors, context, rows=rows, sampling=sampling)
