#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure decoding speed on this machine, as ratios of interleaved runs.

On the demo pair (SmolLM2-135M-Instruct, dequantised Q4_1, float32, and its draft):

  verify     what checking 2 … 16 rows costs the target, against one row
  decode     tokens/s of four decoders on the same prompts, each prompt alone:
             ours with and without a draft, and the `dflash` package's own loop in
             PyTorch with and without one

Every figure is the median over rounds in which all variants take turns, so that a
noisy machine slows all of them alike.

Examples:
  benchmark.py
  benchmark.py --rounds 9 --num-speculative-tokens 2 --json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash.model
import jax
import jax.numpy as jnp
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from torchax_dflash import (
    DraftModel,
    Generator,
    SamplingParams,
    TargetModel,
    demo_draft,
    demo_target,
)
from torchax_dflash.checkpoints.cache import keep_compiled_programs
from torchax_dflash.core.attention import Context
from torchax_dflash.core.kv_cache import KVPool
from torchax_dflash.core.target import forward

ROWS = (1, 2, 4, 8, 16)
CONTEXT = 100
PROMPTS = {
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "math": "Tom has 3 boxes with 12 pens each and gives away 9 pens. "
    "How many pens are left? Explain step by step.",
    "chat": "What are three good reasons to learn a second language?",
}

Variants = dict[str, Callable[[], float]]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="medians are over these (default: 5)")
    add("--max-tokens", type=int, default=96, help="per prompt (default: 96)")
    add(
        "--num-speculative-tokens",
        type=int,
        default=3,
        metavar="K",
        help="drafts a step of our own decoder (default: 3)",
    )
    add(
        "--draft-quantization",
        choices=["int8"],
        help="keep the draft's linear weights in a byte each (ours only)",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.max_tokens < 2:
        parser.error("--rounds must be at least 1, and --max-tokens at least 2")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    keep_compiled_programs()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        report = measure(arguments, progress)
    if arguments.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def measure(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All figures: seconds for `verify`, tokens a second for `decode`."""
    folder = demo_target()
    target = TargetModel.from_pretrained(folder)
    draft = DraftModel.from_pretrained(
        demo_draft(), quantization=arguments.draft_quantization
    )
    rounds = arguments.rounds
    verify = in_turns(verify_variants(target, draft), rounds, progress, "verify")
    decode = {}
    for name, prompt in PROMPTS.items():
        variants = decode_variants(folder, target, draft, prompt, arguments)
        decode[name] = in_turns(variants, rounds, progress, f"decode, {name}")
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores, {jax.default_backend()}",
        "versions": f"jax {jax.__version__}, torch {torch.__version__}",
        "rounds": rounds,
        "verify_seconds": verify,
        "tokens_per_second": decode,
    }


def in_turns(
    variants: Variants, rounds: int, progress: Progress, what: str
) -> dict[str, float]:
    """Medians of each variant's figure; the first round is not counted."""
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for _ in progress.track(range(rounds + 1), description=what):
        for name, variant in variants.items():
            figures[name].append(variant())
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def verify_variants(target: TargetModel, draft: DraftModel) -> Variants:
    """One target pass over n rows after a context; seconds."""
    step = jax.jit(forward, donate_argnames="pool", static_argnames="layer_ids")

    def variant(rows: int) -> Callable[[], float]:
        pool = KVPool.allocate(
            target.config, num_pages=2, page_size=128, dtype=target.dtype
        )

        def run() -> float:
            nonlocal pool
            started = time.perf_counter()
            for _ in range(5):
                pool, logits, _ = step(
                    target,
                    pool,
                    jnp.zeros((1, rows), jnp.int32),
                    context=Context(
                        jnp.array([[0, 1]]),
                        context_lens=jnp.array([CONTEXT]),
                        block_lens=jnp.array([rows]),
                    ),
                    layer_ids=draft.config.target_layer_ids if rows > 1 else (),
                )
                jax.block_until_ready(logits)
            return (time.perf_counter() - started) / 5

        return run

    return {str(rows): variant(rows) for rows in ROWS}


def decode_variants(
    folder: Path,
    target: TargetModel,
    draft: DraftModel,
    prompt: str,
    arguments: argparse.Namespace,
) -> Variants:
    """Decoders of one prompt; tokens a second after the first token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    params = SamplingParams(max_tokens=arguments.max_tokens)
    torch_target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch_draft = dflash.model.DFlashDraftModel.from_pretrained(
        demo_draft(), dtype=torch.float32
    )
    dflash.model._cuda_time = time.perf_counter  # it would synchronise with a GPU

    def ours(generator: Generator) -> Callable[[], float]:
        def run() -> float:
            generator.generate([ids], params)
            return generator.stats.decode_tokens_per_second

        return run

    def theirs(block_size: int | None) -> Callable[[], float]:
        def run() -> float:
            result: Any = dflash.model.dflash_generate(
                torch_draft,
                torch_target,
                torch.LongTensor([ids]),
                arguments.max_tokens,
                list(target.config.eos_token_ids),
                block_size=block_size,
                return_stats=True,
            )
            # Its decode time leaves the first token out, its token count does not.
            tokens = result.num_output_tokens
            return (tokens - 1) / (result.time_per_output_token * tokens)

        return run

    k = arguments.num_speculative_tokens
    return {
        "plain, ours": ours(Generator(target)),
        f"dflash, ours, K = {k}": ours(
            Generator(target, draft, num_speculative_tokens=k)
        ),
        "plain, package (PyTorch)": theirs(1),
        "dflash, package (PyTorch), same K": theirs(k + 1),
        "dflash, package (PyTorch), K = 7": theirs(None),
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def show(report: dict[str, Any]) -> None:
    """Two tables."""
    console = Console()
    console.print(f"{report['machine']}; {report['versions']}")
    console.print(
        f"SmolLM2-135M (dequantised Q4_1), float32; {report['rounds']} rounds"
    )
    one = report["verify_seconds"]["1"]
    verify = Table("rows verified", "ms", "against one row")
    for rows, seconds in report["verify_seconds"].items():
        verify.add_row(rows, f"{seconds * 1e3:.0f}", f"{seconds / one:.2f}x")
    console.print(verify)
    decode = Table("tokens/s", *report["tokens_per_second"])
    for name in next(iter(report["tokens_per_second"].values())):
        cells = []
        for figures in report["tokens_per_second"].values():
            ratio = figures[name] / figures["plain, ours"]
            cells.append(f"{figures[name]:.1f}  ({ratio:.2f}x)")
        decode.add_row(name, *cells)
    console.print(decode)


if __name__ == "__main__":
    sys.exit(main())
