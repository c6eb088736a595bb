"""What only the owner of the data may see of a run: figures without noise, and prices that depend on the votes.

Nothing here enters a ``ReleaseReport`` (but accuracies on a public benchmark); it is written into the run's private
folder and printed for the owner, marked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import rdp
from pate_torch.accounting.data_dependent.theorems import compute_rdp
from pate_torch.accounting.data_dependent.vote_rows import Array
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.core.files import PRIVATE_FILE_MODE
from pate_torch.privacy.records import Dataset, PrivateRecords, Release
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.builder import compute_accuracy, compute_student_metrics
from pate_torch.release.intervals import Share, format_percent
from pate_torch.release.membership import MembershipRecords, MembershipResult, attack
from pate_torch.release.renderer import to_strict_json
from pate_torch.release.report import Accuracy
from pate_torch.release.statement import compute_advantage_bound
from pate_torch.students.base import Student
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.voting import count_votes

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PrivateMetrics:
    """PRIVATE. The figures of a run, for the owner of the data alone; None if one was not computed.

    ``epsilon_pate2018`` depends on the votes: it is no guarantee and no price.

    Attributes:
        records: How many there were, by what became of them.
        student_accuracy: Accuracy on test records that are not public.
        student_size: Number of these test records.
        confusion: The student's counts on them, [truth, predicted].
        ensemble_accuracy: Accuracy of the plurality without noise.
        teacher_accuracy_mean: Mean accuracy of the teachers.
        epsilon_pate2018: Data-dependent epsilon by the bound of PATE 2018.
        gap_quantiles: Quantiles of the votes between winner and runner-up.
        nonprivate_accuracy: Accuracy of a model trained on all records at once.
        membership: The membership test of the student.
        seconds: Time of every stage, also of those whose time tells how many records there are.
        not_computed: Name of a missing figure -> why it is missing.
        forecast: The forecast of the labels from public values (``feasibility.forecast_warning``).
    """

    records: Mapping[str, int] = field(default_factory=dict)
    student_accuracy: float | None = None
    student_size: int | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    ensemble_accuracy: float | None = None
    teacher_accuracy_mean: float | None = None
    epsilon_pate2018: float | None = None
    gap_quantiles: Mapping[str, float] = field(default_factory=dict)
    nonprivate_accuracy: float | None = None
    membership: MembershipResult | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_computed: Mapping[str, str] = field(default_factory=dict)
    forecast: str | None = None

    @classmethod
    def from_student(
        cls, data: Dataset, student: Student, seconds: Mapping[str, float], *, all_private: PrivateRecords | None = None
    ) -> PrivateMetrics:
        """PRIVATE. Count the records, and measure the student on test records whose figures may not be published.

        Args:
            data: The data of the run.
            student: The student, or the model.
            seconds: The time of every stage.
            all_private: The private records with those that are held out; None if none are.
        """
        metrics = compute_student_metrics(data, None if data.evaluation.public else student)
        return cls(**metrics, records=count_records(data, all_private), seconds=dict(seconds))

    def format_rows(self) -> dict[str, str]:
        """The owner's part of the closing table: accuracies, and what is missing (an epsilon looks like a price)."""
        lines = {"Records": ", ".join(f"{n:,} {group}" for group, n in self.records.items())} if self.records else {}
        if self.student_accuracy is not None:
            share = Share(value=self.student_accuracy, size=self.student_size)
            lines["Accuracy of student"] = f"{share}, on {self.student_size} test records"
        accuracies = {
            "Ensemble, no noise": self.ensemble_accuracy,
            "A teacher, on average": self.teacher_accuracy_mean,
            "Model without privacy": self.nonprivate_accuracy,
        }
        lines |= {name: format_percent(value) for name, value in accuracies.items() if value is not None}
        lines |= {} if self.membership is None else self.membership.format_lines()
        lines |= {name: f"not computed: {reason}" for name, reason in self.not_computed.items()}
        return lines if self.forecast is None else lines | {"Forecast": self.forecast}

    def write(self, path: Path) -> None:
        """Write private/summary.json; NaN is refused."""
        path.touch(mode=PRIVATE_FILE_MODE)
        path.chmod(PRIVATE_FILE_MODE)  # before anything private is in it
        path.write_text(to_strict_json(asdict(self)), encoding="utf-8")


def count_records(data: Dataset, all_private: PrivateRecords | None = None) -> dict[str, int]:
    """PRIVATE. How many records there are, by what became of them; ``all_private``: with those held out."""
    all_private = data.private if all_private is None else all_private
    units, num_held_out = len(np.unique(all_private.unit_id)), len(all_private) - len(data.private)
    rows = {"private": len(all_private)} | ({"private units": units} if units < len(all_private) else {})
    rows |= {"public": len(data.pool), "test": len(data.evaluation.y)}
    rows |= {"private held out": num_held_out} if num_held_out else {}
    return rows | {f"left out {reason}": count for reason, count in data.num_dropped_by_reason.items()}


def compute_vote_metrics(
    *,
    data: Dataset,
    release: Release,
    votes: Votes | None,
    ensemble: TeacherEnsemble | None,
    nonprivate: TeacherEnsemble | None,
    model: OutcomeModel | None,
    rounds: int,
    delta: float,
    device: torch.device,
) -> PrivateMetrics:
    """PRIVATE. Compute accuracies without noise, and prices that depend on the votes.

    Args:
        data: The data of the run.
        release: The labels.
        votes: The teachers' votes on the pool; None if records answered for themselves.
        ensemble: The teachers; None if the votes were brought from elsewhere, and tell nothing of the test points.
        nonprivate: A model trained on all records; None if there is none.
        model: The mechanism's law of outcomes; None if it has none.
        rounds: The number of rounds. Data-dependent prices compose only if no question depends on an earlier answer:
            of several rounds there is none.
        delta: The account's delta.
        device: The device of the predictions.
    """
    missing: dict[str, str] = {}
    test, num_classes = data.evaluation, data.spec.num_classes

    def compute_nonprivate() -> float:
        assert nonprivate is not None
        return compute_accuracy(nonprivate.predict(test.x, device=device)[0], test.y)

    def compute_accuracies() -> tuple[float, float]:
        assert ensemble is not None
        prediction_KQ = ensemble.predict(test.x, device=device)
        plurality = count_votes(prediction_KQ, num_classes).compute_plurality()
        return compute_accuracy(prediction_KQ, test.y), compute_accuracy(plurality, test.y)

    nonprivate_accuracy = teachers = epsilon = gaps = None
    if nonprivate is not None:
        nonprivate_accuracy = _compute_or_none("Model without privacy", compute_nonprivate, missing)
    if ensemble is not None:
        teachers = _compute_or_none("Teachers' accuracies", compute_accuracies, missing)
    if votes is not None:
        asked = votes.select(release.query_Q)
        if model is not None and rounds == 1 and len(asked):
            counts = asked.counts_QC.cpu().numpy()
            curve = functools.partial(compute_rdp, model, counts, rdp.ORDERS)
            epsilon = _compute_or_none(
                "Price of these votes, theorem", lambda: _compute_epsilon(curve(), delta), missing
            )
        gaps = _compute_or_none("How the votes agree", lambda: compute_gap_quantiles(asked), missing)
    return PrivateMetrics(
        ensemble_accuracy=None if teachers is None else teachers[1],
        teacher_accuracy_mean=None if teachers is None else teachers[0],
        epsilon_pate2018=epsilon,
        gap_quantiles=gaps or {},
        nonprivate_accuracy=nonprivate_accuracy,
        not_computed=missing,
    )


def compute_gap_quantiles(votes: Votes) -> dict[str, float]:
    """PRIVATE. Quantiles of winner minus runner-up, in votes."""
    gap = votes.compute_gaps().double()
    if len(gap) == 0:
        return {}
    values = torch.quantile(gap, torch.tensor(QUANTILES, dtype=torch.float64, device=gap.device))
    return {f"{q:g}": float(value) for q, value in zip(QUANTILES, values.tolist(), strict=True)}


def _compute_or_none(name: str, compute: Callable[[], T], missing_metrics: dict[str, str]) -> T | None:
    """PRIVATE. The figure, or None and its failure by the error's name alone.

    The labels are charged by now: no figure for the owner may end the run, whatever goes wrong with it.
    """
    try:
        return compute()
    except Exception as error:
        missing_metrics[name] = f"it failed ({type(error).__name__})"
        return None


def _compute_epsilon(rdp_A: Array, delta: float) -> float:
    epsilon = rdp.to_epsilon(rdp.ORDERS, rdp_A, delta)
    if not math.isfinite(epsilon):
        raise ArithmeticError("no finite epsilon")
    return epsilon


def attack_student(
    sides: MembershipRecords,
    *,
    student: Student,
    nonprivate: TeacherEnsemble | None,
    events: Iterable[PrivacyEvent],
    delta: float,
    seed: int,
    secret: bool,
    held_out: bool,
) -> MembershipResult:
    """PRIVATE. The attack on the released student, beside the bound on any attack by its price.

    At epsilon = 0 the privacy curve's delta is the total variation between neighbors, hence a bound of its own.

    Args:
        sides: Members and others.
        student: The released student.
        nonprivate: The model without privacy; None: there is none.
        events: Everything that the student cost.
        delta: The account's delta.
        seed: Seeds the halving of the records.
        secret: Whether the noise was secret; else no bound holds.
        held_out: See ``MembershipResult``.
    """
    bound = bound_by_plan = None
    if secret:
        planned_events = tuple(events)
        bound = compute_advantage_bound(accounting.compute_guarantee(planned_events, delta).epsilon, delta)
        bound_by_plan = min(bound, accounting.compute_delta(planned_events, 0.0))
    nonprivate_attack = None if nonprivate is None else attack(lambda x: nonprivate.compute_logits(x)[0], sides, seed)
    return MembershipResult(
        student=attack(student.compute_logits, sides, seed),
        nonprivate=nonprivate_attack,
        bound=bound,
        bound_by_plan=bound_by_plan,
        held_out=held_out,
    )


def make_public_baselines(data: Dataset, metrics: PrivateMetrics) -> tuple[Accuracy, ...]:
    """The owner's accuracies, where the data set is a public benchmark; else none of them."""
    shares = {"Teachers' plurality, no noise": metrics.ensemble_accuracy, "No privacy": metrics.nonprivate_accuracy}
    description, size = "from private records, shown because this is a public benchmark", len(data.evaluation.y)
    return tuple(
        Accuracy(name=name, share=Share(value=value, size=size), description=description)
        for name, value in shares.items()
        if value is not None and data.spec.benchmark
    )
