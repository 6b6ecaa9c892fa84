# SPDX-License-Identifier: Apache-2.0
"""Beside tpu-inference's own JAX proposer, on its own JAX-native targets.

Both proposers see the same events of the same engine (`serving_shadows.py`). Where the
peer's known faults are avoided, both draft the same; each fault is pinned by a strict
expected failure, so a version of tpu-inference that fixes it is noticed. Ours is held
against the unmodified PyTorch module everywhere.
"""

import functools
import tempfile
from types import SimpleNamespace

import pytest
from serving_jobs import (
    DraftOracle,
    engine_arguments,
    offline,
    run_engine,
    save_pair,
    token_ids,
)
from tiny_models import (
    continuations,
    make_torch_draft,
    make_torch_target,
    random_prompts,
    train_draft,
)

from torchax_dflash import TargetModel

pytestmark = pytest.mark.vllm

# What the peer takes for granted: RoPE of theta 1e6, heads of 128 in both models, the
# last layer not tapped, a tied head, bfloat16.
_HEAD_DIM = 128
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_TAPS = {"dflash_config": {"target_layer_ids": [0, 1, 2]}}
_WINDOW = {
    "layer_types": ["sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 4,
}
DRAFTS = {
    "plain": _THETA | _TAPS,
    "theta 1e4": _TAPS | {"rope_parameters": _THETA["rope_parameters"] | {
        "rope_theta": 1e4}},
    "sliding window": _THETA | _TAPS | _WINDOW,
    "last layer tapped": _THETA | {"dflash_config": {"target_layer_ids": [0, 1, 3]}},
}  # fmt: skip
_JAX_NATIVE = {
    "MODEL_IMPL_TYPE": "flax_nnx",
    "DRAFT_MODEL_IMPL_TYPE": "flax_nnx",
    "SKIP_JAX_PRECOMPILE": "1",
    "VLLM_XLA_CHECK_RECOMPILATION": "0",
}
BATCH = {
    "prompts": random_prompts(8),
    "params": {"max_tokens": 40, "ignore_eos": True},
}


@functools.cache
def target_and_drafts(family: str, tied: bool) -> SimpleNamespace:
    torch_target = make_torch_target(family, tied=tied, head_dim=_HEAD_DIM)
    texts = continuations(torch_target)
    drafts = {}
    for name, overrides in DRAFTS.items():
        drafts[name] = make_torch_draft(head_dim=_HEAD_DIM, **overrides)
        train_draft(drafts[name], torch_target, texts)
    return SimpleNamespace(
        torch_target=torch_target,
        target=TargetModel.from_torch(torch_target),
        drafts=drafts,
    )


@functools.cache
def side_by_side(family: str, tied: bool, names: tuple[str, ...]) -> dict:
    """Both proposers with each draft, as shadows of an engine with the first one."""
    models = target_and_drafts(family, tied)
    shadows = {}
    for name in names:
        folder = tempfile.mkdtemp(prefix="serving-")
        models.drafts[name].save_pretrained(folder)
        shadows[f"ours, {name}"] = {"draft": folder, "peer": False}
        shadows[f"peer, {name}"] = {"draft": folder, "peer": True}
    first = SimpleNamespace(
        torch_target=models.torch_target, torch_draft=models.drafts[names[0]]
    )
    result = run_engine(
        {
            "engine": engine_arguments(*save_pair(first)),
            "batches": [BATCH],
            "environment": _JAX_NATIVE,
            "shadows": shadows,
        }
    )
    assert result["outputs"][0] == token_ids(offline(models, BATCH))
    return result


def agreement(
    family: str, tied: bool, who: str, name: str, names: tuple[str, ...] = ()
) -> float:
    """The share of drafted tokens that are the unmodified module's."""
    result = side_by_side(family, tied, names or (name,))
    if error := result["shadow_errors"].get(f"{who}, {name}"):
        pytest.fail(error)
    models = target_and_drafts(family, tied)
    one = SimpleNamespace(
        torch_target=models.torch_target, torch_draft=models.drafts[name]
    )
    texts = [
        prompt + output
        for prompt, output in zip(BATCH["prompts"], result["outputs"][0], strict=True)
    ]
    oracles = [DraftOracle(one, text) for text in texts]
    same = total = 0
    for index, context_len, _, drafts in result["shadows"][0][f"{who}, {name}"]:
        if context_len < len(texts[index]):
            want = oracles[index].drafts(context_len, len(drafts))
            same += sum(a == b for a, b in zip(drafts, want, strict=True))
            total += len(want)
    assert total > 500
    return same / total


def fault(reason: str):
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


TIED_LLAMA = ("llama", True, tuple(DRAFTS))


@pytest.mark.parametrize("name", DRAFTS)
def test_ours_drafts_what_the_module_does(name):
    family, tied, names = TIED_LLAMA
    assert agreement(family, tied, "ours", name, names) == 1


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        pytest.param(
            "theta 1e4",
            marks=fault("rope_theta is read where transformers 5 has none: 1e6"),
        ),
        pytest.param("sliding window", marks=fault("sliding windows are ignored")),
        pytest.param(
            "last layer tapped",
            marks=fault("the last layer's output is not normalised"),
        ),
    ],
)
def test_the_peer_drafts_what_the_module_does(name):
    """All but a few: its weights and arithmetic are bfloat16 whatever the dtype."""
    family, tied, names = TIED_LLAMA
    assert agreement(family, tied, "peer", name, names) >= 0.98


def test_hidden_states_of_both_agree():
    """To bfloat16's precision, relative to their root mean square."""
    errors = side_by_side(*TIED_LLAMA)["hidden_states_errors"]
    assert errors["peer, plain"] < 0.06


@pytest.mark.parametrize(
    ("who", "family"),
    [
        ("ours", "llama"),
        ("ours", "qwen3"),
        pytest.param(
            "peer",
            "llama",
            marks=fault("the target's head replaces the draft's embedding"),
        ),
        pytest.param(
            "peer",
            "qwen3",
            marks=pytest.mark.xfail(
                strict=True,
                raises=pytest.fail.Exception,
                reason="the target's lm_head is a module, not a weight",
            ),
        ),
    ],
)
def test_untied_targets(who, family):
    assert agreement(family, False, who, "plain") >= 0.98


@functools.cache
def errors_of_the_peers_engine() -> dict[str, str | None]:
    """The error at start-up with the peer instead of our plugin."""
    pytorch = {"MODEL_IMPL_TYPE": "vllm", "DRAFT_MODEL_IMPL_TYPE": "vllm"}
    jobs = {}
    for name, head_dim, draft_head_dim, environment in (
        ("heads that need padding", 16, 16, {}),
        ("a head_dim of its own", _HEAD_DIM, 2 * _HEAD_DIM, {}),
        ("the PyTorch path", _HEAD_DIM, _HEAD_DIM, pytorch),
    ):
        models = SimpleNamespace(
            torch_target=make_torch_target("llama", tied=True, head_dim=head_dim),
            torch_draft=make_torch_draft(head_dim=draft_head_dim, **DRAFTS["plain"]),
        )
        arguments = engine_arguments(
            *save_pair(models), additional_config={"torchax_dflash": False}
        )
        environment = _JAX_NATIVE | environment | {"SKIP_JAX_PRECOMPILE": "0"}
        jobs[name] = {"engine": arguments, "environment": environment}
    errors = run_engine({"refused": list(jobs.values())})["errors"]
    return dict(zip(jobs, errors, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "heads that need padding",
            marks=fault("the norms of queries and keys are not padded with the heads"),
        ),
        pytest.param(
            "a head_dim of its own",
            marks=fault("the cache is made for hidden_size / num_attention_heads"),
        ),
        pytest.param(
            "the PyTorch path",
            marks=fault("a PyTorch draft is called with a JAX draft's arguments"),
        ),
    ],
)
def test_the_peers_engine_starts(name):
    """With our plugin these are tested like any other pair."""
    assert errors_of_the_peers_engine()[name] is None
