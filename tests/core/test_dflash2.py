# SPDX-License-Identifier: Apache-2.0
"""DFlash-2 against the package's own loop: convolutions and candidate selector."""

import functools
from types import SimpleNamespace

import pytest
import torch
from breadth import mostly_slow
from safetensors.torch import load_file, save_file
from tiny_models import (
    BLOCK,
    DFLASH2,
    continuations,
    make_torch_draft,
    pair,
    random_prompts,
    reference_generate,
)

from torchax_dflash import DraftModel, Generator, SamplingParams
from torchax_dflash.generation.sampling_params import DRAFT_SAMPLE_METHODS


@functools.cache
def second() -> SimpleNamespace:
    return pair("llama", False, "DFlash-2")


@pytest.mark.parametrize("k", mostly_slow([1, 3, BLOCK - 1], fast=[3]))
def test_the_packages_own_loop(k):
    """Same tokens, same acceptance lengths, step by step."""
    models = second()
    generator = Generator(
        models.target, models.draft, num_speculative_tokens=k, max_model_len=160
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    lengths = []
    for prompt in continuations(models.torch_target)[:8, :3].tolist():
        tokens, accepted = reference_generate(
            models.torch_draft, models.torch_target, prompt, 40, block_size=k + 1
        )
        output = generator.generate([prompt], params)[0]
        assert output.token_ids == tokens
        assert output.acceptance_lengths == accepted
        lengths += accepted
    assert sum(lengths) > 1.2 * len(lengths), "a draft that knows too little to tell"


@pytest.mark.parametrize(
    "method", mostly_slow(DRAFT_SAMPLE_METHODS, fast=["probabilistic"])
)
def test_a_batch_equals_each_request_alone(method):
    models = second()
    prompts = random_prompts(6)
    params = [
        SamplingParams(
            max_tokens=30, ignore_eos=True, temperature=0.8 * (i % 2), seed=i
        )
        for i in range(6)
    ]
    options = {"max_model_len": 160, "draft_sample_method": method}
    together = Generator(models.target, models.draft, max_num_seqs=6, **options)
    alone = Generator(models.target, models.draft, **options)
    for index, output in enumerate(together.generate(prompts, params)):
        want = alone.generate([prompts[index]], params[index])[0]
        assert output.token_ids == want.token_ids


@pytest.mark.parametrize("kernel_size", mostly_slow([1, 2, 4, 5], fast=[5]))
def test_kernels_longer_than_a_short_block(kernel_size):
    """The module itself cannot run on fewer rows than its kernel reaches back."""
    models = second()
    dflash_config = DFLASH2 | {"conv_kernel_size": kernel_size}
    draft = make_torch_draft(dflash_config=dflash_config)
    generator = Generator(
        models.target,
        DraftModel.from_torch(draft),
        num_speculative_tokens=1,
        max_model_len=64,
    )
    prompt = random_prompts(1, longest=9)[0]
    output = generator.generate([prompt], SamplingParams(max_tokens=12))[0]
    plain = Generator(models.target, max_model_len=64).generate(
        [prompt], SamplingParams(max_tokens=12)
    )
    assert output.token_ids == plain[0].token_ids


def test_published_checkpoints_name_their_codebooks_otherwise(tmp_path):
    module = second().torch_draft
    module.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {
        name.removesuffix(".weight") if "codebook" in name else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    theirs = type(module).from_pretrained(tmp_path, dtype=torch.float32)
    ours = DraftModel.from_pretrained(tmp_path)
    for name, tensor in theirs.state_dict().items():
        stored = ours.params[name]
        stored = stored.T if name in ours.module.linear_weights else stored
        assert torch.equal(torch.tensor(stored.__array__()), tensor)
