# SPDX-License-Identifier: Apache-2.0
"""Which drafts training starts from and exports, and which it refuses."""

import jax
import numpy as np
import pytest
from draft_files import own_tensors, write_speculators
from errors import assert_four_parts
from tiny_models import TARGET_LAYERS, VOCAB, make_torch_draft, pair

from torchax_dflash import DraftModel
from torchax_dflash.core.drafting import head_logits
from torchax_dflash.training.model.initial_draft import load_draft
from torchax_dflash.training.report.export import export, with_draft_vocabulary
from torchax_dflash.training.run.initial_state import initial_state
from torchax_dflash.training.run.recipe import Recipe
from torchax_dflash.training.run.trainer import new_state


def test_starting_from_the_speculators_format(tmp_path):
    """It does not say how many layers the target has; the export does."""
    target = pair("llama", False).target
    module = make_torch_draft(dflash_config={"target_layer_ids": [0, 1]})
    write_speculators(tmp_path / "given", module, {}, num_target_layers=None)
    draft = load_draft(tmp_path / "given", target, largest_block=4)
    export(draft, tmp_path / "plain", dtype="float32")
    again = DraftModel.from_pretrained(tmp_path / "plain")
    assert again.config.num_target_layers == TARGET_LAYERS
    for name, parameter in module.named_parameters():
        kept = again.params[name]
        kept = kept.T if name in again.module.linear_weights else kept
        np.testing.assert_array_equal(kept, parameter.detach())


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_our_export_is_read_again(tmp_path, is_causal):
    """Both formats, the same draft: taps, causality and windows included."""
    options = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "use_sliding_window": True,
        "is_causal": is_causal,
    }
    draft = DraftModel.from_torch(make_torch_draft(**options))
    export(draft, tmp_path / "a", dtype="float32")
    export(draft, tmp_path / "b", dtype="float32", speculators_for="someone/target")
    for folder in ("a", "b"):
        again = DraftModel.from_pretrained(tmp_path / folder)
        assert again.config == draft.config
        assert [layer.self_attn.is_causal for layer in again.module.module.layers] == [
            layer.self_attn.is_causal for layer in draft.module.module.layers
        ]
        assert again.own.is_empty
        assert all((again.params[n] == draft.params[n]).all() for n in draft.params)


def test_an_unknown_depth_is_not_exported(tmp_path):
    write_speculators(
        tmp_path / "given", make_torch_draft(), {}, num_target_layers=None
    )
    draft = DraftModel.from_pretrained(tmp_path / "given")
    with pytest.raises(ValueError, match="expected") as error:
        export(draft, tmp_path / "plain")
    assert_four_parts(error, "num_target_layers")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("speculators_for", [None, "someone/target"])
def test_a_draft_vocabulary_is_the_targets_head_for_its_tokens(
    tmp_path, tied, speculators_for
):
    target = pair("llama", tied).target
    draft = DraftModel.from_torch(make_torch_draft())
    known = [19, 3, 7, 22, 0]
    small = with_draft_vocabulary(draft, target, np.array(known))
    export(small, tmp_path, dtype="float32", speculators_for=speculators_for)
    again = DraftModel.from_pretrained(tmp_path)
    assert again.config == small.config
    assert again.config.draft_vocab_size == len(known)
    hidden = jax.random.normal(jax.random.key(0), (3, draft.config.hidden_size))
    got = np.asarray(head_logits(again, target, hidden))
    want = np.asarray(target.project(hidden))
    np.testing.assert_allclose(got[:, known], want[:, known], rtol=1e-5, atol=1e-5)
    others = np.setdiff1d(np.arange(VOCAB), known)
    assert np.isneginf(got[:, others]).all()


@pytest.mark.parametrize("brings", [{"embedding": True}, {"head": True}])
def test_drafts_with_their_own_embedding_or_head_are_refused(tmp_path, brings):
    target = pair("llama", False).target
    write_speculators(tmp_path, make_torch_draft(), own_tensors(**brings))
    draft = DraftModel.from_pretrained(tmp_path)
    refusals = [
        lambda: load_draft(tmp_path, target, largest_block=4),
        lambda: initial_state(draft, target, None, Recipe()),
    ]
    if "embedding" in brings:
        refusals.append(lambda: export(draft, tmp_path / "out"))
    for refused in refusals:
        with pytest.raises(ValueError, match="expected") as error:
            refused()
        assert_four_parts(error, "draft")


def test_quantised_drafts_are_refused(tmp_path):
    draft = DraftModel.from_torch(make_torch_draft(), quantization="int8")
    scale = np.ones(draft.config.feature_size, np.float32)
    for refused in (
        lambda: new_state(draft, scale, Recipe()),
        lambda: export(draft, tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match="expected") as error:
            refused()
        assert_four_parts(error, "quantization")
