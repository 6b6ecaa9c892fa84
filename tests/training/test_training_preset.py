# SPDX-License-Identifier: Apache-2.0
"""The TPU preset's step for a target of Qwen3-4B's shape: compiled, not run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from dflash.model import DFlashDraftModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from torchax_dflash.checkpoints.build import build_module
from torchax_dflash.core.config import DFlashConfig, TargetConfig
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.target import Target
from torchax_dflash.training.model.loss import Batch
from torchax_dflash.training.run import trainer
from torchax_dflash.training.run.recipe import PRESETS

LENGTH = 3072
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def shapes_of(built, dtype):
    """What `load_params` would give, without the numbers."""
    params = {
        name: jax.ShapeDtypeStruct(
            p.shape[::-1] if name in built.linear_weights else p.shape, dtype
        )
        for name, p in built.module.named_parameters()
    }
    buffers = {
        name: jax.ShapeDtypeStruct(b.shape, jnp.float32)
        for name, b in built.module.named_buffers()
    }
    return params | buffers


def test_the_tpu_preset_compiles_for_one_device():
    """With one sequence per device: the state, and less than 13 GB beside it."""
    recipe = replace(PRESETS["tpu"], sequences=1)
    target_config = Qwen3Config(**SHAPE, num_hidden_layers=2, tie_word_embeddings=False)
    draft_config = Qwen3Config(**SHAPE, num_hidden_layers=5)
    draft_config.num_target_layers = 36
    draft_config.block_size = 16
    taps = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    draft_config.dflash_config = taps
    # Only its embedding and head take part in the step: two layers are enough.
    built = build_module(Qwen3ForCausalLM, target_config)
    target = Target(
        shapes_of(built, jnp.bfloat16),
        built,
        TargetConfig.from_hf(target_config),
        jnp.dtype("bfloat16"),
    )
    built = build_module(DFlashDraftModel, draft_config)
    draft = Draft(
        shapes_of(built, jnp.float32),
        built,
        DFlashConfig.from_hf(draft_config),
        jnp.dtype("float32"),
    )

    def start(params):
        scale = jnp.ones(draft.config.feature_size)
        return trainer.new_state(replace(draft, params=params), scale, recipe)

    state = jax.eval_shape(start, draft.params)
    frozen = trainer.Frozen(draft=trainer.frozen_part(draft), target=target)

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct((1, *shape), dtype)

    batch = Batch(
        token_ids=rows(jnp.int32, LENGTH),
        lengths=rows(jnp.int32),
        features=rows(jnp.bfloat16, LENGTH, draft.config.feature_size),
        choices=rows(jnp.int32, LENGTH, 8),
        logprobs=rows(jnp.float32, LENGTH, 8),
        anchors=rows(jnp.int32, recipe.anchors),
    )
    lowered = trainer.train_step.lower(
        state, frozen, batch, recipe=recipe, block_size=16
    )
    memory = lowered.compile().memory_analysis()
    parameters = sum(p.size for p in state.params.values())
    assert 500e6 < parameters < 600e6
    assert memory.argument_size_in_bytes > 4 * 4 * parameters
    assert memory.temp_size_in_bytes < 13e9
