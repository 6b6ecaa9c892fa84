# SPDX-License-Identifier: Apache-2.0
"""Every bad input gets one error: field, expected, got, what to do."""

import shutil

import pytest
import torch
from draft_files import change_weights, edit_config
from errors import assert_four_parts
from safetensors.torch import load_file, save_file
from tiny_models import BLOCK, DFLASH2, TARGET_LAYERS, VOCAB, make_torch_draft, pair

from torchax_dflash import DraftModel, Generator, SamplingParams, TargetModel


@pytest.fixture(scope="module")
def tiny():
    return pair("llama", False)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    make_torch_draft().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target_folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny.torch_target.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(draft_folder, tmp_path):
    """A copy of the draft's folder to break."""
    return shutil.copytree(draft_folder, tmp_path / "copy")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dflash_config.mask_token_id": None}, "mask_token_id"),
        ({"dflash_config.mask_token_id": "<mask>"}, "mask_token_id"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"num_target_layers": "4"}, "num_target_layers"),
        ({"dflash_config.target_layer_ids": [0, 2, 4]}, "target_layer_ids"),
        ({"dflash_config.target_layer_ids": [-1, 2, 3]}, "target_layer_ids"),
        ({"dflash_config.target_layer_ids": []}, "target_layer_ids"),
        ({"dflash_config.target_layer_ids": 3}, "target_layer_ids"),
        ({"dflash_config.causal_head": True}, "dflash_config"),
        ({"dflash_config": [1]}, "dflash_config"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        ({"rope_parameters.rope_type": "dynamic", "rope_parameters.factor": 2.0},
         "rope_parameters.rope_type"),
        ({"architectures": ["EagleDraftModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
    ],
)  # fmt: skip
def test_broken_draft_configs(copy, changes, field):
    edit_config(copy, changes)
    with pytest.raises(ValueError, match="expected") as error:
        DraftModel.from_pretrained(copy)
    assert_four_parts(error, field)


@pytest.mark.parametrize(
    ("place", "size"), [("dflash_config.block_size", 4), ("block_size", 4)]
)
def test_block_size_in_either_place(copy, place, size):
    edit_config(copy, {"block_size": None, place: size})
    draft = DraftModel.from_pretrained(copy)
    assert draft.config.block_size == draft.module.module.block_size == size


def test_defaults_are_the_modules_own(copy):
    edit_config(copy, {"dflash_config.target_layer_ids": None, "block_size": None})
    edit_config(copy, {"num_target_layers": 28})
    weights = load_file(copy / "model.safetensors")
    weights["fc.weight"] = torch.zeros(64, 128)
    save_file(weights, copy / "model.safetensors")
    draft = DraftModel.from_pretrained(copy)
    module = draft.module.module
    assert draft.config.block_size == module.block_size == 16
    assert list(draft.config.target_layer_ids) == module.target_layer_ids == [1, 25]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"hidden_size": 128}, "hidden_size"),
        ({"num_target_layers": TARGET_LAYERS + 1}, "num_target_layers"),
        ({"vocab_size": VOCAB + 1024}, "vocab_size"),
        ({"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id"),
    ],
)
def test_draft_of_another_target(tiny, overrides, field):
    module = make_torch_draft()
    if "hidden_size" in overrides:
        module.config.hidden_size = 128
        module = type(module)(module.config)
    for name, value in overrides.items():
        if name == "dflash_config":
            module.config.dflash_config |= value
        elif name != "hidden_size":
            setattr(module.config, name, value)
    draft = DraftModel.from_torch(module)
    with pytest.raises(ValueError, match="expected") as error:
        Generator(tiny.target, draft)
    assert_four_parts(error, field)


def test_padded_vocabularies_are_fine(tiny):
    module = make_torch_draft()
    module.config.vocab_size = VOCAB - 3
    draft = DraftModel.from_torch(module)
    output = Generator(tiny.target, draft, max_model_len=64).generate([[1, 2]])[0]
    assert output.token_ids


@pytest.mark.parametrize("k", [0, BLOCK, -1, 2.0, True])
def test_num_speculative_tokens_out_of_range(tiny, k):
    with pytest.raises(ValueError, match="expected") as error:
        Generator(tiny.target, tiny.draft, num_speculative_tokens=k)
    assert_four_parts(error, "num_speculative_tokens")


def test_num_speculative_tokens_without_a_draft(tiny):
    with pytest.raises(ValueError, match="expected") as error:
        Generator(tiny.target, num_speculative_tokens=3)
    assert_four_parts(error, "num_speculative_tokens")


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "steps_per_visit"])
def test_sizes_below_one(tiny, name):
    with pytest.raises(ValueError, match="expected") as error:
        Generator(tiny.target, **{name: 0})
    assert_four_parts(error, name)


def test_mixed_dtypes(tiny):
    draft = DraftModel.from_torch(tiny.torch_draft, dtype="bfloat16")
    with pytest.raises(ValueError, match="expected") as error:
        Generator(tiny.target, draft)
    assert_four_parts(error, "dtype")


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompts[1]"),
        ([VOCAB], {}, "prompts[1]"),
        ([-1], {}, "prompts[1]"),
        ([1] * 64, {}, "prompts[1]"),
        ("text", {}, "prompts[1]"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stop": ("x",)}, "stop"),
        ([1], {"stop_token_ids": tuple(range(20))}, "stop_token_ids"),
    ],
    ids=str,
)
def test_prompts_and_parameters(tiny, prompt, params, field):
    """Before anything runs: the good prompt beside it is not started."""
    generator = Generator(tiny.target, tiny.draft, max_model_len=64)
    with pytest.raises(ValueError, match="expected") as error:
        generator.stream([[1, 2], prompt], SamplingParams(**params))
    assert_four_parts(error, field)
    assert generator.generate([[1, 2]])[0].token_ids


@pytest.mark.parametrize("prompts", ["text", [1, 2, 3], [[1], 2]], ids=str)
def test_one_prompt_instead_of_a_list(tiny, prompts):
    generator = Generator(tiny.target, tiny.draft, max_model_len=64)
    with pytest.raises(ValueError, match="expected") as error:
        generator.generate(prompts)
    assert_four_parts(error, "prompts")


@pytest.mark.parametrize("loader", [DraftModel, TargetModel])
def test_missing_checkpoints(loader, tmp_path):
    for name in (tmp_path / "nowhere", "./nowhere", "nowhere", "no/such-model"):
        with pytest.raises(FileNotFoundError, match="expected a checkpoint folder"):
            loader.from_pretrained(name)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        loader.from_pretrained(tmp_path)


def test_missing_weights(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="expected the checkpoint's weights"):
        DraftModel.from_pretrained(copy)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_corrupt_safetensors(copy, damage):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {"truncated": whole[: len(whole) // 2], "text": b"not weights", "empty": b""}[
            damage
        ]
    )
    with pytest.raises(ValueError, match="expected a safetensors file, got one that"):
        DraftModel.from_pretrained(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), "missing fc.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected extra"),
        (
            lambda w: w.update({"fc.weight": torch.zeros(2, 2)}),
            "fc.weight: expected sh",
        ),
    ],
)
def test_weights_that_are_not_the_modules(copy, change, message):
    change_weights(copy, change)
    with pytest.raises(ValueError, match=message):
        DraftModel.from_pretrained(copy)


def test_targets_of_unknown_architecture(target_folder, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "copy")
    edit_config(folder, {"architectures": ["NoSuchForCausalLM"]})
    with pytest.raises(ValueError, match="expected") as error:
        TargetModel.from_pretrained(folder)
    assert_four_parts(error, "architectures")


def test_linear_attention_targets_are_refused(target_folder, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "copy")
    kinds = ["linear_attention", *["full_attention"] * (TARGET_LAYERS - 1)]
    edit_config(folder, {"layer_types": kinds})
    with pytest.raises(ValueError, match="expected") as error:
        TargetModel.from_pretrained(folder)
    assert_four_parts(error, "layer_types")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_kernel_size", None),
        ("conv_kernel_size", 0),
        ("conv_group_size", 24),
        ("conv_group_size", "16"),
        ("selector_rank", -1),
        ("selector_top_k", VOCAB + 1),
        ("selector_depth", 2),
    ],
)
def test_dflash2_configs(tmp_path, field, value):
    folder = tmp_path / "draft"
    make_torch_draft(dflash_config=DFLASH2).save_pretrained(folder)
    edit_config(folder, {f"dflash_config.{field}": value})
    with pytest.raises(ValueError, match="expected") as error:
        DraftModel.from_pretrained(folder)
    assert_four_parts(error, "dflash_config" if "depth" in field else field)
