#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/demo.svg: what `torchax-dflash generate --compare` shows in a terminal.

The command runs for real; only its consoles are one that records.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchax_dflash import cli
from torchax_dflash.cli import terminal
from torchax_dflash.cli.generate import DEMO_PROMPT

PICTURE = Path(__file__).parent.parent / "docs" / "demo.svg"
TITLE = "torchax-dflash generate --compare"
COLUMNS = 90


def main() -> int:
    """Runs the command and draws it; returns its exit status."""
    recorder = Console(record=True, width=COLUMNS, highlight=False)
    terminal.screen = terminal.notes = recorder
    if status := cli.main(["generate", "--compare", DEMO_PROMPT]):
        return status
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(recorder.export_text(styles=True)))
    return 0


def draw(output: str) -> str:
    """The picture of a terminal in which the command gave this output.

    Args:
        output: with ANSI escapes; lines longer than the terminal are broken.
    """
    canvas = Console(record=True, width=COLUMNS, highlight=False, file=io.StringIO())
    canvas.print(
        Text("$ ", "bold green"),
        Text(f'torchax-dflash generate --compare \\\n    "{DEMO_PROMPT}"\n'),
        sep="",
    )
    canvas.print(Text.from_ansi(output))
    svg = canvas.export_svg(title=TITLE, unique_id="demo")
    # A reader's own font will do: a picture on a page must not fetch one.
    svg = re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL)
    svg = svg.replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace"
    )
    return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)


if __name__ == "__main__":
    sys.exit(main())
