# SPDX-License-Identifier: Apache-2.0
"""The Makefile's commands: what they name exists, and the demo and training run.

The commands are those that `make --dry-run` prints, with this Python's folder in place
of `.venv`. `make serve` is started by tests/serving/test_make_serve.py.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(target: str, *variables: str) -> list[list[str]]:
    """What `make TARGET` would run, without what installs."""
    stamps = re.findall(
        r"\.venv\S*/\.installed[-\w,]*", (ROOT / "Makefile").read_text()
    )
    old = [f"--assume-old={stamp}" for stamp in dict.fromkeys(stamps)]
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *old, *variables, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith(".venv/bin/")]
    assert found, done.stdout
    return [
        [str(BIN / Path(first).name), *rest]
        for first, *rest in (shlex.split(line) for line in found)
        if "pip" not in rest
    ]


@pytest.mark.parametrize("target", ["demo", "train", "test", "bench", "lint"])
def test_scripts_and_options_exist(target):
    """Programs are installed, files are there, and `--help` knows every option."""
    for program, *arguments in commands(target):
        assert Path(program).is_file(), program
        scripts = [word for word in arguments if word.endswith(".py")]
        for script in scripts:
            assert (ROOT / script).is_file(), script
        if target not in ("demo", "train"):
            continue
        end = next(
            (i for i, word in enumerate(arguments) if word.startswith("-")),
            len(arguments),
        )
        shown = subprocess.run(
            [program, *arguments[:end], "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for word in arguments:
            if word.startswith("--"):
                assert word in shown, f"{word} of {arguments}"


@pytest.mark.slow
@pytest.mark.smollm2
def test_make_demo():
    """Its own command, cut short: the same tokens as plain decoding, and counts."""
    ((program, *arguments),) = commands("demo")
    done = subprocess.run(
        [program, *arguments, "--json", "--max-tokens", "24"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["identical"] is True
    assert answer["mean_acceptance_length"] > 2
    assert answer["recompilations"] == 0


@pytest.mark.slow
@pytest.mark.smollm2
def test_make_train(tmp_path):
    """Its three commands with tiny numbers: a draft comes out, and is measured."""
    generate, train, evaluate = commands("train")
    folder = ["--folder", str(tmp_path)]
    small = {
        "generate": ["--num-prompts", "8", "--max-tokens", "24"],
        "train": [
            *("--steps", "2", "--sequences", "2", "--anchors", "4", "--warmup-steps"),
            *("1", "--checkpoint-every", "2", "--held-out-every", "2"),
        ],
        "evaluate": ["--sets", "chat", "--num-prompts", "1", "--max-tokens", "16"],
    }

    def run(command: list[str], *more: str) -> str:
        done = subprocess.run(
            [*command, *more], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run(generate, *folder, *small["generate"])
    run(train, *folder, *small["train"])
    assert (tmp_path / "run" / "draft" / "model.safetensors").is_file()
    draft = ["--draft", str(tmp_path / "run" / "draft"), "--run", str(tmp_path / "run")]
    run(evaluate, *draft, *small["evaluate"], "--out", str(tmp_path / "report"))
    assert any((tmp_path / "report").iterdir())
