# SPDX-License-Identifier: Apache-2.0
"""What requests may ask for is served as without DFlash, or refused by name.

The tiny target's tokens are characters of JSON, so a grammar can be followed by a model
that knows nothing, and nearly every draft breaks it.
"""

import functools
import json
import re

import pytest
import torch
from serving_jobs import LAZY, characters, engine_arguments, run_batches
from tiny_models import VOCAB, pair, random_prompts

pytestmark = pytest.mark.vllm

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
def featured(asynchronous: bool, with_draft: bool = True):
    """The engine's answers to all batches."""
    tiny = pair("llama", False)
    target, draft = characters(tiny.torch_target, tiny.torch_draft, VOCAB)
    arguments = engine_arguments(
        target,
        draft if with_draft else None,
        sample_method="probabilistic",
        async_scheduling=asynchronous,
        structured_outputs_config={
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },
    )
    jobs = feature_batches()
    if with_draft:
        jobs |= refusals()
    else:
        # without drafts the engine takes one request's mask for another's
        jobs = {name: batch for name, batch in jobs.items() if "struct" not in name}
    return run_batches(arguments, jobs, **LAZY)


with_dflash = pytest.mark.parametrize("asynchronous", [True, False])
"""Drafts are drawn in both; `test_serving_sampling.py` has an engine of chosen ones."""


def target_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """The target's logits before each output token, [tokens, V]."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = pair("llama", False).torch_target(ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1]


@with_dflash
def test_a_temperature_near_zero_is_greedy(asynchronous):
    """vLLM makes it 0.01 at least: only near-ties may fall otherwise."""
    engine, equal = featured(asynchronous), 0
    plain = featured(True, with_draft=False)
    assert engine.outputs["greedy"] == plain.outputs["greedy"]
    for prompt, cold, greedy in zip(
        PROMPTS, engine.outputs["cold"], engine.outputs["greedy"], strict=True
    ):
        logits = target_logits(prompt, cold)
        chosen = logits.gather(1, torch.tensor(cold)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 20 * 0.01
        equal += cold == greedy
    assert equal > len(PROMPTS) // 2


@with_dflash
def test_greedy_rows_in_a_mixed_batch(asynchronous):
    engine = featured(asynchronous)
    for index, output in enumerate(engine.outputs["mixed"]):
        if index % 3 != 1:
            assert output == engine.outputs["greedy"][index]


@with_dflash
def test_logprobs_are_those_without_dflash(asynchronous):
    ours, theirs = featured(asynchronous), featured(True, with_draft=False)
    assert ours.outputs["logprobs"] == theirs.outputs["logprobs"]
    for got, want in zip(
        ours.logprobs["logprobs"], theirs.logprobs["logprobs"], strict=True
    ):
        for a, b in zip(got, want, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


@with_dflash
def test_logprobs_of_drawn_tokens_are_the_targets(asynchronous):
    engine = featured(asynchronous)
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
    drawn = featured(asynchronous).drawn
    assert drawn["used"] > 500
    assert drawn["others"] == 0


@with_dflash
@pytest.mark.parametrize(
    "name", [name for name in feature_batches() if "structured" in name]
)
def test_structured_outputs_are_valid(name, asynchronous):
    engine, batch = featured(asynchronous), feature_batches()[name]
    for params, text in zip(batch["params"], engine.texts[name], strict=True):
        if "structured_outputs" in params:
            (kind,) = params["structured_outputs"]
            assert is_valid(kind, text), (kind, text)


@with_dflash
@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs_equal_those_without_dflash(kind, asynchronous):
    name = f"{kind} alone"
    ours, theirs = featured(asynchronous), featured(True, with_draft=False)
    assert ours.outputs[name] == theirs.outputs[name]
    assert is_valid(kind, ours.texts[name][0])


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused(field):
    error = featured(True).errors[field]
    assert error is not None, "it was served"
    assert field in error


@pytest.mark.smollm2
def test_structured_outputs_of_a_real_model(smollm2):
    """Its tokens are of many characters, and a grammar's masks cut across them."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "married": {"type": "boolean"},
        },
        "required": ["name", "age", "married"],
        "additionalProperties": False,
    }
    phone, choices = "[0-9]{3}-[0-9]{4}", ["positive", "negative", "neutral"]
    kinds = [{"json": schema}, {"regex": phone}, {"choice": choices}]
    questions = ["A person as JSON:", "A phone number:", "The weather is awful. Mood:"]
    params = [
        {"max_tokens": 64, "temperature": temperature, "structured_outputs": kind}
        for temperature in (0, 1.0)
        for kind in kinds
    ]
    prompts = [smollm2.tokenizer(text).input_ids for text in questions] * 2
    engine = run_batches(
        engine_arguments(
            smollm2.folder,
            smollm2.draft_folder,
            k=3,
            sample_method="probabilistic",
            max_model_len=128,
            max_num_batched_tokens=64,
            structured_outputs_config={
                "backend": "xgrammar",
                "disable_any_whitespace": True,
            },
        ),
        {"all": {"prompts": prompts, "params": params}},
        **LAZY,
    )
    for text, kind in zip(engine.texts["all"], kinds * 2, strict=True):
        if "json" in kind:
            value = json.loads(text)
            assert set(value) == {"name", "age", "married"}
            assert re.fullmatch("[A-Z][a-z]{2,8}", value["name"])
            assert 1 <= value["age"] <= 99
            assert isinstance(value["married"], bool)
        elif "regex" in kind:
            assert re.fullmatch(phone, text)
        else:
            assert text in choices
