# SPDX-License-Identifier: Apache-2.0
"""tpu-inference knows no aux hidden states for DFlash on the PyTorch path.

Version: 0.32.0, models/vllm/vllm_model_wrapper.py:279 and :419.

PyTorch-path targets return aux hidden states for the method "eagle3" only, and number
them by the layer they are the input of: the output of layer i is i + 1. JAX-native
targets know "dflash", read the layers from the draft's config and have no default for
them (models/jax/llama3.py:323); most ignore the setting without a word. So the target
is loaded under a copy of the config that names the layers as its path wants them, and
it is checked that it listens.

Delete this file when both paths take the layers from the draft's config for "dflash"
and refuse targets that cannot return them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tpu_inference.models.common.model_loader import (
    UnsupportedArchitectureError,
    _get_model_architecture,
    resolve_model_impl_type,
)
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from torchax_dflash.core.config import config_error


@contextmanager
def returned_by_target(runner: Any, layers: list[int]) -> Iterator[None]:
    """The target that is loaded inside returns the outputs of `layers`.

    Args:
        runner: the model runner that loads it.
        layers: zero-based, in order.

    Raises:
        ValueError: the target's class cannot return them.
    """
    original = runner.vllm_config
    impl = _target_impl(original)
    if impl == "vllm" and not supports_eagle3(get_model_cls(original.model_config)):
        raise _no_hidden_states(original, "vLLM's SupportsEagle3")
    runner.vllm_config = _config_naming(original, layers, impl)
    try:
        yield
    finally:
        original.quant_config = runner.vllm_config.quant_config
        runner.vllm_config = original
    if impl == "flax_nnx" and _returned_layers(runner.model.model) != layers:
        # Known only once it is there: JAX-native classes declare nothing.
        raise _no_hidden_states(original, "tpu-inference's aux_hidden_state_layers")


def _target_impl(vllm_config: Any) -> str:
    """Which path the target takes: "vllm" (PyTorch) or "flax_nnx" (JAX-native)."""
    impl = resolve_model_impl_type(vllm_config)
    if impl == "flax_nnx":
        try:
            _get_model_architecture(vllm_config.model_config.hf_config)
        except UnsupportedArchitectureError:
            return "vllm"  # as tpu-inference does
    return impl


def _config_naming(vllm_config: Any, layers: list[int], impl: str) -> Any:
    """A copy of the config that asks the target for the outputs of `layers`."""
    changed = copy.copy(vllm_config)
    speculative = changed.speculative_config = copy.copy(changed.speculative_config)
    model = speculative.draft_model_config = copy.copy(speculative.draft_model_config)
    hf_config = model.hf_config = copy.copy(model.hf_config)
    if impl == "flax_nnx":
        named = {"target_layer_ids": layers}
        hf_config.dflash_config = hf_config.dflash_config | named
    else:
        speculative.method = "eagle3"
        hf_config.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in layers]
    return changed


def _returned_layers(model: Any) -> list[int]:
    if not hasattr(model, "aux_hidden_state_layers"):
        return []
    return sorted(model.aux_hidden_state_layers)


def _no_hidden_states(vllm_config: Any, interface: str) -> ValueError:
    return config_error(
        "target",
        f"a model that gives its hidden states ({interface})",
        vllm_config.model_config.architectures,
        "DFlash needs them. Try the other MODEL_IMPL_TYPE (vllm or flax_nnx).",
    )
