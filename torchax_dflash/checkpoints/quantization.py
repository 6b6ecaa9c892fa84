# SPDX-License-Identifier: Apache-2.0
"""Which of a draft's weights are kept as int8, and which as they are."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from torchax_dflash.core.config import config_error
from torchax_dflash.core.draft_weights import linear_layer
from torchax_dflash.core.int8 import Int8Weight


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
        if quantization and name.endswith(".weight") and linear_layer(name)
        else array.astype(dtype)
        for name, array in weights
    }
