# SPDX-License-Identifier: Apache-2.0
"""The options of `torchax-dflash train`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchax_dflash.checkpoints.demo import DEMO_TARGET, demo_target
from torchax_dflash.checkpoints.finding import find_checkpoint
from torchax_dflash.generation.sampling_params import DRAFT_SAMPLE_METHODS
from torchax_dflash.training.data.evaluation_questions import SETS
from torchax_dflash.training.run.recipe import CHOICES, PRESETS, Recipe

_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "str": str}
_LAYER_IDS = "tapped target layers, like 1,8,14,20,27"


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Adds a subcommand for each step; `step` of the result says which it is."""
    steps = parser.add_subparsers(title="steps", required=True, metavar="STEP")
    _add_generate(steps)
    _add_train(steps)
    _add_export(steps)
    _add_evaluate(steps)


def locate(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The target's checkpoint, and the folder of all files."""
    folder = find_checkpoint(arguments.target) if arguments.target else demo_target()
    name = arguments.target or DEMO_TARGET
    return folder, arguments.folder or Path("runs") / Path(name).name


def _new_step(
    steps: Any, name: str, what: str, aliases: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """A step with the options that all of them have."""
    parser = steps.add_parser(
        name, aliases=aliases, help=what.split(". ")[0], description=what
    )
    parser.set_defaults(step=name)
    add = parser.add_argument
    add("--target", help=f"checkpoint folder or hub id (default: {DEMO_TARGET})")
    add("--folder", type=Path, help="folder of all files (default: runs/TARGET)")
    default, of_evaluate = "bfloat16", "float32 on CPUs, otherwise bfloat16"
    add("--dtype", choices=["float32", "bfloat16"],
        default=None if name == "evaluate" else default,
        help=f"default: {of_evaluate if name == 'evaluate' else default}")  # fmt: skip
    return add


def _add_generate(steps: Any) -> None:
    add = _new_step(
        steps,
        "generate",
        "Ask the target and keep its answers. Prompts that have an answer are skipped. "
        "Evaluation questions, and texts that share a tenth of their word 5-grams with "
        "one, are left out.",
    )
    add("--prompts", type=Path, nargs="+", metavar="FILE",
        help='JSON lines with a field "prompt", or text with one prompt per line '
        "(default: an endless built-in mix of code, mathematics and chat)")  # fmt: skip
    add("--self-prompts", action="store_true",
        help="let the target write the prompts, too: what it generates for the user's "
        "turn of its own chat template")  # fmt: skip
    add("--text", type=Path, nargs="+", metavar="FILE", default=[],
        help="texts to learn from directly; cheaper than answers, since the target "
        "only reads them")  # fmt: skip
    add("--num-prompts", type=int, default=2000, metavar="N",
        help="answer at most this many prompts (default: 2000)")  # fmt: skip
    add("--max-tokens", type=int, default=224, metavar="N",
        help="maximum length of an answer (default: 224)")  # fmt: skip
    add("--sampled-share", type=float, default=0.15, metavar="X",
        help="share of answers that are sampled; the others are greedy (default: "
        "0.15)")  # fmt: skip
    add("--temperature", type=float, default=0.8, metavar="X",
        help="temperature of sampled answers (default: 0.8)")  # fmt: skip
    add("--max-model-len", type=int, default=512, metavar="N",
        help="maximum length of a prompt and its answer (default: 512)")  # fmt: skip
    add("--max-num-seqs", type=int, default=64, metavar="N",
        help="prompts that are answered at the same time (default: 64)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N",
        help="seed of the built-in mix, or of the prompts that the target writes "
        "(default: 0)")  # fmt: skip
    add("--store-features", action="store_true",
        help="store the target's hidden states on disk, so that training does not "
        "compute them (2 bytes x tapped layers x hidden size per token)")  # fmt: skip
    add(
        "--target-layer-ids",
        type=_integers,
        metavar="IDS",
        help=f"{_LAYER_IDS} (default: the demo draft's)",
    )


def _add_train(steps: Any) -> None:
    add = _new_step(
        steps,
        "run",
        "Train a draft. After an interruption (Ctrl-C, a kill, a power failure) the "
        "same command continues from the latest checkpoint, to the same result.",
        aliases=("train",),
    )
    add("--data", type=Path, help="folder of the sequences (default: FOLDER/data)")
    add("--run", dest="name", default="run", help="name of this run (default: run)")
    add("--init", metavar="DRAFT",
        help="a draft to start from, or 'new' (default: the demo draft for the demo "
        "target, otherwise new)")  # fmt: skip
    add("--num-layers", type=int, default=2, metavar="N",
        help="layers of a new draft (default: 2)")  # fmt: skip
    add("--dflash2", action="store_true",
        help="give a new draft DFlash-2's convolutions and candidate "
        "selector")  # fmt: skip
    add("--mask-token-id", type=int, metavar="ID",
        help="mask token of a new draft, which must not occur in texts (default: one "
        "that the target's tokenizer does not use)")  # fmt: skip
    add(
        "--target-layer-ids",
        type=_integers,
        metavar="IDS",
        help=f"of a new draft: {_LAYER_IDS} (default: five, evenly spread)",
    )
    add("--preset", choices=sorted(PRESETS), default="demo",
        help="starting point of the settings below: 'demo' for two CPU cores, 'tpu' "
        "for targets like Qwen3-4B on a TPU (default: demo)")  # fmt: skip
    for field in dataclasses.fields(Recipe):
        if field.name not in ("dtype", "stages"):
            add(f"--{field.name.replace('_', '-')}", metavar="X",
                type=_TYPES.get(str(field.type), float),
                choices=CHOICES.get(field.name),
                help=Recipe.help_of(field.name).rstrip("."))  # fmt: skip
    add("--stages", type=_stages, metavar="Q:SHARE,…",
        help=Recipe.help_of("stages").rstrip("."))  # fmt: skip
    add("--mesh", type=_integers, metavar="DATA,MODEL",
        help="how many devices share a batch, and how many share the weights (default: "
        "all devices, 1)")  # fmt: skip
    add("--checkpoint-every", type=int, default=500, metavar="STEPS",
        help="write a checkpoint every so many steps (default: 500)")  # fmt: skip
    add("--held-out-every", type=int, default=500, metavar="STEPS",
        help="evaluate held-out sequences every so many steps (default: "
        "500)")  # fmt: skip


def _add_export(steps: Any) -> None:
    add = _new_step(
        steps,
        "export",
        "Write a draft as a checkpoint that `dflash`, vLLM and this package load.",
    )
    add("--draft", required=True, help="checkpoint folder or hub id")
    add("--out", type=Path, required=True, help="the new folder")
    add("--speculators", action="store_true",
        help="in the format of the `speculators` library")  # fmt: skip


def _add_evaluate(steps: Any) -> None:
    add = _new_step(
        steps,
        "evaluate",
        "Answer questions with the draft and measure what the target accepts. Writes "
        "report.json, report.png and a model card, README.md.",
    )
    add("--draft", help="checkpoint folder or hub id (default: the demo draft)")
    add("--out", type=Path, help="folder of the report (default: FOLDER/report)")
    add("--sets", nargs="+", choices=SETS, default=list(SETS),
        help="sets of questions (default: all)")  # fmt: skip
    add("--num-prompts", type=int, default=40, metavar="N",
        help="questions of each set (default: 40)")  # fmt: skip
    add("--max-tokens", type=int, default=128, metavar="N",
        help="maximum length of an answer (default: 128)")  # fmt: skip
    add("--max-num-seqs", type=int, default=8, metavar="N",
        help="questions that are answered at the same time (default: 8)")  # fmt: skip
    add("--num-speculative-tokens", type=int, metavar="K",
        help="drafts per step (default: the draft's block size - 1)")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="X",
        help="temperature of the answers (default: 0, greedy)")  # fmt: skip
    add("--draft-sample-method", choices=DRAFT_SAMPLE_METHODS, default="greedy",
        help="with a temperature: take the draft's likeliest tokens, or sample them "
        "(default: greedy)")  # fmt: skip
    add(
        "--run",
        dest="trained_in",
        type=Path,
        metavar="RUN",
        help="the run that trained the draft (its name or folder), for the curves",
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _stages(text: str) -> tuple[tuple[int, float], ...]:
    stages = (part.split(":") for part in text.split(","))
    return tuple((int(block_size), float(share)) for block_size, share in stages)
