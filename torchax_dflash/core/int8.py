# SPDX-License-Identifier: Apache-2.0
"""Linear weights kept as int8: symmetric, a scale for each output, weights only.

    values  int8 [in, out]      -127 … 127
    scale   float32 [out]       largest weight of the output / 127
    weight  = values * scale, rounded once to the dtype of computation

The module never sees this: it gets weights of its own dtype, made inside the program,
where XLA can fuse the product into the matrix multiplication that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from torchax_dflash.core.config import config_error

_LEVELS = 127
# Of a draft's transformer and its input; never heads, convolutions or selectors.
_LAYERS = frozenset(
    {
        *("fc", "q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A linear layer's weight, a quarter of float32's size; a pytree.

    Attributes:
        values: int8 [in, out].
        scale: float32 [out].
        dtype: of the weight it stands for (static).
    """

    values: jax.Array
    scale: jax.Array
    dtype: jnp.dtype = field(metadata={"static": True})

    @classmethod
    def of(cls, weight: jax.Array, dtype: jnp.dtype) -> Int8Weight:
        """Rounds a floating [in, out] to the nearest of 255 levels of each output."""
        weight = weight.astype(jnp.float32)
        scale = jnp.abs(weight).max(axis=0) / _LEVELS
        scale = jnp.where(scale > 0, scale, 1)
        values = jnp.round(weight / scale).astype(jnp.int8)
        return cls(values=values, scale=scale, dtype=jnp.dtype(dtype))

    def dequantize(self) -> jax.Array:
        """The weight it stands for, [in, out]."""
        return (self.values.astype(jnp.float32) * self.scale).astype(self.dtype)


MaybeQuantized = Mapping[str, jax.Array | Int8Weight]
"""A module's parameters and buffers by name, of which some may be kept as int8."""


def dequantize(
    params: MaybeQuantized, inputs: dict[str, Any]
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Params as a module takes them, and its inputs.

    The barrier makes the weights depend on the inputs. Without it XLA would take the
    dequantisation out of a decode loop, and keep all weights in full beside the int8.
    """
    kept = {n: w for n, w in params.items() if isinstance(w, Int8Weight)}
    if kept:
        kept, inputs = jax.lax.optimization_barrier((kept, inputs))
    plain = {n: w for n, w in params.items() if not isinstance(w, Int8Weight)}
    return plain | {n: w.dequantize() for n, w in kept.items()}, inputs


def check_quantization(quantization: str | None) -> None:
    """Raises ValueError unless it is None or one that is known."""
    if quantization not in (None, "int8"):
        raise config_error(
            "quantization", "None or 'int8'", quantization, "Choose one of them."
        )


def kept_weights(
    weights: Iterable[tuple[str, jax.Array]],
    dtype: jnp.dtype,
    quantization: str | None,
) -> dict[str, jax.Array | Int8Weight]:
    """Weights by name as they are kept on the device, made one at a time.

    Args:
        weights: names like "layers.0.mlp.up_proj.weight"; linear ones [in, out].
        dtype: of computation.
        quantization: None or "int8".
    """
    return {
        name: Int8Weight.of(array, dtype)
        if quantization and _becomes_int8(name)
        else array.astype(dtype)
        for name, array in weights
    }


def _becomes_int8(name: str) -> bool:
    *_, layer, kind = ("", *name.split("."))
    return kind == "weight" and layer in _LAYERS
