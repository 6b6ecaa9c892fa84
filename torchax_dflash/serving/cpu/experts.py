# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's grouped matrix product for experts in plain JAX, for CPUs.

All experts on each device (tensor parallelism, not expert parallelism), unquantised.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torchax_dflash.core.config import config_error

_LANES = 128


# The parameters are tpu-inference's.
def gmm_v2(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    rhs_scale: jax.Array | None = None,
    rhs_bias: jax.Array | None = None,
    *,
    fuse_act: str | None = None,
    preferred_element_type: Any = None,
    **_others: Any,
) -> jax.Array:
    """Multiplies each group of rows by its expert's matrix.

    Args:
        lhs: [rows, K], sorted by expert.
        rhs: [E, K, N]; with `fuse_act` gate and up in turn, 128 columns of each.
        group_sizes: int32 [E].
        rhs_scale: None.
        rhs_bias: [E, 1, N] or None.
        fuse_act: "silu" for silu(gate) * up, or None.
        preferred_element_type: of the result.

    Raises:
        ValueError: what only the TPU kernel does.
    """
    for name, value, supported in (
        ("fuse_act", fuse_act, (None, "silu")),
        ("rhs_scale", rhs_scale, (None,)),
        ("local experts", rhs.shape[0], (group_sizes.shape[0],)),
    ):
        if not any(value is s or value == s for s in supported):
            raise config_error(
                name, f"one of {supported} on a CPU", value, "Use a TPU for this model."
            )
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
    if rhs_bias is not None:
        ends = jnp.cumsum(group_sizes)
        expert = jnp.searchsorted(ends, jnp.arange(len(lhs)), side="right")
        out += rhs_bias[jnp.minimum(expert, rhs.shape[0] - 1), 0]
    if fuse_act:
        pairs = out.reshape(len(lhs), -1, 2, _LANES)
        out = jax.nn.silu(pairs[:, :, 0]) * pairs[:, :, 1]
        out = out.reshape(len(lhs), -1)
    return out.astype(preferred_element_type or lhs.dtype)
