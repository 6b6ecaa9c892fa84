# SPDX-License-Identifier: Apache-2.0
"""The command `torchax-dflash`, as it is installed, and what an import costs."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import jax
import pytest

import torchax_dflash
from torchax_dflash import cli
from torchax_dflash.checkpoints.demo import demo_draft
from torchax_dflash.cli.diagnosis import diagnose, plugin_state
from torchax_dflash.cli.doctor import show
from torchax_dflash.cli.requirements import remedy_for

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    """What a fresh Python prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["SamplingParams", "GenerationOutput", "StreamEvent"])
def test_parameters_and_outputs_cost_neither_torch_nor_jax(name):
    code = (
        "import sys, time; started = time.perf_counter(); "
        f"from torchax_dflash import {name}; print(time.perf_counter() - started); "
        "print(sorted({'jax', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answers = [run(code).splitlines() for _ in range(3)]
    assert {heavy for _, heavy in answers} == {"[]"}
    assert min(float(seconds) for seconds, _ in answers) < 0.5


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["--version"], ["generate", "--help"], ["train", "--help"]],
    ids=str,
)
def test_help_is_fast(arguments):
    code = (
        "import sys; from torchax_dflash.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as done: assert not done.code\n"
        "print(sorted({'jax', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    *text, heavy = run(code).splitlines()
    assert heavy == "[]"
    assert "torchax-dflash" in text[0]


def test_the_command_is_an_entry_point():
    (script,) = metadata.entry_points(group="console_scripts", name="torchax-dflash")
    assert script.load() is cli.main


def test_the_version_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert torchax_dflash.__version__ == project["version"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--target", "no-such-folder"], "no-such-folder: expected a"),
        (["generate", "--num-samples", "0"], "--num-samples: expected at least 1"),
    ],
    ids=str,
)
def test_an_error_is_one_line(capsys, arguments, message):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_doctor_itself_imports_nothing_that_may_be_broken():
    code = (
        "import sys, torchax_dflash.cli.doctor\n"
        "print(sorted({'jax', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert run(code) == "[]\n"


def test_ctrl_c_is_no_traceback():
    """While `doctor` waits for another process, which gets it, too."""
    code = (
        "import sys; from torchax_dflash.cli import main; "
        "print('ready', flush=True); sys.exit(main(['doctor']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        _, notes = process.communicate(timeout=60)
    assert process.returncode == 130
    assert notes.strip() == "interrupted"


def test_without_the_extra_demo_one_line_names_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["generate"]) == 2
    error = capsys.readouterr().err
    assert "found no gguf" in error
    assert "pip install 'torchax-dflash[demo]'" in error
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_extra():
    assert remedy_for("optax.losses") == (
        "Install it with pip install 'torchax-dflash[train]'."
    )
    assert remedy_for("reasoning_gym") == remedy_for("optax")
    assert remedy_for("torch") == "Install it with pip install torchax-dflash."
    assert remedy_for("no_such_package") is None


def test_doctor_of_a_sound_installation(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["generate_works"]
    versions = {package["name"]: package["installed"] for package in found["packages"]}
    for name in ("torch", "torchax", "jax", "jaxlib", "transformers", "dflash"):
        assert versions[name] == metadata.version(name)
    assert found["version"] == torchax_dflash.__version__
    assert found["jax"]["backend"] == "cpu"
    assert len(found["jax"]["devices"]) == jax.device_count()
    assert found["demo_draft"] == str(demo_draft())


def test_doctor_names_what_is_wrong(monkeypatch, tmp_path, capsys):
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    monkeypatch.setenv("TORCHAX_DFLASH_DISABLE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    found = diagnose()
    problems = {
        problem.message.partition(":")[0]: problem for problem in found.problems
    }
    assert "no_such_platform" in problems["JAX"].message
    assert problems["JAX"].stops_generate
    assert problems[str(no_folder / "torchax-dflash")].stops_generate
    disabled = problems["TORCHAX_DFLASH_DISABLE"]
    assert disabled.remedy.startswith("Unset TORCHAX_DFLASH_DISABLE")
    assert not disabled.stops_generate
    assert found.plugin.platform is None
    assert not found.generate_works

    show(found)
    shown = capsys.readouterr().out
    for problem in found.problems:
        assert f"{problem.message} {problem.remedy}\n" in shown
    assert "generate will not run" in shown


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_PLUGINS", "another,third"), ("VLLM_TARGET_DEVICE", "cpu")],
)
def test_doctor_knows_what_keeps_the_plugin_from_vllm(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    problems = []
    assert plugin_state(problems).platform is None
    assert [problem.message.partition(":")[0] for problem in problems] == [variable]


@pytest.mark.smollm2
def test_the_example_of_the_api(capsys):
    spec = importlib.util.spec_from_file_location(
        "generate_example", ROOT / "examples" / "generate.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main([]) == 0
    shown = capsys.readouterr().out
    assert "def sum_of_average" in shown
    (mean,) = re.findall(r"([\d.]+) tokens a target pass", shown)
    assert float(mean) > 2


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_wheel_runs_the_command(tmp_path):
    """The files of the wheel, and none of the checkout's."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT)]
    subprocess.run([*build, "--wheel-dir", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("torchax_dflash-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert (installed / "torchax_dflash/training/data/phrases.toml").is_file()
    command = [sys.executable, "-m", "torchax_dflash", "generate"]
    done = subprocess.run(
        [*command, "--json", "--max-tokens", "8"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout)["token_ids"]) == 8
    where = "import torchax_dflash; print(torchax_dflash.demo_draft())"
    found = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(found.strip()) == installed / "torchax_dflash" / "demo_draft"
