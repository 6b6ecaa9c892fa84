#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answer prompts with DFlash speculative decoding, offline.

Without arguments it answers a sample question with SmolLM2-135M-Instruct and the draft
that lies beside this script. In a terminal, tokens that came from accepted drafts are
green, the target's own are plain.

Examples:
  generate.py --compare
  generate.py "Write a haiku about rivers." --max-tokens 64
  generate.py --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --dtype bfloat16
  generate.py "2 + 2 =" "3 + 3 =" --no-chat --json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import jax
from rich.text import Text
from terminal import collect, notes, progress_bar, show_report, warm_up
from transformers import AutoTokenizer

from torchax_dflash import (
    DraftModel,
    GenerationOutput,
    Generator,
    SamplingParams,
    TargetModel,
)
from torchax_dflash.checkpoints.demo import DEMO_TARGET, cache_folder, demo_target
from torchax_dflash.checkpoints.weights import find_checkpoint
from torchax_dflash.core.sampling import DRAFT_SAMPLE_METHODS
from torchax_dflash.generation.text import chat_token_ids

DEMO_DRAFT = Path(__file__).parent / "smollm2-135m-dflash"
DEMO_PROMPT = "Write a Python function that computes the average of a list of numbers."
MAX_BATCH = 8


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help=f"default: {DEMO_PROMPT!r}")
    add("--target", help=f"checkpoint folder or hub id (default: {DEMO_TARGET})")
    add("--draft", help=f"checkpoint folder or hub id (default: {DEMO_DRAFT.name})")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run the module that the draft's checkpoint brings",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put prompts into the chat template (default: if the target has one)",
    )
    add("--max-tokens", type=int, default=128, help="per answer (default: 128)")
    add(
        "--max-model-len",
        type=int,
        default=2048,
        help="prompt and answer together (default: 2048)",
    )
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="drafts a step, at most the draft's block size - 1 (default: that, but at "
        "most 3 on a CPU, where verifying more rows costs more)",
    )
    sampling = parser.add_argument_group("sampling (greedy without --temperature)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--seed", type=int, help="the same one, the same answers")
    sampling.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="answers to each prompt"
    )
    sampling.add_argument(
        "--draft-sample-method",
        choices=DRAFT_SAMPLE_METHODS,
        default="probabilistic",
        help="propose the draft's likeliest tokens, or draw them, which is accepted "
        "more often (default: probabilistic)",
    )
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add(
        "--draft-quantization",
        choices=["int8"],
        help="keep the draft's linear weights in a byte each",
    )
    add("--ignore-eos", action="store_true", help="go on after the end of the answer")
    add("--compare", action="store_true", help="also decode plainly, and compare")
    add(
        "--json",
        action="store_true",
        help="print one JSON object on stdout, everything else on stderr",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = parse_arguments(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    try:
        return run(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        message = Text.assemble(("error: ", "bold red"), str(error))
        notes.print(message, soft_wrap=True)  # so that paths can be copied
        return 2
    except KeyboardInterrupt:
        notes.print("interrupted")
        return 130


def run(arguments: argparse.Namespace) -> int:
    """Loads, generates, compares, reports."""
    target_folder = (
        find_checkpoint(arguments.target) if arguments.target else demo_target()
    )
    if arguments.target and not arguments.draft:
        raise ValueError(
            "--draft: expected a draft made for this target, got none. "
            f"The default draft is for {DEMO_TARGET} only."
        )
    tokenizer = AutoTokenizer.from_pretrained(target_folder, trust_remote_code=False)
    prompts = [
        render(tokenizer, prompt, arguments.chat)
        for prompt in arguments.prompts or [DEMO_PROMPT]
    ]
    if arguments.num_samples < 1:
        raise ValueError(
            f"--num-samples: expected at least 1, got {arguments.num_samples}."
        )
    prompts = [prompt for prompt in prompts for _ in range(arguments.num_samples)]
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )
    params.check()  # complains before the long work
    with progress_bar() as progress:
        progress.add_task("Loading weights", total=None)
        target = TargetModel.from_pretrained(target_folder, dtype=arguments.dtype)
        draft = DraftModel.from_pretrained(
            arguments.draft or DEMO_DRAFT,
            dtype=arguments.dtype,
            trust_remote_code=arguments.trust_remote_code,
            quantization=arguments.draft_quantization,
        )
    k = arguments.num_speculative_tokens
    if k is None and jax.default_backend() == "cpu":
        k = min(3, draft.config.block_size - 1)
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": min(len(prompts), MAX_BATCH),
        "steps_per_visit": 4,
    }
    generator = Generator(
        target,
        draft,
        num_speculative_tokens=k,
        draft_sample_method=arguments.draft_sample_method,
        **common,
    )
    events = generator.stream(prompts, params)  # likewise
    warm_up(generator, "Compiling")
    outputs, interrupted = collect(events, prompts, show=not arguments.json)
    report: dict[str, Any] = {
        "decode_tokens_per_second": generator.stats.decode_tokens_per_second,
        "recompilations": generator.stats.recompilations,
    }
    if arguments.compare and not interrupted:
        plain = Generator(target, **common)
        warm_up(plain, "Compiling plain decoding")
        baseline = plain.generate(prompts, params)
        report |= comparison(outputs, baseline, generator, plain)
        if arguments.temperature:
            del report["identical"]  # drawn otherwise, from the same distribution
    if arguments.json:
        print(json.dumps(as_json(outputs, report)))
    else:
        show_report(outputs, report, generator.num_speculative_tokens)
    return 130 if interrupted else 0


def render(tokenizer: Any, prompt: str, chat: bool | None) -> list[int]:
    """The prompt's token ids, in the chat template if wanted."""
    if not prompt.strip():
        raise ValueError("PROMPT: expected some text, got none. Write a prompt.")
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer(prompt).input_ids
    if tokenizer.chat_template is None:
        raise ValueError(
            "--chat: expected a target with a chat template, got one without. "
            "Use --no-chat."
        )
    return chat_token_ids(tokenizer, prompt)


def comparison(
    outputs: list[GenerationOutput],
    baseline: list[GenerationOutput],
    generator: Generator,
    plain: Generator,
) -> dict[str, Any]:
    """DFlash beside plain decoding of the same prompts on the same target."""
    pairs = zip(outputs, baseline, strict=True)
    speed = generator.stats.decode_tokens_per_second
    plain_speed = plain.stats.decode_tokens_per_second
    return {
        "baseline_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed if plain_speed else None,
        "identical": all(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
    }


def as_json(outputs: list[GenerationOutput], report: dict[str, Any]) -> dict[str, Any]:
    """One flat object for one prompt, a list `outputs` for several."""
    answers = [
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "prompt_tokens": len(output.prompt_token_ids),
            "acceptance_lengths": output.acceptance_lengths,
            "mean_acceptance_length": output.mean_acceptance_length,
            "finish_reason": output.finish_reason or "interrupted",
        }
        for output in outputs
    ]
    return answers[0] | report if len(answers) == 1 else {"outputs": answers} | report


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
