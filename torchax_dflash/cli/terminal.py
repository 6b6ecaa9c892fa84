# SPDX-License-Identifier: Apache-2.0
"""What the command shows in a terminal: progress, text as it comes, a report.

Answers go to stdout (`screen`), everything else to stderr (`notes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchax_dflash import GenerationOutput, StreamEvent

if TYPE_CHECKING:
    from torchax_dflash import Generator

screen = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


def progress_bar() -> Progress:
    """A line on stderr that is gone at the end; nothing where that is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(
        *columns, console=notes, transient=True, disable=not notes.is_terminal
    )


def warm_up(generator: Generator, what: str) -> None:
    """Compiles with progress; from the second start on, from the cache."""
    with progress_bar() as progress:
        task = progress.add_task(what, total=None)

        def on_program(done: int, total: int) -> None:
            progress.update(task, description=f"{what} (program {done}/{total})")

        generator.warm_up(on_program)


def collect(
    events: Iterator[StreamEvent], prompts: list[list[int]], *, show: bool
) -> tuple[list[GenerationOutput], bool]:
    """Outputs, and whether Ctrl-C cut them short. One prompt streams to the screen."""
    outputs = [GenerationOutput(prompt_token_ids=prompt) for prompt in prompts]
    texts = [Text() for _ in prompts]
    stream = show and len(prompts) == 1
    interrupted = False
    try:
        for event in events:
            outputs[event.index] = event.output
            for segment, from_draft in event.segments:
                style = "green" if from_draft else ""
                texts[event.index].append(segment, style)
                if stream:
                    screen.print(Text(segment, style), end="", soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
    if stream:
        screen.print()
    elif show:
        for index, text in enumerate(texts, start=1):
            screen.print(f"[bold]answer {index}[/bold]")
            screen.print(text)
    return outputs, interrupted


def show_report(
    outputs: list[GenerationOutput], report: dict[str, Any], num_speculative_tokens: int
) -> None:
    """A short table, and how often the draft at each position was accepted."""
    lengths = [length for output in outputs for length in output.acceptance_lengths]
    tokens = sum(len(output.token_ids) for output in outputs)
    drafted = sum(sum(output.from_draft) for output in outputs)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("tokens", f"{tokens}, {drafted} of them accepted drafts")
    if lengths:
        mean = sum(lengths) / len(lengths)
        table.add_row("mean acceptance length", f"{mean:.2f} tokens a target pass")
    table.add_row("decoding", f"{report['decode_tokens_per_second']:.1f} tokens/s")
    if "baseline_tokens_per_second" in report:
        plain = f"{report['baseline_tokens_per_second']:.1f} tokens/s"
        table.add_row("plain decoding", plain)
        if report["speedup"]:
            table.add_row("speed-up", f"{report['speedup']:.2f}x")
    if "identical" in report:
        table.add_row("same tokens", "yes" if report["identical"] else "[red]no[/red]")
    if report["recompilations"]:
        table.add_row("recompilations", f"[red]{report['recompilations']}[/red]")
    notes.print()
    notes.print(table)
    if not lengths:
        return
    bars = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for position in range(1, num_speculative_tokens + 1):
        rate = sum(length > position for length in lengths) / len(lengths)
        bar = Bar(1, 0, rate, width=30, color="green")
        bars.add_row(f"draft {position} accepted", f"{rate:4.0%}", bar)
    notes.print(bars)
