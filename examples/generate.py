#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answer a question with DFlash speculative decoding, in a page of Python.

With arguments, this is the command `torchax-dflash generate`: try --help.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from torchax_dflash import (
    DraftModel,
    Generator,
    SamplingParams,
    TargetModel,
    chat_token_ids,
    cli,
    demo_draft,
    demo_target,
    keep_compiled_programs,
)

QUESTION = "Write a Python function that computes the average of a list of numbers."


def main(arguments: list[str]) -> int:
    """Runs the command with arguments, the demo below without."""
    if arguments:
        return cli.main(["generate", *arguments])
    demo()
    return 0


def demo() -> None:
    """Streams one answer: accepted drafts in green, the target's own tokens plain."""
    console = Console(highlight=False)

    # A target and a draft that was trained for it: folders, or names on the hub.
    folder = demo_target()
    target = TargetModel.from_pretrained(folder, dtype="float32")
    draft = DraftModel.from_pretrained(demo_draft(), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    # Compiled programs are kept: from the second start on, this takes a few seconds.
    keep_compiled_programs()
    generator = Generator(
        target,
        draft,
        tokenizer=tokenizer,
        max_model_len=2048,
        num_speculative_tokens=3,  # on a CPU, where verifying more rows costs more
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Compiling", total=None)
        generator.warm_up(
            lambda done, total: progress.update(task, completed=done, total=total)
        )

    prompt = chat_token_ids(tokenizer, QUESTION)
    output = None
    for event in generator.stream([prompt], SamplingParams(max_tokens=128)):
        output = event.output
        for text, from_draft in event.segments:
            style = "green" if from_draft else None
            console.print(text, style=style, end="", markup=False, soft_wrap=True)

    assert output is not None
    console.print("\n")
    console.print(f"{output.mean_acceptance_length:.2f} tokens a target pass")
    console.print(f"{generator.stats.decode_tokens_per_second:.1f} tokens/s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
