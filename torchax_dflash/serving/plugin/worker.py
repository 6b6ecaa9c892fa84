# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's worker, with our proposer in its model runner."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from tpu_inference.models.common.model_loader import (
    UnsupportedArchitectureError,
    _get_model_architecture,
    resolve_model_impl_type,
)
from tpu_inference.runner.speculative_decoding_manager import (
    SpeculativeDecodingManager,
)
from tpu_inference.worker.tpu_worker import TPUWorker
from vllm.v1.outputs import DraftTokenIds

from torchax_dflash.core.config import config_error
from torchax_dflash.serving.cpu import stack as cpu
from torchax_dflash.serving.drafting.proposer import TorchaxDFlashProposer
from torchax_dflash.serving.upstream import async_scheduling as runner_fix
from torchax_dflash.serving.upstream.grammar_bitmasks import StructuredDecoding
from torchax_dflash.serving.verification.rejection_sampler import Verifier


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
        verifier = Verifier(runner, runner.drafter)
        verifier.install()
        structured = StructuredDecoding(runner, verifier)
        runner.structured_decoding_manager = structured
        runner_fix.mend(runner)
        # tpu-inference warms its own shapes up; ours are others
        # (`compilation_manager.py:1311,309`).
        manager = runner.compilation_manager
        manager._precompile_dflash_helpers = self._warm_up
        manager._precompile_structured_decoding = structured.warm_up

    def _warm_up(self) -> None:
        self._drafter.warm_up()
        self.model_runner.rejection_sampler.warm_up()

    def load_model(self) -> None:
        """Loads a target that gives its hidden states.

        Raises:
            ValueError: the target's class cannot give them.
        """
        runner = self.model_runner
        original = runner.vllm_config
        tapped, impl = self._drafter.tapped_layers, target_impl(original)
        runner.vllm_config = _view(original, tapped, impl)
        try:
            super().load_model()
        except RuntimeError as error:
            if "EAGLE3" not in str(error):
                raise
            raise _no_hidden_states(original, "vLLM's SupportsEagle3") from error
        finally:
            original.quant_config = runner.vllm_config.quant_config
            runner.vllm_config = original
        if impl == "flax_nnx":
            # Of tpu-inference's own models only some know of aux hidden states.
            given = getattr(runner.model.model, "aux_hidden_state_layers", ())
            if sorted(given) != tapped:
                raise _no_hidden_states(
                    original, "tpu-inference's aux_hidden_state_layers"
                )

    def determine_available_memory(self) -> int:
        """Leaves room for the draft: a page for each of the target's, and its q.

        Raises:
            ValueError: not enough for one request of max_model_len tokens.
        """
        drawn = self._drafter.drawn
        drawn_from = 0 if drawn is None else drawn.num_bytes
        available = super().determine_available_memory() - drawn_from
        page_size = self.cache_config.block_size
        target = sum(s.page_size_bytes for s in self.get_kv_cache_spec().values())
        draft = self._drafter.page_bytes(page_size)
        longest = self.model_config.max_model_len
        needed = -(-longest // page_size) * (target + draft)
        if needed > available and not self.cache_config.num_gpu_blocks_override:
            raise config_error(
                "MiB of memory for KV caches",
                f"{needed / 2**20:.1f} for one request of max_model_len {longest} "
                f"(the target's {target} bytes a page and the draft's {draft}), and "
                f"{drawn_from / 2**20:.1f} for probabilities of drawn drafts",
                round((available + drawn_from) / 2**20, 1),
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

    @property
    def _drafter(self) -> TorchaxDFlashProposer:
        drafter = self.model_runner.drafter
        assert isinstance(drafter, TorchaxDFlashProposer)
        return drafter


def target_impl(vllm_config: Any) -> str:
    """Whose class the target is: "vllm" (the PyTorch path) or "flax_nnx"."""
    impl = resolve_model_impl_type(vllm_config)
    if impl == "flax_nnx":
        try:
            _get_model_architecture(vllm_config.model_config.hf_config)
        except UnsupportedArchitectureError:
            return "vllm"  # as tpu-inference does
    return impl


def _view(vllm_config: Any, tapped: list[int], impl: str) -> Any:
    """The config under which a target gives the outputs of the tapped layers.

    On the PyTorch path targets give them for the method "eagle3" only
    (`vllm_model_wrapper.py:279,419`), and as inputs of layer id + 1. JAX-native targets
    read the draft's config, and know no default for its layers.
    """
    view = copy.copy(vllm_config)
    speculative = view.speculative_config = copy.copy(vllm_config.speculative_config)
    model = speculative.draft_model_config = copy.copy(speculative.draft_model_config)
    hf_config = model.hf_config = copy.copy(model.hf_config)
    if impl == "flax_nnx":
        hf_config.dflash_config = hf_config.dflash_config | {"target_layer_ids": tapped}
    else:
        speculative.method = "eagle3"
        hf_config.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in tapped]
    return view


def _no_hidden_states(vllm_config: Any, interface: str) -> ValueError:
    return config_error(
        "target",
        f"a model that gives its hidden states ({interface})",
        vllm_config.model_config.architectures,
        "DFlash needs them. Try the other MODEL_IMPL_TYPE (vllm or flax_nnx).",
    )


class _Manager(SpeculativeDecodingManager):
    """Hands the proposer the target's final hidden states, too, and drafts to vLLM.

    The last entry of HF's `hidden_states` is normalised; vLLM's aux state of the last
    layer is not, but its output is.
    """

    _drafted_for: list[str]

    def propose_dflash_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """As the base, with the last argument, `hidden_states`, put aside."""
        hidden_states = kwargs["hidden_states"] if kwargs else args[-1]
        self.runner.drafter.final_hidden_states = hidden_states
        batch = self.runner.input_batch
        self._drafted_for = batch.req_ids[: batch.num_reqs]
        return super().propose_dflash_draft_token_ids(*args, **kwargs)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The last step's drafts, for the scheduler.

        tpu-inference pairs them with the batch of now, which under async scheduling is
        the next step's, and gives rows of a device array where vLLM shortens lists.
        """
        drafts, self._draft_token_ids = self._draft_token_ids, None
        if drafts is None:
            return None
        rows = np.asarray(drafts)[: len(self._drafted_for)]
        return DraftTokenIds(self._drafted_for, rows.tolist())
