# SPDX-License-Identifier: Apache-2.0
"""Requests on a paged cache, and the unmodified module on its own as their oracle."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tiny_models import BLOCK, DFLASH2, HIDDEN
from transformers import DynamicCache

from torchax_dflash import DraftModel
from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import ingest
from torchax_dflash.core.drafting import draft_hidden_states
from torchax_dflash.core.kv_cache import KVPool, slot_mapping_of

PAGE_SIZE, PAGES_PER_ROW = 16, 12

VARIANTS = {
    "full": {},
    "sliding": {
        "layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 20,
        "use_sliding_window": True,
    },
    "causal": {"is_causal": True},
    "sliding, not causal": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "use_sliding_window": True,
        "is_causal": False,
    },
    "DFlash-2": {"dflash_config": DFLASH2},
}

hidden_states = jax.jit(draft_hidden_states)


class Ours:
    """A batch of requests at scattered pages, unwritten rows holding garbage."""

    def __init__(self, draft: DraftModel, batch: int, garbage: float = np.nan):
        self.draft = draft
        num_pages = batch * PAGES_PER_ROW + 3
        pool = KVPool.allocate(
            draft.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=draft.dtype
        )
        self.pool: KVPool = jax.tree.map(lambda x: jnp.full_like(x, garbage), pool)
        table = np.random.default_rng(0).permutation(num_pages)
        table = table[: batch * PAGES_PER_ROW].reshape(batch, PAGES_PER_ROW)
        self.table = jnp.array(table, jnp.int32)
        self.lens = np.zeros(batch, np.int32)

    def ingest(self, new: list[np.ndarray], garbage: float = np.nan) -> None:
        """Adds context rows of every request, in one flat padded run."""
        total = sum(map(len, new))
        size = max(16, 1 << (total - 1).bit_length())
        features = np.full((size, self.draft.config.feature_size), garbage, np.float32)
        positions = np.zeros(size, np.int32)
        slots = np.full(size, self.pool.num_slots, np.int32)
        row = 0
        for b, rows in enumerate(new):
            span = slice(row, row + len(rows))
            at = self.lens[b] + np.arange(len(rows), dtype=np.int32)
            features[span], positions[span] = rows, at
            slots[span] = slot_mapping_of(
                self.pool, self.table[b : b + 1], at[None], np.ones((1, len(at)), bool)
            )[0]
            row += len(rows)
            self.lens[b] += len(rows)
        self.pool = ingest(
            self.draft, self.pool, *map(jnp.array, (features, positions, slots))
        )

    def hidden(self, noise: np.ndarray) -> np.ndarray:
        out = hidden_states(
            self.draft,
            self.pool,
            jnp.array(noise, self.draft.dtype),
            context=Context(
                self.table,
                context_lens=jnp.array(self.lens),
                block_lens=jnp.full(len(noise), noise.shape[1]),
            ),
        )
        return np.asarray(out.astype(jnp.float32))


class Oracle:
    """One request of the module itself, as the package's own loop calls it."""

    def __init__(self, module):
        self.module = module
        config = type(module.config)(**module.config.to_dict())
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        self.cache = DynamicCache(config=config)
        self.length = 0

    @torch.inference_mode()
    def hidden(self, new: np.ndarray, noise: np.ndarray) -> np.ndarray:
        end = self.length + len(new)
        dtype = self.module.dtype
        out = self.module(
            target_hidden=torch.tensor(new, dtype=dtype)[None],
            noise_embedding=torch.tensor(noise, dtype=dtype)[None],
            position_ids=torch.arange(self.length, end + len(noise))[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.crop(end - self.cache.get_seq_length())
        self.length = end
        return out[0].float().numpy()


def history(rng, batch: int, rounds: int, feature_size: int):
    """Rounds of newly accepted rows: a prompt first, then 1 … BLOCK rows or none."""
    for index in range(rounds):
        counts = rng.integers(1, 40 if index == 0 else BLOCK + 1, batch)
        new = [rng.standard_normal((n, feature_size), np.float32) for n in counts]
        yield new, rng.standard_normal((batch, BLOCK, HIDDEN), np.float32)


def arguments_of(ours: Ours, count: int) -> dict:
    """What drafting `count` tokens after the rows of `ours` needs."""
    return {
        "context": Context(
            ours.table,
            context_lens=jnp.array(ours.lens),
            block_lens=jnp.full(len(ours.lens), count + 1),
        ),
        "num_speculative_tokens": count,
    }


def bfloat16_errors(draft: DraftModel, module: torch.nn.Module) -> tuple[float, float]:
    """How far ours and PyTorch's own bfloat16 are from float32: root mean squares.

    Args:
        draft: ours, in bfloat16.
        module: the same weights, already rounded to bfloat16, in float32.
    """
    batch, rng = 2, np.random.default_rng(4)
    half = copy.deepcopy(module).to(torch.bfloat16)
    ours = Ours(draft, batch)
    exact, theirs = ([Oracle(m) for _ in range(batch)] for m in (module, half))
    errors = []
    for new, noise in history(rng, batch, 8, draft.config.feature_size):
        new = [_rounded(rows) for rows in new]
        noise = _rounded(noise)
        ours.ingest(new)
        got = ours.hidden(noise)
        for b in range(batch):
            want = exact[b].hidden(new[b], noise[b])
            other = theirs[b].hidden(new[b], noise[b])
            errors.append([np.square(x - want).mean() for x in (got[b], other)])
    of_ours, of_theirs = np.sqrt(np.mean(errors, axis=0))
    return float(of_ours), float(of_theirs)


def _rounded(rows: np.ndarray) -> np.ndarray:
    """What bfloat16 can hold."""
    return torch.tensor(rows).to(torch.bfloat16).float().numpy()
