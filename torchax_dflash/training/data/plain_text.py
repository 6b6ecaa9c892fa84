# SPDX-License-Identifier: Apache-2.0
"""Ordinary texts as training sequences: the target reads them instead of writing."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchax_dflash.core.config import config_error
from torchax_dflash.training.data.sequences import SequenceStore, TokenSequence

_SHORTEST = 16  # tokens


def add_texts(
    files: list[Path],
    store: SequenceStore,
    tokenizer: Any,
    *,
    length: int,
    refuse: Callable[[str], bool],
    on_text: Callable[[int, int], None],
) -> int:
    """Cuts texts into sequences and stores those that are new.

    Args:
        files: UTF-8 texts.
        store: where sequences go; the `prompt` of one says which file and part it is.
        tokenizer: the target's.
        length: most tokens of a sequence.
        refuse: whether a text must not be trained on.
        on_text: called with (files read, files in all).

    Returns:
        How many sequences were added.

    Raises:
        ValueError: a file that is no text, or has none.
        OSError: a file that cannot be read.
    """
    known = {sequence.prompt for sequence in store if sequence.kind == "text"}
    added = 0
    for number, file in enumerate(files, start=1):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise config_error(
                str(file), "a text in UTF-8", str(error), "Convert it or leave it out."
            ) from error
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(token_ids) < _SHORTEST:
            raise config_error(
                str(file),
                f"a text of at least {_SHORTEST} tokens",
                len(token_ids),
                "Leave it out.",
            )
        for start in range(0, len(token_ids), length):
            part = token_ids[start : start + length]
            digest = zlib.crc32(np.array(part, np.int32).tobytes())
            name = f"{file.name}:{start}:{digest:08x}"
            if len(part) < _SHORTEST or name in known:
                continue
            if refuse(tokenizer.decode(part)):
                continue
            store.append(TokenSequence(name, "text", 0.0, 1, part))
            added += 1
        on_text(number, len(files))
    return added
