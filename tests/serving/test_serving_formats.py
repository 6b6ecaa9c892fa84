# SPDX-License-Identifier: Apache-2.0
"""Drafts of other formats in the real vLLM: lossless, and each draft the module's."""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft_files import KNOWN, rounded, write_speculators
from serving_jobs import (
    ACCEPTED,
    DraftOracle,
    batches,
    check_drafts,
    engine_arguments,
    offline,
    run_batches,
    saved,
    token_ids,
)
from tiny_models import pair

pytestmark = pytest.mark.vllm

NAMES = ("ragged", "shared prefix", "shared prefix, cached", "max_model_len")


def own_tables() -> dict[str, torch.Tensor]:
    """An embedding that is not quite the target's, and the head of some tokens."""
    target = pair("llama", False).torch_target
    embedding = target.get_input_embeddings().weight.detach()
    torch.manual_seed(4)
    known = torch.tensor(KNOWN)
    return {
        "embed_tokens.weight": embedding + 0.02 * torch.randn_like(embedding),
        "lm_head.weight": target.lm_head.weight.detach()[known].clone(),
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill(
            0, known, True
        ),
    }


class OwnOracle(DraftOracle):
    """The unmodified module between its own embedding and head."""

    def __init__(self, tiny, ids):
        super().__init__(tiny, ids)
        own = own_tables()
        self.embed = lambda block: own["embed_tokens.weight"][block]
        self.head = lambda hidden: hidden @ own["lm_head.weight"].T

    def drafts(self, context_len: int, k: int) -> list[int]:
        return [KNOWN[row] for row in super().drafts(context_len, k)]


@functools.cache
def engine():
    """vLLM reads the `speculators` config itself; int8 comes by additional_config."""
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    write_speculators(folder, pair("llama", False).torch_draft, own_tables())
    target, _ = saved("llama", False)
    arguments = engine_arguments(
        target,
        str(folder),
        additional_config={"torchax_dflash": {"draft_quantization": "int8"}},
    )
    return run_batches(arguments, {name: batches()[name] for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_speculators_draft_with_a_reduced_vocabulary(name):
    tiny, batch = pair("llama", False), batches()[name]
    outputs = engine().outputs[name]
    assert outputs == token_ids(offline(tiny, batch))
    reference = SimpleNamespace(
        torch_target=tiny.torch_target, torch_draft=rounded(tiny.torch_draft)
    )
    drafts = engine().drafts[name]
    assert check_drafts(reference, batch, outputs, drafts, OwnOracle) > 20


def test_its_drafts_are_accepted():
    assert engine().metrics["ragged"][ACCEPTED] > 30
