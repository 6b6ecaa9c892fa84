# SPDX-License-Identifier: Apache-2.0
"""`torchax-dflash train generate`: data to train on."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from itertools import islice

from transformers import AutoTokenizer

from torchax_dflash import DraftModel, Generator, TargetModel
from torchax_dflash.checkpoints.demo import demo_draft
from torchax_dflash.cli.progress import ProgressBar
from torchax_dflash.cli.terminal import notes
from torchax_dflash.cli.train_arguments import locate
from torchax_dflash.core.config import config_error
from torchax_dflash.training.data.answers import AnswerProgress, answer
from torchax_dflash.training.data.builtin_prompts import builtin_prompts
from torchax_dflash.training.data.evaluation_questions import Overlap
from torchax_dflash.training.data.plain_text import add_texts
from torchax_dflash.training.data.prompts import TrainingPrompt, read_prompts
from torchax_dflash.training.data.prompts_self import write_prompts
from torchax_dflash.training.data.sequences import SequenceStore, fingerprint
from torchax_dflash.training.model.feature_store import FeatureStore


def generate(arguments: argparse.Namespace) -> None:
    """Answers prompts, reads texts, and stores features if wanted."""
    _check(arguments)
    layer_ids = arguments.target_layer_ids
    if arguments.store_features and not layer_ids:
        layer_ids = _demo_layer_ids(arguments)
    folder, place = locate(arguments)
    target_hash = fingerprint(folder)
    store = SequenceStore(place / "data", target_hash)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    refuse = Overlap()
    with ProgressBar("Reading texts") as (_, update):
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
        _answer_prompts(arguments, generator, store, refuse)
    if arguments.store_features:
        features = FeatureStore(store.folder / "features", target_hash, layer_ids)
        with ProgressBar("Features") as (_, update):
            features.add(target, list(store), layer_ids, update)


def _answer_prompts(
    arguments: argparse.Namespace,
    generator: Generator,
    store: SequenceStore,
    refuse: Overlap,
) -> None:
    prompts = _prompts(arguments, generator, store)
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


def _prompts(
    arguments: argparse.Namespace, generator: Generator, store: SequenceStore
) -> Iterable[TrainingPrompt]:
    """From files, written by the target, or the built-in mix."""
    if arguments.prompts:
        return read_prompts(arguments.prompts)
    if not arguments.self_prompts:
        return builtin_prompts(arguments.seed)
    with ProgressBar("Asking") as (_, update):
        return write_prompts(
            generator,
            arguments.num_prompts,
            store.folder / "prompts.jsonl",
            seed=arguments.seed,
            on_prompt=update,
        )


def _check(arguments: argparse.Namespace) -> None:
    """Finds mistakes in options and prompt files before the long work.

    Raises:
        ValueError: an option is wrong, or a prompt file.
        OSError: a prompt file cannot be read.
    """
    if arguments.num_prompts < 0:
        raise config_error(
            "--num-prompts",
            "0 or more",
            arguments.num_prompts,
            "With 0 no prompts are answered.",
        )
    if arguments.num_prompts and arguments.max_tokens >= arguments.max_model_len:
        raise config_error(
            "--max-tokens",
            f"less than --max-model-len, {arguments.max_model_len}",
            arguments.max_tokens,
            "Leave room for the prompts.",
        )
    if arguments.prompts and arguments.self_prompts:
        raise config_error(
            "--self-prompts",
            "no --prompts beside it",
            [str(file) for file in arguments.prompts],
            "Choose one; a second call with the other adds to the same answers.",
        )
    if arguments.prompts:
        list(read_prompts(arguments.prompts))  # read again later, when they are asked


def _demo_layer_ids(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The demo draft's tapped layers."""
    if arguments.target:
        raise config_error(
            "--target-layer-ids",
            "the layers that the draft will tap",
            None,
            "Name them, for example 1,9,17,25,33.",
        )
    return DraftModel.from_pretrained(demo_draft()).config.target_layer_ids
