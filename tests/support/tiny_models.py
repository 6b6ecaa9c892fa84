# SPDX-License-Identifier: Apache-2.0
"""Tiny real models, their PyTorch oracles, and drafts that are half right."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, dflash_generate
from torch import nn
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from torchax_dflash import DraftModel, TargetModel

DFLASH2 = {
    "conv_kernel_size": 3,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 6,
}
"""What makes a draft's `dflash_config` a DFlash-2 one."""

DRAFTS = {
    "DFlash": {},
    "DFlash-2": {"dflash_config": DFLASH2},
    "sliding and full": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "use_sliding_window": True,
    },
}
"""Kinds of drafts: overrides of `make_torch_draft`."""

VOCAB, HIDDEN, TARGET_LAYERS, BLOCK, MASK_ID, EOS_ID = 32, 64, 4, 6, 5, 2

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}


PAIRS = ["llama-tied", "llama-untied", "qwen3-tied", "qwen3-untied"]
"""Pairs that most claims are tested with."""

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    # scales embeddings, residuals and logits; drafts see none of these
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
}


def make_torch_target(family: str, *, tied: bool, seed: int = 0, **overrides):
    """A random target, larger weights than usual so that logits differ.

    `overrides` go into its config.
    """
    torch.manual_seed(seed)
    config_class, model_class, extra = _FAMILIES[family]
    settings = {"tie_word_embeddings": tied, "initializer_range": 0.15}
    config = config_class(
        num_hidden_layers=TARGET_LAYERS, **(_SIZES | extra | settings | overrides)
    )
    return model_class(config).eval()


def make_torch_draft(
    seed: int = 1, *, layers: int = 2, block: int = BLOCK, **overrides
):
    """A random draft; `overrides` go into its config.

    With the fields of `DFLASH2` in `dflash_config`, a DFlash-2 draft.
    """
    torch.manual_seed(seed)
    dflash_config = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 2, 3]}
    dflash_config |= overrides.pop("dflash_config", {})
    settings = {"tie_word_embeddings": True, "initializer_range": 0.15}
    config = Qwen3Config(num_hidden_layers=layers, **(_SIZES | settings | overrides))
    second = "selector_rank" in dflash_config
    draft_class = DFlash2DraftModel if second else DFlashDraftModel
    config.architectures = [draft_class.__name__]
    config.num_target_layers = TARGET_LAYERS
    config.block_size = block
    config.dflash_config = dflash_config
    draft = draft_class(config).eval()
    for name, parameter in draft.named_parameters():
        if name.endswith("base_kernel"):  # left uninitialised by the class
            with torch.no_grad():
                parameter.normal_(std=0.2)[:, 0] += 1
    return draft


def continuations(target: nn.Module) -> torch.Tensor:
    """Greedy texts of the target from 48 random prompts of 3 tokens, [48, 43]."""
    generator = torch.Generator().manual_seed(2)
    size = target.config.vocab_size
    ids = torch.randint(0, size, (48, 3), generator=generator)
    with torch.no_grad():
        for _ in range(40):
            logits = target(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def train_draft(
    draft: nn.Module, target: nn.Module, ids: torch.Tensor, *, steps: int = 150
) -> None:
    """Fits the draft to texts [N, T] of the target, whose prompts have 3 tokens."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[i + 1] for i in draft.target_layer_ids], dim=-1)
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    size = draft.block_size
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(steps):
        start = int(torch.randint(3, ids.shape[1] - size, (), generator=generator))
        noise = torch.full((len(ids), size), draft.mask_token_id)
        noise[:, 0] = ids[:, start]
        hidden = draft(
            target_hidden=features[:, :start],
            noise_embedding=embedding[noise],
            position_ids=torch.arange(start + size)[None],
        )
        logits = hidden[:, 1:] @ head.T
        if isinstance(draft, DFlash2DraftModel):
            logits = logits + _pair_scores(
                draft.candidate_selector, hidden[:, 1:], ids[:, start : start + size]
            )
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, start + 1 : start + size].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft.requires_grad_(False)


def _pair_scores(selector: nn.Module, hidden: torch.Tensor, block: torch.Tensor):
    """What a selector adds to logits if each choice before was right, [N, K, V]."""
    before = selector.predecessor_codebook(block[:, :-1])
    return (before * selector.hidden_projection(hidden)) @ (
        selector.successor_codebook.weight.T
    )


@functools.cache
def pair(family: str, tied: bool, kind: str = "DFlash") -> SimpleNamespace:
    """A tiny target and a draft (of `DRAFTS`) trained on it: in PyTorch and in ours."""
    torch_target = make_torch_target(family, tied=tied)
    torch_draft = make_torch_draft(**DRAFTS[kind])
    train_draft(torch_draft, torch_target, continuations(torch_target))
    return SimpleNamespace(
        torch_target=torch_target,
        torch_draft=torch_draft,
        target=TargetModel.from_torch(torch_target),
        draft=DraftModel.from_torch(torch_draft),
    )


@functools.cache
def memorised_pair() -> tuple[SimpleNamespace, list[list[int]]]:
    """A draft that knows four texts of its target by heart, and their prompts."""
    tiny = pair("llama", False)
    ids = continuations(tiny.torch_target)[[0, 7, 13, 40]]
    torch_draft = make_torch_draft(seed=5)
    train_draft(torch_draft, tiny.torch_target, ids, steps=1500)
    known = SimpleNamespace(
        torch_target=tiny.torch_target,
        torch_draft=torch_draft,
        target=tiny.target,
        draft=DraftModel.from_torch(torch_draft),
    )
    return known, ids[:, :3].tolist()


def random_prompts(count: int, *, seed: int = 3, longest: int = 40) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [integers(0, VOCAB, n) for n in integers(1, longest + 1, count)]


def reference_generate(
    torch_draft, torch_target, prompt, max_tokens, stop_ids=None, block_size=None
):
    """The package's own loop; returns new tokens and acceptance lengths."""
    result = dflash_generate(
        torch_draft,
        torch_target,
        torch.tensor([prompt]),
        max_tokens,
        stop_ids,
        block_size=block_size,
        return_stats=True,
    )
    return (
        result.output_ids[0, result.num_input_tokens :].tolist(),
        result.acceptance_lengths,
    )
