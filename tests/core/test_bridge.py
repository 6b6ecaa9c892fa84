# SPDX-License-Identifier: Apache-2.0
"""The seams between PyTorch modules and JAX: one for the process, safe for threads."""

import re
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from paged_requests import Oracle, Ours, history
from tiny_models import make_torch_draft, make_torch_target
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchax_dflash import DraftModel
from torchax_dflash.core.attention import Context
from torchax_dflash.core.bridge import tracing
from torchax_dflash.core.drafting import draft_hidden_states


def test_threads_that_trace_at_once():
    """Half of them share a module, and "sdpa" goes on meaning PyTorch's for others."""
    module = make_torch_draft(seed=21)
    shared = DraftModel.from_torch(module)
    other = make_torch_target("llama", tied=True, seed=22)
    other.set_attn_implementation("sdpa")
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    want_logits = other(prompt).logits
    start, errors, states = threading.Barrier(7), [], [None] * 6

    def drafts(index: int) -> None:
        # blocks of another length each, so that each thread has to trace
        draft = shared if index % 2 else DraftModel.from_torch(module)
        rng = np.random.default_rng(index)
        ours, oracle = Ours(draft, 1), Oracle(module)
        new, noise = next(history(rng, 1, 1, draft.config.feature_size))
        noise = noise[:, : 1 + index]
        start.wait()
        ours.ingest(new)
        states[index] = (ours.hidden(noise)[0], oracle.hidden(new[0], noise[0]))

    def attends() -> None:
        start.wait()
        for _ in range(20):
            assert torch.equal(other(prompt).logits, want_logits)

    def guarded(function, *arguments) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(drafts, i)) for i in range(6)]
    threads.append(threading.Thread(target=guarded, args=(attends,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for got, want in states:
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_sdpa_is_installed_once():
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with tracing(jnp.dtype("float32")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_precision_follows_the_dtype_not_a_weight():
    """A float32 draft with one bfloat16 weight still multiplies in full precision."""
    draft = DraftModel.from_torch(make_torch_draft())
    first = min(draft.params)
    odd = draft.params | {first: draft.params[first].astype(jnp.bfloat16)}
    half = {n: w.astype(jnp.bfloat16) for n, w in draft.params.items()}
    for params, dtype, is_exact in ((odd, "float32", True), (half, "bfloat16", False)):
        one = replace(draft, params=params, dtype=jnp.dtype(dtype))
        ours = Ours(one, 1)
        context = Context(
            ours.table, context_lens=jnp.array([3]), block_lens=jnp.array([2])
        )
        noise = jnp.zeros((1, 2, draft.config.hidden_size), one.dtype)
        text = str(jax.make_jaxpr(draft_hidden_states)(one, ours.pool, noise, context))
        precisions = set(
            re.findall(r"precision=(?:\S*\.)?(HIGHEST|DEFAULT|None)", text)
        )
        assert ("HIGHEST" in precisions) == is_exact, precisions
