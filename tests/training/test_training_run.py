# SPDX-License-Identifier: Apache-2.0
"""Runs of a tiny target: they learn, they resume exactly, they spread over devices."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from tiny_models import DFLASH2, make_torch_draft, pair, random_prompts
from training_runs import RECIPE, answers, fresh_draft, ignore, make_run

from torchax_dflash import DraftModel, Generator, SamplingParams
from torchax_dflash.training.report.export import export
from torchax_dflash.training.run import checkpoint
from torchax_dflash.training.run.recipe import Recipe
from torchax_dflash.training.run.trainer import trained_draft

NEW = {"optimizer": "muon", "position_weights": "dpace", "loss": "lk"}
NEW |= {"draft_vocab_size": 20}


@pytest.fixture(scope="module")
def tiny():
    return pair("llama", False)


@pytest.fixture(scope="module")
def data(tiny):
    return answers(tiny, random_prompts(12, longest=8))


@pytest.mark.parametrize("changes", [{}, NEW], ids=str)
def test_resuming_gives_the_same_bits(tiny, data, changes, tmp_path):
    recipe = replace(RECIPE, **changes)
    run, state = make_run(tiny, data, recipe, tmp_path / "whole")
    whole = run.train(run.resume(state), ignore)

    run, state = make_run(tiny, data, recipe, tmp_path / "halves")

    def stop(step, line):
        run.stopped = step == 10

    half = run.train(run.resume(state), stop)
    assert int(half.step) == 10
    run, state = make_run(tiny, data, recipe, tmp_path / "halves")
    resumed = run.resume(state)
    assert int(resumed.step) == 10
    resumed = run.train(resumed, ignore)
    assert int(resumed.step) == 20
    for ours, theirs in zip(
        jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("dflash2", "changes"),
    [
        (False, {}),
        (True, {}),
        (False, {"optimizer": "muon", "position_weights": "dpace"}),
    ],
    ids=str,
)
def test_overfitting_reaches_the_full_acceptance_length(
    tiny, dflash2, changes, tmp_path
):
    prompts = [[3, 7, 11], [20, 1]]
    sequences = answers(tiny, prompts)
    recipe = Recipe(
        stages=((6, 1.0),),
        steps=150,
        sequences=2,
        anchors=40,
        learning_rate=3e-3,
        warmup_steps=10,
        weight_decay=0.0,
        feature_noise=0.0,
        common_tokens=0,
        average=0.9,
        soft=0.0,
        dtype="float32",
    )
    recipe = replace(recipe, **changes)
    run, state = make_run(tiny, sequences, recipe, tmp_path, fresh_draft(dflash2))
    state = run.train(state, ignore)
    export(
        trained_draft(state, run.frozen, "float32"), tmp_path / "draft", dtype="float32"
    )
    draft = DraftModel.from_pretrained(tmp_path / "draft")
    generator = Generator(tiny.target, draft, max_model_len=128)
    params = SamplingParams(max_tokens=37, ignore_eos=True)
    for output, sequence in zip(
        generator.generate(prompts, params), sequences, strict=True
    ):
        wanted = sequence.token_ids[sequence.num_prompt_tokens :][:37]
        assert output.token_ids == wanted
        assert output.acceptance_lengths == [6] * 6


@pytest.mark.parametrize("dflash2", [False, True])
def test_an_export_is_what_the_dflash_package_loads(tiny, data, dflash2, tmp_path):
    run, state = make_run(tiny, data, RECIPE, tmp_path, fresh_draft(dflash2))
    exported = trained_draft(state, run.frozen, "float32")
    export(exported, tmp_path / "draft", dtype="float32")
    for file in (tmp_path / "draft").iterdir():
        assert file.stat().st_mode & 0o444 == 0o444, f"{file} is for its owner only"
    draft_class = DFlash2DraftModel if dflash2 else DFlashDraftModel
    module = draft_class.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    original = make_torch_draft(dflash_config=DFLASH2 if dflash2 else {})
    for name, parameter in original.named_parameters():
        ours = dict(module.named_parameters())[name].detach()
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-5, atol=1e-7)


def test_blocks_shorter_than_convolutions_reach(tiny, data, tmp_path):
    config = DFLASH2 | {"conv_kernel_size": 5}
    draft = DraftModel.from_torch(make_torch_draft(dflash_config=config))
    with pytest.raises(ValueError, match="--stages: expected blocks of at least 4"):
        make_run(tiny, data, RECIPE, tmp_path, draft)


def test_resuming_with_other_settings_says_which(tiny, data, tmp_path):
    run, state = make_run(tiny, data, RECIPE, tmp_path)
    checkpoint.save(tmp_path / "checkpoints", state, RECIPE, {"target": "x"})
    for changes, field in (({"anchors": 9}, "anchors"), ({"seed": 1}, "seed")):
        other, state = make_run(tiny, data, replace(RECIPE, **changes), tmp_path)
        with pytest.raises(ValueError, match=f"{field}: expected the interrupted run"):
            other.resume(state)
    run.about = {"target": "y"}
    with pytest.raises(ValueError, match="target: expected the interrupted run"):
        run.resume(state)


def test_only_whole_checkpoints_are_seen_and_two_are_kept(tiny, data, tmp_path):
    run, state = make_run(tiny, data, RECIPE, tmp_path, checkpoint=5)
    run.train(state, ignore)
    places = tmp_path / "checkpoints"
    assert sorted(p.name for p in places.iterdir()) == ["00000015", "00000020"]
    torn = places / "00000025"
    torn.mkdir()
    (torn / "state.safetensors").write_bytes(b"torn")
    assert checkpoint.latest(places) == places / "00000020"


MESH = """
    import sys
    from pathlib import Path

    import jax
    import numpy as np
    from dataclasses import replace

    from tiny_models import pair, random_prompts
    from training_runs import RECIPE, answers, ignore, make_run

    from torchax_dflash.training.run.mesh import make_mesh, shard_state

    assert len(jax.devices()) == 8
    tiny = pair("llama", False)
    data = answers(tiny, random_prompts(12, longest=8))
    RECIPE = replace(RECIPE, steps=6, stages=((6, 1.0),))
    run, state = make_run(tiny, data, RECIPE, Path(sys.argv[1]) / "one")
    one = run.train(state, ignore)

    mesh = make_mesh(4, 2)
    run, state = make_run(tiny, data, RECIPE, Path(sys.argv[1]) / "eight")
    run.batches.mesh = mesh
    state, run.frozen = shard_state(state, run.frozen, mesh)
    weight = state.params["layers.0.mlp.gate_proj.weight"]
    assert weight.addressable_shards[0].data.size == weight.size // 2
    eight = run.train(state, ignore)
    assert not eight.params["layers.0.mlp.gate_proj.weight"].is_fully_replicated
    for ours, theirs in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-4)
    print("same")
"""


def test_a_mesh_of_devices_gives_the_same_numbers(tmp_path):
    script = tmp_path / "mesh.py"
    script.write_text(textwrap.dedent(MESH))
    tests = Path(__file__).parent.parent
    places = (tests.parent, tests / "support")
    result = subprocess.run(
        [sys.executable, script, tmp_path],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": os.pathsep.join(map(str, places)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "same", result.stderr[-3000:]
