# SPDX-License-Identifier: Apache-2.0
"""Built-in prompts, the evaluation's questions, and that the two stay apart."""

from itertools import islice

import numpy as np
import pytest
from tiny_models import pair
from training_runs import sequences

from torchax_dflash.training.data.builtin_prompts import builtin_prompts
from torchax_dflash.training.data.evaluation_questions import (
    SETS,
    Overlap,
    evaluation_questions,
)
from torchax_dflash.training.data.sequences import TokenSequence
from torchax_dflash.training.model.feature_store import FeatureStore
from torchax_dflash.training.model.objective import Objective
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.recipe import Recipe


def test_the_mix_is_the_same_for_the_same_seed():
    prompts = list(islice(builtin_prompts(3), 60))
    assert prompts == list(islice(builtin_prompts(3), 60))
    assert prompts != list(islice(builtin_prompts(4), 60))
    assert len({prompt.text for prompt in prompts}) == 60
    kinds = [prompt.kind for prompt in prompts]
    assert [kinds.count(kind) for kind in ("code", "math", "chat")] == [24, 18, 18]


def test_evaluation_questions_and_what_shares_their_words_are_refused():
    refuse = Overlap()
    assert [len(evaluation_questions(name)) for name in SETS] == [164, 100, 40]
    for name in SETS:
        for question in evaluation_questions(name):
            assert len(question.text.split()) < 5 or refuse(question.text)
    melanie = evaluation_questions("gsm8k")[0].text
    assert refuse(melanie.replace("Melanie", "Tom").replace("5 vacuum", "9 vacuum"))
    assert not refuse("What would a river say to a boat about the sea and the moon?")


def test_stored_features_give_the_same_batches_as_computed_ones(tmp_path):
    tiny = pair("llama", False)
    ids, lengths = sequences(count=9)
    data = [
        TokenSequence(str(row), "test", 0.0, 3, ids[row, :n].tolist())
        for row, n in enumerate(lengths)
    ]
    layer_ids = (0, 2, 3)
    store = FeatureStore(tmp_path / "features", "hash", layer_ids)
    store.add(tiny.target, data, layer_ids, lambda done, total: None)
    assert len(store) == 9
    recipe = Recipe(sequences=2, anchors=4)
    how = {"target": tiny.target, "layer_ids": layer_ids}
    stored = Batches(data, recipe, store=store, **how)
    made = Batches(data, recipe, store=None, **how)
    for step in range(stored.steps_per_epoch + 2):
        ours, theirs = stored.batch(step), made.batch(step)
        np.testing.assert_array_equal(ours.anchors, theirs.anchors)
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        features = np.asarray(ours.features, np.float32)
        np.testing.assert_allclose(features, theirs.features, rtol=1e-2, atol=1e-6)
        if (ours.lengths > 0).all():
            np.testing.assert_array_equal(ours.choices, theirs.choices)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_an_epoch_sees_each_sequence_once():
    tiny = pair("llama", False)
    ids, lengths = sequences(count=20, length=70)
    data = [
        TokenSequence(str(row), "test", 0.0, 3, ids[row, :n].tolist())
        for row, n in enumerate(lengths)
    ]
    recipe = Recipe(sequences=3, anchors=4)
    how = {"target": tiny.target, "layer_ids": (0, 2, 3), "store": None}
    batches = Batches(data, recipe, **how)
    seen = [
        tuple(row[:n].tolist())
        for step in range(batches.steps_per_epoch)
        for row, n in zip(*batch_rows(batches.batch(step)), strict=True)
        if n
    ]
    wanted = [tuple(data[index].token_ids) for index in batches.train]
    assert sorted(seen) == sorted(wanted)


def batch_rows(batch):
    return np.asarray(batch.token_ids), np.asarray(batch.lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"soft": 1.5},
        {"learning_rate": 0.0},
        {"gamma": -1.0},
        {"stages": ((4, 0.5), (8, 0.4))},
        {"stages": ((1, 1.0),)},
        {"dtype": "float16"},
        {"loss": "mse"},
        {"position_weights": "even"},
        {"dpace_smoothing": 1.5},
        {"optimizer": "sgd"},
    ],
    ids=str,
)
def test_recipes_out_of_range(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected .* got"):
        Recipe(**changes)


def test_stages_follow_each_other():
    recipe = Recipe(stages=((3, 0.5), (5, 0.3), (8, 0.2)), steps=10)
    sizes = [recipe.block_size_at(step) for step in range(10)]
    assert sizes == [3] * 5 + [5] * 3 + [8] * 2
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_recipes_of_older_runs_mean_what_they_meant():
    saved = Recipe().to_json()
    for name in ("loss", "position_weights", "dpace_smoothing", "optimizer"):
        del saved[name]
    assert Recipe.from_json(saved) == Recipe()
    objective = Recipe.from_json(saved).objective(8)
    assert objective == Objective("kl", soft=0.3, position_weights="decay", gamma=4.0)
