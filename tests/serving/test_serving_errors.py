# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused at start-up, with an error that helps."""

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
from draft_files import KNOWN, edit_config, own_tensors, write_speculators
from serving_jobs import engine_arguments, run_engine, saved
from tiny_models import BLOCK, make_torch_draft, pair
from transformers import AutoTokenizer, StableLmConfig, StableLmForCausalLM

from torchax_dflash.serving.plugin import versions
from torchax_dflash.serving.plugin.versions import Seam

pytestmark = pytest.mark.vllm


def draft_of(**changes) -> str:
    """The tiny draft with changes to its config.json."""
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    pair("llama", False).torch_draft.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def wider_draft() -> str:
    folder = tempfile.mkdtemp(prefix="serving-")
    make_torch_draft(hidden_size=128).save_pretrained(folder)
    return folder


def speculators_draft_without(tensor: str = "", algorithm: str = "dflash") -> str:
    """A draft in the speculators format, with a fault."""
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    extra = own_tensors(head=True, known=KNOWN)
    extra.pop(tensor, None)
    write_speculators(folder, pair("llama", False).torch_draft, extra)
    edit_config(folder, {"speculators_config.algorithm": algorithm})
    return str(folder)


def quantized_by_vllm(target: str, draft: str) -> dict:
    arguments = engine_arguments(target, draft)
    arguments["speculative_config"]["quantization"] = "fp8"
    return arguments


def target_without_hidden_states() -> str:
    """Of a class that is no SupportsEagle3 in vLLM."""
    folder = tempfile.mkdtemp(prefix="serving-")
    sizes = pair("llama", False).torch_target.config
    config = StableLmConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        max_position_embeddings=sizes.max_position_embeddings,
        eos_token_id=sizes.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    StableLmForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(saved("llama", False)[0]).save_pretrained(folder)
    return folder


def cases() -> dict[str, tuple[dict, str]]:
    """Name -> a job that must be refused, and what the error must say."""
    target, draft = saved("llama", False)

    def engine(target: str = target, draft: str = draft, **options) -> dict:
        return {"engine": engine_arguments(target, draft, **options)}

    other_rule = engine()
    other_rule["engine"]["speculative_config"]["rejection_sample_method"] = "block"
    return {
        "no draft there": (engine(draft="no-such-draft"), "no-such-draft"),
        "K too large": (
            engine(k=BLOCK),
            f"num_speculative_tokens: expected 1 to {BLOCK - 1}.*got {BLOCK}",
        ),
        "other depth": (
            engine(draft=draft_of(num_target_layers=6)),
            "num_target_layers: expected the target's.*4.*got 6",
        ),
        "other width": (
            engine(draft=wider_draft()),
            "hidden_size: expected the target's, 64, got 128",
        ),
        "other vocabulary": (
            engine(draft=draft_of(vocab_size=5000)),
            "vocab_size: expected the target's, 32.*got 5000",
        ),
        "a head without d2t": (
            engine(draft=speculators_draft_without("d2t")),
            "d2t of .*: expected a tensor .*got None",
        ),
        "another speculator": (
            engine(draft=speculators_draft_without(algorithm="eagle3")),
            "speculators_config.algorithm: expected 'dflash', got 'eagle3'",
        ),
        "unknown quantization": (
            engine(
                additional_config={"torchax_dflash": {"draft_quantization": "int4"}}
            ),
            "quantization: expected None or 'int8', got 'int4'",
        ),
        "unknown option": (
            engine(additional_config={"torchax_dflash": {"quantization": "int8"}}),
            "additional_config.torchax_dflash: expected true, false or",
        ),
        "vLLM's quantization": (
            {"engine": quantized_by_vllm(target, draft)},
            "speculative_config.quantization: expected none.*draft_quantization",
        ),
        "no hidden states": (
            engine(target_without_hidden_states()),
            "target: expected a model that gives its hidden states.*StableLm",
        ),
        "LoRA": (engine(enable_lora=True), "enable_lora: expected none with DFlash"),
        "data parallelism": (
            engine(data_parallel_size=2),
            "data parallelism: expected 1 with DFlash, got 2",
        ),
        "another accept rule": (
            other_rule,
            "rejection_sample_method: expected standard with DFlash, got 'block'",
        ),
        "processed logprobs": (
            engine(logprobs_mode="processed_logprobs"),
            "logprobs_mode: expected a raw one with DFlash, got 'processed_logprobs'",
        ),
        "no memory for the pool": (
            engine(gpu_memory_utilization=0.001),
            "memory for KV caches: expected .* for one request of max_model_len "
            r"128 .*the draft's \d+.*Raise gpu_memory_utilization",
        ),
    }


NAMES = (
    "no draft there",
    "K too large",
    "other depth",
    "other width",
    "other vocabulary",
    "a head without d2t",
    "another speculator",
    "unknown quantization",
    "unknown option",
    "vLLM's quantization",
    "no hidden states",
    "LoRA",
    "data parallelism",
    "another accept rule",
    "processed logprobs",
    "no memory for the pool",
)


@functools.cache
def errors() -> dict[str, str | None]:
    """All of them, tried one after the other in one process."""
    jobs = cases()
    assert tuple(jobs) == NAMES
    texts = run_engine({"refused": [job for job, _ in jobs.values()]})["errors"]
    return dict(zip(jobs, texts, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_refused_at_start_up(name):
    error = errors()[name]
    assert error is not None, "the engine started"
    assert re.search(cases()[name][1], error, re.DOTALL), error


def test_the_installed_version_is_compatible():
    versions.check()


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Seam("no_such_module", "f"), "got nothing"),
        (Seam("json", "JSONDecoder.no_such_method"), "got nothing"),
        (Seam("json", "JSONDecoder.decode", ("self", "text")), r"got \(self, s, _w\)"),
    ],
    ids=str,
)
def test_an_incompatible_version_is_refused(seam, message):
    with pytest.raises(RuntimeError, match=f"{message}.*install tpu-inference"):
        versions.check((seam,))


def test_an_untested_version_is_warned_about(monkeypatch, caplog):
    monkeypatch.setitem(versions.TESTED, "tpu-inference", "0.0.1")
    versions.check()
    assert "tested with tpu-inference 0.0.1, but 0.32.0 is installed" in caplog.text
