# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's worker, with our proposer and rejection sampler in its runner."""

from __future__ import annotations

from typing import Any

from tpu_inference.worker.tpu_worker import TPUWorker

from torchax_dflash.core.config import config_error
from torchax_dflash.serving.cpu import stack
from torchax_dflash.serving.drafting import warm_up
from torchax_dflash.serving.drafting.proposer import TorchaxDFlashProposer
from torchax_dflash.serving.plugin import options
from torchax_dflash.serving.upstream import (
    aux_hidden_states,
    draft_token_ids,
    final_hidden_states,
    logprobs,
    preempted_requests,
    unscheduled_requests,
)
from torchax_dflash.serving.upstream.grammar_bitmasks import DFlashStructuredDecoding
from torchax_dflash.serving.verification.rejection_sampler import (
    DFlashRejectionSampler,
)


class CpuWorker(TPUWorker):
    """TPUWorker, also on CPU devices where JAX is told to use them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if stack.is_wanted():
            stack.apply()
        super().__init__(*args, **kwargs)


class DFlashWorker(CpuWorker):
    """TPUWorker, with five of its methods extended."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        """Puts our parts into the runner it makes (`tpu_runner.py:1056`)."""
        super().init_device(*args, **kwargs)
        runner = self.model_runner
        self._drafter = runner.drafter = TorchaxDFlashProposer(
            self.vllm_config,
            runner,
            quantization=options.draft_quantization(self.vllm_config),
        )
        sampler = DFlashRejectionSampler(runner, self._drafter)
        sampler.install()
        structured_decoding = DFlashStructuredDecoding(runner, sampler)
        runner.structured_decoding_manager = structured_decoding
        for fault in (
            draft_token_ids,
            final_hidden_states,
            logprobs,
            preempted_requests,
            unscheduled_requests,
        ):
            fault.install(runner)

        def compile_ours() -> None:
            warm_up.warm_up(self._drafter)
            sampler.warm_up()
            logprobs.warm_up(runner)

        # tpu-inference compiles for the shapes of its own proposer and bitmasks
        # (`compilation_manager.py:1312,311`); ours differ.
        manager = runner.compilation_manager
        manager._precompile_dflash_helpers = compile_ours
        manager._precompile_structured_decoding = structured_decoding.warm_up

    def load_model(self) -> None:
        """Loads a target that returns the hidden states that the draft reads.

        Raises:
            ValueError: the target's class cannot return them.
        """
        layers = self._drafter.served.target_layers
        with aux_hidden_states.returned_by_target(self.model_runner, layers):
            super().load_model()

    def determine_available_memory(self) -> int:
        """Leaves room for the draft: a page for each of the target's, and its q.

        Raises:
            ValueError: not enough for one request of max_model_len tokens.
        """
        drawn = self._drafter.drawn
        drawn_bytes = 0 if drawn is None else drawn.num_bytes
        available = super().determine_available_memory() - drawn_bytes
        page_size = self.cache_config.block_size
        target = sum(s.page_size_bytes for s in self.get_kv_cache_spec().values())
        draft = self._drafter.served.page_bytes(page_size)
        longest = self.model_config.max_model_len
        needed = -(-longest // page_size) * (target + draft)
        if needed > available and not self.cache_config.num_gpu_blocks_override:
            raise config_error(
                "MiB of memory for KV caches",
                f"{needed / 2**20:.1f} for one request of max_model_len {longest} "
                f"(the target's {target} bytes a page and the draft's {draft}), and "
                f"{drawn_bytes / 2**20:.1f} for probabilities of drawn drafts",
                round((available + drawn_bytes) / 2**20, 1),
                "Raise gpu_memory_utilization, or lower max_model_len (with drawn "
                "drafts also max_num_seqs).",
            )
        return int(available * target / (target + draft))

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The target's layers only: the draft's cache is ours."""
        specs = super().get_kv_cache_spec()
        return {name: s for name, s in specs.items() if not name.startswith("draft_")}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocates the draft's pool together with the target's cache.

        Raises:
            ValueError: the target has several KV cache groups, so several block tables.
        """
        groups = len(kv_cache_config.kv_cache_groups)
        if groups != 1:
            raise config_error(
                "KV cache groups",
                "1 with DFlash",
                groups,
                "Try --disable-hybrid-kv-cache-manager.",
            )
        super().initialize_from_config(kv_cache_config)
        self._drafter.allocate(kv_cache_config.num_blocks, self.cache_config.block_size)
