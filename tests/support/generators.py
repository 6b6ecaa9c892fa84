# SPDX-License-Identifier: Apache-2.0
"""Generators with and without a draft, and when their outputs are the same."""

import torch

from torchax_dflash import Generator

MAX_LEN = 160


def generators(tiny, batch=4, k=None, **options):
    options = {"max_model_len": MAX_LEN, "max_num_seqs": batch} | options
    return (
        Generator(tiny.target, tiny.draft, num_speculative_tokens=k, **options),
        Generator(tiny.target, **options),
    )


def assert_lossless(target, got, want):
    """Equal tokens, or a difference that float32 cannot decide (gap <= 1e-4)."""
    if got.token_ids == want.token_ids:
        return
    pairs = zip(got.token_ids, want.token_ids, strict=False)
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    ids = torch.tensor([want.prompt_token_ids + want.token_ids[:first]])
    with torch.no_grad():
        top = target(ids).logits[0, -1].topk(2)
    gap = float(top.values[0] - top.values[1])
    assert gap <= 1e-4, f"token {first} differs though the logit gap is {gap}"
