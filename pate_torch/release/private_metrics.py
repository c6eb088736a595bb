"""What only the owner of the data may see of a run: figures without noise, and prices that depend on the votes.

Nothing here enters a ``ReleaseReport`` (but accuracies on a public benchmark); it is written into the run's private
folder and printed for the owner, marked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import rdp
from pate_torch.accounting.data_dependent.theorems import compute_rdp
from pate_torch.accounting.data_dependent.vote_rows import Array
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.audit.membership import MembershipRecords, MembershipResult, attack
from pate_torch.core import checks
from pate_torch.core.files import PRIVATE_FILE_MODE
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.records import Dataset, PrivateRecords, Release
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.builder import compute_accuracy, compute_student_metrics
from pate_torch.release.intervals import Share, format_percent
from pate_torch.release.renderer import to_strict_json
from pate_torch.release.report import Baseline
from pate_torch.release.statement import compute_advantage_bound
from pate_torch.students.base import Student
from pate_torch.teachers import distributed
from pate_torch.teachers.baseline import compute_first_logits, train_on_all
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.voting import count_votes

if TYPE_CHECKING:
    from pate_torch.context import LabelRelease, RunContext

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
THEOREM_PRICE = "Price of these votes, theorem"
"""A figure for the owner, as it is called where it is missing."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OwnerSummary:
    """PRIVATE. Figures of a run; None if one was not computed.

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

    def __post_init__(self) -> None:
        for name in ("student_accuracy", "ensemble_accuracy", "teacher_accuracy_mean", "nonprivate_accuracy"):
            if getattr(self, name) is not None:
                checks.between(name, getattr(self, name), 0, 1)
        if self.epsilon_pate2018 is not None:
            checks.non_negative("epsilon_pate2018", self.epsilon_pate2018)
        for key, value in self.gap_quantiles.items():
            checks.non_negative(f"gap_quantiles.{key}", value)

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
        if self.membership is not None:
            lines |= self.membership.format_lines()
        lines |= {name: f"not computed: {reason}" for name, reason in self.not_computed.items()}
        return lines if self.forecast is None else lines | {"Forecast": self.forecast}


def write_owner_summary(summary: OwnerSummary, path: Path) -> None:
    """Write private/summary.json; NaN is refused."""
    path.touch(mode=PRIVATE_FILE_MODE)
    path.chmod(PRIVATE_FILE_MODE)  # before anything private is in it
    path.write_text(to_strict_json(asdict(summary)), encoding="utf-8")


def private_test_metrics(data: Dataset, student: Student) -> dict[str, Any]:
    """PRIVATE. The student's figures on test records, if they may not be published."""
    return {} if data.evaluation.public else compute_student_metrics(data, student)


def count_records(data: Dataset, all_private: PrivateRecords | None = None) -> dict[str, int]:
    """PRIVATE. How many records there are, by what became of them; ``all_private``: with those held out."""
    all_private = data.private if all_private is None else all_private
    units, num_held_out = len(np.unique(all_private.unit_id)), len(all_private) - len(data.private)
    rows = {"private": len(all_private)} | ({"private units": units} if units < len(all_private) else {})
    rows |= {"public": len(data.pool), "test": len(data.evaluation.y)}
    rows |= {"private held out": num_held_out} if num_held_out else {}
    return rows | {f"left out {reason}": count for reason, count in data.num_dropped_by_reason.items()}


def make_owner_summary(
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
) -> OwnerSummary:
    """PRIVATE. Accuracies without noise, and prices that depend on the votes.

    Args:
        data: The run's data.
        release: The labels.
        votes: The teachers' on the pool; None if records answered for themselves.
        ensemble: None if the votes were brought from elsewhere: they say nothing of the test points.
        nonprivate: A model trained on all records, if there is one.
        model: The mechanism's law of outcomes, if it has one.
        rounds: Data-dependent prices compose only if no question depends on an earlier answer: of several rounds there
            is none.
        delta: The account's delta.
        device: Device of the predictions.
    """
    missing_metrics: dict[str, str] = {}
    ensemble_accuracy = mean_teacher_accuracy = nonprivate_accuracy = None
    truth = data.evaluation.y
    if nonprivate is not None:
        nonprivate_accuracy = _compute_or_none(
            "Model without privacy",
            lambda: compute_accuracy(nonprivate.predict(data.evaluation.x, device=device)[0], truth),
            missing_metrics,
        )
    if ensemble is not None:

        def compute_accuracies() -> tuple[float, float]:
            prediction_KQ = ensemble.predict(data.evaluation.x, device=device)
            plurality = count_votes(prediction_KQ, data.spec.num_classes).compute_plurality()
            return compute_accuracy(prediction_KQ, truth), compute_accuracy(plurality, truth)

        mean_teacher_accuracy, ensemble_accuracy = _compute_or_none(
            "Teachers' accuracies", compute_accuracies, missing_metrics
        ) or (None, None)
    query_votes = None if votes is None else votes.select(release.query_Q)
    theorem_epsilon = None
    if model is not None and rounds == 1 and query_votes is not None and len(query_votes):
        counts, orders = query_votes.counts_QC.cpu().numpy(), rdp.ORDERS
        theorem_epsilon = _compute_or_none(
            THEOREM_PRICE, lambda: _compute_epsilon(compute_rdp(model, counts, orders), delta), missing_metrics
        )
    gaps = (
        None
        if query_votes is None
        else _compute_or_none("How the votes agree", lambda: compute_gap_quantiles(query_votes), missing_metrics)
    )
    return OwnerSummary(
        ensemble_accuracy=ensemble_accuracy,
        teacher_accuracy_mean=mean_teacher_accuracy,
        epsilon_pate2018=theorem_epsilon,
        gap_quantiles=gaps or {},
        nonprivate_accuracy=nonprivate_accuracy,
        not_computed=missing_metrics,
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
    nonprivate_attack = (
        None if nonprivate is None else attack(functools.partial(compute_first_logits, nonprivate), sides, seed)
    )
    return MembershipResult(
        student=attack(student.compute_logits, sides, seed),
        nonprivate=nonprivate_attack,
        bound=bound,
        bound_by_plan=bound_by_plan,
        held_out=held_out,
    )


# ---- of one run ----------------------------------------------------------------------------------------------------


def save_votes(run: RunContext, release: LabelRelease) -> None:
    """PRIVATE. Write the votes behind the answers into the run's private folder.

    Where the answers are of an earlier run, the votes of those who gave them stand in; records are not asked again.
    """
    votes, method = release.raw_votes, release.method
    if votes is None and method is not None and isinstance(method.sensitive, Votes):
        votes = method.sensitive.select(release.labels.query_Q)
    if votes is None:
        return
    table = {"query_Q": release.labels.query_Q, "counts_QC": votes.counts_QC.cpu()}
    save_file(table, run.private_dir / "votes.safetensors")
    if isinstance(votes, Votes) and run.private_writer is not None:
        run.private_writer.log_votes(votes, release.labels.answered_Q)


def compute_private_metrics(run: RunContext, release: LabelRelease) -> tuple[OwnerSummary, TeacherEnsemble | None]:
    """PRIVATE. The figures that need no student, and the model without privacy where one is wanted."""
    config, method = run.config, release.method
    if method is None:
        return OwnerSummary(), None
    nonprivate = None
    if config.baseline:
        distributed.broadcast_text(distributed.BASELINE)
        nonprivate = train_on_all(run.data, config.teacher, seed=config.seed, device=config.device, stages=run.stages)
    metrics = make_owner_summary(
        data=run.data,
        release=release.labels,
        votes=method.sensitive if isinstance(method.sensitive, Votes) else None,
        ensemble=method.ensemble,
        nonprivate=nonprivate,
        model=config.mechanism.make_outcome_model(),
        rounds=config.num_rounds,
        delta=config.privacy.delta,
        device=config.device,
    )
    return metrics, nonprivate


def run_membership_attack(
    run: RunContext, release: LabelRelease, student: Student, metrics: OwnerSummary, nonprivate: TeacherEnsemble | None
) -> OwnerSummary:
    """PRIVATE. The figures, with those of an attack on the student where the records behind it are here."""
    config, data, facts = run.config, run.data, release.facts
    metrics = replace(
        metrics,
        **private_test_metrics(data, student),
        records=_count_run_records(run),
        seconds=run.clock.seconds,
        forecast=run.forecast,
    )
    if config.membership is None or facts["adjacency"] != config.partition.adjacency:
        return metrics
    if not run.store.was_trained_on(facts["teachers_id"], run.store.compute_fingerprint(data.private)):
        return metrics  # labels of other records, or of votes that were brought: who taught is not known here
    # Where records answered every one of them took part: one shard of all.
    shards = assign_shards(config.partition, data.private, max(1, facts["num_teachers"]), facts["seed"])
    sides = config.membership.select_records(data, shards, run.splits.membership_holdout, config.seed)
    if sides is None:
        return metrics
    claim = run.ledger.make_claim(data.spec.name, [release.labels.id, *run.reservation_ids])
    membership = attack_student(
        sides,
        student=student,
        nonprivate=nonprivate,
        events=claim.reserved_events,
        delta=facts["delta"],
        seed=config.seed,
        secret=claim.is_private,
        held_out=run.splits.membership_holdout is not None,
    )
    if run.private_writer is not None:
        run.private_writer.log_text("membership", "\n\n".join(membership.format_lines().values()))
    return replace(metrics, membership=membership)


def make_public_baselines(data: Dataset, metrics: OwnerSummary) -> tuple[Baseline, ...]:
    """The owner's accuracies, where the data set is a public benchmark; else none of them."""
    if not data.spec.benchmark:
        return ()
    accuracies = (
        ("Teachers' plurality, no noise", metrics.ensemble_accuracy),
        ("No privacy", metrics.nonprivate_accuracy),
    )
    size = len(data.evaluation.y)
    return tuple(
        Baseline(name=name, accuracy=value, disclosure_basis="benchmark", size=size)
        for name, value in accuracies
        if value is not None
    )


def _count_run_records(run: RunContext) -> dict[str, int]:
    """PRIVATE. How many records there were, and what became of them."""
    config, private = run.config, run.data.private
    counts = count_records(run.data, run.all_private)
    capacity = getattr(config.partition, "capacity", None)
    if config.labels is None and config.num_teachers and capacity is not None:
        shards = assign_shards(config.partition, private, config.num_teachers, config.seed)
        counts["left out beyond partition.capacity"] = len(private) - int(shards.mask_KS.sum())
    return counts
