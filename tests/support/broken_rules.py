# SPDX-License-Identifier: Apache-2.0
"""Accept rules that are wrong, to see that the tests of distributions notice."""

from dataclasses import replace

import jax.numpy as jnp

# not the module: tests replace it there
from torchax_dflash.core.accept import accept_sampled
from torchax_dflash.core.sampling import draw


def accepts_all(probs, drafts, num_drafts, *, draft_probs, **others):
    return accept_sampled(
        probs, drafts, num_drafts, draft_probs=draft_probs * 1e-9, **others
    )


def keeps_what_was_rejected(
    probs, drafts, num_drafts, *, draft_probs, sampling, positions
):
    """Draws from p after a rejection, not from p - q."""
    right = accept_sampled(
        probs,
        drafts,
        num_drafts,
        draft_probs=draft_probs,
        sampling=sampling,
        positions=positions,
    )
    at = right.num_accepted[:, None]
    p = jnp.take_along_axis(probs, at[..., None], axis=1)
    own = draw(p, sampling.keys(positions, 2))
    columns = jnp.arange(right.token_ids.shape[1])
    return replace(right, token_ids=jnp.where(columns < at, right.token_ids, own))


def takes_another_q(probs, drafts, num_drafts, *, draft_probs, **others):
    sharper = draft_probs**2
    sharper /= sharper.sum(-1, keepdims=True)
    return accept_sampled(probs, drafts, num_drafts, draft_probs=sharper, **others)
