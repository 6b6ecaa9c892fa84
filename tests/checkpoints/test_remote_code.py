# SPDX-License-Identifier: Apache-2.0
"""Drafts that bring their own module, by the protocol of the first hub checkpoints.

Unlike the package's class it looks attention up by its config, has `block_size` at the
top level only, and no `compute_logits`; windows arrive at the attention function as a
keyword only; the loop around it crops the cache to a length, and tells all layers that
they are not causal. (Repository z-lab/dflash, `dflash/model.py` of April 2026.)
"""

from itertools import accumulate

import numpy as np
import pytest
import torch
from breadth import mostly_slow
from draft_files import edit_config
from errors import assert_four_parts
from paged_requests import Oracle, Ours, history
from tiny_models import MASK_ID, make_torch_draft, pair, random_prompts
from transformers import AutoModel, DynamicCache

from torchax_dflash import DraftModel, Generator, SamplingParams

OWN_MODULE = """
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    ALL_ATTENTION_FUNCTIONS, Qwen3Config, Qwen3MLP, Qwen3PreTrainedModel, Qwen3RMSNorm,
    Qwen3RotaryEmbedding, eager_attention_forward, rotate_half,
)


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.is_causal = config.head_dim, False
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None
        self.num_key_value_groups = (
            config.num_attention_heads // config.num_key_value_heads
        )
        def linear(heads):
            return nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.q_proj = linear(config.num_attention_heads)
        self.k_proj = linear(config.num_key_value_heads)
        self.v_proj = linear(config.num_key_value_heads)
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden, target_hidden, cos, sin, past_key_values, **kwargs):
        rows = torch.cat([target_hidden, hidden], dim=1)
        def heads(x):
            return x.view(*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(heads(self.q_proj(hidden))).transpose(1, 2)
        k = self.k_norm(heads(self.k_proj(rows))).transpose(1, 2)
        v = heads(self.v_proj(rows)).transpose(1, 2)
        n = q.shape[2]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q = q * cos[..., -n:, :] + rotate_half(q) * sin[..., -n:, :]
        k = k * cos + rotate_half(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, {})
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(
            self, q, k, v, None, scaling=self.head_dim**-0.5,
            sliding_window=self.sliding_window, **kwargs,
        )
        return self.o_proj(out.reshape(*hidden.shape[:2], -1))


class OwnLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = OwnAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(
            config.hidden_size, config.rms_norm_eps
        )

    def forward(self, hidden, *args, **kwargs):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *args, **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class OwnDraftModel(Qwen3PreTrainedModel):
    config_class = Qwen3Config

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(
            OwnLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.target_layer_ids = config.dflash_config["target_layer_ids"]
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(
            len(self.target_layer_ids) * config.hidden_size,
            config.hidden_size,
            bias=False,
        )
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.block_size = config.block_size
        self.post_init()

    def forward(self, position_ids, noise_embedding, target_hidden,
                past_key_values=None, use_cache=False, **kwargs):
        target_hidden = self.hidden_norm(self.fc(target_hidden))
        cos, sin = self.rotary_emb(noise_embedding, position_ids)
        hidden = noise_embedding
        for layer in self.layers:
            hidden = layer(hidden, target_hidden, cos, sin, past_key_values, **kwargs)
        return self.norm(hidden)
"""


@pytest.fixture
def own_code(tmp_path):
    """A checkpoint that brings its module, with the weights of a package draft."""
    pair("llama", False).torch_draft.save_pretrained(tmp_path)
    (tmp_path / "own_draft.py").write_text(OWN_MODULE)
    edit_config(
        tmp_path,
        {
            "architectures": ["OwnDraftModel"],
            "auto_map": {"AutoModel": "own_draft.OwnDraftModel"},
            "dflash_config.own_field": 1,
        },
    )
    return tmp_path


def test_remote_code_needs_consent(own_code):
    with pytest.raises(ValueError, match="trust_remote_code=True") as error:
        DraftModel.from_pretrained(own_code)
    assert_four_parts(error, "architectures")


def test_own_module_drafts_what_the_packages_would(own_code):
    tiny = pair("llama", False)
    own = DraftModel.from_pretrained(own_code, trust_remote_code=True)
    assert type(own.module.module).__name__ == "OwnDraftModel"
    assert not hasattr(own.module.module, "compute_logits")
    outputs = [
        Generator(tiny.target, draft, max_model_len=128).generate(
            [[1, 2, 3], [4]], SamplingParams(max_tokens=40)
        )
        for draft in (own, tiny.draft)
    ]
    assert outputs[0] == outputs[1]
    assert max(outputs[0][0].acceptance_lengths) > 1


@torch.inference_mode()
def generate_as_in_april(draft, target, prompt, max_tokens):
    """The loop that such checkpoints were made for; tokens and acceptance lengths."""
    ids, lengths = list(prompt), []
    of_target, of_draft = DynamicCache(), DynamicCache()

    def verify(tokens):
        outputs = target(
            torch.tensor([tokens]),
            past_key_values=of_target,
            use_cache=True,
            output_hidden_states=True,
        )
        taps = [outputs.hidden_states[i + 1] for i in draft.target_layer_ids]
        return outputs.logits[0].argmax(-1).tolist(), torch.cat(taps, dim=-1)

    choices, features = verify(ids)
    ids.append(choices[-1])
    while len(ids) < len(prompt) + max_tokens:
        start = len(ids) - 1
        block = [ids[-1]] + [MASK_ID] * (draft.block_size - 1)
        seen = of_draft.get_seq_length()
        hidden = draft(
            target_hidden=features,
            noise_embedding=target.model.embed_tokens(torch.tensor([block])),
            position_ids=torch.arange(seen, start + len(block))[None],
            past_key_values=of_draft,
            use_cache=True,
            is_causal=False,
        )
        of_draft.crop(start)
        block[1:] = target.lm_head(hidden[0, 1:]).argmax(-1).tolist()
        choices, features = verify(block)
        count = 0
        while count < len(block) - 1 and block[count + 1] == choices[count]:
            count += 1
        ids += [*block[1 : count + 1], choices[count]]
        features = features[:, : count + 1]
        of_target.crop(start + count + 1)
        lengths.append(count + 1)
    return ids[len(prompt) :], lengths


@pytest.mark.parametrize("attention", mostly_slow(["sdpa", "eager"], fast=["sdpa"]))
def test_own_module_step_by_step_as_in_its_own_loop(own_code, attention):
    """Loaded as anyone would, by transformers, and run in PyTorch."""
    tiny = pair("llama", False)
    torch_draft = AutoModel.from_pretrained(
        own_code, trust_remote_code=True, attn_implementation=attention
    ).eval()
    assert type(torch_draft).__name__ == "OwnDraftModel"
    draft = DraftModel.from_pretrained(own_code, trust_remote_code=True)
    generator = Generator(tiny.target, draft, max_model_len=128)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    accepted = 0
    for prompt in random_prompts(6, seed=12):
        (output,) = generator.generate([prompt], params)
        tokens, lengths = generate_as_in_april(
            torch_draft, tiny.torch_target, prompt, 40
        )
        assert output.token_ids == tokens[:40]
        ours = output.acceptance_lengths
        # near its limit ours drafts a shorter block
        settled = [
            n for n, done in zip(lengths, accumulate(lengths), strict=True) if done < 34
        ]
        assert ours[: len(settled)] == settled
        accepted += sum(settled) - len(settled)
    assert accepted > 5


def test_windows_that_only_its_attention_function_hears_of(own_code):
    """Ours has the window; PyTorch's sdpa and eager would ignore it."""
    windows = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "use_sliding_window": True,
    }
    edit_config(own_code, windows)
    own = DraftModel.from_pretrained(own_code, trust_remote_code=True)
    package = make_torch_draft(**windows, is_causal=False)
    package.load_state_dict(pair("llama", False).torch_draft.state_dict())
    ours, oracle = Ours(own, 1), Oracle(package)
    rng = np.random.default_rng(3)
    for new, noise in history(rng, 1, 6, own.config.feature_size):
        ours.ingest(new)
        want = oracle.hidden(new[0], noise[0])
        np.testing.assert_allclose(ours.hidden(noise)[0], want, atol=1e-5, rtol=0)
    assert oracle.length > 20


@pytest.mark.slow
def test_own_module_with_int8(own_code):
    """By the names of its layers, whoever wrote them."""
    own = DraftModel.from_pretrained(
        own_code, trust_remote_code=True, quantization="int8"
    )
    tiny = pair("llama", False)
    package = DraftModel.from_torch(tiny.torch_draft, quantization="int8")
    params = SamplingParams(max_tokens=24)
    outputs = [
        Generator(tiny.target, draft, max_model_len=64).generate([[1, 2, 3]], params)
        for draft in (own, package)
    ]
    assert outputs[0] == outputs[1]


def test_own_module_that_keeps_keyword_arguments_to_itself(own_code):
    """Attention that our cache cannot reach would silently lose the context."""
    file = own_code / "own_draft.py"
    deaf = OWN_MODULE.replace("sliding_window=self.sliding_window, **kwargs,", "")
    file.write_text(deaf.replace("OwnDraftModel", "DeafDraftModel"))
    edit_config(own_code, {"auto_map": {"AutoModel": "own_draft.DeafDraftModel"}})
    with pytest.raises(RuntimeError, match="hand on its keyword arguments"):
        DraftModel.from_pretrained(own_code, trust_remote_code=True)


def test_make_torch_draft_is_what_was_saved(own_code):
    """The fixture's weights are the package draft's, not random ones."""
    own = DraftModel.from_pretrained(own_code, trust_remote_code=True)
    random = DraftModel.from_torch(make_torch_draft())
    trained = pair("llama", False).draft
    name = "fc.weight"
    assert (own.params[name] == trained.params[name]).all()
    assert not (own.params[name] == random.params[name]).all()
