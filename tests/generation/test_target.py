# SPDX-License-Identifier: Apache-2.0
"""The offline target against transformers' own forward."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import TARGET_LAYERS, VOCAB, make_torch_target, random_prompts
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from torchax_dflash import TargetModel
from torchax_dflash.core.attention import Context
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.target import forward

_forward = jax.jit(forward, static_argnames="layer_ids")
LAYER_IDS = (0, 2, TARGET_LAYERS - 1)  # the last one is normalised in HF's states


def run_in_blocks(target, prompt, sizes, *, garbage=np.nan):
    """Feeds a prompt in padded blocks; returns all logits and hidden states."""
    pool = KVPool.allocate(target.config, num_pages=8, page_size=16, dtype=target.dtype)
    pool = jax.tree.map(lambda x: jnp.full_like(x, garbage), pool)
    table = jnp.array([[5, 2, 7, 0]])
    logits, states, start = [], [], 0
    for size in sizes:
        rows = prompt[start : start + size]
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(rows)] = rows
        pool, block_logits, features = _forward(
            target,
            pool,
            jnp.array(padded),
            context=Context(
                table,
                context_lens=jnp.array([start]),
                block_lens=jnp.array([len(rows)]),
            ),
            layer_ids=LAYER_IDS,
        )
        logits.append(block_logits[0, : len(rows)])
        states.append(features[0, : len(rows)])
        start += len(rows)
    return np.concatenate(logits), np.concatenate(states)


def assert_equals_transformers(target, torch_target, prompt, sizes):
    with torch.no_grad():
        want = torch_target(torch.tensor([prompt]), output_hidden_states=True)
    got_logits, got_states = run_in_blocks(target, prompt, sizes)
    np.testing.assert_allclose(got_logits, want.logits[0], atol=2e-5, rtol=1e-5)
    states = torch.cat([want.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)
    np.testing.assert_allclose(got_states, states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [[16, 16, 16], [1, 7, 16, 3, 16], [9] * 5])
def test_logits_and_hidden_states(any_pair, sizes):
    prompt = random_prompts(1, seed=11, longest=60)[0][: sum(sizes)] * 3
    assert_equals_transformers(
        any_pair.target, any_pair.torch_target, prompt[: sum(sizes)], sizes
    )


def test_bfloat16_is_as_exact_as_pytorchs():
    """Logits and hidden states of 96 tokens, both against float32."""
    rounded = make_torch_target("llama", tied=False).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    target = TargetModel.from_torch(rounded, dtype="bfloat16")
    errors = []
    for prompt in (random_prompts(2, seed=11, longest=60)[i] * 48 for i in range(2)):
        ids = torch.tensor([prompt[:48]])
        ours = run_in_blocks(target, prompt[:48], [16, 16, 16])
        found = []
        for model in (exact, rounded):
            with torch.no_grad():
                out = model(ids, output_hidden_states=True)
            states = [out.hidden_states[i + 1][0] for i in LAYER_IDS]
            found.append((out.logits[0].float(), torch.cat(states, dim=-1).float()))
        for got, want, theirs in zip(ours, *found, strict=True):
            pair_ = got.astype(np.float32), theirs.numpy()
            errors.append([np.square(x - want.numpy()).mean() for x in pair_])
    for of_logits_or_states in (errors[::2], errors[1::2]):
        of_ours, of_theirs = np.sqrt(np.mean(of_logits_or_states, axis=0))
        print(f"error {of_ours:.5f}, PyTorch's {of_theirs:.5f}")
        assert 0 < of_ours <= 1.5 * of_theirs


@pytest.mark.parametrize(
    ("config_class", "model_class", "options"),
    [
        (Qwen2Config, Qwen2ForCausalLM, {}),
        (MistralConfig, MistralForCausalLM, {"sliding_window": 9, "head_dim": 16}),
    ],
)
def test_other_families_through_the_attention_interface(
    config_class, model_class, options
):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    model = model_class(config).eval()
    prompt = random_prompts(1, seed=12, longest=60)[0] * 40
    sizes = [16, 16, 10]
    target = TargetModel.from_torch(model)
    assert_equals_transformers(target, model, prompt[: sum(sizes)], sizes)


def make_moe(config_class, model_class, **options):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96,
        moe_intermediate_size=48, num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, **options,
    )  # fmt: skip
    return model_class(config).eval()


def test_mixture_of_experts():
    model = make_moe(Qwen3MoeConfig, Qwen3MoeForCausalLM, head_dim=16)
    prompt = random_prompts(1, seed=12, longest=60)[0] * 40
    target = TargetModel.from_torch(model)
    assert_equals_transformers(target, model, prompt[:42], [16, 16, 10])


def test_windows_that_only_the_mask_tells_are_refused():
    """Qwen2-MoE gives its attention function no sliding_window."""
    model = make_moe(
        Qwen2MoeConfig, Qwen2MoeForCausalLM, use_sliding_window=True,
        sliding_window=9, max_window_layers=4, shared_expert_intermediate_size=48,
    )  # fmt: skip
    target = TargetModel.from_torch(model)
    with pytest.raises(RuntimeError, match="expected sliding layers to pass"):
        run_in_blocks(target, [1, 2, 3], [3])


def test_eos_of_the_generation_config(tmp_path):
    model = make_torch_target("llama", tied=True)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    for target in (
        TargetModel.from_torch(model),
        TargetModel.from_pretrained(tmp_path),
    ):
        assert target.config.eos_token_ids == (2, 7)


def test_from_pretrained_equals_from_torch(any_pair, tmp_path):
    any_pair.torch_target.save_pretrained(tmp_path)
    loaded = TargetModel.from_pretrained(tmp_path)
    assert loaded.config == any_pair.target.config
    assert loaded.params.keys() == any_pair.target.params.keys()
    for name, array in loaded.params.items():
        np.testing.assert_array_equal(array, any_pair.target.params[name])


def test_sharded_checkpoint(any_pair, tmp_path):
    any_pair.torch_target.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = TargetModel.from_pretrained(tmp_path)
    assert loaded.params.keys() == any_pair.target.params.keys()


def test_one_copy_of_the_weights(any_pair):
    """PyTorch holds none, and tied weights are one array."""
    target = any_pair.target
    assert all(p.is_meta for p in target.module.module.parameters())
    parameters = any_pair.torch_target.parameters()
    stored = sum(p.numel() for p in parameters)
    buffers = sum(b.numel() for b in any_pair.torch_target.buffers())
    assert sum(array.size for array in target.params.values()) == stored + buffers
