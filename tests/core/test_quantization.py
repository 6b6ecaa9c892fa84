# SPDX-License-Identifier: Apache-2.0
"""int8 weights: exactly the module with the rounded weights, a quarter of the bytes."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from breadth import mostly_slow
from draft_files import BRINGS, LINEAR, own_tensors, rounded, write_speculators
from errors import assert_four_parts
from paged_requests import (
    VARIANTS,
    Oracle,
    Ours,
    arguments_of,
    bfloat16_errors,
    history,
)
from tiny_models import (
    BLOCK,
    MASK_ID,
    VOCAB,
    make_torch_draft,
    memorised_pair,
    pair,
    random_prompts,
)

from torchax_dflash import DraftModel, Generator, SamplingParams
from torchax_dflash.core.drafting import draft_tokens
from torchax_dflash.core.int8 import Int8Weight
from torchax_dflash.generation import step as decoding


def quantized(module, **options) -> DraftModel:
    return DraftModel.from_torch(module, quantization="int8", **options)


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, fast=["sliding"]))
def test_hidden_states_equal_the_module_with_rounded_weights(variant):
    module = make_torch_draft(**VARIANTS[variant])
    ours = Ours(quantized(module), 2)
    reference = rounded(module)
    oracles = [Oracle(reference) for _ in range(2)]
    rng = np.random.default_rng(4)
    for new, noise in history(rng, 2, 5, ours.draft.config.feature_size):
        ours.ingest(new)
        got = ours.hidden(noise)
        for b in range(2):
            want = oracles[b].hidden(new[b], noise[b])
            np.testing.assert_allclose(got[b], want, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_in_bfloat16_is_as_exact_as_pytorchs(variant):
    module = make_torch_draft(**VARIANTS[variant])
    reference = rounded(module).to(torch.bfloat16).float()
    ours, theirs = bfloat16_errors(quantized(module, dtype="bfloat16"), reference)
    assert 0 < ours <= 1.5 * theirs


def test_drafts_are_those_of_the_module_with_rounded_weights():
    tiny = pair("llama", False)
    ours, oracle = (
        Ours(quantized(tiny.torch_draft), 1),
        Oracle(rounded(tiny.torch_draft)),
    )
    rng = np.random.default_rng(8)
    drafts, differing = 0, 0
    original = Oracle(tiny.torch_draft)
    embedding = tiny.torch_target.get_input_embeddings().weight.detach()
    for new, _ in history(rng, 1, 12, ours.draft.config.feature_size):
        anchor = int(rng.integers(0, VOCAB))
        ours.ingest(new)
        options = arguments_of(ours, BLOCK - 1)
        anchors = jnp.array([anchor])
        got = draft_tokens(ours.draft, tiny.target, ours.pool, anchors, **options)
        noise = embedding[torch.tensor([anchor] + [MASK_ID] * (BLOCK - 1))].numpy()
        want, other = (
            tiny.torch_target.lm_head(torch.tensor(one.hidden(new[0], noise))[1:])
            for one in (oracle, original)
        )
        assert got[0].tolist() == want.argmax(-1).tolist()
        differing += int((want - other).abs().max() > 1e-3)
        drafts += BLOCK - 1
    assert differing > 0, "the rounding must show"


def test_what_is_quantised_and_how():
    module = make_torch_draft()
    module.layers[0].self_attn.o_proj.weight.data[3] = 0  # an output that is always 0
    draft = quantized(module)
    assert draft.quantization == "int8"
    assert draft.dtype == jnp.float32
    for name, kept in draft.params.items():
        *_, layer, kind = ("", *name.split("."))
        assert isinstance(kept, Int8Weight) == bool(LINEAR.fullmatch(layer)), name
        if not isinstance(kept, Int8Weight):
            assert kept.dtype == jnp.float32
            continue
        assert kind == "weight"
        weight = module.get_parameter(name).detach().numpy().T
        assert kept.values.dtype == jnp.int8
        assert kept.values.shape == weight.shape
        assert kept.scale.shape == weight.shape[1:]
        values = np.asarray(kept.values, np.int32)
        assert set(np.abs(values).max(axis=0)) <= {0, 127}
        error = np.abs(np.asarray(kept.dequantize()) - weight)
        assert (error <= np.asarray(kept.scale) * 0.501).all()


@pytest.mark.parametrize(("dtype", "share"), [("float32", 4), ("bfloat16", 2)])
def test_memory(dtype, share):
    """Norms and scales are small beside the weights, already in this tiny draft."""
    module = make_torch_draft()
    whole = DraftModel.from_torch(module, dtype=dtype)
    small = quantized(module, dtype=dtype)
    assert whole.num_bytes / small.num_bytes == pytest.approx(share, rel=0.12)


# XLA's CPU backend makes all weights at once, to have work for its threads; told to be
# sparing, it makes one after the other, as on accelerators.
SPARING = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def test_a_decode_loop_holds_no_second_copy():
    """The weights are not dequantised before the loop, but in each step, one by one."""
    module = make_torch_draft(layers=12)
    target = pair("llama", False).target
    extra = {}
    for quantization in (None, "int8"):
        draft = DraftModel.from_torch(module, quantization=quantization)
        loop = decoding.decode.lower(
            target,
            draft,
            Generator(target, draft, max_model_len=64)._state,
            keep=jnp.array([True]),
            num_speculative_tokens=BLOCK - 1,
            num_steps=4,
            draft_sample_method="greedy",
        )
        memory = loop.compile(compiler_options=SPARING).memory_analysis()
        extra[quantization] = memory.temp_size_in_bytes
    assert extra["int8"] < extra[None] + 0.1 * DraftModel.from_torch(module).num_bytes


@pytest.mark.parametrize(
    "brings", mostly_slow(BRINGS, fast=["nothing", "head of some tokens"])
)
def test_of_every_format(tmp_path, brings):
    """From a checkpoint as from memory; own embeddings and heads stay as they are."""
    module, extra = make_torch_draft(), own_tensors(**BRINGS[brings])
    write_speculators(tmp_path / "a", module, extra)
    module.save_pretrained(tmp_path / "b")
    want = quantized(module)
    for folder in ("a", "b"):
        got = DraftModel.from_pretrained(tmp_path / folder, quantization="int8")
        for name, kept in want.params.items():
            if isinstance(kept, Int8Weight):
                assert (got.params[name].values == kept.values).all()
                assert (got.params[name].scale == kept.scale).all()
    own = DraftModel.from_pretrained(tmp_path / "a", quantization="int8").own
    if "head" in brings:
        head = extra["lm_head.weight"].numpy()
        np.testing.assert_array_equal(own.head, head.T)


@pytest.mark.parametrize("name", ["int4", "INT8", "", "fp8", 8])
def test_unknown_quantizations(tmp_path, name):
    for load in (
        lambda: DraftModel.from_torch(make_torch_draft(), quantization=name),
        lambda: DraftModel.from_pretrained(tmp_path, quantization=name),
    ):
        with pytest.raises(ValueError, match="expected") as error:
            load()
        assert_four_parts(error, "quantization")


def acceptance(target, draft, prompts, **options):
    """Outputs, and the mean acceptance length over all steps."""
    generator = Generator(target, draft, max_num_seqs=4, **options)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    outputs = generator.generate(prompts, params)
    lengths = [n for output in outputs for n in output.acceptance_lengths]
    return [o.token_ids for o in outputs], sum(lengths) / len(lengths)


@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3"], fast=["llama"]))
def test_lossless_and_accepted_nearly_as_much(family):
    tiny, options = pair(family, False), {"max_model_len": 160}
    prompts = random_prompts(12)
    plain, _ = acceptance(tiny.target, None, prompts, **options)
    texts, whole = acceptance(tiny.target, tiny.draft, prompts, **options)
    small = quantized(tiny.torch_draft)
    small_texts, length = acceptance(tiny.target, small, prompts, **options)
    print(f"{family}: acceptance length {whole:.3f}, int8 {length:.3f}")
    assert texts == small_texts == plain
    assert length == pytest.approx(whole, rel=0.05)


@pytest.mark.slow
def test_a_draft_that_is_right_stays_right():
    tiny, prompts = memorised_pair()
    params = SamplingParams(max_tokens=37, ignore_eos=True)
    generator = Generator(tiny.target, quantized(tiny.torch_draft), max_model_len=64)
    lengths = [
        n for o in generator.generate(prompts, params) for n in o.acceptance_lengths
    ]
    assert sum(lengths) / len(lengths) > 0.95 * BLOCK


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_demo_draft(smollm2):
    small = DraftModel.from_pretrained(smollm2.draft_folder, quantization="int8")
    assert smollm2.draft.num_bytes / small.num_bytes == pytest.approx(4, rel=0.02)
    questions = [
        "Write a Python function that returns the n-th Fibonacci number.",
        "Tom has 3 boxes with 12 pens each. How many pens does he have?",
        "Count from 1 to 30.",
        "What are three good reasons to learn a second language?",
    ]
    prompts = [
        smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        ).input_ids
        for question in questions
    ]
    options = {"max_model_len": 256}
    texts, whole = acceptance(smollm2.target, smollm2.draft, prompts, **options)
    small_texts, length = acceptance(smollm2.target, small, prompts, **options)
    print(f"demo: acceptance length {whole:.3f}, int8 {length:.3f}")
    assert small_texts == texts
    assert length == pytest.approx(whole, rel=0.05)
