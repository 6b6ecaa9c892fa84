# SPDX-License-Identifier: Apache-2.0
"""The results of an evaluation: a table, report.json, curves and a model card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from torchax_dflash.core.draft import Draft
from torchax_dflash.training.data.storage import write_atomically
from torchax_dflash.training.report.evaluation import Acceptance
from torchax_dflash.training.run import checkpoint


@dataclass(frozen=True)
class Subject:
    """What was evaluated, and how.

    Attributes:
        draft: the draft.
        draft_folder: its checkpoint.
        target: the target's name.
        target_hash: from `fingerprint`.
        dtype: of computation.
        max_tokens: the most tokens in an answer.
        temperature: of the answers; 0 is greedy.
        draft_sample_method: see `Generator`.
        run: folder of the run that trained the draft, or None.
    """

    draft: Draft
    draft_folder: Path
    target: str
    target_hash: str
    dtype: str
    max_tokens: int
    temperature: float = 0.0
    draft_sample_method: str = "greedy"
    run: Path | None = None

    @property
    def sampling(self) -> str:
        """How answers and drafts were chosen, in words."""
        if not self.temperature:
            return "greedy"
        return f"temperature {self.temperature}, {self.draft_sample_method} drafts"


def table(found: dict[str, Acceptance]) -> Table:
    """A table for the terminal, one row per set."""
    lines = Table("set", "tau", "accepted at 1, 2, …", "prompts", "tokens")
    for name, acceptance in found.items():
        shares = " ".join(f"{share:.0%}" for share in acceptance.accepted)
        counts = (str(acceptance.prompts), str(acceptance.tokens))
        lines.add_row(name, f"{acceptance.tau:.2f}", shares, *counts)
    return lines


def write(folder: Path, found: dict[str, Acceptance], subject: Subject) -> None:
    """Writes report.json, report.png and README.md.

    Args:
        folder: created if needed.
        found: the acceptance, by set of questions.
        subject: what was evaluated.

    Raises:
        FileNotFoundError: `subject.run` has no log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = read_log(subject.run) if subject.run else []
    recipe = _read_recipe(subject.run) if subject.run else {}
    figures = {name: acceptance.to_json() for name, acceptance in found.items()}
    content = {
        "draft": subject.draft_folder.name,
        "target": subject.target,
        "target_sha256": subject.target_hash,
        "dtype": subject.dtype,
        "max_tokens": subject.max_tokens,
        "sampling": subject.sampling,
        "num_speculative_tokens": _num_drafts(found),
        "acceptance": figures,
        "recipe": recipe,
    }
    write_atomically(folder / "report.json", json.dumps(content, indent=2) + "\n")
    _figure(found, log).savefig(folder / "report.png", dpi=120)
    write_atomically(folder / "README.md", _card(found, subject, recipe, log))


def _figure(found: dict[str, Acceptance], log: list[dict[str, Any]]) -> Figure:
    """Acceptance by position, and the curves of the training run if there is one."""
    figure = Figure(figsize=(11 if log else 5.5, 4), layout="constrained")
    left, *rest = figure.subplots(1, 2 if log else 1, squeeze=False)[0]
    for name, acceptance in found.items():
        positions = range(1, len(acceptance.accepted) + 1)
        label = f"{name}, tau {acceptance.tau:.2f}"
        left.plot(positions, acceptance.accepted, marker="o", label=label)
    left.set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1))
    left.grid(alpha=0.3)
    left.legend()
    if rest:
        tokens = accumulate(
            line.get("blocks", 0) * (line["block_size"] - 1) / 1e6 for line in log
        )
        pairs = list(zip(tokens, log, strict=True))
        trained = [(at, line["tau"]) for at, line in pairs if "tau" in line]
        held_out = [
            (at, line["held_out"]["tau"]) for at, line in pairs if line.get("held_out")
        ]
        rest[0].plot(*zip(*trained, strict=True), alpha=0.4, label="training")
        if held_out:
            rest[0].plot(*zip(*held_out, strict=True), marker="o", label="held out")
        rest[0].set(xlabel="million drafted tokens trained on", ylabel="tau")
        rest[0].grid(alpha=0.3)
        rest[0].legend()
    return figure


def _card(
    found: dict[str, Acceptance],
    subject: Subject,
    recipe: dict[str, Any],
    log: list[dict[str, Any]],
) -> str:
    config = subject.draft.config
    module: Any = subject.draft.module.module
    parameters = sum(p.numel() for p in module.parameters())
    lines = [
        "---",
        f"base_model: {subject.target}",
        "library_name: torchax-dflash",
        "tags: [speculative-decoding, dflash]",
        "---",
        f"# A DFlash draft for {Path(subject.target).name}",
        "",
        "| | |",
        "|---|---|",
        f"| module | `{type(module).__name__}` of PyPI's `dflash` |",
        f"| layers | {config.num_hidden_layers}, hidden size {config.hidden_size}; "
        f"{parameters / 1e6:.1f} M parameters |",
        f"| block size | {config.block_size} |",
        f"| mask token id | {config.mask_token_id} |",
        f"| target layers | {', '.join(map(str, config.target_layer_ids))} "
        f"of {config.num_target_layers} |",
        f"| target, SHA-256 | `{subject.target_hash[:16]}…` |",
        "",
        f"## Acceptance ({subject.sampling}, {subject.dtype}, {subject.max_tokens} "
        f"tokens per answer, {_num_drafts(found)} drafts per step, chat template)",
        "",
        "Mean tokens per target pass (tau), and the share of steps in which the draft "
        "at each position was accepted.",
        "",
        "| set | tau | accepted at 1, 2, … | prompts |",
        "|---|---|---|---|",
    ]
    for name, acceptance in found.items():
        shares = " ".join(f"{share:.2f}" for share in acceptance.accepted)
        lines.append(
            f"| {name} | {acceptance.tau:.2f} | {shares} | {acceptance.prompts} |"
        )
    lines += ["", "![acceptance](report.png)", ""]
    if recipe:
        steps = log[-1]["step"] if log else 0
        lines += [f"## Training ({steps} steps)", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in recipe.items()]
        lines.append("")
    return "\n".join(lines)


def _num_drafts(found: dict[str, Acceptance]) -> int:
    return max((len(acceptance.accepted) for acceptance in found.values()), default=0)


def read_log(run: Path) -> list[dict[str, Any]]:
    """The log of a run, one line per step: of a repeated step the last line counts.

    Raises:
        FileNotFoundError: there is no log.
    """
    file = run / "log.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: expected a run's log, found no such file. Give a run's folder."
        )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return list({line["step"]: line for line in lines}.values())


def _read_recipe(run: Path) -> dict[str, Any]:
    place = checkpoint.latest(run / "checkpoints")
    if place is None:
        return {}
    return json.loads((place / "recipe.json").read_text())["recipe"]
