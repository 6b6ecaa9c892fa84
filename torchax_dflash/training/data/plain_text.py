# SPDX-License-Identifier: Apache-2.0
"""Ordinary texts as training sequences, which the target only has to read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchax_dflash.core.config import config_error
from torchax_dflash.training.data.sequences import SequenceStore, TokenSequence

_MIN_TOKENS = 16


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
        store: receives the sequences; `prompt` names the file and the part of it.
        tokenizer: the target's.
        length: the most tokens in a sequence.
        refuse: tells whether a text must not be trained on.
        on_text: called with (files read, files in total).

    Returns:
        How many sequences were added.

    Raises:
        ValueError: a file is not UTF-8, or has too little text.
        OSError: a file cannot be read.
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
        if len(token_ids) < _MIN_TOKENS:
            raise config_error(
                str(file),
                f"a text of at least {_MIN_TOKENS} tokens",
                len(token_ids),
                "Leave it out.",
            )
        for start in range(0, len(token_ids), length):
            part = token_ids[start : start + length]
            digest = zlib.crc32(np.array(part, np.int32).tobytes())
            name = f"{file.name}:{start}:{digest:08x}"
            if len(part) < _MIN_TOKENS or name in known:
                continue
            if refuse(tokenizer.decode(part)):
                continue
            store.append(TokenSequence(name, "text", 0.0, 1, part))
            added += 1
        on_text(number, len(files))
    return added
