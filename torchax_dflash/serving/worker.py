# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's worker, with our proposer in its model runner."""

from __future__ import annotations

import copy
from typing import Any

from tpu_inference.runner.speculative_decoding_manager import (
    SpeculativeDecodingManager,
)
from tpu_inference.worker.tpu_worker import TPUWorker

from torchax_dflash.config import config_error
from torchax_dflash.serving import cpu, runner_fix
from torchax_dflash.serving.proposer import TorchaxDFlashProposer


class CpuWorker(TPUWorker):
    """TPUWorker, on CPU devices where JAX is told to use them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if cpu.is_wanted():
            cpu.apply()
        super().__init__(*args, **kwargs)


class DFlashWorker(CpuWorker):
    """A few moments in a worker's life are different; the rest is TPUWorker's."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the proposer that the runner chose (`tpu_runner.py:1056`)."""
        super().init_device(*args, **kwargs)
        runner = self.model_runner
        runner.drafter = TorchaxDFlashProposer(self.vllm_config, runner)
        runner.speculative_decoding_manager = _Manager(runner)
        runner_fix.mend(runner)
        # tpu-inference warms its own proposer's shapes up; ours has others
        # (`compilation_manager.py:1311`).
        runner.compilation_manager._precompile_dflash_helpers = self._drafter.warm_up

    def load_model(self) -> None:
        """Loads a target that gives its hidden states.

        The PyTorch path gives them for the method "eagle3" only
        (`vllm_model_wrapper.py:279,419`), so the target is loaded under a view of the
        config that says so, with the layers in vLLM's terms: an input of layer id + 1.

        Raises:
            ValueError: the target's class in vLLM cannot give them.
        """
        runner = self.model_runner
        original = runner.vllm_config
        view = copy.copy(original)
        speculative = view.speculative_config = copy.copy(original.speculative_config)
        speculative.method = "eagle3"
        model = speculative.draft_model_config = copy.copy(
            speculative.draft_model_config
        )
        model.hf_config = copy.copy(model.hf_config)
        model.hf_config.eagle_aux_hidden_state_layer_ids = [
            layer + 1 for layer in self._drafter.tapped_layers
        ]
        runner.vllm_config = view
        try:
            super().load_model()
        except RuntimeError as error:
            if "EAGLE3" not in str(error):
                raise
            raise config_error(
                "target",
                "a model that gives its hidden states (vLLM's SupportsEagle3)",
                original.model_config.architectures,
                "Its class in vLLM does not; DFlash needs them.",
            ) from error
        finally:
            runner.vllm_config = original
            original.quant_config = view.quant_config

    def determine_available_memory(self) -> int:
        """Leaves room for the draft's pool: a page for each of the target's."""
        available = super().determine_available_memory()
        target = sum(s.page_size_bytes for s in self.get_kv_cache_spec().values())
        draft = self._drafter.page_bytes(self.cache_config.block_size)
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

    @property
    def _drafter(self) -> TorchaxDFlashProposer:
        drafter = self.model_runner.drafter
        assert isinstance(drafter, TorchaxDFlashProposer)
        return drafter


class _Manager(SpeculativeDecodingManager):
    """Hands the proposer the target's final hidden states, too.

    The last entry of HF's `hidden_states` is normalised; vLLM's aux state of the last
    layer is not, but its output is.
    """

    def propose_dflash_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """As the base, with the last argument, `hidden_states`, put aside."""
        hidden_states = kwargs["hidden_states"] if kwargs else args[-1]
        self.runner.drafter.final_hidden_states = hidden_states
        return super().propose_dflash_draft_token_ids(*args, **kwargs)
