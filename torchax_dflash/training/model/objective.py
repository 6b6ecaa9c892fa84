# SPDX-License-Identifier: Apache-2.0
"""Settings of the loss. No JAX in here, so that the command's help needs none.

With p the target's and q the draft's probabilities, rejection sampling accepts a draft
token with the probability alpha = sum(min(p, q)). The losses by name:

    kl      KL(p || q) up to a constant, over the target's likeliest tokens only
    tv      1 - alpha, the total variation distance
    accept  -log(alpha), the negative log of the acceptance
    lk      w KL + (1 - w) TV with w = exp(-3 alpha), held constant: KL while little is
            accepted, TV later

The last two are from "LK Losses" (Samarin et al. 2026, arXiv 2602.23881).
"""

from __future__ import annotations

from dataclasses import dataclass

LOSSES = ("kl", "tv", "accept", "lk")
"""Losses that compare distributions."""

POSITION_WEIGHTS = ("decay", "dpace")
"""How much each position of a block counts: by a fixed rule, or by D-PACE."""


@dataclass(frozen=True)
class Objective:
    """What is lost at each position of a block, and how much the position counts.

    Attributes:
        loss: one of `LOSSES`.
        soft: its share; the rest is the cross-entropy of the target's choice.
        position_weights: one of `POSITION_WEIGHTS`.
        gamma: decay length of "decay".
        smoothing: of "dpace", see `dpace_weights`.
    """

    loss: str = "kl"
    soft: float = 0.0
    position_weights: str = "decay"
    gamma: float = 4.0
    smoothing: float = 0.5
