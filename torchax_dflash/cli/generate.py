# SPDX-License-Identifier: Apache-2.0
r"""Answer prompts with DFlash speculative decoding, offline.

Without arguments it answers a sample question with the demo pair:
SmolLM2-135M-Instruct, which is fetched once, and the draft that comes with this
package. In a terminal, tokens that came from accepted drafts are green, the target's
own are plain.

Examples:
  torchax-dflash generate --compare
  torchax-dflash generate "Write a haiku about rivers." --max-tokens 64
  torchax-dflash generate --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 \
      --dtype bfloat16 "Why is the sky blue?"
  torchax-dflash generate "2 + 2 =" "3 + 3 =" --no-chat --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchax_dflash as dflash  # its names are imported when they are first used
from torchax_dflash.checkpoints.cache import keep_compiled_programs
from torchax_dflash.checkpoints.demo import (
    DEMO_DRAFT,
    DEMO_TARGET,
    demo_draft,
    demo_target,
)
from torchax_dflash.generation.sampling_params import DRAFT_SAMPLE_METHODS

if TYPE_CHECKING:
    from torchax_dflash import (
        DraftModel,
        GenerationOutput,
        Generator,
        SamplingParams,
        TargetModel,
    )

DEMO_PROMPT = "Write a Python function that computes the average of a list of numbers."
MAX_BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help=f"default: {DEMO_PROMPT!r}")
    add("--target", help=f"checkpoint folder or hub id (default: {DEMO_TARGET})")
    add("--draft", help=f"checkpoint folder or hub id (default: {DEMO_DRAFT})")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run the draft checkpoint's own module",
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
    sampling.add_argument(
        "--seed", type=int, help="the same seed gives the same answers"
    )
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
        help="keep the draft's linear weights as int8",
    )
    add("--ignore-eos", action="store_true", help="go on after the end of the answer")
    add("--compare", action="store_true", help="also decode plainly, and compare")
    add(
        "--json",
        action="store_true",
        help="print one JSON object on stdout, everything else on stderr",
    )


def run(arguments: argparse.Namespace) -> int:
    """Loads, generates, compares, reports; returns the exit status."""
    import jax
    from transformers import AutoTokenizer

    from torchax_dflash.cli.terminal import collect, show_report, warm_up

    keep_compiled_programs()
    folder = target_folder(arguments)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts = [
        render(tokenizer, prompt, arguments.chat)
        for prompt in arguments.prompts or [DEMO_PROMPT]
        for _ in range(arguments.num_samples)
    ]
    params = sampling_params(arguments)  # complains before the long work
    target, draft = load(arguments, folder)
    k = arguments.num_speculative_tokens
    if k is None and jax.default_backend() == "cpu":
        k = min(3, draft.config.block_size - 1)
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": min(len(prompts), MAX_BATCH),
        "steps_per_visit": 4,
    }
    generator = dflash.Generator(
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
        plain = dflash.Generator(target, **common)
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


def target_folder(arguments: argparse.Namespace) -> Path:
    """Where the target is, after a look at the options that need no weights."""
    if arguments.num_samples < 1:
        raise ValueError(
            f"--num-samples: expected at least 1, got {arguments.num_samples}."
        )
    if not arguments.target:
        return demo_target()
    folder = dflash.find_checkpoint(arguments.target)
    if not arguments.draft:
        raise ValueError(
            "--draft: expected a draft made for this target, got none. "
            f"The default draft is for {DEMO_TARGET} only."
        )
    return folder


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """How to continue the prompts, checked."""
    params = dflash.SamplingParams(
        max_tokens=arguments.max_tokens,
        ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )
    params.check()
    return params


def load(arguments: argparse.Namespace, folder: Path) -> tuple[TargetModel, DraftModel]:
    """The target in `folder`, and the draft."""
    from torchax_dflash.cli.terminal import progress_bar

    with progress_bar() as progress:
        progress.add_task("Loading weights", total=None)
        target = dflash.TargetModel.from_pretrained(folder, dtype=arguments.dtype)
        draft = dflash.DraftModel.from_pretrained(
            arguments.draft or demo_draft(),
            dtype=arguments.dtype,
            trust_remote_code=arguments.trust_remote_code,
            quantization=arguments.draft_quantization,
        )
    return target, draft


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
    return dflash.chat_token_ids(tokenizer, prompt)


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
