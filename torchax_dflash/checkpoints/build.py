# SPDX-License-Identifier: Apache-2.0
"""An unmodified module without weights: its class, constructed on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchax_dflash.core.bridge import ATTENTION, TorchModule
from torchax_dflash.core.config import sliding_layers


def build_module(module_class: type[torch.nn.Module], hf_config: Any) -> TorchModule:
    """Constructs the module as its class does, with parameters that hold no memory.

    Buffers (RoPE frequencies) are real. A module that takes its attention from its
    config gets ours.
    """
    hf_config._attn_implementation = ATTENTION
    # Experts: the other implementations are kernels that torchax does not lower.
    hf_config._experts_implementation = "batched_mm"
    with _EmptyOnMeta():
        module = module_class(hf_config)
    module.eval()
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            submodule.register_parameter(name, empty)
    linear_weights = frozenset(
        f"{name}.weight"
        for name, submodule in module.named_modules()
        if isinstance(submodule, torch.nn.Linear)
    )
    return TorchModule(
        module=module,
        linear_weights=linear_weights,
        num_layers=hf_config.get_text_config().num_hidden_layers,
        sliding_layers=sliding_layers(hf_config),
    )


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` gives meta tensors: layers allocate their parameters with it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
