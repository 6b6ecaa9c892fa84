# SPDX-License-Identifier: Apache-2.0
"""Broken checkpoints: one fault each; the error begins with the field."""

import numpy as np
import pytest
import torch
from draft_files import (
    KNOWN,
    change_weights,
    edit_config,
    own_tensors,
    write_speculators,
)
from errors import assert_four_parts
from tiny_models import HIDDEN, TARGET_LAYERS, VOCAB, make_torch_draft, pair

from torchax_dflash import DraftModel, Generator


@pytest.fixture
def reduced(tmp_path):
    extra = own_tensors(head=True, embedding=True, known=KNOWN)
    write_speculators(tmp_path, make_torch_draft(), extra)
    DraftModel.from_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
        ({"speculators_model_type": None}, "speculators_model_type"),
        ({"speculators_config.algorithm": "dspark"}, "speculators_config.algorithm"),
        ({"speculators_config.verifier": None}, "speculators_config.verifier"),
        ({"speculators_config.verifier": {"name_or_path": 3}},
         "speculators_config.verifier"),
        ({"speculators_config": [1]}, "speculators_config"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"transformer_layer_config.model_type": "mamba"},
         "transformer_layer_config.model_type"),
        ({"transformer_layer_config.num_hidden_layers": "2"},
         "transformer_layer_config"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": "1"}, "aux_hidden_state_layer_ids"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"target_hidden_size": 128}, "target_hidden_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"draft_vocab_size": 7}, "lm_head.weight"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=str,
)  # fmt: skip
def test_broken_configs(reduced, changes, field):
    edit_config(reduced, changes)
    with pytest.raises(ValueError, match="expected") as error:
        DraftModel.from_pretrained(reduced)
    assert_four_parts(error, field) if "weight" not in field else None
    assert str(error.value).startswith(field)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_configs_that_cannot_be_read(reduced, text):
    (reduced / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json: expected .*, got .*again"):
        DraftModel.from_pretrained(reduced)


def test_a_mapping_without_a_head(reduced):
    change_weights(reduced, lambda weights: weights.pop("lm_head.weight"))
    order = torch.arange(VOCAB).flip(0)
    changes = {"d2t": order - torch.arange(VOCAB), "t2d": torch.ones(VOCAB).bool()}
    change_weights(reduced, lambda weights: weights.update(changes))
    edit_config(reduced, {"draft_vocab_size": None})
    with pytest.raises(ValueError, match=r"lm_head\.weight of .*: expected a tensor"):
        DraftModel.from_pretrained(reduced)


def test_an_embedding_for_the_mask_alone_is_refused(reduced):
    (reduced / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="expected") as error:
        DraftModel.from_pretrained(reduced)
    assert str(error.value).startswith("mask_embedding.pt: expected no such file, got")


def offsets(known):
    return torch.tensor(known) - torch.arange(len(known))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("d2t"), "d2t of .*: expected a tensor .*got None"),
        (lambda w: w.pop("lm_head.weight"), "lm_head.weight of .*: expected a tensor"),
        (lambda w: w.update(d2t=w["d2t"][:-1].clone()),
         r"d2t: expected shape \(19,\) by the config, got \(18,\)"),
        (lambda w: w.update(d2t=offsets([*KNOWN[:-1], VOCAB])),
         r"d2t of .*: expected i \+ d2t\[i\] from 0 to 31, got \[32\].* offsets"),
        (lambda w: w.update(d2t=offsets([-1, *KNOWN[1:]])), r"d2t of .* got \[-1\]"),
        (lambda w: w.update(d2t=offsets([*KNOWN[:-1], KNOWN[0]])),
         "d2t of .*: expected 19 different tokens, got '18'"),
        (lambda w: w.update(d2t=w["d2t"].float()), "d2t of .*: expected integers, got"),
        (lambda w: w.update(t2d=~w["t2d"]), "t2d of .*: expected true at the 19 "),
        (lambda w: w.update(t2d=w["t2d"][:-1].clone()), "t2d: expected shape"),
        (lambda w: w.update({"embed_tokens.weight": torch.zeros(VOCAB, 2)}),
         r"embed_tokens.weight: expected shape \(32, 64\) .*, got \(32, 2\)"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}),
         r"lm_head.weight: expected shape \(19, 64\) by the config, got \(32, 64\)"),
        (lambda w: w.pop("fc.weight"), "expected the weights of .*missing fc.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda w: w.update({"norm.weight": torch.zeros(3)}), "norm.weight: expected"),
    ],
)  # fmt: skip
def test_broken_tensors(reduced, change, message):
    change_weights(reduced, change)
    with pytest.raises(ValueError, match=message):
        DraftModel.from_pretrained(reduced)


def test_a_whole_vocabulary_that_is_mapped_elsewhere(tmp_path):
    """As many tokens as the target has, but d2t is no identity: still honoured."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)).tolist()
    extra = own_tensors(head=True, known=order)
    write_speculators(tmp_path, make_torch_draft(), extra)
    draft = DraftModel.from_pretrained(tmp_path)
    assert draft.own.row_of_token[np.array(order)].tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    ("depth", "last", "field"),
    [
        (None, 1, None),
        # its state would be the one before the final norm
        (None, TARGET_LAYERS - 1, "target_layer_ids"),
        (None, TARGET_LAYERS, "target_layer_ids"),
        (TARGET_LAYERS, TARGET_LAYERS - 1, None),
        (TARGET_LAYERS + 1, 1, "num_target_layers"),
    ],
)
def test_another_target(tmp_path, depth, last, field):
    """The library's configs do not say how deep the target is, but which layers."""
    module = make_torch_draft(dflash_config={"target_layer_ids": [0, last]})
    write_speculators(tmp_path, module, {}, num_target_layers=depth)
    edit_config(tmp_path, {"num_target_layers": depth})
    draft = DraftModel.from_pretrained(tmp_path)
    target = pair("llama", False).target
    if field is None:
        Generator(target, draft)
        return
    with pytest.raises(ValueError, match="expected") as error:
        Generator(target, draft)
    assert_four_parts(error, field)
