# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is: a folder of this machine, or the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError


def find_checkpoint(name_or_path: str | Path) -> Path:
    """The local folder of a checkpoint: as given, or downloaded from the hub.

    Raises:
        FileNotFoundError: no such folder, and the hub does not have it either.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder}: expected a checkpoint folder, found no config.json in it. "
                "Name the folder that holds config.json and model.safetensors."
            )
        return folder
    name = str(name_or_path)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_like_path:
        raise FileNotFoundError(
            f"{name}: expected a checkpoint folder or a hub id (owner/name), found no "
            "such folder. Check the spelling."
        )
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    patterns.append("mask_embedding.pt")  # of some drafts, which are refused
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=["consolidated*"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{name}: expected a checkpoint folder or a model on the hub, found no "
            f"such folder and could not download it ({error}). Check the spelling, the "
            "network, and your access to the model."
        ) from error
