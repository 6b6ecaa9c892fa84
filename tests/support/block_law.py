# SPDX-License-Identifier: Apache-2.0
"""What one block may yield under the accept rule, by enumeration, and samples of it.

A target and a draft of five tokens are tables here: logits and probabilities after each
prefix of drafts. Prefixes are numbers, their tokens the digits.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import torch
from distributions import penalised_and_filtered

from torchax_dflash import SamplingParams
from torchax_dflash.core import accept as accepting
from torchax_dflash.core.sampling import SamplingState
from torchax_dflash.generation.penalties import Penalties

SIZE, DRAFTS, SAMPLES = 5, 2, 60_000
PROMPT, ANCHOR = [1, 3, 3, 4], 2


def _tables(seed: int, depth: int, spread: float) -> list[np.ndarray]:
    """Logits after every prefix of 0 to `depth` - 1 drafts, each [SIZE ** i, SIZE]."""
    rng = np.random.default_rng(seed)
    shapes = [(SIZE**i, SIZE) for i in range(depth)]
    return [spread * rng.standard_normal(shape, np.float32) for shape in shapes]


TARGET_LOGITS = _tables(0, DRAFTS + 1, 1.0)


def draft_probs(method: str) -> list[np.ndarray]:
    """What drafts are drawn from after each prefix; some tokens never are.

    Args:
        method: "probabilistic", or "greedy": only the likeliest token.
    """
    found = []
    for known, noise in zip(TARGET_LOGITS, _tables(1, DRAFTS, 0.8), strict=False):
        logits = known + noise  # a draft that is half right
        kept = (
            logits >= np.sort(logits)[:, -(4 if method == "probabilistic" else 1), None]
        )
        weights = np.where(kept, np.exp(logits), 0)
        found.append(weights / weights.sum(-1, keepdims=True))
    return found


def target_probs(params: SamplingParams) -> list[np.ndarray]:
    """What the target's tokens are drawn from, by transformers' own processors."""
    found = []
    for depth, table in enumerate(TARGET_LOGITS):
        prefixes = list(product(range(SIZE), repeat=depth))
        texts = [[*PROMPT, ANCHOR, *prefix] for prefix in prefixes]
        output = [np.bincount([ANCHOR, *prefix], minlength=SIZE) for prefix in prefixes]
        logits = penalised_and_filtered(
            torch.tensor(texts),
            torch.tensor(table).double(),
            params,
            torch.tensor(np.array(output)),
        )
        found.append(torch.softmax(logits, -1).numpy())
    return found


def block_law(
    p: list[np.ndarray], q: list[np.ndarray], num_drafts: int = DRAFTS
) -> list[np.ndarray]:
    """The chance of each output, by number of accepted drafts: [SIZE ** (i + 1)].

    A draft x stands with chance q(x) * min(1, p(x) / q(x)), and what is drawn instead
    has the rest of p.
    """
    law, chance = [], np.ones(1)
    for depth in range(num_drafts + 1):
        stands = np.minimum(p[depth], q[depth]) if depth < num_drafts else 0 * p[depth]
        law.append((chance[:, None] * (p[depth] - stands)).ravel())
        chance = (chance[:, None] * stands).ravel()
    return law


def first_token(law: list[np.ndarray]) -> np.ndarray:
    """The law of a block's first token, [SIZE]."""
    return sum(chances.reshape(SIZE, -1).sum(1) for chances in law)


def sampled_blocks(
    params: SamplingParams, method: str, num_drafts: int = DRAFTS
) -> list[np.ndarray]:
    """How often each output came from `accept_block`, laid out as `block_law`'s."""
    rng = np.random.default_rng(2)
    drafts, prefix = np.zeros((SAMPLES, DRAFTS), np.int32), np.zeros(SAMPLES, int)
    logits, probs = [TARGET_LOGITS[0][prefix]], []
    for i, q in enumerate(draft_probs(method)):
        probs.append(q[prefix])
        below = np.cumsum(probs[-1], axis=1)[:, :-1]
        drafts[:, i] = (rng.random((SAMPLES, 1)) > below).sum(1)
        prefix = prefix * SIZE + drafts[:, i]
        logits.append(TARGET_LOGITS[i + 1][prefix])
    q = jnp.array(np.stack(probs, 1), jnp.float32)

    def all_(value, dtype=jnp.float32):
        return jnp.full(SAMPLES, value, dtype)

    in_prompt = np.isin(np.arange(SIZE), PROMPT)
    arguments = {
        "draft_probs": q if method == "probabilistic" else None,
        "sampling": SamplingState(
            temperature=all_(params.temperature),
            top_k=all_(params.top_k, jnp.int32),
            top_p=all_(params.top_p),
            min_p=all_(params.min_p),
            seed=jnp.arange(SAMPLES, dtype=jnp.uint32),
            logprobs=all_(False, bool),
        ),
        "positions": all_(len(PROMPT), jnp.int32),
        "logits_processor": Penalties(
            repetition=all_(params.repetition_penalty),
            presence=all_(params.presence_penalty),
            frequency=all_(params.frequency_penalty),
            in_prompt=jnp.tile(jnp.array(in_prompt), (SAMPLES, 1)),
            in_output=jnp.zeros((SAMPLES, SIZE), jnp.int32).at[:, ANCHOR].set(1),
        ),
    }

    @jax.jit  # a new function, so that a rule that was replaced is not remembered
    def run(logits, drafts, arguments):
        return accepting.accept_block(
            logits, drafts, all_(num_drafts, jnp.int32), **arguments
        )

    got = jax.device_get(
        run(jnp.array(np.stack(logits, 1)), jnp.array(drafts), arguments)
    )
    counts = []
    for i in range(num_drafts + 1):
        outputs = got.token_ids[got.num_accepted == i, : i + 1]
        code = outputs @ (SIZE ** np.arange(i + 1)[::-1])
        counts.append(np.bincount(code, minlength=SIZE ** (i + 1)))
    assert sum(map(np.sum, counts)) == SAMPLES
    return counts
