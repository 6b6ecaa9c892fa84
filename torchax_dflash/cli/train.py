# SPDX-License-Identifier: Apache-2.0
"""Train a DFlash draft for a target model.

Four steps, each of which shows its progress. `generate` and `run` continue where they
were interrupted, and log JSON lines. Without arguments they work on the demo pair,
SmolLM2-135M-Instruct and the draft in this package:

  generate      ask the target thousands of questions and keep its answers
  run           train a draft on them, from an older draft or the target's last layers
  export        write the trained draft as a checkpoint folder
  evaluate      measure what the target accepts, on questions that are never trained on

All files are in one folder, runs/NAME unless --folder says otherwise:

  runs/NAME/data/sequences.jsonl    answers                (generate)
  runs/NAME/data/prompts.jsonl      questions              (generate --self-prompts)
  runs/NAME/data/log.jsonl          speed                  (generate)
  runs/NAME/data/features/          hidden states          (generate --store-features)
  runs/NAME/RUN/log.jsonl           losses                 (run)
  runs/NAME/RUN/checkpoints/        states to resume from  (run)
  runs/NAME/RUN/draft/              the draft              (run)
  runs/NAME/report/                 acceptance             (evaluate)

Examples:
  torchax-dflash train generate --num-prompts 2000
  torchax-dflash train generate --target Qwen/Qwen3-4B --prompts questions.jsonl
  torchax-dflash train generate --target Qwen/Qwen3-4B --self-prompts
  torchax-dflash train run --stages 4:0.6,8:0.4 --steps 4000
  torchax-dflash train evaluate --draft runs/SmolLM2-135M-Instruct/run/draft
  torchax-dflash train STEP --help
"""

from __future__ import annotations

import argparse

from torchax_dflash.cli import train_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the four steps and their options."""
    train_arguments.add_steps(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the step that was asked for; returns the exit status.

    Raises:
        ValueError: an option or a file has a mistake.
        OSError: a file cannot be read or written.
        KeyboardInterrupt: with what to do next, where the step can be continued.
    """
    from torchax_dflash.checkpoints.cache import keep_compiled_programs
    from torchax_dflash.cli import train_generate, train_report, train_run

    steps = {
        "generate": train_generate.generate,
        "run": train_run.train,
        "export": train_report.export_draft,
        "evaluate": train_report.evaluate,
    }
    keep_compiled_programs()
    try:
        steps[arguments.step](arguments)
    except KeyboardInterrupt:
        if arguments.step not in ("generate", "run"):
            raise
        remedy = "run the same command again to continue"
        raise KeyboardInterrupt(remedy) from None
    return 0
