"""The owner's side of a report: votes may be seen here, and nothing written here may be published."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from pate_torch.audit.membership import Attack, Membership
from pate_torch.core import checks
from pate_torch.reporting.charts import percent, show_share, thinned
from pate_torch.reporting.intervals import Share
from pate_torch.reporting.released import strict_json
from pate_torch.reporting.table import OwnerLine
from pate_torch.types import Votes

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
OWNER_ONLY = 0o700
OWNER_ONLY_FILE = 0o600

README = """PRIVATE: do not publish, do not copy to where others can read it.

{what}

What lies here was computed from private records without noise, and no privacy guarantee covers it. Choosing a
parameter of a later release after a look at it is a release too, one that no ledger charges.
What may be published lies in the folder `release` of a run.
"""

CONTENT = {
    "run": "A run's private side: votes, teachers' curves, accuracies, what an attack on the student found, and\n"
    "data-dependent prices (they depend on the votes, so they may not be published as a guarantee).",
    "teachers": "An ensemble: the teachers' weights, how their shares were drawn, and their votes on public points. "
    "It belongs to the ledger of the same root: without that ledger it is refused.",
    "store": "The root of all runs: teachers, ledger and runs. Only the folders `release` below it may be published.",
}


def make_private_folder(path: Path, content: str = "run") -> Path:
    """Create ``path`` (or tighten it) with mode 0700 and a README; ``content``: a key of CONTENT, or a sentence."""
    path.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
    os.chmod(path, OWNER_ONLY)  # mkdir leaves an existing folder as it was, and obeys the umask
    readme = path / "README.txt"
    readme.write_text(README.format(what=CONTENT.get(content, content)), encoding="utf-8")
    return path


def gap_quantiles(votes: Votes) -> dict[str, float]:
    """How clearly the teachers agree: quantiles of winner minus runner-up, in votes. PRIVATE."""
    gap = votes.gap().double()
    if len(gap) == 0:
        return {}
    values = torch.quantile(gap, torch.tensor(QUANTILES, dtype=torch.float64, device=gap.device))
    return {f"{q:g}": float(value) for q, value in zip(QUANTILES, values.tolist(), strict=True)}


@dataclass(frozen=True, kw_only=True)
class OwnerSummary:
    """PRIVATE figures of a run; None where one was not computed.

    records: how many there were, by what became of them. student_accuracy, student_size, confusion: of the student on
    test records that are not public, where a report may not show them.
    ensemble_accuracy: of the plurality without noise; nonprivate_accuracy: of a model trained on all records at once;
    the two epsilons depend on the votes, so they are no guarantee and no price; membership: what an attack found;
    seconds: per stage, also of those whose time tells how many records there are. not_computed: why a figure is missing
    that should be here, by what it is called. forecast: what was foretold of the labels from public values
    (``chance.foretold``).
    """

    records: Mapping[str, int] = field(default_factory=dict)
    student_accuracy: float | None = None
    student_size: int | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    ensemble_accuracy: float | None = None
    teacher_accuracy_mean: float | None = None
    epsilon_exact_data_dependent: float | None = None
    epsilon_pate2018: float | None = None
    gap_quantiles: Mapping[str, float] = field(default_factory=dict)
    nonprivate_accuracy: float | None = None
    membership: Membership | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_computed: Mapping[str, str] = field(default_factory=dict)
    forecast: str | None = None

    def __post_init__(self) -> None:
        for name in ("student_accuracy", "ensemble_accuracy", "teacher_accuracy_mean", "nonprivate_accuracy"):
            if getattr(self, name) is not None:
                checks.between(name, getattr(self, name), 0, 1)
        for name in ("epsilon_exact_data_dependent", "epsilon_pate2018"):
            if getattr(self, name) is not None:
                checks.non_negative(name, getattr(self, name))
        for key, value in self.gap_quantiles.items():
            checks.non_negative(f"gap_quantiles.{key}", value)

    def lines(self) -> tuple[OwnerLine, ...]:
        """What the closing table shows the owner: accuracies, and what is missing (an epsilon looks like a price)."""
        shown = (
            ("Ensemble, no noise", self.ensemble_accuracy),
            ("A teacher, on average", self.teacher_accuracy_mean),
            ("Model without privacy", self.nonprivate_accuracy),
        )
        lines = [OwnerLine(name="Records", value=", ".join(f"{n:,} {what}" for what, n in self.records.items()))]
        if self.student_accuracy is not None:
            on = Share(value=self.student_accuracy, size=self.student_size)
            value = f"{show_share(on)}, on {self.student_size} test records"
            lines.append(OwnerLine(name="Accuracy of student", value=value))
        lines += [OwnerLine(name=name, value=percent(value)) for name, value in shown if value is not None]
        missing = [OwnerLine(name=name, value=f"not computed: {why}") for name, why in self.not_computed.items()]
        missing += [] if self.forecast is None else [OwnerLine(name="Forecast", value=self.forecast)]
        return (*(line for line in lines if line.value), *_membership_lines(self.membership), *missing)


def _membership_lines(found: Membership | None) -> list[OwnerLine]:
    """What the attack found in the student, what any attack may find, and what it found without privacy."""
    if found is None:
        return []
    bound = found.bound_by_plan
    most = "" if bound is None else f"; any attack's advantage is at most {percent(bound)} by the guarantee"
    alarm = ". ABOVE ITS BOUND: a fault, or the records differ from the others" if found.above_bound else ""
    lines = [OwnerLine(name="Attack on the student", value=_show_attack(found.student) + most + alarm)]
    if found.nonprivate is not None:
        lines.append(OwnerLine(name="  and without privacy", value=_show_attack(found.nonprivate)))
    return lines


def _show_attack(attack: Attack) -> str:
    """advantage 1.2 % (-3.0 to 5.4), AUC 0.507 (0.485 to 0.529). Below 0 it is chance, and says so."""
    low, high = attack.advantage_interval
    below, above = attack.auc_interval
    advantage = f"advantage {percent(attack.advantage)} ({100 * low:.1f} to {100 * high:.1f})"
    found = "no signal found: " if attack.advantage <= 0 else ""
    return f"{found}{advantage}, AUC {attack.auc:.3f} ({below:.3f} to {above:.3f})"


def write_owner_summary(summary: OwnerSummary, path: Path) -> None:
    """private/summary.json; NaN is refused."""
    content: dict[str, Any] = {
        "records": dict(summary.records),
        "student_accuracy": summary.student_accuracy,
        "student_size": summary.student_size,
        "confusion": summary.confusion,
        "ensemble_accuracy": summary.ensemble_accuracy,
        "teacher_accuracy_mean": summary.teacher_accuracy_mean,
        "epsilon_exact_data_dependent": summary.epsilon_exact_data_dependent,
        "epsilon_pate2018": summary.epsilon_pate2018,
        "gap_quantiles": dict(summary.gap_quantiles),
        "nonprivate_accuracy": summary.nonprivate_accuracy,
        "seconds": dict(summary.seconds),
        "not_computed": dict(summary.not_computed),
        "forecast": summary.forecast,
        "membership": None if summary.membership is None else asdict(summary.membership),
    }
    path.touch(mode=OWNER_ONLY_FILE)
    path.chmod(OWNER_ONLY_FILE)  # before anything private is in it
    path.write_text(strict_json(content), encoding="utf-8")


LAYOUT = {
    "Teachers: mean, least and greatest": {
        what: ["Margin", [f"teachers/{what}_{which}" for which in ("mean", "min", "max")]]
        for what in ("loss", "accuracy")
    },
    "Votes": {"share of questions answered": ["Multiline", ["votes/answered_share$"]]},
}
"""Of TensorBoard's page of custom scalars."""


class PrivateBoard:
    """PRIVATE. Writes private/tensorboard: how the teachers learn, how they agree, how many questions were answered.

    ``log`` is a ``protocols.Log`` for the teachers' training, ``losses`` takes every teacher's loss at a step.
    """

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("PRIVATE", README.format(what=CONTENT["run"]))
        self.writer.add_custom_scalars(LAYOUT)
        self.writer.flush()
        for file in folder.glob("events.out.tfevents.*"):
            file.chmod(OWNER_ONLY_FILE)  # the folder is closed already; a copy of the file alone should be, too

    def log(self, tag: str, value: float, step: int) -> None:
        self.writer.add_scalar(tag, value, step)

    def losses(self, step: int, loss_K: Tensor) -> None:
        """The distribution of the teachers' losses, [K], at a step."""
        self._spread("teachers/loss", loss_K, step)

    def accuracies(self, accuracy_K: Tensor, step: int = 0) -> None:
        """The distribution of the teachers' accuracies, [K]."""
        self._spread("teachers/accuracy", accuracy_K, step)

    def votes(self, votes: Votes, answered_Q: Tensor) -> None:
        """How clearly the questions asked were decided, and the share of them answered (bool [Q])."""
        self._spread("votes/gap", votes.gap(), 0)
        self._spread("votes/top", votes.top(), 0)
        if len(answered_Q):
            share_Q = answered_Q.cpu().double().cumsum(0) / torch.arange(1, len(answered_Q) + 1)
            for question, share in thinned(list(enumerate(share_Q.tolist(), start=1))):
                self.writer.add_scalar("votes/answered_share", share, int(question))

    def membership(self, found: Membership) -> None:
        """What the attack on the student found, beside its bounds and a model without privacy."""
        words = "\n\n".join(f"{line.name.strip()}: {line.value}" for line in _membership_lines(found))
        self.writer.add_text("membership", words)

    def _spread(self, tag: str, values: Tensor, step: int) -> None:
        finite = values.double()[values.double().isfinite()]
        if len(finite):  # a diverged teacher must not end the run: its vote is one among K
            self.writer.add_histogram(tag, finite.cpu().numpy(), step)

    def close(self) -> None:
        self.writer.close()
