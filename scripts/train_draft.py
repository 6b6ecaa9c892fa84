#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a DFlash draft for a target model.

Four steps; each goes on where it was interrupted, shows its progress, and logs JSON
lines. Without arguments they work on the demo pair (SmolLM2-135M-Instruct and the draft
in examples/):

  generate   ask the target thousands of questions and keep its answers
  train      train a draft on them, from an older draft or from the target's last layers
  export     write the trained draft as a checkpoint folder
  evaluate   measure what the target accepts, on questions that were never trained on

Everything lies in one folder, runs/NAME unless --folder says otherwise:

  runs/NAME/data/sequences.jsonl    answers           (generate)
  runs/NAME/data/features/          hidden states     (generate --store-features)
  runs/NAME/RUN/log.jsonl           losses            (train)
  runs/NAME/RUN/checkpoints/        to resume from    (train)
  runs/NAME/RUN/draft/              the draft         (train, export)

Examples:
  train_draft.py generate --num-prompts 2000
  train_draft.py generate --target Qwen/Qwen3-4B --prompts questions.jsonl
  train_draft.py train --stages 4:0.6,8:0.4 --steps 4000
  train_draft.py evaluate --draft runs/SmolLM2-135M-Instruct/run/draft
  train_draft.py STEP --help
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from torchax_dflash import DraftModel, Generator, TargetModel
from torchax_dflash.demo import DEMO_TARGET, cache_folder, demo_target
from torchax_dflash.training import report
from torchax_dflash.training.answers import AnswerProgress, answer
from torchax_dflash.training.batches import Batches
from torchax_dflash.training.evaluation import Acceptance, measure
from torchax_dflash.training.export import export
from torchax_dflash.training.feature_store import FeatureStore
from torchax_dflash.training.prompts import builtin_mix, read_prompts
from torchax_dflash.training.questions import SETS, Overlap, evaluation_questions
from torchax_dflash.training.recipe import PRESETS, Recipe
from torchax_dflash.training.run import Cadence, Run, stopping
from torchax_dflash.training.sequences import SequenceStore, fingerprint
from torchax_dflash.training.setup import prepare, starting_draft
from torchax_dflash.training.texts import add_texts
from torchax_dflash.training.trainer import trained_draft
from torchax_dflash.weights import find_checkpoint

DEMO_DRAFT = Path(__file__).parent.parent / "examples" / "smollm2-135m-dflash"
LAYER_IDS_HELP = "tapped target layers, like 1,8,14,20,27 (default: the demo draft's)"

screen = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="command", required=True, metavar="STEP")
    _add_generate(steps)
    _add_train(steps)
    _add_export(steps)
    _add_evaluate(steps)
    return parser.parse_args(argv)


def _new_step(
    steps: Any, name: str, run: Callable[..., None], what: str
) -> Callable[..., Any]:
    parser = steps.add_parser(name, help=what, description=what)
    parser.set_defaults(step=run)
    add = parser.add_argument
    add("--target", help=f"checkpoint folder or hub id (default: {DEMO_TARGET})")
    add("--folder", type=Path, help="where everything lies (default: runs/TARGET)")
    on_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if name == "evaluate" and on_cpu else "bfloat16"
    add("--dtype", choices=["float32", "bfloat16"], default=dtype)
    return add


def _add_generate(steps: Any) -> None:
    add = _new_step(
        steps,
        "generate",
        generate,
        "Ask the target, and keep its answers. A prompt that was answered is not asked "
        "again; questions of the evaluation sets, and texts that share a tenth of "
        "their 5-grams with one, are left out.",
    )
    add("--prompts", type=Path, nargs="+", metavar="FILE",
        help='JSON lines with a field "prompt", or text with one prompt a line '
        "(default: an endless built-in mix of code, mathematics and chat)")  # fmt: skip
    add("--text", type=Path, nargs="+", metavar="FILE", default=[],
        help="texts to learn from as they are: cheaper than answers, since the target "
        "only reads them")  # fmt: skip
    add("--num-prompts", type=int, default=2000,
        help="of the prompts, so many at most (default: 2000; 0: none)")  # fmt: skip
    add("--max-tokens", type=int, default=224, help="of an answer (default: 224)")
    add("--max-model-len", type=int, default=512,
        help="of a prompt and its answer (default: 512)")  # fmt: skip
    add("--max-num-seqs", type=int, default=64,
        help="answers that are written at the same time (default: 64)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the built-in mix")
    add("--store-features", action="store_true",
        help="keep the target's hidden states on disk, so that training need not "
        "make them (2 bytes x tapped layers x hidden size for each token)")  # fmt: skip
    add("--target-layer-ids", type=_integers, help=LAYER_IDS_HELP)


def _add_train(steps: Any) -> None:
    add = _new_step(
        steps,
        "train",
        train,
        "Train a draft. Interrupted (Ctrl-C, a kill, a power cut), the same command "
        "goes on from the latest checkpoint, to the same result.",
    )
    add("--data", type=Path, help="folder of sequences (default: FOLDER/data)")
    add("--run", dest="name", default="run", help="name of this run (default: run)")
    add("--init", metavar="DRAFT",
        help="a draft to go on from, or 'new' (default: the demo draft for the demo "
        "target, else new)")  # fmt: skip
    add("--num-layers", type=int, default=2, help="of a new draft (default: 2)")
    add("--mask-token-id", type=int, metavar="ID",
        help="of a new draft: a token that texts do not have (default: one that the "
        "target's tokenizer does not use)")  # fmt: skip
    add("--target-layer-ids", type=_integers, help=LAYER_IDS_HELP)
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
    add("--checkpoint-every", type=int, default=500, help="steps (default: 500)")
    add("--held-out-every", type=int, default=500, help="steps (default: 500)")


def _add_export(steps: Any) -> None:
    add = _new_step(
        steps,
        "export",
        export_again,
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
        evaluate,
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
    add("--run", type=Path, help="folder of the run that made it, for the curves")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = parse_arguments(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    try:
        arguments.step(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        notes.print(Text.assemble(("error: ", "bold red"), str(error)))
        return 2
    except KeyboardInterrupt:
        notes.print("interrupted; the same command goes on from here")
        return 130
    return 0


def generate(arguments: argparse.Namespace) -> None:
    """Answers prompts, reads texts, and stores features if wanted."""
    folder, place = locate(arguments)
    hash_of_target = fingerprint(folder)
    store = SequenceStore(place / "data", hash_of_target)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    with bar("Reading texts") as (_, update):
        refuse = Overlap()
        add_texts(
            arguments.text,
            store,
            tokenizer,
            length=arguments.max_model_len,
            refuse=refuse,
            on_text=update,
        )
    target = TargetModel.from_pretrained(folder, dtype=arguments.dtype)
    if arguments.num_prompts:
        prompts = (
            read_prompts(arguments.prompts)
            if arguments.prompts
            else builtin_mix(arguments.seed)
        )
        generator = Generator(
            target,
            tokenizer=tokenizer,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
        )
        with bar("Answering") as (log, update):

            def on_answer(progress: AnswerProgress) -> None:
                update(progress.answers, arguments.num_prompts)
                if progress.answers % 100 == 0:
                    log(dataclasses.asdict(progress))

            answer(
                generator,
                islice(prompts, arguments.num_prompts),
                store,
                max_tokens=arguments.max_tokens,
                refuse=refuse,
                on_answer=on_answer,
            )
    if arguments.store_features:
        layer_ids = arguments.target_layer_ids or demo_layer_ids(arguments)
        features = FeatureStore(store.folder / "features", hash_of_target, layer_ids)
        with bar("Features") as (_, update):
            features.add(target, list(store), layer_ids, update)


def train(arguments: argparse.Namespace) -> None:
    """Trains, and exports the result."""
    folder, place = locate(arguments)
    recipe = recipe_of(arguments)
    hash_of_target = fingerprint(folder)
    store = SequenceStore(arguments.data or place / "data", hash_of_target)
    target = TargetModel.from_pretrained(folder, dtype=arguments.dtype)
    sequences = list(store)
    init = arguments.init or ("new" if arguments.target else DEMO_DRAFT)
    draft = starting_draft(
        init,
        folder,
        target,
        sequences,
        num_layers=arguments.num_layers,
        block_size=recipe.largest_block,
        mask_token_id=arguments.mask_token_id,
        target_layer_ids=arguments.target_layer_ids,
        seed=recipe.seed,
    )
    layer_ids = draft.config.target_layer_ids
    features = store.folder / "features"
    stored = (
        FeatureStore(features, hash_of_target, layer_ids) if features.is_dir() else None
    )
    if stored is not None:
        sequences = sequences[: len(stored)]
    batches = Batches(
        sequences, recipe, target=target, layer_ids=layer_ids, store=stored
    )
    state, frozen = prepare(draft, target, batches, recipe)
    run = Run(
        folder=place / arguments.name,
        recipe=recipe,
        frozen=frozen,
        batches=batches,
        about={"target": hash_of_target, "init": str(init)},
        cadence=Cadence(
            checkpoint=arguments.checkpoint_every, held_out=arguments.held_out_every
        ),
    )
    state = run.resume(state)
    notes.print(
        f"{len(batches.train)} sequences, {batches.steps_per_epoch} steps an epoch; "
        f"features {'from disk' if stored else 'made while training'}; "
        f"from step {int(state.step)} of {recipe.steps}"
    )
    with bar("Training") as (log, update), stopping(run):

        def on_step(step: int, line: dict[str, Any] | None) -> None:
            update(step, recipe.steps)
            if line is not None:
                log(line)

        state = run.train(state, on_step)
    export(trained_draft(state, frozen, "float32"), run.folder / "draft")
    notes.print(f"the draft as it is now: {run.folder / 'draft'}")
    if run.stopped:
        raise KeyboardInterrupt


def export_again(arguments: argparse.Namespace) -> None:
    """Writes a draft in another format."""
    draft = DraftModel.from_pretrained(arguments.draft)
    target = arguments.target or DEMO_TARGET
    export(
        draft,
        arguments.out,
        dtype=arguments.dtype,
        speculators_for=target if arguments.speculators else None,
    )
    notes.print(f"written: {arguments.out}")


def evaluate(arguments: argparse.Namespace) -> None:
    """Measures acceptance and writes the report."""
    folder, place = locate(arguments)
    draft_folder = find_checkpoint(arguments.draft or DEMO_DRAFT)
    draft = DraftModel.from_pretrained(draft_folder, dtype=arguments.dtype)
    target = TargetModel.from_pretrained(folder, dtype=arguments.dtype)
    generator = Generator(
        target,
        draft,
        tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        max_model_len=1024,
        max_num_seqs=arguments.max_num_seqs,
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    found: dict[str, Acceptance] = {}
    for name in arguments.sets:
        questions = evaluation_questions(name)[: arguments.num_prompts]
        with bar(name) as (_, update):
            found[name] = measure(
                generator, questions, max_tokens=arguments.max_tokens, on_answer=update
            )
    report.write(
        arguments.out or place / "report",
        found,
        report.Subject(
            draft=draft,
            draft_folder=draft_folder,
            target=arguments.target or DEMO_TARGET,
            target_hash=fingerprint(folder),
            dtype=arguments.dtype,
            max_tokens=arguments.max_tokens,
            run=arguments.run,
        ),
    )
    table = Table("set", "tau", "accepted at 1, 2, …", "prompts", "tokens")
    for name, acceptance in found.items():
        shares = " ".join(f"{share:.0%}" for share in acceptance.accepted)
        counts = (str(acceptance.prompts), str(acceptance.tokens))
        table.add_row(name, f"{acceptance.tau:.2f}", shares, *counts)
    screen.print(table)


def locate(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The target's checkpoint, and the folder of everything."""
    folder = find_checkpoint(arguments.target) if arguments.target else demo_target()
    name = arguments.target or DEMO_TARGET
    return folder, arguments.folder or Path("runs") / Path(name).name


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The preset, with what the command line changes."""
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Recipe)
        if getattr(arguments, field.name) is not None
    }
    return dataclasses.replace(PRESETS[arguments.preset], **given)


def demo_layer_ids(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The demo draft's tapped layers."""
    if arguments.target:
        raise ValueError(
            "--target-layer-ids: expected the layers that the draft will tap, got "
            "none. Name them, for example 1,9,17,25,33."
        )
    return DraftModel.from_pretrained(DEMO_DRAFT).config.target_layer_ids


class bar:
    """A progress bar on stderr; where there is no terminal, JSON lines instead."""

    def __init__(self, what: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
        )
        self._what = what
        self._progress = Progress(*columns, console=notes, transient=True)
        self._task = self._progress.add_task(what, total=None, news="")

    def __enter__(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Starts it; gives `log(line)` and `update(done, total)`."""
        self._progress.start()
        return self._log, self._update

    def __exit__(self, *_: object) -> None:
        """Takes it away."""
        self._progress.stop()

    def _log(self, line: dict[str, Any]) -> None:
        if notes.is_terminal:
            shown = ("tau", "loss", "tokens")
            news = " ".join(f"{k} {line[k]:.4g}" for k in shown if k in line)
            self._progress.update(self._task, news=news)
        else:
            print(json.dumps({"what": self._what} | line), file=sys.stderr, flush=True)

    def _update(self, done: int, total: int | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _stages(text: str) -> tuple[tuple[int, float], ...]:
    stages = (part.split(":") for part in text.split(","))
    return tuple((int(block_size), float(share)) for block_size, share in stages)


if __name__ == "__main__":
    sys.exit(main())
