# SPDX-License-Identifier: Apache-2.0
"""Say what is installed, what JAX runs on, and what is wrong.

Each problem is one line with its remedy. The exit status is 1 if something would keep
`torchax-dflash generate` from working, else 0. Nothing is fetched or changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich import filesize
from rich.table import Table
from rich.text import Text

from torchax_dflash.cli.diagnosis import diagnose
from torchax_dflash.cli.findings import Diagnosis
from torchax_dflash.cli.terminal import progress_bar, screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout"
    )


def run(arguments: argparse.Namespace) -> int:
    """Looks, and shows what it saw; returns the exit status."""
    with progress_bar() as progress:
        progress.add_task("Importing what generate needs", total=None)
        diagnosis = diagnose()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(diagnosis)))
    else:
        show(diagnosis)
    return int(not diagnosis.generate_works)


def show(diagnosis: Diagnosis) -> None:
    """What is there, and below it what is wrong."""
    screen.print(f"[bold]torchax-dflash {diagnosis.version or 'as sources'}[/bold]")
    screen.print(f"Python {diagnosis.python}, {diagnosis.executable}", soft_wrap=True)
    packages = _section("Packages", "installed", "required")
    for package in diagnosis.packages:
        style = "" if package.fits else "red"
        installed = Text(package.installed or "none", style)
        packages.add_row(package.name, installed, package.required)
    _print(packages)

    jax, plugin = diagnosis.jax, diagnosis.plugin
    state = _section("JAX and vLLM")
    state.add_row("devices", ", ".join(jax.devices) or "none")
    state.add_row("vLLM", plugin.vllm or "not installed")
    if plugin.vllm:
        state.add_row("our entry point", "found" if plugin.has_entry_point else "none")
        state.add_row("our platform", plugin.platform or "off")
    _print(state)

    folders = _section("Folders", "size", "")
    for cache in diagnosis.caches:
        size = filesize.decimal(cache.num_bytes) if cache.num_bytes else "empty"
        folders.add_row(cache.name, size, cache.folder)
    folders.add_row("demo target", "", diagnosis.demo_target or "not fetched yet")
    folders.add_row("demo draft", "", diagnosis.demo_draft or "none")
    _print(folders)

    screen.print()
    for problem in diagnosis.problems:
        style = "bold red" if problem.stops_generate else "bold yellow"
        line = Text.assemble(("• ", style), f"{problem.message} {problem.remedy}")
        screen.print(line, soft_wrap=True)
    if diagnosis.generate_works:
        screen.print("[green]torchax-dflash generate can run.[/green]")
    else:
        screen.print("[bold red]torchax-dflash generate will not run.[/bold red]")


def _section(title: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column(f"\n[bold]{title}[/bold]", min_width=17)
    for column in columns or ("",):
        table.add_column(f"\n[dim]{column}[/dim]", no_wrap=True)
    return table


def _print(table: Table) -> None:
    """Wider than the screen if need be, so that paths can be copied whole."""
    screen.print(table, width=max(screen.width, 300), soft_wrap=True)
