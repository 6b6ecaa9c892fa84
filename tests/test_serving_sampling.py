# SPDX-License-Identifier: Apache-2.0
"""Sampled and structured requests in the real engine, with DFlash on.

Sampling must keep the target's distribution, computed here from transformers' own model
and filters; everything else must be what the engine gives without DFlash.
"""

import functools
import json
import re
import tempfile

import numpy as np
import pytest
import torch
from conftest import VOCAB, pair, random_prompts
from distributions import LENGTH, SMALL_VOCAB, exact_distribution, p_value, small
from serving_jobs import ACCEPTED, engine_arguments, run_batches
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchax_dflash import SamplingParams

pytestmark = pytest.mark.vllm

LAZY = {"SKIP_JAX_PRECOMPILE": "1", "VLLM_XLA_CHECK_RECOMPILATION": "0"}
"""Compile what is used, not everything."""

PROMPT = [1, 3, 5, 1, 7]
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "filters": {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
}
SAMPLES = 5_000
"""Of each of the settings. A fault that moves one continuation of probability 1/10 by a
tenth is then more than two standard deviations off, and a wrong rule moves all of them:
those below give p < 1e-6 on less than half as many."""


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


def with_method(arguments: dict, method: str) -> dict:
    arguments["speculative_config"]["draft_sample_method"] = method
    return arguments


def sampled(method: str, samples: int, broken: str | None = None):
    """Continuations of one prompt, all settings and greedy rows in one batch."""
    tiny = small("trained")
    arguments = engine_arguments(
        *characters(tiny.torch_target, tiny.torch_draft, SMALL_VOCAB),
        k=3,
        max_num_seqs=64,
        max_num_batched_tokens=192,
        max_model_len=32,
        num_gpu_blocks_override=200,
        block_size=16,
    )
    common = {"max_tokens": LENGTH, "ignore_eos": True}
    params = [common | setting for setting in SETTINGS.values()] * samples
    params += [common] * (samples // 20)
    order = np.random.default_rng(0).permutation(len(params))
    batch = {"prompts": [PROMPT] * len(params), "params": [params[i] for i in order]}
    engine = run_batches(
        with_method(arguments, method),
        {"sampled": batch},
        options={"silent": True, "broken": broken},
        **LAZY,
    )
    outputs = np.array(engine.outputs["sampled"])[np.argsort(order)]
    greedy = outputs[samples * len(SETTINGS) :]
    drawn = {
        name: outputs[i : samples * len(SETTINGS) : len(SETTINGS)]
        for i, name in enumerate(SETTINGS)
    }
    return drawn, greedy, engine.metrics["sampled"][ACCEPTED]


right = functools.cache(lambda method: sampled(method, SAMPLES))


def served_p_value(drawn: dict, name: str) -> float:
    codes = drawn[name] @ (SMALL_VOCAB ** np.arange(LENGTH)[::-1])
    counts = np.bincount(codes, minlength=SMALL_VOCAB**LENGTH)
    target, params = small("trained").torch_target, SamplingParams(**SETTINGS[name])
    return p_value(counts, exact_distribution(target, PROMPT, params))


def greedy_text() -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = small("trained").torch_target(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_targets_distribution(name, method):
    drawn, _, _ = right(method)
    assert served_p_value(drawn, name) > 1e-3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_greedy_rows_beside_sampled_ones(method):
    _, greedy, _ = right(method)
    assert (greedy == greedy_text()).all()


def test_drawn_drafts_are_accepted_more_often():
    assert right("probabilistic")[2] > 1.05 * right("greedy")[2]


@pytest.mark.parametrize("rule", ["keeps_what_was_rejected", "tpu_inference"])
def test_this_test_notices_a_wrong_rule(rule):
    method = "greedy" if rule == "tpu_inference" else "probabilistic"
    drawn, greedy, _ = sampled(method, SAMPLES * 2 // 5, broken=rule)
    assert min(served_p_value_or_zero(drawn, name) for name in SETTINGS) < 1e-6
    if rule == "tpu_inference":
        assert (greedy != greedy_text()).any()


def served_p_value_or_zero(drawn: dict, name: str) -> float:
    try:
        return served_p_value(drawn, name)
    except AssertionError:  # tokens that the filters exclude
        return 0.0


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": [1, 22, 333]},
        "b": {"type": "string", "pattern": "^[abc]{2,4}$"},
        "c": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
REGEX = "(ab|cd){2,5}[0-9]{1,3}"
CHOICES = ["abc", "abd", "10,20", "deed"]


def is_valid(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "choice":
        return text in CHOICES
    value = json.loads(text)
    return (
        set(value) == {"a", "b", "c"}
        and value["a"] in (1, 22, 333)
        and re.fullmatch("[abc]{2,4}", value["b"]) is not None
        and len(value["c"]) <= 3
        and set(value["c"]) <= {0, 1}
    )


KINDS = {
    "json": {"structured_outputs": {"json": SCHEMA}},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "choice": {"structured_outputs": {"choice": CHOICES}},
}
REFUSED = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_p": 0.1,
    "min_tokens": 3,
    "logit_bias": {"3": 1.0},
    "bad_words": ["ab"],
    "allowed_token_ids": [3, 4],
    "prompt_logprobs": 1,
    "seed": 7,
}
PROMPTS = random_prompts(12)
FREE = {"max_tokens": 24, "ignore_eos": True}
DRAWN = FREE | {"temperature": 1.0}


def feature_batches() -> dict[str, dict]:
    """Batches through one engine, by name."""

    def alternating(*params: dict) -> dict:
        return {
            "prompts": PROMPTS,
            "params": [params[i % len(params)] for i in range(len(PROMPTS))],
        }

    structured = [{"max_tokens": 60} | kind for kind in KINDS.values()]
    warm = [params | {"temperature": 1.5} for params in structured]
    alone = {
        f"{name} alone": {"prompts": PROMPTS[:1], "params": params}
        for name, params in zip(KINDS, structured, strict=True)
    }
    return {
        "greedy": {"prompts": PROMPTS, "params": FREE},
        "cold": {"prompts": PROMPTS, "params": FREE | {"temperature": 0.01}},
        "logprobs": {"prompts": PROMPTS, "params": FREE | {"logprobs": 4}},
        "drawn logprobs": {"prompts": PROMPTS, "params": DRAWN | {"logprobs": 4}},
        "mixed": alternating(FREE, DRAWN, FREE | {"logprobs": 2}),
        "structured": alternating(*structured),
        "structured and drawn": alternating(*warm),
        "structured beside free ones": alternating(*warm, FREE, DRAWN),
        **alone,
    }


def refusals() -> dict[str, dict]:
    return {
        name: {"prompts": [[3, 4]], "params": DRAWN | {name: value}}
        for name, value in REFUSED.items()
    }


@functools.cache
def featured(method: str | None, asynchronous: bool = True):
    """The engine with DFlash, or without it for None."""
    tiny = pair("llama", False)
    target, draft = characters(tiny.torch_target, tiny.torch_draft, VOCAB)
    arguments = engine_arguments(
        target,
        draft if method else None,
        async_scheduling=asynchronous,
        structured_outputs_config={
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },
    )
    jobs = feature_batches()
    if method:
        arguments = with_method(arguments, method)
        jobs |= refusals()
    else:
        # without drafts the engine takes one request's mask for another's
        jobs = {name: batch for name, batch in jobs.items() if "struct" not in name}
    return run_batches(arguments, jobs, **LAZY)


ENGINES = [("greedy", True), ("probabilistic", True), ("probabilistic", False)]
with_dflash = pytest.mark.parametrize(("method", "asynchronous"), ENGINES)


def target_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """What the target says before each output token, [tokens, V]."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = pair("llama", False).torch_target(ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1]


@with_dflash
def test_a_temperature_near_zero_is_greedy(method, asynchronous):
    """vLLM makes it 0.01 at least: only near-ties may fall otherwise."""
    engine, equal = featured(method, asynchronous), 0
    assert engine.outputs["greedy"] == featured(None).outputs["greedy"]
    for prompt, cold, greedy in zip(
        PROMPTS, engine.outputs["cold"], engine.outputs["greedy"], strict=True
    ):
        logits = target_logits(prompt, cold)
        said = logits.gather(1, torch.tensor(cold)[:, None])[:, 0]
        assert (logits.max(-1).values - said).max() < 20 * 0.01
        equal += cold == greedy
    assert equal > len(PROMPTS) // 2


@with_dflash
def test_greedy_rows_in_a_mixed_batch(method, asynchronous):
    engine = featured(method, asynchronous)
    for index, output in enumerate(engine.outputs["mixed"]):
        if index % 3 != 1:
            assert output == engine.outputs["greedy"][index]


@with_dflash
def test_logprobs_are_those_without_dflash(method, asynchronous):
    ours, theirs = featured(method, asynchronous), featured(None)
    assert ours.outputs["logprobs"] == theirs.outputs["logprobs"]
    for got, want in zip(
        ours.logprobs["logprobs"], theirs.logprobs["logprobs"], strict=True
    ):
        for a, b in zip(got, want, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


@with_dflash
def test_logprobs_of_drawn_tokens_are_the_targets(method, asynchronous):
    engine = featured(method, asynchronous)
    for prompt, output, logprobs in zip(
        PROMPTS,
        engine.outputs["drawn logprobs"],
        engine.logprobs["drawn logprobs"],
        strict=True,
    ):
        want = torch.log_softmax(target_logits(prompt, output), dim=-1)
        assert len(logprobs) == len(output)
        for token, given, row in zip(output, logprobs, want, strict=True):
            assert str(token) in given
            assert len(given) in (4, 5)
            for name, value in given.items():
                assert value == pytest.approx(row[int(name)].item(), abs=1e-4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_draft_is_held_against_what_it_was_drawn_from(asynchronous):
    """Requests join, leave, change rows and are left out of steps in between."""
    drawn = featured("probabilistic", asynchronous).drawn
    assert drawn["used"] > 500
    assert drawn["others"] == 0


@with_dflash
@pytest.mark.parametrize(
    "name", [name for name in feature_batches() if "structured" in name]
)
def test_structured_outputs_are_valid(name, method, asynchronous):
    engine, batch = featured(method, asynchronous), feature_batches()[name]
    for params, text in zip(batch["params"], engine.texts[name], strict=True):
        if "structured_outputs" in params:
            (kind,) = params["structured_outputs"]
            assert is_valid(kind, text), (kind, text)


@with_dflash
@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs_equal_those_without_dflash(kind, method, asynchronous):
    name = f"{kind} alone"
    ours, theirs = featured(method, asynchronous), featured(None)
    assert ours.outputs[name] == theirs.outputs[name]
    assert is_valid(kind, ours.texts[name][0])


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused(field):
    error = featured("probabilistic").errors[field]
    assert error is not None, "it was served"
    assert field in error
