# SPDX-License-Identifier: Apache-2.0
"""Further proposers beside the engine's own, given the same events at each step.

Imported only by `serving_engine.py`. What a shadow drafts is recorded and never
verified, so all shadows and the engine's proposer see one history of requests.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
from tpu_inference.runner.kv_cache import create_kv_caches
from tpu_inference.spec_decode.jax.dflash import DFlashProposer
from transformers import AutoConfig

from torchax_dflash.core.drafting import draft_hidden_states
from torchax_dflash.serving.drafting.proposer import TorchaxDFlashProposer

_hidden_states = jax.jit(draft_hidden_states)


class Shadow:
    """One proposer, ours or tpu-inference's, with a draft of its own.

    Attributes:
        steps: per step (drafts [B, K], hidden states [B, Q, D]).
    """

    def __init__(self, runner, *, draft: str, peer: bool) -> None:
        self.runner, self.peer, self.steps = runner, peer, []
        view = copy.copy(runner.vllm_config)
        view.speculative_config = copy.copy(view.speculative_config)
        model = copy.copy(view.speculative_config.draft_model_config)
        view.speculative_config.draft_model_config = model
        model.model = draft
        model.hf_config = model.hf_text_config = AutoConfig.from_pretrained(draft)
        self.config = model.hf_config
        proposer = DFlashProposer if peer else TorchaxDFlashProposer
        self.proposer = proposer(view, runner)
        self.proposer.load_model(runner.state)
        pages = runner.kv_cache_config.num_blocks
        page_size = runner.cache_config.block_size
        if not peer:
            self.proposer.allocate(pages, page_size)
            return
        self.caches = create_kv_caches(
            pages,
            page_size,
            self.config.num_key_value_heads,
            self.config.head_dim,
            runner.mesh,
            [f"draft_layer.{i}" for i in range(self.config.num_hidden_layers)],
            cache_dtype=runner.kv_caches[0].dtype,
        )

    def prepare_inputs(self, *args) -> None:
        if not self.peer:
            final = self.runner.drafter.final_hidden_states
            self.proposer.final_hidden_states = final
        self.inputs = self.proposer.prepare_inputs(*args)

    def propose(self) -> None:
        states, input_ids, _, metadata = self.inputs
        hidden = self._hidden_states(states, input_ids, metadata)
        caches, drafts = self.proposer.propose(
            kv_caches=self.caches if self.peer else [],
            input_ids=input_ids,
            attn_metadata=metadata,
            last_token_indices=None,
            target_hidden_states=states,
        )
        if self.peer:
            self.caches = caches
        self.steps.append((np.asarray(drafts), np.asarray(hidden, np.float32)))

    def _hidden_states(self, states, input_ids, metadata):
        rows = self.proposer.num_speculative_tokens + 1
        if self.peer:
            proposer, caches = self.proposer, jax.tree.map(jnp.copy, self.caches)
            _, hidden, *_ = proposer.model_fn(
                proposer.state_leaves, caches, input_ids, states, metadata
            )
            return hidden.reshape(-1, rows, hidden.shape[-1])
        served, context = self.proposer.served, states
        masks = jnp.full((len(input_ids), rows - 1), self.mask_token_id)
        block = jnp.concatenate([input_ids[:, None], masks], axis=1)
        noise = served.head.embed(block)
        return _hidden_states(served.draft, served.pool, noise, context)

    @property
    def mask_token_id(self) -> int:
        return self.proposer.served.draft.config.mask_token_id


def hidden_states_error(one: Shadow, other: Shadow, context_lens: list) -> float:
    """The largest difference of two shadows, relative to the root mean square."""
    worst = 0.0
    for (_, a), (_, b), lens in zip(one.steps, other.steps, context_lens, strict=True):
        real = lens > 0
        a, b = a[real], b[real]
        worst = max(worst, float(np.abs(a - b).max() / np.sqrt((b * b).mean())))
    return worst
