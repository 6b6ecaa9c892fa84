# SPDX-License-Identifier: Apache-2.0
"""The flat layout of tpu-inference: rows of all requests in turn, then padding.

query_start_loc  0, 3, 3, 5 (three requests; the second has no rows)
rows             a a a | c c | padding …
request          0 0 0   2 2   anything
place            0 1 2   0 1   anything
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class FlatRows(NamedTuple):
    """Whose the rows are.

    Attributes:
        request: int32 [T], in range for padding, too.
        place: int32 [T], from the request's first row.
        exists: bool [T], false for padding.
    """

    request: jax.Array
    place: jax.Array
    exists: jax.Array


def flat_rows(
    query_start_loc: jax.Array, num_requests: jax.Array | int, *, rows: int
) -> FlatRows:
    """Finds the request of each row.

    Args:
        query_start_loc: int32 [S + 1], first rows of the requests, and the end.
        num_requests: requests that exist, at most S; what follows may be anything.
        rows: T.
    """
    slots = query_start_loc.shape[0] - 1
    index = jnp.arange(rows)
    in_batch = jnp.arange(slots) < num_requests
    ends = jnp.where(in_batch, query_start_loc[1:], jnp.iinfo(jnp.int32).max)
    # The first request that ends after the row.
    request = jnp.searchsorted(ends, index, side="right")
    request = jnp.clip(request, 0, slots - 1).astype(jnp.int32)
    return FlatRows(
        request=request,
        place=index - query_start_loc[request],
        exists=index < query_start_loc[num_requests],
    )
