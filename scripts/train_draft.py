#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`torchax-dflash train` from a checkout: see `train_draft.py --help`."""

from __future__ import annotations

import sys

from torchax_dflash.cli import main as command


def main(argv: list[str] | None = None) -> int:
    """Runs a step of training; returns the exit status."""
    return command(["train", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
