# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified PyTorch module inside a JAX trace, on our cache and attention.

A module has two seams: the cache object it is given, and the attention function it
looks up in transformers' registry. The cache travels as an argument; attention finds it
as the keyword argument `static_cache`, which modules hand on to their attention
function with all others. Nothing is global but the registry entry.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.interop import jax_view, torch_view
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchax_dflash.core.attention import Attend
from torchax_dflash.core.int8 import MaybeQuantized, dequantize

# transformers takes any name with "flash" in it for a flash-attention kernel.
ATTENTION = "static_kv_cache"
"""The name under which transformers' registry knows our attention."""

# Keyword arguments that reach attention functions and say nothing about attention, or
# (dropout) nothing in evaluation.
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)

Params = dict[str, jax.Array]
"""A module's parameters and buffers by name; see `TorchModule.linear_weights`."""


class AttentionCache(Protocol):
    """What a module gets as its cache: it keeps rows, and attends to them.

    Attributes:
        windows: filled while a trace runs, by layer that attended: its sliding window
            or None.
    """

    windows: dict[int, int | None]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a layer's new rows, [B, H, R, K]; returns what `attend` is given."""
        ...

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of cached rows, as the module is told."""
        ...

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, how: Attend
    ) -> jax.Array:
        """Attention of one layer: query [B, N, Q, K] -> [B, N, Q, K]."""
        ...


@dataclass(frozen=True, eq=False)
class TorchModule:
    """An unmodified module without its weights: they come with each call.

    Hashed by identity, so that it can be a static part of a jitted function's argument.

    Attributes:
        module: parameters on the meta device.
        linear_weights: parameters stored as [in, out], the layout every backend
            multiplies fastest, and turned back to PyTorch's [out, in] inside the trace,
            where XLA folds the transposition into the product.
        num_layers: layers that attend.
        sliding_layers: layers whose config says that they have a sliding window.
        tied: names that share another's array, as (name, other).
    """

    module: torch.nn.Module
    linear_weights: frozenset[str]
    num_layers: int
    sliding_layers: frozenset[int]
    tied: tuple[tuple[str, str], ...] = ()

    def __call__(
        self,
        params: MaybeQuantized,
        cache: AttentionCache,
        *,
        dtype: jnp.dtype,
        **inputs: Any,
    ) -> Any:
        """Calls the module's forward; arrays in, arrays out (inside a JAX trace).

        Args:
            params: the module's weights and buffers.
            cache: keeps its rows and attends to them.
            dtype: of computation; says how exact matrix products are.
            inputs: the forward's other arguments.

        Raises:
            RuntimeError: a layer did not attend through `cache`.
        """
        dense, inputs = dequantize(params, inputs)
        seams = {"past_key_values": cache, "static_cache": cache, "use_cache": True}
        arguments = torch_view(inputs) | seams
        outputs = self.apply(dense, lambda module: module(**arguments), dtype=dtype)
        self._check_attention(cache)
        return outputs

    def apply(
        self,
        params: Params,
        function: Callable[[Any], torch.Tensor | tuple],
        *,
        dtype: jnp.dtype,
    ) -> Any:
        """Calls `function(module)` while the module has these weights, all or some."""
        weights = {
            name: array.T if name in self.linear_weights else array
            for name, array in params.items()
        }
        weights |= {n: weights[other] for n, other in self.tied if other in weights}
        named = {f"module.{name}": array for name, array in weights.items()}
        with tracing(dtype):
            return torch.func.functional_call(
                _Applied(self.module, function),
                torch_view(named),
                (),
                tie_weights=False,
            )

    def weight_name(self, getter: str) -> str:
        """Name of the weight of the layer that `module.getter()` returns."""
        layer = getattr(self.module, getter)()
        for name, submodule in self.module.named_modules():
            if submodule is layer:
                return f"{name}.weight"
        raise AssertionError(f"{getter} returned no submodule")

    def _check_attention(self, cache: AttentionCache) -> None:
        """Every layer must have called our attention, with its window if it has one.

        Some modules tell their window by the mask alone, which we do not read.
        """
        name = type(self.module).__name__
        for layer in range(self.num_layers):
            if layer not in cache.windows:
                raise RuntimeError(
                    f"{name}: expected every layer to call transformers' attention "
                    "interface with its keyword arguments, got none from layer "
                    f"{layer}. This architecture is not supported."
                )
            if layer in self.sliding_layers and cache.windows[layer] is None:
                raise RuntimeError(
                    f"{name}: expected sliding layers to pass their sliding_window to "
                    f"the attention function, got None from layer {layer}. "
                    "This architecture is not supported."
                )


_TRACING = threading.RLock()


@contextlib.contextmanager
def tracing(dtype: jnp.dtype) -> Iterator[None]:
    """The torchax environment, with matrix products as exact as `dtype`.

    One thread at a time: `functional_call` swaps the weights of a module that all
    threads share, and torchax's environment is one for the process. Only tracing
    waits; compiled programs run side by side.
    """
    precision = "highest" if dtype == jnp.float32 else "default"
    with (
        _TRACING,
        torchax.default_env(),
        jax.default_matmul_precision(precision),
        jax.numpy_dtype_promotion("standard"),
        torch.no_grad(),
    ):
        yield


class _Applied(torch.nn.Module):
    """A function of a module, as a module: what `functional_call` can call."""

    def __init__(self, module: torch.nn.Module, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self) -> Any:
        return self.function(self.module)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    static_cache: AttentionCache | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface over an `AttentionCache`.

    A mask that the module built is ignored: it comes from tensor indices and knows
    nothing of padding. What it may say, causality and a window, comes as arguments.

    Args:
        module: the attention layer; gives `layer_idx` and `is_causal`.
        query: [B, N, Q, K].
        key: [B, H, Q, K] as returned by the cache's `update`.
        value: [B, H, Q, K].
        attention_mask: ignored.
        scaling: factor on the scores; None means K ** -0.5.
        static_cache: the cache of this trace.
        sliding_window: distance from which a key is no longer seen, or None.
        is_causal: None means the module's own `is_causal`.
        softcap: scores become softcap * tanh(scores / softcap), or None.
        others: ignored if known to change nothing here.

    Returns:
        [B, Q, N, K] and None for the weights.

    Raises:
        ValueError: an argument that would change the result and is not supported.
        RuntimeError: the module keeps its keyword arguments to itself, so that the
            cache does not arrive.
    """
    if static_cache is None:
        raise RuntimeError(
            f"{type(module).__name__}: expected the layer to hand on its keyword "
            "arguments to its attention function, got none. This architecture is not "
            "supported."
        )
    meant = {name for name, argument in others.items() if argument is not None}
    if unknown := sorted(meant - _HARMLESS):
        raise ValueError(
            f"{type(module).__name__}: expected plain attention, got {unknown}. "
            "This architecture is not supported."
        )
    layer_idx: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    static_cache.windows[layer_idx] = sliding_window
    width = query.shape[-1]
    how = Attend(
        layer_idx=layer_idx,
        scale=width**-0.5 if scaling is None else scaling,
        is_causal=bool(module.is_causal if is_causal is None else is_causal),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    out = static_cache.attend(jax_view(query), jax_view(key), jax_view(value), how)
    return torch_view(out.swapaxes(1, 2)), None


def _routed_sdpa(original: Callable[..., Any]) -> Callable[..., Any]:
    """The attention "sdpa" as it was, but ours for calls with our cache.

    The `dflash` package's modules look up "sdpa" whatever their config says.
    """

    @functools.wraps(original)
    def sdpa(*args: Any, **kwargs: Any) -> Any:
        ours = "static_cache" in kwargs
        return (attention_forward if ours else original)(*args, **kwargs)

    return sdpa


# Installed once, when this module is imported, and never taken back: other models of
# the process go on as before, and threads that trace at the same time agree.
AttentionInterface.register(ATTENTION, attention_forward)
AttentionInterface.register("sdpa", _routed_sdpa(ALL_ATTENTION_FUNCTIONS["sdpa"]))
