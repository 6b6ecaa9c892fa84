# SPDX-License-Identifier: Apache-2.0
"""The command `torchax-dflash`: its subcommands, and how any of them fails.

    generate.py      answers prompts
    terminal.py      shows them, and a report
    train.py         trains a draft; its steps are in train_generate.py, train_run.py
                     and train_report.py, their options in train_arguments.py
    progress.py      progress of long steps
    doctor.py        says what is installed, and what is wrong
    diagnosis.py     finds that out, as findings.py describes it
    requirements.py  what our metadata requires
    probe.py         imports and devices, tried in a process of its own

A subcommand is a module with `add_arguments(parser)` and `run(arguments) -> status`.
It is imported when it is the one asked for, and imports torch and JAX when it runs, so
`--help` and `--version` are fast.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import torchax_dflash

COMMANDS = {
    "generate": "answer prompts, and say what the draft was worth",
    "train": "train a draft for your target, export it, measure it",
    "doctor": "say what is installed, and what is wrong with it",
}

_DESCRIPTION = """\
Speculative decoding with DFlash: a small model drafts a block of tokens in one pass,
the target verifies it in one pass, and the output is the target's own. The drafts are
the original PyTorch modules, run as JAX programs.
"""

_EPILOG = """\
Examples:
  torchax-dflash generate --compare
      answer a question with the demo pair, then without its draft, and compare
  torchax-dflash generate --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 \\
      --dtype bfloat16 "Prove that the square root of 2 is irrational."
      the same with models of your own: checkpoint folders or names on the hub
  torchax-dflash COMMAND --help
      everything that a command can do

In Python, start with `from torchax_dflash import Generator`. vLLM on TPUs finds its
plugin by itself where this package is installed; `torchax-dflash doctor` says whether.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments, or None for those of the process.

    Returns:
        The exit status: 0, 1 for what `doctor` finds, 2 for an error, which is one line
        on stderr, or 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = _parse(argv)
        # tokenizers would warn of threads in the processes that are forked later
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        from torchax_dflash.cli.requirements import remedy_for

        remedy = remedy_for(error.name or "")
        if remedy is None:
            raise
        return _fail(f"{error.name}: expected this package, found none. {remedy}")
    except (ValueError, RuntimeError, OSError) as error:
        return _fail(str(error) or type(error).__name__)
    except KeyboardInterrupt as interrupt:
        from torchax_dflash.cli.terminal import notes

        notes.print("; ".join(["interrupted", *map(str, interrupt.args)]))
        return 130


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchax-dflash",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print it and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if argv[:1] == [name]:
            module = import_module(f"{__name__}.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv or ["--help"])


class _Version(argparse.Action):
    """Like argparse's own, but asks for the version only when it is wanted."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"torchax-dflash {torchax_dflash.__version__}")
        parser.exit()


def _fail(message: str) -> int:
    """Prints an error as one line, and returns its exit status."""
    from rich.text import Text

    from torchax_dflash.cli.terminal import notes

    line = " ".join(line.strip() for line in message.splitlines())
    # soft_wrap: the terminal breaks the line, so that paths can be copied whole
    notes.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
    return 2
