# SPDX-License-Identifier: Apache-2.0
"""Usage: sharding_case.py CASE … QUANTIZATION|none. See test_sharding.py."""

import json
import sys
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Case:
    """Heads of a draft, and how often the mesh holds it."""

    heads: int
    kv_heads: int
    replicas: int = 1


CASES = {
    "even": Case(heads=16, kv_heads=8),
    "KV heads that do not divide": Case(heads=6, kv_heads=3),
    "fewer heads than devices": Case(heads=4, kv_heads=2),
    "two axes": Case(heads=16, kv_heads=8, replicas=2),
}

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


def compare(case: Case, quantization: str | None = None) -> dict:
    """One draft on one device and on a mesh."""
    target = TargetModel.from_torch(make_torch_target("llama", tied=False))
    heads = {"num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads}
    module = make_torch_draft(**heads)
    draft = DraftModel.from_torch(module, quantization=quantization)
    if quantization is not None:  # it also brings a head and an embedding of its own
        vocabulary = OwnVocabulary(
            embedding=target.params["model.embed_tokens.weight"],
            head=target.params["lm_head.weight"][:, 8:],
            row_of_token=rows_of_tokens(np.arange(8, VOCAB), VOCAB),
        )
        draft = replace(draft, own=vocabulary)
    _, want_hidden, want_tokens = run(draft, target)
    grid = np.array(jax.devices()).reshape(case.replicas, -1)
    mesh = Mesh(grid, ("data", "model"))
    split = shard_draft(draft, mesh, "model")
    sharding = pool_sharding(config=draft.config, mesh=mesh, axis="model")
    pool, hidden, tokens = run(split, target, sharding)
    layer = "layers.0.{}.weight"
    found = {
        "devices": len(jax.devices()),
        "hidden_states_error": float(np.abs(hidden - want_hidden).max()),
        "same_drafts": bool((tokens == want_tokens).all()),
        "pool_share": share(pool),
        "weights_share": share(split.params),
        "mlp_share": share(split.params[layer.format("mlp.gate_proj")]),
        "query_share": share(split.params[layer.format("self_attn.q_proj")]),
        "key_share": share(split.params[layer.format("self_attn.k_proj")]),
        "pool_stays": all(
            array.sharding.is_equivalent_to(sharding, array.ndim)
            for array in jax.tree.leaves(pool)
        ),
    }
    if quantization is not None:
        found["own_share"] = share((split.own.embedding, split.own.head))
    else:
        sums_ = sums(split, sharding)
        found["sums_per_layer"] = sums_ / draft.config.num_hidden_layers
    return found


def main() -> None:
    torch.set_num_threads(1)
    *names, quantization = sys.argv[1:]
    options = {"quantization": None if quantization == "none" else quantization}
    found = {name: compare(CASES[name], **options) for name in names}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
