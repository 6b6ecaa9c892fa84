# SPDX-License-Identifier: Apache-2.0
"""One training step of an unmodified draft module: torchax, `jax.grad` and optax."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from torchax_dflash.core.bridge import Params, TorchModule
from torchax_dflash.core.draft import Draft
from torchax_dflash.core.draft_weights import FC
from torchax_dflash.core.target import Target
from torchax_dflash.training.model.loss import Batch, Score, Vocabulary, score
from torchax_dflash.training.run.recipe import Recipe

_MUON_RMS = 0.2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and all that a checkpoint holds.

    Attributes:
        params: the draft's weights, float32, in PyTorch's layout; fc is multiplied by
            `feature_scale`.
        average: their moving average, which is evaluated and exported.
        optimizer: optax's state.
        feature_scale: float32 [F], typical size of each feature; constant.
        step: int32 [], steps done.
    """

    params: Params
    average: Params
    optimizer: Any
    feature_scale: jax.Array
    step: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What a step reads and never changes.

    Attributes:
        draft: the module; its `params` are the buffers only.
        target: lends its embedding and head.
        common: int32 [R], common tokens of the softmax, or None for all tokens.
        rare: int32 [V - R], the other tokens, or None.
        index: int32 [V], see `Vocabulary`, or None.
    """

    draft: Draft
    target: Target
    common: jax.Array | None = None
    rare: jax.Array | None = None
    index: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepReport:
    """Measurements of a step.

    Attributes:
        score: of its batch.
        grad_norm: the gradient's norm before clipping.
    """

    score: Score
    grad_norm: jax.Array


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """Clipping, then AdamW or Muon with warm-up and cosine decay of the step size."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,
        decay_steps=max(recipe.steps, recipe.warmup_steps + 1),
        end_value=recipe.learning_rate * recipe.final_learning_rate,
    )
    if recipe.optimizer == "muon":
        # Steps as large as Adam's usually are (Liu et al. 2025, arXiv 2502.16982), so
        # that the same learning rates suit both. Weight decay is on matrices only.
        steps = optax.contrib.muon(
            schedule,
            weight_decay=recipe.weight_decay,
            adam_b2=recipe.beta2,
            consistent_rms=_MUON_RMS,
        )
    else:
        steps = optax.adamw(
            schedule,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), steps)


def new_state(draft: Draft, feature_scale: jax.Array, recipe: Recipe) -> TrainState:
    """The state before the first step, with a draft's weights."""
    params = {
        name: jnp.array(array.T if name in draft.module.linear_weights else array)
        for name, array in _trainable(draft).items()
    }
    params = {name: array.astype(jnp.float32) for name, array in params.items()}
    params[FC] = params[FC] * feature_scale
    return TrainState(
        params=params,
        average=jax.tree.map(jnp.copy, params),
        optimizer=optimizer_of(recipe).init(params),
        feature_scale=feature_scale,
        step=jnp.zeros((), jnp.int32),
    )


def frozen_part(draft: Draft) -> Draft:
    """The draft without its trained weights, for linear weights in PyTorch's layout.

    On CPUs, XLA's three bfloat16 products of a linear layer and its gradients are only
    fast if the weights are [out, in].
    """
    trained = _trainable(draft)
    return replace(
        draft,
        params={n: a for n, a in draft.plain_params.items() if n not in trained},
        module=_as_in_pytorch(draft.module),
    )


def trained_draft(state: TrainState, frozen: Frozen, dtype: str) -> Draft:
    """The draft with averaged weights; linear ones stay in PyTorch's layout.

    In training, features are divided by their typical size, so that Adam's steps suit
    every input of fc; here this scale is folded back into fc.
    """
    params = state.average | {FC: state.average[FC] / state.feature_scale}
    params = {name: array.astype(dtype) for name, array in params.items()}
    params |= frozen.draft.plain_params
    return replace(frozen.draft, params=params, dtype=jnp.dtype(dtype))


@functools.cache
def _as_in_pytorch(module: TorchModule) -> TorchModule:
    """The module with all linear weights [out, in]; cached, since it is static."""
    return replace(module, linear_weights=frozenset())


def _trainable(draft: Draft) -> Params:
    names = {name for name, _ in draft.module.module.named_parameters()}
    return {name: a for name, a in draft.plain_params.items() if name in names}


@partial(jax.jit, static_argnames=("recipe", "block_size"), donate_argnames="state")
def train_step(
    state: TrainState,
    frozen: Frozen,
    batch: Batch,
    *,
    recipe: Recipe,
    block_size: int,
) -> tuple[TrainState, StepReport]:
    """One step; deterministic in its arguments, including the noise.

    Args:
        state: donated.
        frozen: the rest of the model.
        batch: the data.
        recipe: hyperparameters (static).
        block_size: Q in this stage (static).
    """
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    noise_key, vocabulary_key = jax.random.split(key)
    features = batch.features.astype(jnp.float32) / state.feature_scale
    if recipe.feature_noise:
        signs = _random_signs(noise_key, features.shape)
        features += recipe.feature_noise * signs
    batch = replace(batch, features=features)
    vocabulary = _draft_vocabulary(frozen, recipe) or _draw_vocabulary(
        vocabulary_key, frozen, recipe
    )

    def loss(params: Params) -> tuple[jax.Array, Score]:
        params = {name: p.astype(recipe.dtype) for name, p in params.items()}
        params |= frozen.draft.plain_params
        draft = replace(frozen.draft, params=params, dtype=jnp.dtype(recipe.dtype))
        result = score(
            draft,
            frozen.target,
            batch,
            vocabulary,
            block_size=block_size,
            objective=recipe.objective(block_size),
        )
        return result.loss / jnp.maximum(result.weight, 1e-6), result

    grads, result = jax.grad(loss, has_aux=True)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax counts in int32
        updates, optimizer = optimizer_of(recipe).update(
            grads, state.optimizer, state.params
        )
        params: Any = optax.apply_updates(state.params, updates)
    # In early steps the average follows faster, so that it forgets its start.
    decay = jnp.minimum(recipe.average, (1 + state.step) / (10 + state.step))
    average = jax.tree.map(
        lambda old, new: decay * old + (1 - decay) * new, state.average, params
    )
    state = replace(
        state,
        params=params,
        average=average,
        optimizer=optimizer,
        step=state.step + 1,
    )
    return state, StepReport(score=result, grad_norm=optax.tree.norm(grads))


@partial(jax.jit, static_argnames=("recipe", "block_size"))
def held_out_score(
    state: TrainState,
    frozen: Frozen,
    batch: Batch,
    *,
    recipe: Recipe,
    block_size: int,
) -> Score:
    """The averaged weights' score over all tokens the draft knows, without noise."""
    draft = trained_draft(state, frozen, recipe.dtype)
    return score(
        draft,
        frozen.target,
        batch,
        _draft_vocabulary(frozen, recipe),
        block_size=block_size,
        objective=recipe.objective(block_size),
    )


def _draft_vocabulary(frozen: Frozen, recipe: Recipe) -> Vocabulary | None:
    """The tokens of a draft with a reduced vocabulary; None if it knows all."""
    if not recipe.draft_vocab_size or frozen.common is None:
        return None
    assert frozen.index is not None
    return Vocabulary(frozen.common, frozen.index, jnp.zeros(len(frozen.common)))


def _draw_vocabulary(
    key: jax.Array, frozen: Frozen, recipe: Recipe
) -> Vocabulary | None:
    """All common tokens, and a few random ones that stand for the rest."""
    if frozen.common is None:
        return None
    assert frozen.rare is not None
    assert frozen.index is not None
    place = jax.random.randint(key, (recipe.random_tokens,), 0, len(frozen.rare))
    stands_for = jnp.log(len(frozen.rare) / recipe.random_tokens)
    offsets = jnp.where(
        jnp.arange(len(frozen.common) + recipe.random_tokens) < len(frozen.common),
        0.0,
        stands_for,
    )
    return Vocabulary(
        token_ids=jnp.append(frozen.common, frozen.rare[place]),
        index=frozen.index,
        offsets=offsets,
    )


def _random_signs(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """-1 or 1 from random bits: cheap, and after fc as good as Gaussian noise."""
    width = shape[-1]
    words = jax.random.bits(key, (*shape[:-1], -(-width // 32)), jnp.uint32)
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(*shape[:-1], -1)[..., :width]
    return bits.astype(jnp.float32) * 2 - 1
