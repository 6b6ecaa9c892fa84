# SPDX-License-Identifier: Apache-2.0
"""A training run from its first step, or its latest checkpoint, to its last."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax_dflash.core.config import config_error
from torchax_dflash.training.model.loss import Score
from torchax_dflash.training.run import checkpoint
from torchax_dflash.training.run.batches import Batches
from torchax_dflash.training.run.recipe import Recipe
from torchax_dflash.training.run.trainer import (
    Frozen,
    StepReport,
    TrainState,
    held_out_score,
    train_step,
)


@dataclass(frozen=True)
class Cadence:
    """How often a run logs, evaluates and saves, in steps.

    Attributes:
        log: a line in log.jsonl.
        held_out: a score of held-out sequences.
        checkpoint: a checkpoint.
        held_out_sequences: the most sequences in a held-out score.
    """

    log: int = 20
    held_out: int = 500
    checkpoint: int = 500
    held_out_sequences: int = 32

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: one is below 1.
        """
        for name, steps in vars(self).items():
            if steps < 1:
                option = f"--{name.replace('_', '-')}-every"
                raise config_error(
                    option, "at least 1 step", steps, "For never, give a large number."
                )


@dataclass
class Run:
    """A run and its folder: log.jsonl and checkpoints.

    Attributes:
        folder: of the log and the checkpoints.
        recipe: hyperparameters.
        frozen: the models.
        batches: the data.
        about: what else must be the same to resume.
        cadence: how often it logs, evaluates and saves.
        stopped: if set, the run ends after the current step, with a checkpoint.
    """

    folder: Path
    recipe: Recipe
    frozen: Frozen
    batches: Batches
    about: dict[str, Any]
    cadence: Cadence = Cadence()
    stopped: bool = field(default=False, init=False)

    def resume(self, state: TrainState) -> TrainState:
        """The latest checkpoint's state, or `state` if there is no checkpoint.

        Raises:
            ValueError: the checkpoint is of a run with other settings.
        """
        place = checkpoint.latest(self.folder / "checkpoints")
        if place is None:
            return state
        return checkpoint.load(place, state, self.recipe, self.about)

    def train(
        self, state: TrainState, on_step: Callable[[int, dict[str, Any] | None], None]
    ) -> TrainState:
        """Runs the remaining steps.

        Args:
            state: from `resume`.
            on_step: called with the number of steps done, and the log line of this step
                or None.

        Returns:
            The last state, of which a checkpoint was written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        step, saved_at, tally = int(state.step), -1, _Tally()
        while step < self.recipe.steps and not self.stopped:
            block_size = self.recipe.block_size_at(step)
            state, report = train_step(
                state,
                self.frozen,
                self.batches.batch(step),
                recipe=self.recipe,
                block_size=block_size,
            )
            step += 1
            tally.add(report.score)
            line = self._line(step, block_size, state, report, tally)
            if step % self.cadence.checkpoint == 0:
                self._save(state)
                saved_at = step
            on_step(step, line)
        if saved_at != step:
            self._save(state)
        return state

    def held_out(self, state: TrainState, block_size: int) -> dict[str, Any]:
        """The summary of the held-out sequences; {} if there are none."""
        tally = _Tally()
        for batch in self.batches.held_out_batches(self.cadence.held_out_sequences):
            found = held_out_score(
                state,
                self.frozen,
                batch,
                recipe=self.recipe,
                block_size=block_size,
            )
            tally.add(found)
        return summary(tally.total) if tally.total else {}

    def _line(
        self,
        step: int,
        block_size: int,
        state: TrainState,
        report: StepReport,
        tally: _Tally,
    ) -> dict[str, Any] | None:
        """Logs and returns what is due after this step."""
        is_last = step == self.recipe.steps
        line: dict[str, Any] = {}
        if step % self.cadence.log == 0 or is_last:
            assert tally.total is not None
            line |= summary(tally.total) | {
                "grad_norm": round(float(report.grad_norm), 4),
                "seconds_a_step": round(tally.seconds / tally.steps, 4),
            }
            tally.clear()
        if step % self.cadence.held_out == 0 or is_last:
            started = time.perf_counter()
            line["held_out"] = self.held_out(state, block_size)
            tally.leave_out(time.perf_counter() - started)
        if not line:
            return None
        line = {"step": step, "block_size": block_size} | line
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line | {"time": round(time.time(), 1)}) + "\n")
        return line

    def _save(self, state: TrainState) -> None:
        checkpoint.save(self.folder / "checkpoints", state, self.recipe, self.about)


class _Tally:
    """The sum of scores since the last log line, for one block size."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.total: Score | None = None
        self.steps, self._since = 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    def leave_out(self, seconds: float) -> None:
        self._since += seconds

    def add(self, score: Score) -> None:
        if self.total is None or self.total.hits.shape != score.hits.shape:
            self.total = score
        else:
            self.total = jax.tree.map(jnp.add, self.total, score)
        self.steps += 1


def summary(total: Score) -> dict[str, Any]:
    """A score as plain numbers.

    `accepted` is, by position, the share of blocks whose drafts are right up to and at
    it; `tau` is 1 plus their sum, the acceptance length if every position were an
    anchor; `blocks` is the number of blocks.
    """
    hits, counts = np.asarray(total.hits), np.asarray(total.counts)
    accepted = hits / max(float(counts[0]), 1.0)
    return {
        "loss": round(float(total.loss) / max(float(total.weight), 1e-6), 5),
        "tau": round(1 + float(accepted.sum()), 4),
        "accepted": [round(float(share), 4) for share in accepted],
        "blocks": int(counts[0]),
    }


@contextlib.contextmanager
def stopping(run: Run) -> Iterator[None]:
    """SIGINT or SIGTERM ends the run after the current step; a second one, at once."""

    def stop(signum: int, frame: object) -> None:
        if run.stopped:
            raise KeyboardInterrupt
        run.stopped = True

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
