# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of a training run."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchax_dflash.core.config import config_error
from torchax_dflash.training.model.objective import (
    LOSSES,
    POSITION_WEIGHTS,
    Objective,
)

# The paper's gamma by block size.
_PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}

CHOICES = {
    "optimizer": ("adamw", "muon"),
    "position_weights": POSITION_WEIGHTS,
    "loss": LOSSES,
    "dtype": ("float32", "bfloat16"),
}
"""Fields that are one of a few words."""


@dataclass(frozen=True)
class Recipe:
    """How a draft is trained. The defaults are those of the demo pair.

    Attributes:
        stages: block sizes in the order they are trained, each with its share of the
            steps; starting with short blocks is cheaper and teaches the first
            positions, which matter most.
        steps: number of training steps.
        sequences: sequences per step.
        anchors: blocks per sequence.
        learning_rate: peak learning rate.
        final_learning_rate: learning rate at the end, as a share of the peak.
        warmup_steps: steps until the peak.
        weight_decay: weight decay, applied to matrices only.
        beta2: AdamW's beta2.
        clip: gradients are clipped to this norm.
        optimizer: adamw, or muon for matrices (and AdamW for everything else).
        position_weights: how much the positions of a block count, by decay (see
            `gamma`) or by dpace, the probability that a position is reached.
        gamma: decay length of the weight of later positions; None means the paper's
            value for the block size.
        dpace_smoothing: with dpace, 0 weights by the draft's own probabilities, 1 by
            the position only.
        loss: what compares the draft's distribution with the target's, one of kl, tv
            (total variation), accept (negative log of the acceptance) and lk (KL, then
            TV).
        soft: share of the loss that compares distributions; the rest is the
            cross-entropy of the target's likeliest token.
        feature_noise: noise added to features, in units of their typical size.
        common_tokens: the softmax is over this many of the most common tokens and
            `random_tokens` others; 0 means the whole vocabulary.
        random_tokens: number of other tokens, drawn again in each step.
        draft_vocab_size: the draft knows this many of the most common tokens only, and
            is exported with a head for them; 0 means all tokens, with the target's
            head.
        average: decay of the moving average of the weights.
        dtype: of computation; weights and optimiser state are float32.
        seed: of all randomness.
    """

    stages: tuple[tuple[int, float], ...] = ((4, 0.6), (8, 0.4))
    steps: int = 4000
    sequences: int = 4
    anchors: int = 32
    learning_rate: float = 1.5e-3
    final_learning_rate: float = 0.05
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    optimizer: str = "adamw"
    position_weights: str = "decay"
    gamma: float | None = None
    dpace_smoothing: float = 0.5
    loss: str = "kl"
    soft: float = 0.3
    feature_noise: float = 0.15
    common_tokens: int = 8192
    random_tokens: int = 1024
    draft_vocab_size: int = 0
    average: float = 0.998
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: one is out of range.
        """
        for name in ("steps", "sequences", "anchors", "random_tokens"):
            _check(name, getattr(self, name), at_least=1)
        for name in ("learning_rate", "clip"):
            _check(name, getattr(self, name), above=0)
        for name in ("warmup_steps", "weight_decay", "feature_noise", "common_tokens"):
            _check(name, getattr(self, name), at_least=0)
        _check("draft_vocab_size", self.draft_vocab_size, at_least=0)
        for name in ("final_learning_rate", "soft", "average", "beta2"):
            _check(name, getattr(self, name), at_least=0, at_most=1)
        _check("dpace_smoothing", self.dpace_smoothing, at_least=0, at_most=1)
        if self.gamma is not None:
            _check("gamma", self.gamma, above=0)
        for name, choices in CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                expected = " or ".join(choices)
                raise config_error(name, expected, given, "Choose one of them.")
        shares = [share for _, share in self.stages]
        if not shares or abs(sum(shares) - 1) > 1e-6 or min(shares) <= 0:
            raise config_error(
                "stages",
                "block sizes with shares that sum to 1",
                self.stages,
                "Write for example 4:0.6,8:0.4.",
            )
        for block_size, _ in self.stages:
            _check("stages", block_size, at_least=2)

    @property
    def largest_block(self) -> int:
        """The block size of the trained draft."""
        return max(block_size for block_size, _ in self.stages)

    def block_size_at(self, step: int) -> int:
        """The block size at a step."""
        end = 0.0
        for block_size, share in self.stages:
            end += share
            if step < end * self.steps - 1e-6:
                return block_size
        return self.stages[-1][0]

    def gamma_of(self, block_size: int) -> float:
        """The decay length of position weights at this block size."""
        if self.gamma is not None:
            return self.gamma
        nearest = min(_PAPER_GAMMA, key=lambda known: abs(known - block_size))
        return _PAPER_GAMMA[nearest]

    def objective(self, block_size: int) -> Objective:
        """What blocks of this size are trained for."""
        return Objective(
            loss=self.loss,
            soft=self.soft,
            position_weights=self.position_weights,
            gamma=self.gamma_of(block_size),
            smoothing=self.dpace_smoothing,
        )

    @classmethod
    def help_of(cls, name: str) -> str:
        """A field's description in the docstring of this class, on one line."""
        text = inspect.cleandoc(cls.__doc__ or "").split("Attributes:")[1]
        entry = text.split(f"\n    {name}: ")[1]
        lines = itertools.takewhile(
            lambda line: not line.strip() or line.startswith("        "),
            entry.splitlines()[1:],
        )
        return " ".join([entry.splitlines()[0], *map(str.strip, lines)]).strip()

    def to_json(self) -> dict[str, Any]:
        """As in a checkpoint's `recipe.json`."""
        return asdict(self) | {"stages": [list(stage) for stage in self.stages]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recipe:
        """The inverse of `to_json`."""
        stages: Any = tuple((int(q), float(share)) for q, share in values["stages"])
        return cls(**{**values, "stages": stages})

    def check_same(self, saved: Recipe) -> None:
        """Raises ValueError if a run with `saved` cannot continue with this recipe."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(saved, field.name)
            if ours != theirs:
                raise config_error(
                    field.name,
                    f"the interrupted run's, {theirs}",
                    ours,
                    "Resume with the same settings, or start a new run with another "
                    "--run (and --init to keep the weights).",
                )


def _check(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> None:
    wrong = (
        (at_least is not None and value < at_least)
        or (above is not None and value <= above)
        or (at_most is not None and value > at_most)
    )
    if wrong:
        limits = [f"at least {at_least}"] if at_least is not None else []
        limits += [f"above {above}"] if above is not None else []
        limits += [f"at most {at_most}"] if at_most is not None else []
        raise config_error(name, ", ".join(limits), value, "Choose another value.")


PRESETS = {
    "demo": Recipe(),
    # Block size, gamma, learning rate, warm-up of 4 % and clipping are the paper's, as
    # in SpecForge's recipe. Half of its 512 anchors, so that the state and a sequence
    # of 3072 tokens fit into 32 GB. The whole vocabulary, no noise and no KL term, for
    # use with plenty of data. Never run to the end so far; a test compiles its step for
    # a target of Qwen3-4B's shape.
    "tpu": Recipe(
        stages=((16, 1.0),),
        steps=100_000,
        sequences=16,
        anchors=256,
        learning_rate=6e-4,
        final_learning_rate=0.0,
        warmup_steps=4000,
        weight_decay=0.0,
        beta2=0.999,
        soft=0.0,
        feature_noise=0.0,
        common_tokens=0,
        average=0.0,
    ),
}
"""Settings to start from: for two CPU cores, and for targets like Qwen3-4B on a TPU."""
