# SPDX-License-Identifier: Apache-2.0
"""Which of a block's drafts stand: the accept rule, pure and on the device.

Greedy: a draft is accepted while it is the target's own choice, and the target's choice
after the last accepted draft comes for free (paper arXiv 2602.06036, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """What one verified block yields.

    Attributes:
        token_ids: int32 [B, Q]; the first `num_accepted + 1` of a row are its next
            tokens: accepted drafts, then the target's own.
        num_accepted: int32 [B], drafts that stand.
    """

    token_ids: jax.Array
    num_accepted: jax.Array


def accept_greedy(
    logits: jax.Array, draft_token_ids: jax.Array, num_drafts: jax.Array
) -> Accepted:
    """Accepts the longest prefix of drafts that the target would have chosen.

    Args:
        logits: [B, Q, V] of the target; row i follows the anchor and i drafts.
        draft_token_ids: int32 [B, Q - 1].
        num_drafts: int32 [B], drafts of a row that exist.
    """
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    exists = jnp.arange(draft_token_ids.shape[1]) < num_drafts[:, None]
    agrees = (draft_token_ids == choices[:, :-1]) & exists
    num_accepted = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1)
    # An accepted draft is the target's choice, so its choices are the output.
    return Accepted(token_ids=choices, num_accepted=num_accepted)
