# SPDX-License-Identifier: Apache-2.0
"""Training runs of a tiny target, and what they are given."""

import functools

import numpy as np
from tiny_models import DFLASH2, VOCAB, make_torch_draft

from torchax_dflash import DraftModel, Generator, SamplingParams
from torchax_dflash.training.data.sequences import TokenSequence
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.initial_state import initial_state
from torchax_dflash.training.run.recipe import Recipe
from torchax_dflash.training.run.training_run import Cadence, Run

RECIPE = Recipe(
    stages=((3, 0.5), (6, 0.5)),
    steps=20,
    sequences=4,
    anchors=8,
    learning_rate=3e-3,
    warmup_steps=5,
    common_tokens=20,
    random_tokens=6,
    dtype="float32",
)


def answers(tiny, prompts, max_tokens=40):
    """Sequences that the target continued greedily."""
    generator = Generator(tiny.target, max_model_len=128, max_num_seqs=4)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        TokenSequence(
            prompt=str(index),
            kind="test",
            temperature=0.0,
            num_prompt_tokens=len(output.prompt_token_ids),
            token_ids=[*output.prompt_token_ids, *output.token_ids],
        )
        for index, output in enumerate(generator.generate(prompts, params))
    ]


@functools.cache
def fresh_draft(dflash2=False):
    """One object, so that equal runs compile once."""
    config = DFLASH2 if dflash2 else {}
    return DraftModel.from_torch(make_torch_draft(dflash_config=config))


def make_run(tiny, sequences, recipe, folder, draft=None, **cadence):
    draft = draft or fresh_draft()
    batches = Batches(
        sequences,
        recipe,
        target=tiny.target,
        layer_ids=draft.config.target_layer_ids,
        store=None,
    )
    state, frozen = initial_state(draft, tiny.target, batches, recipe)
    cadence = {"log": 5, "held_out": 1000, "checkpoint": 1000} | cadence
    run = Run(folder, recipe, frozen, batches, {"target": "x"}, Cadence(**cadence))
    return run, state


def ignore(step, line):
    pass


def sequences(count=3, length=24, seed=0):
    """Random token ids and lengths, int32."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (count, length)).astype(np.int32)
    lengths = rng.integers(length // 2, length + 1, count).astype(np.int32)
    return np.where(np.arange(length) < lengths[:, None], ids, 0), lengths
