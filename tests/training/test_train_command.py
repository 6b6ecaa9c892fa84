# SPDX-License-Identifier: Apache-2.0
"""The options of `torchax-dflash train`, and what they need to be read."""

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from torchax_dflash.cli import train
from torchax_dflash.training.data.prompts import TrainingPrompt, read_prompts
from torchax_dflash.training.run.recipe import Recipe


def parse(*argv):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(argv)


def test_train_is_another_name_of_the_step_run():
    options = ("--steps", "7", "--stages", "4:0.5,8:0.5", "--run", "x")
    assert parse("run", *options) == parse("train", *options)
    assert parse("run", *options).stages == ((4, 0.5), (8, 0.5))


@pytest.mark.parametrize("argv", [["generate"], ["train"], ["run"], ["evaluate"]])
def test_every_step_runs_without_options(argv):
    assert parse(*argv).step == ("run" if argv == ["train"] else argv[0])


def test_every_hyperparameter_is_explained():
    for field in fields(Recipe):
        text = Recipe.help_of(field.name)
        assert text.endswith(".")
        assert "\n" not in text
        assert ": " not in text


def test_options_are_read_without_the_packages_of_the_extra():
    """So that a missing one can be named, instead of a traceback."""
    code = """
import argparse, sys
from torchax_dflash.cli import train
train.add_arguments(argparse.ArgumentParser())
print(sorted({"matplotlib", "optax", "reasoning_gym", "torch"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_prompt_files_give_text_kind_and_seed(tmp_path):
    lines = tmp_path / "mixed.jsonl"
    lines.write_text(
        '{"prompt": "a", "kind": "self", "seed": 7}\n\n'
        '{"prompt": "b\u2028c", "seed": "none"}\n'
    )
    plain = tmp_path / "plain.txt"
    plain.write_text(" d \n\n")
    assert list(read_prompts([lines, plain])) == [
        TrainingPrompt("self", "a", 7),
        TrainingPrompt("mixed", "b\u2028c"),
        TrainingPrompt("plain", "d"),
    ]
