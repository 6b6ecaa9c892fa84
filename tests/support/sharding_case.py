# SPDX-License-Identifier: Apache-2.0
"""Usage: sharding_case.py. Prints a JSON object; see test_sharding.py."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from tiny_models import VOCAB, make_torch_draft, make_torch_target

from torchax_dflash import DraftModel, TargetModel
from torchax_dflash.checkpoints.sharding import pool_sharding, shard_draft
from torchax_dflash.core.attention import Context
from torchax_dflash.core.draft import ingest
from torchax_dflash.core.drafting import draft_hidden_states, draft_tokens
from torchax_dflash.core.kv_cache import KVPool, slot_mapping_of
from torchax_dflash.core.vocabulary import OwnVocabulary, rows_of_tokens

LENGTHS = [11, 3, 0, 25]
PAGES, PAGE_SIZE, BLOCK = 32, 4, 6


def empty_pool(draft: DraftModel, sharding) -> KVPool:
    return KVPool.allocate(
        draft.config,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        dtype=draft.dtype,
        sharding=sharding,
    )


def run(draft: DraftModel, target: TargetModel, sharding=None) -> tuple:
    """Three rounds of ingest, then a block of each of four requests."""
    random = np.random.default_rng(0)
    pages = random.permutation(PAGES).reshape(len(LENGTHS), -1)
    table = jnp.asarray(pages, jnp.int32)
    pool = empty_pool(draft, sharding)
    for start in (0, 10, 20):
        lengths = np.clip(np.array(LENGTHS) - start, 0, 10)
        positions = start + np.tile(np.arange(10), (len(LENGTHS), 1))
        valid = np.arange(10) < lengths[:, None]
        slots = slot_mapping_of(pool, table, jnp.asarray(positions), jnp.asarray(valid))
        size = (positions.size, draft.config.feature_size)
        features = random.standard_normal(size, np.float32)
        pool = ingest(
            draft,
            pool,
            jnp.asarray(features),
            jnp.asarray(positions.reshape(-1), jnp.int32),
            slots.reshape(-1),
        )
    context = Context(
        table,
        context_lens=jnp.array(LENGTHS, jnp.int32),
        block_lens=jnp.full(len(LENGTHS), BLOCK, jnp.int32),
    )
    noise = random.standard_normal(
        (len(LENGTHS), BLOCK, draft.config.hidden_size), np.float32
    )
    hidden = jax.jit(draft_hidden_states)(draft, pool, jnp.asarray(noise), context)
    anchors = jnp.asarray(random.integers(0, VOCAB, len(LENGTHS)), jnp.int32)
    tokens = draft_tokens(
        draft, target, pool, anchors, context, num_speculative_tokens=BLOCK - 1
    )
    return pool, np.asarray(hidden), np.asarray(tokens)


def sums(draft: DraftModel, sharding) -> int:
    """Sums over all devices in a pass over blocks so short that heads may fold."""
    batch = len(LENGTHS)
    pool = empty_pool(draft, sharding)
    program = jax.jit(draft_hidden_states).lower(
        draft,
        pool,
        jnp.zeros((batch, 2, draft.config.hidden_size)),
        context=Context(
            jnp.zeros((batch, PAGES // batch), jnp.int32),
            context_lens=jnp.array(LENGTHS, jnp.int32),
            block_lens=jnp.full(batch, 2, jnp.int32),
        ),
    )
    return program.compile().as_text().count(" all-reduce(")


def share(tree) -> float:
    """The fraction of a tree's bytes that the first device holds."""
    arrays = jax.tree.leaves(tree)
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    return held / sum(array.nbytes for array in arrays)


def main() -> None:
    torch.set_num_threads(1)
    target = TargetModel.from_torch(make_torch_target("llama", tied=False))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    draft = DraftModel.from_torch(make_torch_draft(**heads))
    _, want_hidden, want_tokens = run(draft, target)

    mesh = Mesh(np.array(jax.devices()), ("model",))
    split = shard_draft(draft, mesh, "model")
    sharding = pool_sharding(config=draft.config, mesh=mesh, axis="model")
    pool, hidden, tokens = run(split, target, sharding)
    result = {
        "devices": len(jax.devices()),
        "hidden_states_error": float(np.abs(hidden - want_hidden).max()),
        "same_drafts": bool((tokens == want_tokens).all()),
        "pool_share": share(pool),
        "weights_share": share(split.params),
        "sums_per_layer": sums(split, sharding) / draft.config.num_hidden_layers,
        "pool_stays_split": all(
            array.sharding.is_equivalent_to(sharding, array.ndim)
            for array in jax.tree.leaves(pool)
        ),
    }
    small = DraftModel.from_torch(make_torch_draft(**heads), quantization="int8")
    vocabulary = OwnVocabulary(
        embedding=target.params["model.embed_tokens.weight"],
        head=target.params["lm_head.weight"][:, 8:],
        row_of_token=rows_of_tokens(np.arange(8, VOCAB), VOCAB),
    )
    small = replace(small, own=vocabulary)
    _, want_hidden, want_tokens = run(small, target)
    split = shard_draft(small, mesh, "model")
    _, hidden, tokens = run(split, target, sharding)
    result |= {
        "int8_error": float(np.abs(hidden - want_hidden).max()),
        "int8_same_drafts": bool((tokens == want_tokens).all()),
        "int8_weights_share": share(split.params),
        "own_share": share((split.own.embedding, split.own.head)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
