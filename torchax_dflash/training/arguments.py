# SPDX-License-Identifier: Apache-2.0
"""The command line of scripts/train_draft.py."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from torchax_dflash.checkpoints.demo import DEMO_TARGET
from torchax_dflash.core.config import config_error
from torchax_dflash.generation.sampling_params import DRAFT_SAMPLE_METHODS
from torchax_dflash.training.data.evaluation_questions import SETS
from torchax_dflash.training.data.prompts import read_prompts
from torchax_dflash.training.run.mesh import make_mesh
from torchax_dflash.training.run.recipe import PRESETS, Recipe

_LAYER_IDS = "tapped target layers, like 1,8,14,20,27"


def parse_arguments(description: str, argv: list[str] | None) -> argparse.Namespace:
    """The command line; `command` of the result says which step.

    Args:
        description: of the program.
        argv: its arguments, or None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="command", required=True, metavar="STEP")
    _add_generate(steps)
    _add_train(steps)
    _add_export(steps)
    _add_evaluate(steps)
    return parser.parse_args(argv)


def check_generate(arguments: argparse.Namespace) -> None:
    """Complains of prompts and lengths before the long work.

    Raises:
        ValueError: which option, and what it should be.
        OSError: a file that cannot be read.
    """
    if arguments.num_prompts < 0:
        raise ValueError(
            f"--num-prompts: expected 0 or more, got {arguments.num_prompts}."
        )
    if arguments.num_prompts and arguments.max_tokens >= arguments.max_model_len:
        raise config_error(
            "--max-tokens",
            f"less than --max-model-len, {arguments.max_model_len}",
            arguments.max_tokens,
            "Leave room for the prompts.",
        )
    if arguments.prompts and arguments.self_prompts:
        raise ValueError(
            "--self-prompts: expected no --prompts beside it, got both. Choose one; "
            "a second call with the other adds to the same answers."
        )
    if arguments.prompts:
        list(read_prompts(arguments.prompts))


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The preset, with what the command line changes."""
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Recipe)
        if getattr(arguments, field.name) is not None
    }
    return dataclasses.replace(PRESETS[arguments.preset], **given)


def mesh_of(shape: tuple[int, ...] | None) -> Mesh | None:
    """The mesh asked for; None for a single device."""
    shape = shape or (jax.device_count(), 1)
    if len(shape) != 2:
        raise ValueError(
            f"--mesh: expected two numbers, like 4,2, got {shape}. The first is how "
            "many devices share a batch, the second how many share the weights."
        )
    return None if shape == (1, 1) else make_mesh(*shape)


def _new_step(steps: Any, name: str, what: str) -> Callable[..., Any]:
    parser = steps.add_parser(name, help=what.split(". ")[0], description=what)
    add = parser.add_argument
    add("--target", help=f"checkpoint folder or hub id (default: {DEMO_TARGET})")
    add("--folder", type=Path, help="where everything lies (default: runs/TARGET)")
    default, of_evaluate = "bfloat16", "float32 on a CPU, else bfloat16"
    add("--dtype", choices=["float32", "bfloat16"],
        default=None if name == "evaluate" else default,
        help=f"default: {of_evaluate if name == 'evaluate' else default}")  # fmt: skip
    return add


def _add_generate(steps: Any) -> None:
    add = _new_step(
        steps,
        "generate",
        "Ask the target, and keep its answers. A prompt that was answered is not asked "
        "again; questions of the evaluation sets, and texts that share a tenth of "
        "their 5-grams with one, are left out.",
    )
    add("--prompts", type=Path, nargs="+", metavar="FILE",
        help='JSON lines with a field "prompt", or text with one prompt a line '
        "(default: an endless built-in mix of code, mathematics and chat)")  # fmt: skip
    add("--self-prompts", action="store_true",
        help="let the target write the prompts, too: what it says as the user of its "
        "own chat template")  # fmt: skip
    add("--text", type=Path, nargs="+", metavar="FILE", default=[],
        help="texts to learn from as they are: cheaper than answers, since the target "
        "only reads them")  # fmt: skip
    add("--num-prompts", type=int, default=2000,
        help="of the prompts, so many at most (default: 2000; 0: none)")  # fmt: skip
    add("--max-tokens", type=int, default=224, help="of an answer (default: 224)")
    add("--sampled-share", type=float, default=0.15, metavar="X",
        help="of the answers, drawn instead of greedy (default: 0.15)")  # fmt: skip
    add("--temperature", type=float, default=0.8, metavar="X",
        help="of drawn answers (default: 0.8)")  # fmt: skip
    add("--max-model-len", type=int, default=512,
        help="of a prompt and its answer (default: 512)")  # fmt: skip
    add("--max-num-seqs", type=int, default=64,
        help="answers that are written at the same time (default: 64)")  # fmt: skip
    add("--seed", type=int, default=0,
        help="of the built-in mix, or of prompts that the target writes")  # fmt: skip
    add("--store-features", action="store_true",
        help="keep the target's hidden states on disk, so that training need not "
        "make them (2 bytes x tapped layers x hidden size for each token)")  # fmt: skip
    add(
        "--target-layer-ids",
        type=_integers,
        help=f"{_LAYER_IDS} (default: the demo draft's)",
    )


def _add_train(steps: Any) -> None:
    add = _new_step(
        steps,
        "train",
        "Train a draft. Interrupted (Ctrl-C, a kill, a power cut), the same command "
        "goes on from the latest checkpoint, to the same result.",
    )
    add("--data", type=Path, help="folder of sequences (default: FOLDER/data)")
    add("--run", dest="name", default="run", help="name of this run (default: run)")
    add("--init", metavar="DRAFT",
        help="a draft to go on from, or 'new' (default: the demo draft for the demo "
        "target, else new)")  # fmt: skip
    add("--num-layers", type=int, default=2, help="of a new draft (default: 2)")
    add("--dflash2", action="store_true",
        help="a new draft has DFlash-2's convolutions and selector")  # fmt: skip
    add("--mask-token-id", type=int, metavar="ID",
        help="of a new draft: a token that texts do not have (default: one that the "
        "target's tokenizer does not use)")  # fmt: skip
    add(
        "--target-layer-ids",
        type=_integers,
        help=f"of a new draft: {_LAYER_IDS} (default: five, spread)",
    )
    add("--preset", choices=sorted(PRESETS), default="demo",
        help="where the settings below start from: 'demo' is made for two CPU cores, "
        "'tpu' for targets like Qwen3-4B on a TPU (default: demo)")  # fmt: skip
    for field in dataclasses.fields(Recipe):
        if field.name not in ("dtype", "stages"):
            add(f"--{field.name.replace('_', '-')}", metavar="X",
                type=int if field.type == "int" else float,
                help=Recipe.help_of(field.name))  # fmt: skip
    add("--stages", type=_stages, metavar="Q:SHARE,…",
        help=Recipe.help_of("stages"))  # fmt: skip
    add("--mesh", type=_integers, metavar="DATA,MODEL",
        help="devices that share a batch, and devices that share the weights (default: "
        "all devices, 1)")  # fmt: skip
    add("--checkpoint-every", type=int, default=500, help="steps (default: 500)")
    add("--held-out-every", type=int, default=500, help="steps (default: 500)")


def _add_export(steps: Any) -> None:
    add = _new_step(
        steps,
        "export",
        "Write a draft in bfloat16, as `dflash`, vLLM and this package load it.",
    )
    add("--draft", required=True, help="checkpoint folder or hub id")
    add("--out", type=Path, required=True, help="the new folder")
    add("--speculators", action="store_true",
        help="in the format of the `speculators` library")  # fmt: skip


def _add_evaluate(steps: Any) -> None:
    add = _new_step(
        steps,
        "evaluate",
        "Answer questions with the draft and count what the target accepts. Writes "
        "report.json, report.png and a model card, README.md.",
    )
    add("--draft", help="checkpoint folder or hub id (default: the demo draft)")
    add("--out", type=Path, help="folder of the report (default: FOLDER/report)")
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--num-prompts", type=int, default=40, help="of each set (default: 40)")
    add("--max-tokens", type=int, default=128, help="of an answer (default: 128)")
    add("--max-num-seqs", type=int, default=8, help="at the same time (default: 8)")
    add("--num-speculative-tokens", type=int, metavar="K",
        help="drafts a step (default: the draft's block size - 1)")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="X",
        help="of answers (default: 0, greedy)")  # fmt: skip
    add("--draft-sample-method", choices=DRAFT_SAMPLE_METHODS, default="greedy",
        help="with a temperature: take the draft's likeliest tokens, or draw them "
        "(default: greedy)")  # fmt: skip
    add(
        "--run",
        type=Path,
        help="the run that made it (its name or folder), for the curves",
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _stages(text: str) -> tuple[tuple[int, float], ...]:
    stages = (part.split(":") for part in text.split(","))
    return tuple((int(block_size), float(share)) for block_size, share in stages)
