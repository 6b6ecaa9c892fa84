# SPDX-License-Identifier: Apache-2.0
"""The proposer: each engine step, ingest what the target accepted, then draft.

    target's pass        tpu-inference; rows of new tokens and of the last step's drafts
    rejection sampler    which drafts are accepted, and the token after them:
                         `verification/rejection_sampler.py`
    `prepare_inputs`     the accepted rows' hidden states -> K/V in the draft's pool
    `propose`            anchors -> the next step's drafts

The runner's layout of rows is flat, and so is ours. For two requests, the first with
three drafts of which one was rejected, the second in the middle of its prompt:

    input_positions    7  8  9 10 | 0  1  2  3  4 | padding …
    query_start_loc    0            4               9
    seq_lens           11, 5        num_rejected_tokens  1, 0
    ingested rows      x  x  x  . | x  x  x  x  x | …
    context_lens       10, 5        anchors at positions 10 and 5

Rows go to the pages of the target's own block table, so a prefix-cache hit, a preempted
request or a reordered batch needs nothing done here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.spec_decode.jax.dflash import DFlashProposer

from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import Draft, ingest
from torchax_dflash.core.drafting import draft_tokens, draw_draft_tokens
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.serving.drafting.drawn_drafts import DrawnDrafts
from torchax_dflash.serving.drafting.served_draft import ServedDraft
from torchax_dflash.serving.drafting.step_inputs import StepInputs
from torchax_dflash.serving.drafting.target_head import ServedHead


class TorchaxDFlashProposer(DFlashProposer):
    """tpu-inference's proposer interface over the three programs below.

    A subclass because the runner's manager asserts the class
    (`runner/speculative_decoding_manager.py:153`); nothing of the base is used.

    Attributes:
        served: the draft, the target's head and the draft's pool.
        drawn: what drafts were drawn from; None where all are chosen.
        final_hidden_states: [T, D], the target's output in this step; set before
            `prepare_inputs` is called.
        row_sizes: numbers of requests that a draft program is compiled for.
    """

    final_hidden_states: jax.Array

    def __init__(
        self, vllm_config: Any, runner: Any, *, quantization: str | None = None
    ) -> None:
        self.runner = runner
        self.served = ServedDraft(vllm_config, runner.mesh, quantization=quantization)
        speculative = vllm_config.speculative_config
        self.num_speculative_tokens: int = speculative.num_speculative_tokens
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.drawn: DrawnDrafts | None = None
        if speculative.draft_sample_method == "probabilistic":
            self.drawn = DrawnDrafts(
                runner,
                num_speculative_tokens=self.num_speculative_tokens,
                vocab_size=self.vocab_size,
            )
        self.row_sizes = _powers_of_two(8, runner.max_num_reqs)

    def load_model(self, target_model: Any) -> None:
        """Takes the target's embedding and head from the runner's state."""
        self.served.take_head(target_model)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocates as many pages as the target's cache has, and room for q.

        Raises:
            RuntimeError: there is not enough memory.
        """
        try:
            if self.drawn is not None:
                self.drawn.allocate()
            self.served.allocate(num_pages, page_size)
        except jax.errors.JaxRuntimeError as error:
            drawn = self.drawn.num_bytes if self.drawn is not None else 0
            size = (num_pages * self.served.page_bytes(page_size) + drawn) / 2**30
            raise RuntimeError(
                f"draft KV cache: expected room for {num_pages} pages, {size:.2f} GiB, "
                f"got {error}. Lower gpu_memory_utilization."
            ) from error

    # One served step: `prepare_inputs`, then `propose`. The parameters are
    # tpu-inference's, and so are their names.
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
    ) -> tuple[Context, jax.Array, None, Any]:
        """Ingests the accepted rows of this step; called by the runner's manager.

        Args:
            attn_metadata: of the target's pass; `seq_lens` counts rejected rows, too.
            input_ids: int32 [T], not needed.
            aux_hidden_states: of each of `served.target_layers` [T, D].
            last_sampled_token_id: see `StepInputs`, as for the others.
            next_prompt_token_id: as above.
            is_in_prefill: as above.
            num_rejected_tokens: as above.
            num_reqs_dp: as above, `num_reqs`.

        Returns:
            What `propose` gets: the context of each request, anchors, None,
            attn_metadata.
        """
        step = StepInputs(
            positions=attn_metadata.input_positions,
            block_tables=attn_metadata.block_tables,
            seq_lens=attn_metadata.seq_lens,
            query_start_loc=attn_metadata.query_start_loc,
            aux_hidden_states=self.served.features(
                aux_hidden_states, self.final_hidden_states
            ),
            last_sampled_token_id=last_sampled_token_id,
            next_prompt_token_id=next_prompt_token_id,
            is_in_prefill=is_in_prefill,
            num_rejected_tokens=num_rejected_tokens,
            num_reqs=num_reqs_dp,
        )
        self.served.pool, context, anchors = ingest_step(
            self.served.draft,
            self.served.pool,
            step,
            num_speculative_tokens=self.num_speculative_tokens,
        )
        return context, anchors, None, attn_metadata

    def propose(
        self,
        kv_caches: list[jax.Array],
        input_ids: jax.Array,
        attn_metadata: Any,
        last_token_indices: None,
        target_hidden_states: Context,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Drafts for every request of the batch.

        Args:
            kv_caches: the target's, handed back untouched.
            input_ids: int32 [B], the anchors.
            attn_metadata: not needed.
            last_token_indices: not needed.
            target_hidden_states: the context of each request, from `prepare_inputs`.

        Returns:
            kv_caches and draft_token_ids, int32 [B, num_speculative_tokens].
        """
        num_reqs = self.runner.input_batch.num_reqs
        rows = next(size for size in self.row_sizes if size >= num_reqs)
        sampling = None if self.drawn is None else self.drawn.settings(rows)
        return kv_caches, self.draft_block(
            input_ids, target_hidden_states, rows=rows, sampling=sampling
        )

    def draft_block(
        self,
        anchors: jax.Array,
        context: Context,
        *,
        rows: int,
        sampling: SamplingState | None = None,
    ) -> jax.Array:
        """Drafts for the first `rows` of the batch, int32 [B, K].

        The likeliest tokens; with `sampling`, drawn ones, and their q goes to `drawn`.
        """
        served, k = self.served, self.num_speculative_tokens
        block = (served.draft, served.head, served.pool, anchors, context)
        if sampling is None:
            return draft_step(*block, rows=rows, num_speculative_tokens=k)
        assert self.drawn is not None, "drafts are drawn, but q has no buffer"
        draft_token_ids, self.drawn.probs = draft_drawn_step(
            *block,
            sampling=sampling,
            draft_probs=self.drawn.probs,
            num_speculative_tokens=k,
        )
        return draft_token_ids


@partial(jax.jit, donate_argnames="pool", static_argnames="num_speculative_tokens")
def ingest_step(
    draft: Draft, pool: KVPool, step: StepInputs, *, num_speculative_tokens: int
) -> tuple[KVPool, Context, jax.Array]:
    """The program of `prepare_inputs`: pool, context and anchors of the next block."""
    context = step.context(num_speculative_tokens)
    slot_mapping = step.slot_mapping(pool, context)
    aux_hidden_states = jnp.concatenate(step.aux_hidden_states, axis=-1)
    pool = ingest(draft, pool, aux_hidden_states, step.positions, slot_mapping)
    return pool, context, step.anchors()


@partial(jax.jit, static_argnames=("rows", "num_speculative_tokens"))
def draft_step(
    draft: Draft,
    head: ServedHead,
    pool: KVPool,
    anchors: jax.Array,
    context: Context,
    *,
    rows: int,
    num_speculative_tokens: int,
) -> jax.Array:
    """The program of `propose`: the likeliest tokens, int32 [B, K]."""
    draft_token_ids = draft_tokens(
        draft,
        head,
        pool,
        anchors[:rows],
        jax.tree.map(lambda array: array[:rows], context),
        num_speculative_tokens=num_speculative_tokens,
    )
    return jnp.pad(draft_token_ids, ((0, anchors.shape[0] - rows), (0, 0)))


@partial(
    jax.jit, static_argnames="num_speculative_tokens", donate_argnames="draft_probs"
)
def draft_drawn_step(
    draft: Draft,
    head: ServedHead,
    pool: KVPool,
    anchors: jax.Array,
    context: Context,
    *,
    sampling: SamplingState,
    draft_probs: jax.Array,
    num_speculative_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """As `draft_step`, but drawn: int32 [B, K], and `draft_probs` with their q."""
    rows = sampling.seed.shape[0]
    draft_token_ids, probs = draw_draft_tokens(
        draft,
        head,
        pool,
        anchors[:rows],
        jax.tree.map(lambda array: array[:rows], context),
        sampling=sampling,
        num_speculative_tokens=num_speculative_tokens,
    )
    draft_probs = draft_probs.at[:rows].set(probs[..., : head.vocab_size])
    assert pool.sharding is not None, "served pools have a sharding"
    replicated = NamedSharding(pool.sharding.mesh, PartitionSpec())
    return (
        jnp.pad(draft_token_ids, ((0, anchors.shape[0] - rows), (0, 0))),
        jax.lax.with_sharding_constraint(draft_probs, replicated),
    )


def _powers_of_two(first: int, last: int) -> list[int]:
    """Doubling from `first`, and `last` itself."""
    sizes = [first << i for i in range(last.bit_length()) if first << i < last]
    return [*sizes, last]
