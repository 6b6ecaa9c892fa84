# SPDX-License-Identifier: Apache-2.0
"""`torchax-dflash train export` and `evaluate`: a draft on disk, and its acceptance."""

from __future__ import annotations

import argparse

import jax
from transformers import AutoTokenizer

from torchax_dflash import DraftModel, Generator, TargetModel
from torchax_dflash.checkpoints.demo import DEMO_TARGET, demo_draft
from torchax_dflash.checkpoints.finding import find_checkpoint
from torchax_dflash.cli.progress import ProgressBar
from torchax_dflash.cli.terminal import notes, screen
from torchax_dflash.cli.train_arguments import locate
from torchax_dflash.training.data.evaluation_questions import evaluation_questions
from torchax_dflash.training.data.sequences import fingerprint
from torchax_dflash.training.report import model_card
from torchax_dflash.training.report.evaluation import measure
from torchax_dflash.training.report.export import export


def export_draft(arguments: argparse.Namespace) -> None:
    """Writes a draft again, in a format and dtype of choice."""
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
    run = arguments.trained_in
    if run is not None:
        run = run if run.is_dir() else place / run  # a folder, or a run's name
        model_card.read_log(run)  # so that a mistake is found before the long work
    draft_folder = find_checkpoint(arguments.draft or demo_draft())
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
    screen.print(model_card.table(found))
    model_card.write(
        arguments.out or place / "report",
        found,
        model_card.Subject(
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
