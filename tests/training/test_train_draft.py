# SPDX-License-Identifier: Apache-2.0
"""scripts/train_draft.py on a tiny target: from prompts to a report, through a kill."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from tiny_models import make_torch_target
from training_command import (
    NEW,
    SCRIPT,
    SMALL,
    common,
    fails,
    load_script,
    tiny_checkpoint,
)

from torchax_dflash import DraftModel
from torchax_dflash.training.data.sequences import SequenceStore, fingerprint


@pytest.fixture(scope="module")
def main():
    return load_script().main


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "questions.txt"
    words = ("river", "boat", "stone", "apple", "cloud", "train", "music", "paper")
    file.write_text("".join(f"what is a {word}?\n" for word in words))
    return file


@pytest.fixture(scope="module")
def generated(main, target, questions, tmp_path_factory):
    """A folder with answers and features."""
    folder = tmp_path_factory.mktemp("run")
    options = ["--target", str(target), "--folder", str(folder), "--dtype", "float32"]
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 4)
    limits = ["--max-tokens", "24", "--max-model-len", "64", "--max-num-seqs", "4"]
    layers = ["--store-features", "--target-layer-ids", "0,2,3"]
    command = ["generate", *options, "--prompts", str(questions), *limits, *layers]
    command += ["--sampled-share", "0.5"]
    assert main([*command, "--text", str(text)]) == 0
    return folder


def test_generate_goes_on_where_it_stopped(main, target, questions, generated):
    store = SequenceStore(generated / "data", fingerprint(target))
    sequences = list(store)
    kinds = [sequence.kind for sequence in sequences]
    assert kinds.count("questions") == 8
    assert kinds.count("text") == 3
    assert {sequence.temperature for sequence in sequences} == {0.0, 0.8}
    with (generated / "data" / "sequences.jsonl").open("a") as file:
        file.write('{"prompt": "torn')
    limits = ["--max-tokens", "24", "--max-model-len", "64", "--max-num-seqs", "4"]
    command = ["generate", *common(target, generated), "--prompts", str(questions)]
    assert main([*command, *limits]) == 0
    again = SequenceStore(generated / "data", fingerprint(target))
    assert list(again) == sequences


def test_train_export_evaluate(main, target, generated, tmp_path):
    options = common(target, generated)
    # steps with a held-out score and no other line
    assert main(["run", *options, *NEW, *SMALL, "--held-out-every", "4"]) == 0
    run = generated / "run"
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6
    assert lines[-1]["loss"] > 0
    draft = DraftModel.from_pretrained(run / "draft")
    assert draft.config.block_size == 4
    assert draft.config.target_layer_ids == (0, 2, 3)

    out = tmp_path / "report"
    command = ["evaluate", *options, "--draft", str(run / "draft"), "--out", str(out)]
    numbers = ["--num-prompts", "3", "--max-tokens", "12", "--max-num-seqs", "2"]
    assert main([*command, *numbers, "--sets", "chat", "--run", "run"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["acceptance"]["chat"]["prompts"] == 3
    assert report["acceptance"]["chat"]["tau"] >= 1
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "| chat |" in (out / "README.md").read_text()

    drawn = ["--temperature", "1", "--draft-sample-method", "probabilistic"]
    assert main([*command, *numbers, "--sets", "chat", *drawn]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["sampling"] == "temperature 1.0, probabilistic drafts"

    other = tmp_path / "speculators"
    command = ["export", *options, "--draft", str(run / "draft"), "--out", str(other)]
    assert main([*command, "--speculators"]) == 0
    config = json.loads((other / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 4]


@pytest.mark.slow
def test_a_new_dflash2_draft(main, capsys, target, generated, tmp_path):
    options = common(target, generated)
    second = ["--run", "second", "--dflash2"]
    assert main(["train", *options, *NEW, *SMALL, *second]) == 0
    made = generated / "second" / "draft"
    assert DraftModel.from_pretrained(made).config.has_selector
    numbers = ["--num-prompts", "2", "--max-tokens", "8", "--sets", "chat"]
    report = ["--draft", str(made), "--out", str(tmp_path / "report")]
    assert main(["evaluate", *options, *report, *numbers]) == 0
    out = ["--draft", str(made), "--out", str(tmp_path / "other"), "--speculators"]
    assert main(["export", "--target", str(target), *out]) != 0
    assert "--speculators: expected a DFlashDraftModel" in capsys.readouterr().err


def test_a_killed_run_goes_on_to_the_same_result(main, target, generated):
    rarely = ["--held-out-every", "1000", "--steps", "60"]
    options = [*common(target, generated), *NEW, *SMALL, *rarely]
    assert main(["train", *options, "--run", "whole"]) == 0
    command = [sys.executable, SCRIPT, "train", *options, "--run", "killed"]
    places = generated / "killed" / "checkpoints"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(places.glob("000000[1-5]*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    newest = sorted(places.glob("0*"))[-1].name
    assert newest < "00000060"
    assert main(["train", *options, "--run", "killed"]) == 0
    whole, killed = (
        (generated / name / "draft" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    )
    assert whole == killed


def test_ctrl_c_keeps_everything(target, generated):
    options = [*common(target, generated), *NEW, *SMALL, "--steps", "100000"]
    command = [sys.executable, SCRIPT, "train", *options, "--run", "stopped"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = generated / "stopped" / "log.jsonl"
    while process.poll() is None and not log.is_file():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "interrupted; run the same command again to continue" in printed
    assert (generated / "stopped" / "draft" / "model.safetensors").is_file()
    assert list((generated / "stopped" / "checkpoints").glob("0*"))


def test_other_settings_layers_and_targets(main, capsys, target, generated, tmp_path):
    options = common(target, generated)
    assert main(["train", *options, *NEW, *SMALL, "--run", "settings"]) == 0
    changed = ["train", *options, *NEW, *SMALL, "--run", "settings", "--anchors", "5"]
    fails(main, capsys, changed, "anchors: expected the interrupted run's, 6, got 5")
    layers = ["train", *options, *NEW, *SMALL, "--target-layer-ids", "1,2,3"]
    fails(main, capsys, layers, "features of", "Remove this folder")
    draft = str(generated / "settings" / "draft")
    longer = ["train", *options, "--init", draft, *SMALL, "--stages", "6:1"]
    fails(main, capsys, longer, "--stages: expected blocks of at most 4")
    other = tmp_path / "other"
    make_torch_target("llama", tied=False, seed=9).save_pretrained(other)
    command = ["train", *common(other, tmp_path / "run"), *NEW, *SMALL]
    command += ["--data", str(generated / "data")]
    fails(main, capsys, command, "sequences of this target")


@contextlib.contextmanager
def files_of_at_most(size):
    """The operating system refuses larger files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_storing_features(main, capsys, target, generated):
    features = generated / "data" / "features"
    (features / "00000.safetensors").unlink()
    layers = ["--store-features", "--target-layer-ids", "0,2,3"]
    command = ["generate", *common(target, generated), "--num-prompts", "0", *layers]
    with files_of_at_most(100_000):
        fails(main, capsys, command, "expected room for", "the same command again")
    assert [file.name for file in features.iterdir()] == ["about.json"]
    assert main(command) == 0
    assert os.path.getsize(features / "00000.safetensors") > 100_000
