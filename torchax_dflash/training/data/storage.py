# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, even if a run is interrupted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file


def write_atomically(file: Path, text: str) -> None:
    """Writes a text file.

    Raises:
        OSError: the file cannot be written; an earlier version of it is unharmed.
    """
    scratch = _scratch(file)
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def save_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: the file cannot be written; an earlier version of it is unharmed.
    """
    scratch = _scratch(file)
    try:
        contiguous = {n: np.asarray(array, order="C") for n, array in tensors.items()}
        save_file(contiguous, scratch, metadata={"format": "pt"})
        scratch.chmod(0o644)  # safetensors makes it readable by its owner only
        scratch.replace(file)
    except SafetensorError as error:  # wraps the operating system's errors
        megabytes = sum(array.nbytes for array in tensors.values()) / 1e6
        raise OSError(
            f"{file}: expected room for {megabytes:.0f} MB, got {error}. Free "
            "some space and run the same command again; finished work is kept."
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def cut_torn_line(file: Path) -> None:
    """Removes an incomplete last line, which an interrupted append leaves behind."""
    with file.open("rb+") as content:
        end = content.seek(0, os.SEEK_END)
        if not end:
            return
        content.seek(end - 1)
        if content.read(1) == b"\n":
            return  # complete; another process may be appending
        while end > 0:
            start = max(0, end - (1 << 16))
            content.seek(start)
            newline = content.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        content.truncate(end)


def _scratch(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}")
