"""PRIVATE. Metrics of a run for the owner of the data: accuracies without noise, and a cost that depends on the votes.

The metrics are written into the private folder of the run and printed for the owner, marked as private. Of these
metrics, a ``ReleaseReport`` holds only the accuracies on public benchmarks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import compute_data_dependent_epsilon
from pate_torch.accounting.costs import OutcomeModel
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.config import DataSplits, RunConfig
from pate_torch.core.files import PRIVATE_FILE_MODE, PRIVATE_README, create_private_folder
from pate_torch.core.progress import Stages
from pate_torch.methods.base import PreparedMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.privacy.accounts import Claim
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.records import Dataset, Release
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.builder import compute_accuracy, compute_student_metrics
from pate_torch.release.membership import MembershipRecords, MembershipResult, attack
from pate_torch.release.renderer import to_strict_json
from pate_torch.release.report import Accuracy, Share, format_percent
from pate_torch.release.statement import compute_advantage_bound
from pate_torch.release.store import WrittenRelease
from pate_torch.students.base import Student
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.training import train_on_all
from pate_torch.teachers.voting import count_votes

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MAX_CURVE_POINTS = 300


@dataclass(frozen=True, kw_only=True)
class PrivateMetrics:
    """PRIVATE. Metrics of a run for the owner of the data. A metric that was not computed is None or empty.

    Attributes:
        records: Number of records for each use.
        student_accuracy: Accuracy of the student on test records that are not public.
        student_size: Number of these test records.
        confusion: Confusion matrix of the student on these test records, [true class, predicted class].
        ensemble_accuracy: Test accuracy of the teachers' plurality vote without noise.
        teacher_accuracy_mean: Mean test accuracy of the teachers.
        epsilon_pate2018: Data-dependent epsilon by the bound of PATE 2018. It depends on the votes, so it is neither a
            guarantee nor a charge.
        gap_quantiles: Quantiles of the gap between the two largest counts of a query, in votes, by level.
        neighbor_recall: Smallest share of the nearest neighbors that an approximate search among public points found.
        nonprivate_accuracy: Test accuracy of a model trained on all records without privacy.
        membership: Result of the membership attack on the student.
        seconds: Duration of each stage, in seconds. It can depend on the number of records.
        not_computed: Reason why a metric is missing, by name of the metric.
        forecast: Warning, from public values, that labels are mostly noise (``feasibility.format_low_signal_warning``).
    """

    records: Mapping[str, int] = field(default_factory=dict)
    student_accuracy: float | None = None
    student_size: int | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    ensemble_accuracy: float | None = None
    teacher_accuracy_mean: float | None = None
    epsilon_pate2018: float | None = None
    gap_quantiles: Mapping[str, float] = field(default_factory=dict)
    neighbor_recall: float | None = None
    nonprivate_accuracy: float | None = None
    membership: MembershipResult | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_computed: Mapping[str, str] = field(default_factory=dict)
    forecast: str | None = None

    def format_rows(self) -> dict[str, str]:
        """Format the owner's rows of the closing table, without epsilons, which would look like guarantees."""
        rows = {"Records": ", ".join(f"{n:,} {group}" for group, n in self.records.items())} if self.records else {}
        if self.student_accuracy is not None:
            share = Share(value=self.student_accuracy, size=self.student_size)
            rows["Accuracy of student"] = f"{share}, on {self.student_size} test records"
        accuracies = {
            "Ensemble, no noise": self.ensemble_accuracy,
            "A teacher, on average": self.teacher_accuracy_mean,
            "Model without privacy": self.nonprivate_accuracy,
        }
        rows |= {name: format_percent(value) for name, value in accuracies.items() if value is not None}
        rows |= {} if self.membership is None else self.membership.format_lines()
        rows |= {name: f"not computed: {reason}" for name, reason in self.not_computed.items()}
        return rows if self.forecast is None else rows | {"Forecast": self.forecast}

    def write(self, path: Path) -> None:
        """Write the metrics to ``private/summary.json``. Raises ValueError for NaN."""
        path.touch(mode=PRIVATE_FILE_MODE)
        path.chmod(PRIVATE_FILE_MODE)  # before private values are written
        path.write_text(to_strict_json(asdict(self)), encoding="utf-8")


def save_votes(
    written: WrittenRelease, prepared: PreparedMethod | None, folder: Path, writer: PrivateWriter | None
) -> None:
    """PRIVATE. Write the votes behind the answers, if the run has any, into the private folder of the run."""
    if prepared is None:
        return
    votes = prepared.opened_votes
    if votes is None and prepared.votes is not None:
        votes = prepared.votes.select(written.labels.query_Q)
    if votes is None:
        return
    table = {"query_Q": written.labels.query_Q, "counts_QC": votes.counts_QC.cpu()}
    save_file(table, folder / "votes.safetensors")
    if isinstance(votes, Votes) and writer is not None:
        writer.log_votes(votes, written.labels.answered_Q)


def compute_metrics(
    config: RunConfig, splits: DataSplits, written: WrittenRelease, prepared: PreparedMethod | None, stages: Stages
) -> tuple[PrivateMetrics, TeacherEnsemble | None]:
    """PRIVATE. Compute the metrics that need no student; return these metrics and the model without privacy.

    The model is trained here. It is None if ``config.baseline`` is None or if the run released no labels.
    """
    method, nonprivate = config.method, None
    if prepared is None or not isinstance(method, LabelingMethod):
        return PrivateMetrics(), None
    if config.baseline is not None:
        nonprivate = train_on_all(splits.data, config.baseline, seed=config.seed, device=config.device, stages=stages)
    # Data-dependent costs compose only if no query depends on an earlier answer.
    model = method.mechanism.make_outcome_model() if method.num_rounds == 1 else None
    delta, device = config.privacy.delta, config.device
    return compute_vote_metrics(splits.data, written.labels, prepared, nonprivate, model, delta, device), nonprivate


def compute_vote_metrics(
    data: Dataset,
    release: Release,
    prepared: PreparedMethod,
    nonprivate: TeacherEnsemble | None,
    model: OutcomeModel | None,
    delta: float,
    device: torch.device,
) -> PrivateMetrics:
    """PRIVATE. Compute accuracies without noise, and the cost that depends on the votes.

    The labels are charged by now, so an error is recorded in ``not_computed`` instead of ending the run. The
    distribution ``model`` of the mechanism's outcomes is None if data-dependent costs are unknown.
    """
    test, figures, missing = data.evaluation, dict[str, Any](), dict[str, str]()
    if nonprivate is not None:
        with _note_failure("Model without privacy", missing):
            figures["nonprivate_accuracy"] = compute_accuracy(nonprivate.predict(test.x, device=device)[0], test.y)
    if prepared.ensemble is not None:
        with _note_failure("Teachers' accuracies", missing):
            prediction_KQ = prepared.ensemble.predict(test.x, device=device)
            plurality_Q = count_votes(prediction_KQ, data.spec.num_classes).compute_plurality()
            figures["ensemble_accuracy"] = compute_accuracy(plurality_Q, test.y)
            figures["teacher_accuracy_mean"] = compute_accuracy(prediction_KQ, test.y)
    if prepared.votes is None or not len(release.query_Q):
        return PrivateMetrics(**figures, not_computed=missing)
    asked = prepared.votes.select(release.query_Q)
    if model is not None:
        with _note_failure("Cost of these votes, theorem", missing):
            counts_QC = asked.counts_QC.cpu().numpy()
            epsilon = compute_data_dependent_epsilon(counts_QC, model, delta=delta)
            if not math.isfinite(epsilon):
                raise ArithmeticError("no finite epsilon")
            figures["epsilon_pate2018"] = epsilon
    with _note_failure("How the votes agree", missing):
        gap_Q = asked.compute_gaps().double().cpu().numpy()
        quantiles = zip(QUANTILES, np.quantile(gap_Q, QUANTILES).tolist(), strict=True)
        figures["gap_quantiles"] = {f"{q:g}": value for q, value in quantiles}
    return PrivateMetrics(**figures, not_computed=missing)


@contextlib.contextmanager
def _note_failure(name: str, missing: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        missing[name] = f"it failed ({type(error).__name__})"  # without the message, which could quote a private value


def complete_metrics(
    metrics: PrivateMetrics,
    config: RunConfig,
    splits: DataSplits,
    written: WrittenRelease,
    student: Student,
    nonprivate: TeacherEnsemble | None,
    claim: Claim,
) -> PrivateMetrics:
    """PRIVATE. Add the numbers of records, the accuracy on private test records, and the attack on the student.

    The model without privacy is attacked, too, unless it is None. ``claim`` is the guarantee of everything that was
    reserved for the student.
    """
    data, num_private, size = splits.data, len(splits.all_private), config.method.ensemble_size
    num_units, num_held_out = len(np.unique(splits.all_private.unit_id)), num_private - len(data.private)
    records = {"private": num_private} | ({"private units": num_units} if num_units < num_private else {})
    records |= {"public": len(data.pool), "test": len(data.evaluation.y)}
    records |= {"private held out": num_held_out} if num_held_out else {}
    records |= {f"left out {reason}": count for reason, count in data.num_dropped_by_reason.items()}
    if config.labels is None and config.partition.max_shard_size is not None and size is not None:
        shards = assign_shards(config.partition, data.private, size, config.seed)
        records["left out beyond partition.capacity"] = len(data.private) - int(shards.mask_KS.sum())
    return replace(
        metrics,
        records=records,
        membership=_attack_released_student(config, splits, written.record, student, nonprivate, claim),
        **compute_student_metrics(data, None if data.evaluation.public else student),
    )


def _attack_released_student(
    config: RunConfig,
    splits: DataSplits,
    record: Mapping[str, Any],
    student: Student,
    nonprivate: TeacherEnsemble | None,
    claim: Claim,
) -> MembershipResult | None:
    """PRIVATE. Attack the student. None without ``config.membership``, or if the members are not known here."""
    data, store, test, holdout = splits.data, TeacherStore(config.root), config.membership, splits.membership_holdout
    if test is None or config.method.releases_model or record["adjacency"] != config.partition.adjacency:
        return None
    if not store.was_trained_on(record["teachers_id"], store.compute_fingerprint(data.private)):
        return None  # the labels come from other records, or from votes in a file
    # All records affect every answer of a method without teachers, so they form one shard.
    shards = assign_shards(config.partition, data.private, record["num_teachers"] or 1, record["seed"])
    records = test.select_records(data, shards, holdout, config.seed)
    if records is None:
        return None
    events = claim.reserved_events if claim.is_private else None
    delta, held_out = record["delta"], holdout is not None
    return attack_student(records, student, nonprivate, events, delta=delta, seed=config.seed, held_out=held_out)


def attack_student(
    records: MembershipRecords,
    student: Student,
    nonprivate: TeacherEnsemble | None,
    events: tuple[PrivacyEvent, ...] | None,
    *,
    delta: float,
    seed: int,
    held_out: bool,
) -> MembershipResult:
    """PRIVATE. Attack the released student, and compute the bounds on any attack from its privacy events.

    The delta of the privacy curve at epsilon = 0 is the total variation between neighbors, hence a second bound.

    Args:
        records: Members, and other records.
        student: Released student.
        nonprivate: Model without privacy, which is attacked, too. None to attack the student alone.
        events: Privacy events of all that the student cost. None if the noise was not secret: then no bound holds.
        delta: Delta of the account.
        seed: Seed of the split of the records into two halves.
        held_out: Whether the other records were held out from the teachers for this attack.
    """
    bound = bound_by_plan = None
    if events is not None:
        bound = compute_advantage_bound(accounting.compute_guarantee(events, delta).epsilon, delta)
        bound_by_plan = min(bound, accounting.compute_delta(events, 0.0))
    return MembershipResult(
        student=attack(student.compute_logits, records, seed),
        nonprivate=None if nonprivate is None else attack(lambda x: nonprivate.compute_logits(x)[0], records, seed),
        bound=bound,
        bound_by_plan=bound_by_plan,
        held_out=held_out,
    )


def make_public_baselines(data: Dataset, metrics: PrivateMetrics) -> tuple[Accuracy, ...]:
    """Make the baselines of a report from the owner's accuracies. Empty unless the data set is a public benchmark."""
    shares = {"Teachers' plurality, no noise": metrics.ensemble_accuracy, "No privacy": metrics.nonprivate_accuracy}
    description, size = "from private records, shown because this is a public benchmark", len(data.evaluation.y)
    return tuple(
        Accuracy(name=name, share=Share(value=value, size=size), description=description)
        for name, value in shares.items()
        if value is not None and data.spec.benchmark
    )


class PrivateWriter:
    """PRIVATE. Writer of a run's TensorBoard: losses of teachers and student, votes, and the owner's metrics.

    Args:
        folder: Folder of the event files, which other users cannot read.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and few commands need it

        create_private_folder(folder)
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("PRIVATE", PRIVATE_README)
        self.writer.flush()
        for file in folder.glob("events.out.tfevents.*"):
            file.chmod(PRIVATE_FILE_MODE)  # so that a copy of the file outside the folder is not readable, either

    def log(self, tag: str, value: float, step: int) -> None:
        """PRIVATE. Write one scalar, as a ``core.progress.Log``."""
        self.writer.add_scalar(tag, value, step)

    def log_losses(self, step: int, loss_K: Tensor) -> None:
        """PRIVATE. Write a histogram of the teachers' losses, [K], at a training step."""
        self._log_distribution("teachers/loss", loss_K, step)

    def log_votes(self, votes: Votes, answered_Q: Tensor) -> None:
        """PRIVATE. Write histograms of the votes, and the share of answered queries up to each query."""
        self._log_distribution("votes/gap", votes.compute_gaps(), 0)
        self._log_distribution("votes/top", votes.compute_top_counts(), 0)
        share_Q = answered_Q.cpu().double().cumsum(0) / torch.arange(1, len(answered_Q) + 1)
        for q in range(0, len(share_Q), 1 + len(share_Q) // MAX_CURVE_POINTS):
            self.log("votes/answered_share", float(share_Q[q]), q + 1)

    def log_metrics(self, metrics: PrivateMetrics) -> None:
        """PRIVATE. Write the owner's metrics."""
        for name, value in vars(metrics).items():
            if isinstance(value, float):
                self.log(f"owner/{name}", value, 0)
        self.writer.add_text("owner", "\n\n".join(f"{name}: {value}" for name, value in metrics.format_rows().items()))

    def _log_distribution(self, tag: str, values: Tensor, step: int) -> None:
        finite = values.double()[values.double().isfinite()]
        if len(finite):  # a diverged teacher, whose vote is one among K, must not end the run
            self.writer.add_histogram(tag, finite.cpu().numpy(), step)

    def close(self) -> None:
        self.writer.close()
