# SPDX-License-Identifier: Apache-2.0
"""Engines to run, what to ask them, and what they should answer.

An engine runs in a process of its own (`serving_engine.py`), so no test imports vllm;
what it should answer comes from our offline generator, which other tests hold against
transformers, and from the unmodified PyTorch draft.
"""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from dflash.model import DFlash2DraftModel
from tiny_models import BLOCK, VOCAB, pair, random_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchax_dflash import Generator, SamplingParams

ENGINE = Path(__file__).parent / "serving_engine.py"
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}

LAZY = {"SKIP_JAX_PRECOMPILE": "1", "VLLM_XLA_CHECK_RECOMPILATION": "0"}
"""Compile what is used, not everything."""

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_drafts"


def run_engine(job: dict) -> dict:
    """One engine start; raises with the engine's output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "job.json", Path(folder) / "result.json"
        request.write_text(json.dumps(job))
        command = [sys.executable, ENGINE, request, result]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if not result.is_file():
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
        return json.loads(result.read_text())


def save_pair(tiny: SimpleNamespace) -> tuple[str, str]:
    """Folders of a tiny target with a tokenizer, and of its draft."""
    folder = tempfile.mkdtemp(prefix="serving-")
    words = {f"w{i}": i for i in range(VOCAB)}
    bare = Tokenizer(models.WordLevel(words, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny.torch_target.save_pretrained(f"{folder}/target")
    tiny.torch_draft.save_pretrained(f"{folder}/draft")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="w2")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }} {% endfor %}"
    )
    tokenizer.save_pretrained(f"{folder}/target")
    return f"{folder}/target", f"{folder}/draft"


def characters(torch_target, torch_draft, vocab_size: int) -> tuple[str, str]:
    """Folders of a target whose tokens are characters of JSON, and of its draft."""
    folder = tempfile.mkdtemp(prefix="serving-")
    letters = '{}"[]:,0123456789abcdefghijklmnop'[: vocab_size - 1]
    tokens = [*letters[:2], "<eos>", *letters[2:]]
    words = {token: index for index, token in enumerate(tokens)}
    bare = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    bare.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    bare.decoder = decoders.Fuse()
    torch_target.save_pretrained(f"{folder}/target")
    torch_draft.save_pretrained(f"{folder}/draft")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>")
    tokenizer.save_pretrained(f"{folder}/target")
    return f"{folder}/target", f"{folder}/draft"


@functools.cache
def saved(family: str, tied: bool, kind: str = "DFlash") -> tuple[str, str]:
    """Folders of `pair(family, tied, kind)`."""
    return save_pair(pair(family, tied, kind))


def engine_arguments(
    target, draft, k=BLOCK - 1, sample_method="greedy", **options
) -> dict:
    """Of `vllm.LLM`; `draft` may be None."""
    speculative = {
        "method": "dflash",
        "model": draft,
        "num_speculative_tokens": k,
        "draft_sample_method": sample_method,
    }
    return {
        "model": str(target),
        "dtype": "float32",
        "speculative_config": speculative if draft else None,
        **LIMITS,
        **options,
    }


def batches() -> dict[str, dict]:
    """What can go wrong between requests, by name."""
    go_on = {"max_tokens": 40, "ignore_eos": True}
    prefix = random_prompts(1, seed=30, longest=2)[0] * 57
    prefix = (prefix + random_prompts(60, seed=31, longest=1)[0] * 57)[:57]
    endings = random_prompts(5, seed=32, longest=30)
    shared = [prefix + ending for ending in endings] + [[7], prefix]
    return {
        # more requests than rows, prompts longer than a chunk, joining and leaving
        "ragged": {"prompts": random_prompts(12), "params": go_on},
        "shared prefix": {"prompts": shared, "params": go_on},
        "shared prefix, cached": {"prompts": shared, "params": go_on},
        # two decoding requests take the whole token budget from the others
        "left unscheduled": {
            "prompts": [[3], [4], [7], [9], [11], [2]],
            "params": go_on,
        },
        "max_model_len": {
            "prompts": [(p * 128)[:n] for p, n in zip(
                random_prompts(4, seed=33), (120, 124, 126, 127), strict=True)],
            "params": go_on,
        },
        "stop token": {
            "prompts": random_prompts(12),
            "params": {"max_tokens": 40, "stop_token_ids": [20, 27]},
        },
    }  # fmt: skip


def run_batches(
    arguments: dict,
    jobs: dict[str, dict],
    *,
    options: dict | None = None,
    **environment,
):
    """Batches through one engine: outputs, metrics and drafts, each by batch name.

    Args:
        arguments: of `vllm.LLM`.
        jobs: the batches, by name.
        options: further fields of the engine's job.
        environment: changes to it.
    """
    result = run_engine(
        {
            "engine": arguments,
            "batches": list(jobs.values()),
            "environment": environment,
            **(options or {}),
        }
    )
    return SimpleNamespace(
        jobs=jobs,
        drawn=result.get("drawn"),
        **{
            field: dict(zip(jobs, values, strict=bool(values)))
            for field, values in result.items()
            if isinstance(values, list)
        },
    )


@functools.cache
def served(
    family: str, tied: bool, kind: str = "DFlash", *, with_draft: bool = True
) -> SimpleNamespace:
    """All batches through one engine."""
    target, draft = saved(family, tied, kind)
    return run_batches(
        engine_arguments(target, draft if with_draft else None), batches()
    )


def offline(tiny, batch: dict, *, with_draft: bool = False, **options):
    """What our generator answers."""
    options = {"max_model_len": LIMITS["max_model_len"], "max_num_seqs": 4} | options
    generator = Generator(tiny.target, tiny.draft if with_draft else None, **options)
    return generator.generate(batch["prompts"], SamplingParams(**batch["params"]))


def token_ids(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


class DraftOracle:
    """What the unmodified draft proposes, from features computed for each text."""

    def __init__(self, tiny: SimpleNamespace, ids: list[int]) -> None:
        self.target, self.draft, self.ids = tiny.torch_target, tiny.torch_draft, ids
        with torch.no_grad():
            outputs = self.target(
                torch.tensor([ids]), output_hidden_states=True, use_cache=False
            )
        states = outputs.hidden_states
        taps = [states[i + 1] for i in self.draft.target_layer_ids]
        self.features = torch.cat(taps, dim=-1)
        self.embed = self.target.get_input_embeddings()
        self.head = self.target.get_output_embeddings()

    @torch.no_grad()
    def drafts(self, context_len: int, k: int) -> list[int]:
        """Of the block that begins with the token at position `context_len`."""
        masks = [self.draft.mask_token_id] * k
        block = torch.tensor([[self.ids[context_len], *masks]])
        hidden = self.draft(
            target_hidden=self.features[:, :context_len],
            noise_embedding=self.embed(block),
            position_ids=torch.arange(context_len + k + 1)[None],
        )
        if isinstance(self.draft, DFlash2DraftModel):
            anchor = block[:, 0]
            path, _, _ = self.draft.propose(hidden[:, 1:], anchor, self.head, 0.0)
            return path[0].tolist()
        return self.head(hidden[0, 1:]).argmax(-1).tolist()


def check_drafts(
    tiny, batch: dict, outputs: list, drafts: list, oracle=DraftOracle
) -> int:
    """Every draft that an engine made is the oracle's; returns how many there were."""
    texts = [p + o for p, o in zip(batch["prompts"], outputs, strict=True)]
    oracles = [oracle(tiny, text) for text in texts]
    checked = 0
    for index, context_len, anchor, draft_token_ids in drafts:
        if context_len >= len(texts[index]):
            continue  # the request was over when this draft was made
        assert anchor == texts[index][context_len]
        want = oracles[index].drafts(context_len, len(draft_token_ids))
        assert draft_token_ids == want, f"prompt {index}, context_len {context_len}"
        checked += 1
    return checked
