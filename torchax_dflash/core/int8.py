# SPDX-License-Identifier: Apache-2.0
"""Linear weights kept as int8: symmetric, a scale for each output, weights only.

    values  int8 [in, out]      -127 … 127
    scale   float32 [out]       largest weight of the output / 127
    weight  = values * scale, rounded once to the dtype of computation

The module never sees this: it gets weights of its own dtype, made inside the program,
where XLA can fuse the product into the matrix multiplication that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

_LEVELS = 127


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
