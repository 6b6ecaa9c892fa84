# SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at: packages, devices, caches, the demo pair, vLLM's plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from torchax_dflash import serving
from torchax_dflash.checkpoints import demo
from torchax_dflash.checkpoints.cache import cache_folder
from torchax_dflash.cli.findings import (
    Cache,
    Devices,
    Diagnosis,
    Package,
    Plugin,
    Problem,
)
from torchax_dflash.cli.requirements import (
    PACKAGE,
    installed_version,
    required_packages,
)
from torchax_dflash.serving.plugin.versions import TESTED

_PROBE_SECONDS = 300
_GROUP, _ENTRY = "vllm.platform_plugins", "torchax_dflash"


def diagnose() -> Diagnosis:
    """Looks at this installation; imports of other packages run in another process."""
    problems: list[Problem] = []
    version = installed_version(PACKAGE)
    if version is None:
        problems.append(
            Problem(
                f"{PACKAGE}: expected an installed package, found a folder of sources.",
                "Install it with pip install -e . in the checkout.",
            )
        )
    packages = _packages(problems)
    jax = _devices(problems)
    plugin = plugin_state(problems)
    target, draft = _demo_pair(problems)
    return Diagnosis(
        version=version,
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        packages=packages,
        jax=jax,
        plugin=plugin,
        caches=_caches(problems, needs_ours=target is None),
        demo_target=target and str(target),
        demo_draft=draft and str(draft),
        problems=problems,
        generate_works=not any(problem.stops_generate for problem in problems),
    )


def _packages(problems: list[Problem]) -> list[Package]:
    """The packages that are always needed, then those of TPUs and of vLLM."""
    try:
        required = required_packages()
    except metadata.PackageNotFoundError:
        required = []
    found = []
    for one in required:
        installed = installed_version(one.name)
        fits = installed is not None and one.versions.contains(
            installed, prereleases=True
        )
        if not one.extra or (one.extra == "vllm" and installed):
            found.append(Package(one.name, installed, str(one.versions), fits))
        if not fits and (installed or not one.extra):
            problems.append(
                Problem(
                    f"{one.name}: expected {one.versions or 'it'} to be installed, "
                    f"found {installed or 'none'}.",
                    f"Install it with pip install '{one.name}{one.versions}'.",
                    stops_generate=installed is None,
                )
            )
    for name in ("jaxlib", "libtpu"):
        found.append(Package(name, installed_version(name), "", True))
    for name, tested in TESTED.items():
        installed = installed_version(name)
        fits = installed in (None, tested)
        found.append(Package(name, installed, f"=={tested}", fits))
        if not fits:
            problems.append(
                Problem(
                    f"{name}: expected {tested}, which the plugin is tested with, "
                    f"found {installed}.",
                    f"Install it with pip install {name}=={tested}, or go on: the "
                    "plugin checks at start-up what it needs of it.",
                )
            )
    return found


def _devices(problems: list[Problem]) -> Devices:
    """What JAX finds, asked in a process of its own."""
    command = [sys.executable, "-m", "torchax_dflash.cli.probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
        )
        report = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problems.append(
            Problem(
                f"JAX: expected an answer within {_PROBE_SECONDS} seconds, got none.",
                "See whether another process holds the accelerator, or set "
                "JAX_PLATFORMS=cpu.",
                stops_generate=True,
            )
        )
        return Devices(None, [])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        problems.append(
            Problem(
                f"JAX: expected its devices, got exit status {error.returncode} "
                f"({last}).",
                f"Run {' '.join(command)} to see all of it.",
                stops_generate=True,
            )
        )
        return Devices(None, [])
    for name, error in report["errors"].items():
        problems.append(
            Problem(
                f"{name}: expected it to work, got {error}.",
                "Set JAX_PLATFORMS to what this machine has (cpu always works)."
                if name == "JAX"
                else f"Install it again with pip install --force-reinstall {name}.",
                stops_generate=True,
            )
        )
    return Devices(report["backend"], report["devices"])


def plugin_state(problems: list[Problem]) -> Plugin:
    """What vLLM's `resolve_current_platform_cls_qualname` will make of our plugin.

    Args:
        problems: grows by what keeps it switched off.
    """
    vllm = installed_version("vllm-tpu", "vllm")
    has_entry_point = bool(metadata.entry_points(group=_GROUP, name=_ENTRY))
    platform = serving.platform_plugin() if vllm and has_entry_point else None
    for variable, lets_it_run in {
        serving.DISABLE_VARIABLE: lambda value: value in ("", "0"),
        "VLLM_PLUGINS": lambda value: _ENTRY in value.split(","),
        "VLLM_TARGET_DEVICE": lambda value: value != "cpu",
    }.items():
        value = os.environ.get(variable)
        if value is not None and not lets_it_run(value):
            problems.append(
                Problem(
                    f"{variable}: expected a value that lets vLLM use our plugin, got "
                    f"{value!r}.",
                    f"Unset {variable} to serve with DFlash.",
                )
            )
            return Plugin(vllm, has_entry_point, platform=None)
    if vllm and not has_entry_point:
        problems.append(
            Problem(
                f"vLLM {vllm}: expected our entry point in {_GROUP}, found none.",
                f"Install {PACKAGE} into vLLM's environment.",
            )
        )
    elif vllm and platform is None:
        problems.append(
            Problem(
                f"vLLM {vllm}: expected libtpu and tpu-inference beside it, found one "
                "of them missing, so our plugin stays off.",
                f"Install them with pip install '{PACKAGE}[vllm]'.",
            )
        )
    return Plugin(vllm, has_entry_point, platform)


def _demo_pair(problems: list[Problem]) -> tuple[Path | None, Path | None]:
    """Where target and draft of the demo are, if they are there."""
    target, draft = demo.fetched_demo_target(), None
    try:
        draft = demo.demo_draft()
        if target is None:
            demo.check_demo_packages()
    except (RuntimeError, OSError) as error:
        message, _, remedy = str(error).partition(". ")
        problems.append(Problem(f"{message}.", remedy, stops_generate=True))
    return target, draft


def _caches(problems: list[Problem], *, needs_ours: bool) -> list[Cache]:
    """Ours, that of compiled programs, and that of the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    ours = cache_folder()
    programs = os.environ.get("JAX_COMPILATION_CACHE_DIR") or ours / "jax"
    found = []
    for name, folder, variable, consequence in (
        (PACKAGE, ours, "XDG_CACHE_HOME", "the demo target cannot be kept"),
        (
            "compiled programs",
            programs,
            "JAX_COMPILATION_CACHE_DIR",
            "each start compiles anew",
        ),
        ("hub", HF_HUB_CACHE, "HF_HUB_CACHE", "models cannot be downloaded"),
    ):
        folder = Path(folder)
        cache = Cache(name, str(folder), _num_bytes(folder), _is_writable(folder))
        found.append(cache)
        if not cache.is_writable:
            problems.append(
                Problem(
                    f"{folder}: expected to be able to write into it, found that "
                    f"impossible; {consequence}.",
                    f"Give yourself the permission, or set {variable} to another "
                    "folder.",
                    stops_generate=name == PACKAGE and needs_ours,
                )
            )
    return found


def _num_bytes(folder: Path) -> int:
    """What the files below a folder hold; 0 if there is none."""
    files = (
        Path(parent) / name for parent, _, names in os.walk(folder) for name in names
    )
    return sum(file.lstat().st_size for file in files)


def _is_writable(folder: Path) -> bool:
    """Whether something can be made in it, or where it would have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False
