# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats: what loads drafts as its reference does, broken ones say so."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from breadth import mostly_slow
from draft_files import (
    BRINGS,
    KNOWN,
    change_weights,
    edit_config,
    own_tensors,
    write_speculators,
)
from paged_requests import Oracle, Ours, arguments_of, history
from safetensors.torch import load_file, save_file
from tiny_models import (
    BLOCK,
    MASK_ID,
    VOCAB,
    make_torch_draft,
    make_torch_target,
    pair,
    random_prompts,
)

from torchax_dflash import DraftModel, Generator, SamplingParams, TargetModel
from torchax_dflash.core.drafting import draft_logits, draft_tokens

LIBRARY = Path(__file__).parent.parent / "data" / "speculators-dflash"


def saved_draft(folder, form, module, brings):
    """The module in one of the formats, with what it brings."""
    extra = own_tensors(**BRINGS[brings])
    if form == "speculators":
        write_speculators(folder, module, extra)
    else:
        module.save_pretrained(folder)
        change_weights(folder, lambda weights: weights.update(extra))
        if "d2t" in extra:
            edit_config(folder, {"draft_vocab_size": len(extra["d2t"])})
    return DraftModel.from_pretrained(folder), extra


@pytest.mark.parametrize(
    ("form", "brings", "capped"),
    mostly_slow(
        [
            *(("dflash", brings, False) for brings in BRINGS),
            *(("speculators", brings, False) for brings in BRINGS),
            # the library has no fields for these
            ("dflash", "nothing", True),
            ("dflash", "head of some tokens", True),
        ],
        fast=[
            ("dflash", "both", False),
            ("dflash", "head of some tokens", True),
            ("speculators", "nothing", False),
            ("speculators", "head of some tokens, in no order", False),
        ],
    ),
)
def test_drafts_are_the_modules_with_what_it_brings(tmp_path, form, brings, capped):
    """The reference: the unmodified module, and PyTorch's own embedding and head."""
    scales = {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 2.0,
    }
    module = make_torch_draft(dflash_config=scales if capped else {})
    target = pair("llama", False)
    draft, extra = saved_draft(tmp_path, form, module, brings)
    embedding = target.torch_target.get_input_embeddings().weight.detach()
    embedding = extra.get("embed_tokens.weight", embedding)
    head = extra.get("lm_head.weight", target.torch_target.lm_head.weight.detach())
    tokens = np.arange(len(head))
    if "d2t" in extra:
        tokens = tokens + extra["d2t"].numpy()
    ours, oracle = Ours(draft, 1), Oracle(module)
    rng = np.random.default_rng(8)
    for new, _ in history(rng, 1, 5, draft.config.feature_size):
        anchor = int(rng.integers(0, VOCAB))
        ours.ingest(new)
        options = arguments_of(ours, BLOCK - 1)
        anchors = jnp.array([anchor])
        _, got = draft_logits(draft, target.target, ours.pool, anchors, **options)
        got = got[0]
        noise = embedding[torch.tensor([anchor] + [MASK_ID] * (BLOCK - 1))]
        hidden = oracle.hidden(new[0], (noise * (3 if capped else 1)).numpy())
        want = module.compute_logits(torch.tensor(hidden)[1:], lambda h: h @ head.T)
        got = np.asarray(got)
        np.testing.assert_allclose(got[:, tokens], want, atol=1e-4, rtol=0)
        unknown = np.setdiff1d(np.arange(VOCAB), tokens)
        assert (got[:, unknown] == -np.inf).all()
        drafts = draft_tokens(draft, target.target, ours.pool, anchors, **options)
        assert drafts[0].tolist() == tokens[want.argmax(-1)].tolist()


def test_a_checkpoint_that_the_library_wrote():
    """`speculators` 0.9.0 itself saved it, and said what it drafts."""
    draft = DraftModel.from_pretrained(LIBRARY)
    assert draft.config.target_layer_ids == (0, 2, 3)
    assert draft.config.draft_vocab_size == 20
    assert draft.config.num_target_layers is None
    torch_target = make_torch_target(
        "llama", tied=True, vocab_size=48, hidden_size=32, intermediate_size=48
    )
    said = load_file(LIBRARY / "drafts.safetensors")
    torch_target.get_input_embeddings().weight.data.copy_(said["embedding"])
    target = TargetModel.from_torch(torch_target)
    said = {name: tensor.numpy() for name, tensor in said.items()}
    ours = Ours(draft, 2)
    ours.ingest(list(said["features"]))
    options, anchors = arguments_of(ours, 3), jnp.array(said["anchors"], jnp.int32)
    got = np.asarray(draft_logits(draft, target, ours.pool, anchors, **options)[1])
    known = np.flatnonzero(load_file(LIBRARY / "model.safetensors")["t2d"].numpy())
    np.testing.assert_allclose(got[..., known], said["logits"], atol=1e-5, rtol=0)
    drafts = draft_tokens(draft, target, ours.pool, anchors, **options)
    assert drafts.tolist() == said["drafts"].tolist()


@pytest.mark.parametrize(
    ("brings", "temperature", "method"),
    mostly_slow(
        [
            ("both", 0.0, "greedy"),
            ("head of some tokens", 0.0, "greedy"),
            ("head of some tokens", 1.0, "probabilistic"),
        ],
        fast=[
            ("head of some tokens", 0.0, "greedy"),
            ("head of some tokens", 1.0, "probabilistic"),
        ],
    ),
)
def test_generating_with_a_draft_of_its_own_head(tmp_path, brings, temperature, method):
    """Lossless, whatever it drafts; with penalties and filters nothing becomes NaN."""
    tiny = pair("llama", False)
    draft, _ = saved_draft(tmp_path, "speculators", tiny.torch_draft, brings)
    filters = {"top_p": 0.9, "top_k": 25, "min_p": 0.01} if temperature else {}
    params = SamplingParams(
        max_tokens=30, temperature=temperature, seed=7, logprobs=True, **filters,
        repetition_penalty=1.1, presence_penalty=0.1, ignore_eos=True,
    )  # fmt: skip
    prompts = random_prompts(4)
    options = {"max_model_len": 128, "max_num_seqs": 4}
    generator = Generator(tiny.target, draft, draft_sample_method=method, **options)
    outputs = generator.generate(prompts, params)
    assert all(len(output.token_ids) == 30 for output in outputs)
    assert all(np.isfinite(output.logprobs).all() for output in outputs)
    if not temperature:
        plain = Generator(tiny.target, **options).generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    accepted = [
        token
        for output in outputs
        for token, drafted in zip(output.token_ids, output.from_draft, strict=True)
        if drafted
    ]
    if brings == "head of some tokens":
        assert set(accepted) <= set(KNOWN)


def test_a_target_whose_vocabulary_is_padded(tmp_path):
    """Own logits cover the target's, however many it gives."""
    draft, _ = saved_draft(
        tmp_path, "speculators", make_torch_draft(), "head of some tokens"
    )
    for size in (VOCAB - 3, VOCAB + 8):
        torch_target = make_torch_target("llama", tied=True, vocab_size=size)
        target = TargetModel.from_torch(torch_target)
        ours = Ours(draft, 1)
        ours.ingest([np.ones((3, draft.config.feature_size), np.float32)])
        options = arguments_of(ours, 2)
        _, got = draft_logits(draft, target, ours.pool, jnp.array([1]), **options)
        assert got.shape == (1, 2, size)
        known = [token for token in KNOWN if token < size]
        assert np.flatnonzero(np.isfinite(got[0, 0])).tolist() == known


@pytest.mark.parametrize("kind", ["qwen3", "llama", None])
def test_layers_of_other_model_types(tmp_path, kind):
    """Fields that equal their type's defaults are left out of the file."""
    module = make_torch_draft()
    write_speculators(tmp_path, module, {})
    edit_config(tmp_path, {"transformer_layer_config.model_type": kind})
    if kind == "llama":
        changes = {"max_position_embeddings": None, "rms_norm_eps": None}
        edit_config(
            tmp_path,
            {f"transformer_layer_config.{name}": v for name, v in changes.items()},
        )
    draft = DraftModel.from_pretrained(tmp_path)
    hf_config = draft.module.module.config
    assert hf_config.max_position_embeddings == (2048 if kind == "llama" else 1024)
    assert draft.config.head_dim == 16


@pytest.mark.parametrize("non_causal", [False, True])
def test_causality_of_sliding_layers(tmp_path, non_causal):
    types = ["sliding_attention", "full_attention"]
    module = make_torch_draft(
        layer_types=types, sliding_window=20, use_sliding_window=True
    )
    write_speculators(tmp_path, module, {}, sliding_window_non_causal=non_causal)
    layers = DraftModel.from_pretrained(tmp_path).module.module.layers
    assert [layer.self_attn.is_causal for layer in layers] == [not non_causal, False]
    assert [layer.self_attn.sliding_window for layer in layers] == [20, None]


def test_a_checkpoint_in_several_files(tmp_path):
    module = make_torch_draft()
    extra = own_tensors(head=True, embedding=True, known=KNOWN)
    write_speculators(tmp_path / "whole", module, extra)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    weights = load_file(tmp_path / "parts" / "model.safetensors")
    (tmp_path / "parts" / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for part, some in enumerate((names[::2], names[1::2])):
        save_file(
            {name: weights[name] for name in some},
            tmp_path / "parts" / f"part-{part}.safetensors",
        )
        index |= dict.fromkeys(some, f"part-{part}.safetensors")
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    whole, parts = (
        DraftModel.from_pretrained(tmp_path / name) for name in ("whole", "parts")
    )
    assert whole.params.keys() == parts.params.keys()
    assert all((whole.params[n] == parts.params[n]).all() for n in whole.params)
    assert (whole.own.head == parts.own.head).all()
