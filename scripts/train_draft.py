#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a DFlash draft for a target model.

Four steps, each with progress; `generate` and `train` go on where they were interrupted
and log JSON lines. Without arguments they work on the demo pair (SmolLM2-135M-Instruct
and the draft in examples/):

  generate   ask the target thousands of questions and keep its answers
  train      train a draft on them, from an older draft or from the target's last layers
  export     write the trained draft as a checkpoint folder
  evaluate   measure what the target accepts, on questions that were never trained on

Everything lies in one folder, runs/NAME unless --folder says otherwise:

  runs/NAME/data/sequences.jsonl    answers           (generate)
  runs/NAME/data/prompts.jsonl      questions         (generate --self-prompts)
  runs/NAME/data/log.jsonl          how fast          (generate)
  runs/NAME/data/features/          hidden states     (generate --store-features)
  runs/NAME/RUN/log.jsonl           losses            (train)
  runs/NAME/RUN/checkpoints/        to resume from    (train)
  runs/NAME/RUN/draft/              the draft         (train, export)

Examples:
  train_draft.py generate --num-prompts 2000
  train_draft.py generate --target Qwen/Qwen3-4B --prompts questions.jsonl
  train_draft.py generate --target Qwen/Qwen3-4B --self-prompts --num-prompts 20000
  train_draft.py train --stages 4:0.6,8:0.4 --steps 4000
  train_draft.py evaluate --draft runs/SmolLM2-135M-Instruct/run/draft
  train_draft.py STEP --help
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from torchax_dflash import DraftModel, Generator, TargetModel
from torchax_dflash.checkpoints.demo import DEMO_TARGET, cache_folder, demo_target
from torchax_dflash.checkpoints.weights import find_checkpoint
from torchax_dflash.training.arguments import (
    check_generate,
    mesh_of,
    parse_arguments,
    recipe_of,
)
from torchax_dflash.training.data.answers import AnswerProgress, answer
from torchax_dflash.training.data.evaluation_questions import (
    Overlap,
    evaluation_questions,
)
from torchax_dflash.training.data.plain_text import add_texts
from torchax_dflash.training.data.prompts import (
    TrainingPrompt,
    builtin_mix,
    read_prompts,
)
from torchax_dflash.training.data.prompts_self import write_prompts
from torchax_dflash.training.data.sequences import SequenceStore, fingerprint
from torchax_dflash.training.model.feature_store import FeatureStore, stored_features
from torchax_dflash.training.report import model_card as report
from torchax_dflash.training.report.evaluation import measure
from torchax_dflash.training.report.export import export
from torchax_dflash.training.report.progress import ProgressBar, notes
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.mesh import shard_state, shard_target
from torchax_dflash.training.run.start import prepare, starting_draft
from torchax_dflash.training.run.trainer import trained_draft
from torchax_dflash.training.run.training_run import Cadence, Run, stopping

DEMO_DRAFT = Path(__file__).parent.parent / "examples" / "smollm2-135m-dflash"

screen = Console(highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = parse_arguments(__doc__ or "", argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    try:
        STEPS[arguments.command](arguments)
    except (ValueError, RuntimeError, OSError) as error:
        message = Text.assemble(("error: ", "bold red"), str(error))
        notes.print(message, soft_wrap=True)  # so that paths can be copied
        return 2
    except KeyboardInterrupt:
        keeps = arguments.command in ("generate", "train")
        goes_on = "; the same command goes on from here" if keeps else ""
        notes.print("interrupted" + goes_on)
        return 130
    return 0


def generate(arguments: argparse.Namespace) -> None:
    """Answers prompts, reads texts, and stores features if wanted."""
    check_generate(arguments)
    layer_ids = arguments.target_layer_ids
    if arguments.store_features and not layer_ids:
        layer_ids = demo_layer_ids(arguments)
    folder, place = locate(arguments)
    hash_of_target = fingerprint(folder)
    store = SequenceStore(place / "data", hash_of_target)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    with ProgressBar("Reading texts") as (_, update):
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
        generator = Generator(
            target,
            tokenizer=tokenizer,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
        )
        prompts = prompts_of(arguments, generator, store)
        with ProgressBar("Answering", store.folder / "log.jsonl") as (log, update):

            def on_answer(progress: AnswerProgress) -> None:
                update(progress.answers, arguments.num_prompts)
                if progress.answers % 100 == 0:
                    log(dataclasses.asdict(progress))

            progress = answer(
                generator,
                islice(prompts, arguments.num_prompts),
                store,
                max_tokens=arguments.max_tokens,
                sampled_share=arguments.sampled_share,
                temperature=arguments.temperature,
                refuse=refuse,
                on_answer=on_answer,
            )
        notes.print(
            f"{progress.answers} answers, {progress.tokens} tokens; "
            f"{progress.left_out} prompts left out (too long for --max-model-len, or "
            "too close to a question of the evaluation)"
        )
    if arguments.store_features:
        features = FeatureStore(store.folder / "features", hash_of_target, layer_ids)
        with ProgressBar("Features") as (_, update):
            features.add(target, list(store), layer_ids, update)


def prompts_of(
    arguments: argparse.Namespace, generator: Generator, store: SequenceStore
) -> Iterable[TrainingPrompt]:
    """The prompts asked for: of files, the target's own, or the built-in mix."""
    if arguments.prompts:
        return read_prompts(arguments.prompts)
    if not arguments.self_prompts:
        return builtin_mix(arguments.seed)
    with ProgressBar("Asking") as (_, update):
        return write_prompts(
            generator,
            arguments.num_prompts,
            store.folder / "prompts.jsonl",
            seed=arguments.seed,
            on_prompt=update,
        )


def train(arguments: argparse.Namespace) -> None:
    """Trains, and exports the result."""
    folder, place = locate(arguments)
    recipe = recipe_of(arguments)
    hash_of_target = fingerprint(folder)
    store = SequenceStore(arguments.data or place / "data", hash_of_target)
    target = TargetModel.from_pretrained(folder, dtype=arguments.dtype)
    mesh = mesh_of(arguments.mesh)
    if mesh is not None:
        target = shard_target(target, mesh)
    sequences = list(store)
    init = arguments.init or ("new" if arguments.target else DEMO_DRAFT)
    draft = starting_draft(
        init,
        folder,
        target,
        sequences,
        num_layers=arguments.num_layers,
        dflash2=arguments.dflash2,
        block_size=recipe.largest_block,
        mask_token_id=arguments.mask_token_id,
        target_layer_ids=arguments.target_layer_ids,
        seed=recipe.seed,
    )
    layer_ids = draft.config.target_layer_ids
    stored = stored_features(
        store.folder / "features", hash_of_target, layer_ids, len(sequences)
    )
    batches = Batches(
        sequences, recipe, target=target, layer_ids=layer_ids, store=stored, mesh=mesh
    )
    state, frozen = prepare(draft, target, batches, recipe)
    run = Run(
        folder=place / arguments.name,
        recipe=recipe,
        frozen=frozen,
        batches=batches,
        about={
            "target": hash_of_target,
            "init": str(init),
            "sequences": len(sequences),
        },
        cadence=Cadence(
            checkpoint=arguments.checkpoint_every, held_out=arguments.held_out_every
        ),
    )
    state = run.resume(state)
    if mesh is not None:
        state, run.frozen = shard_state(state, frozen, mesh)
    notes.print(
        f"{len(batches.train)} sequences, {batches.steps_per_epoch} steps an epoch; "
        f"features {'from disk' if stored else 'made while training'}; "
        f"from step {int(state.step)} of {recipe.steps}"
    )
    with ProgressBar("Training") as (log, update), stopping(run):

        def on_step(step: int, line: dict[str, Any] | None) -> None:
            update(step, recipe.steps)
            if line is not None:
                log(line)

        state = run.train(state, on_step)
    export(trained_draft(state, run.frozen, "float32"), run.folder / "draft")
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
    run = arguments.run
    if run is not None:
        run = run if run.is_dir() else place / run  # a folder, or a run's name
        report.read_log(run)  # complains before the long work
    draft_folder = find_checkpoint(arguments.draft or DEMO_DRAFT)
    on_cpu = jax.default_backend() == "cpu"
    dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    draft = DraftModel.from_pretrained(draft_folder, dtype=dtype)
    target = TargetModel.from_pretrained(folder, dtype=dtype)
    generator = Generator(
        target,
        draft,
        tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        max_model_len=1024,
        max_num_seqs=arguments.max_num_seqs,
        num_speculative_tokens=arguments.num_speculative_tokens,
        draft_sample_method=arguments.draft_sample_method,
    )
    found = {}
    for name in arguments.sets:
        with ProgressBar(name) as (_, update):
            found[name] = measure(
                generator,
                evaluation_questions(name)[: arguments.num_prompts],
                max_tokens=arguments.max_tokens,
                temperature=arguments.temperature,
                on_answer=update,
            )
    screen.print(report.table(found))
    report.write(
        arguments.out or place / "report",
        found,
        report.Subject(
            draft=draft,
            draft_folder=draft_folder,
            target=arguments.target or DEMO_TARGET,
            target_hash=fingerprint(folder),
            dtype=dtype,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            draft_sample_method=arguments.draft_sample_method,
            run=run,
        ),
    )


def locate(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The target's checkpoint, and the folder of everything."""
    folder = find_checkpoint(arguments.target) if arguments.target else demo_target()
    name = arguments.target or DEMO_TARGET
    return folder, arguments.folder or Path("runs") / Path(name).name


def demo_layer_ids(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The demo draft's tapped layers."""
    if arguments.target:
        raise ValueError(
            "--target-layer-ids: expected the layers that the draft will tap, got "
            "none. Name them, for example 1,9,17,25,33."
        )
    return DraftModel.from_pretrained(DEMO_DRAFT).config.target_layer_ids


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "generate": generate,
    "train": train,
    "export": export_again,
    "evaluate": evaluate,
}

if __name__ == "__main__":
    sys.exit(main())
