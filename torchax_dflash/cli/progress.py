# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: a bar in a terminal, JSON lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from torchax_dflash.cli.terminal import notes


class ProgressBar:
    """A context manager: `with ProgressBar(…) as (log, update)`."""

    def __init__(self, what: str, log: Path | None = None) -> None:
        """Prepares the bar.

        Args:
            what: the label.
            log: a file to which `log` also appends its lines.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
        )
        self._what, self._file = what, log
        self._progress = Progress(*columns, console=notes, transient=True)
        self._task = self._progress.add_task(what, total=None, news="")

    def __enter__(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Shows the bar."""
        self._progress.start()
        return self._log, self._update

    def __exit__(self, *_: object) -> None:
        """Removes the bar."""
        self._progress.stop()

    def _log(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(line | {"time": round(time.time(), 1)}) + "\n")
        if notes.is_terminal:
            shown = ("tau", "loss", "tokens")
            news = " ".join(f"{k} {line[k]:.4g}" for k in shown if k in line)
            self._progress.update(self._task, news=news)
        else:
            print(json.dumps({"what": self._what} | line), file=sys.stderr, flush=True)

    def _update(self, done: int, total: int | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total)
