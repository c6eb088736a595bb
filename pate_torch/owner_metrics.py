"""PRIVATE. What only the owner of the data may see of a run, computed from its records, votes and teachers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.config import RunConfig
from pate_torch.core.progress import Stages
from pate_torch.methods.base import PreparedMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.private_metrics import PrivateMetrics, attack_student, compute_vote_metrics
from pate_torch.release.private_writer import PrivateWriter
from pate_torch.release.store import WrittenRelease
from pate_torch.splits import DataSplits
from pate_torch.students.base import Student
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.training import train_on_all


def save_votes(
    written: WrittenRelease, prepared: PreparedMethod | None, folder: Path, writer: PrivateWriter | None
) -> None:
    """PRIVATE. Write the votes behind the answers into the private folder of the run.

    Where the answers are of an earlier run, the votes of those who gave them stand in; records are not asked again.
    """
    votes = None if prepared is None else prepared.opened_votes
    if votes is None and prepared is not None and prepared.votes is not None:
        votes = prepared.votes.select(written.labels.query_Q)
    if votes is None:
        return
    table = {"query_Q": written.labels.query_Q, "counts_QC": votes.counts_QC.cpu()}
    save_file(table, folder / "votes.safetensors")
    if isinstance(votes, Votes) and writer is not None:
        writer.log_votes(votes, written.labels.answered_Q)


def compute_owner_metrics(
    config: RunConfig, splits: DataSplits, written: WrittenRelease, prepared: PreparedMethod | None, stages: Stages
) -> tuple[PrivateMetrics, TeacherEnsemble | None]:
    """PRIVATE. Compute the figures that need no student, and the model without privacy where one is wanted."""
    method = config.method
    if prepared is None or not isinstance(method, LabelingMethod):
        return PrivateMetrics(), None
    nonprivate = None
    if config.baseline is not None:
        distributed.broadcast_object(distributed.BASELINE)
        nonprivate = train_on_all(splits.data, config.baseline, seed=config.seed, device=config.device, stages=stages)
    metrics = compute_vote_metrics(
        data=splits.data,
        release=written.labels,
        votes=prepared.votes,
        ensemble=prepared.ensemble,
        nonprivate=nonprivate,
        model=method.mechanism.make_outcome_model(),
        rounds=method.num_rounds,
        delta=config.privacy.delta,
        device=config.device,
    )
    return metrics, nonprivate


def add_student_metrics(
    metrics: PrivateMetrics, config: RunConfig, splits: DataSplits, student: Student, forecast: str | None
) -> PrivateMetrics:
    """PRIVATE. The figures with the student's, where test records are not public, and what became of all records."""
    student_metrics = PrivateMetrics.from_student(splits.data, student, {}, all_private=splits.all_private)
    counts, shard_size, ensemble_size = dict(student_metrics.records), config.partition.max_shard_size, None
    if config.labels is None and shard_size is not None:
        ensemble_size = config.method.ensemble_size
    if ensemble_size is not None:
        shards = assign_shards(config.partition, splits.data.private, ensemble_size, config.seed)
        counts["left out beyond partition.capacity"] = len(splits.data.private) - int(shards.mask_KS.sum())
    return replace(
        metrics,
        student_accuracy=student_metrics.student_accuracy,
        student_size=student_metrics.student_size,
        confusion=student_metrics.confusion,
        records=counts,
        forecast=forecast,
    )


def attack_released_student(
    metrics: PrivateMetrics,
    config: RunConfig,
    splits: DataSplits,
    written: WrittenRelease,
    student: Student,
    nonprivate: TeacherEnsemble | None,
    *,
    events: Iterable[PrivacyEvent],
    is_private: bool,
) -> PrivateMetrics:
    """PRIVATE. The figures with those of an attack on the student, where the records behind it are here.

    Args:
        metrics: The figures so far.
        config: The run's choices.
        splits: Its data.
        written: The release that the student learnt from.
        student: The student.
        nonprivate: A model without privacy, to be attacked too; None: there is none.
        events: What was reserved for the student.
        is_private: Whether the noise was secret.
    """
    record, data, store = written.record, splits.data, TeacherStore(config.root)
    test = config.membership
    if test is None or config.method.releases_model or record["adjacency"] != config.partition.adjacency:
        return metrics
    if not store.was_trained_on(record["teachers_id"], store.compute_fingerprint(data.private)):
        return metrics  # labels of other records, or of votes that were brought: who taught is not known here
    # Where records answered every one of them took part: one shard of all.
    shards = assign_shards(config.partition, data.private, record["num_teachers"] or 1, record["seed"])
    sides = test.select_records(data, shards, splits.membership_holdout, config.seed)
    if sides is None:
        return metrics
    membership = attack_student(
        sides,
        student=student,
        nonprivate=nonprivate,
        events=events,
        delta=record["delta"],
        seed=config.seed,
        secret=is_private,
        held_out=splits.membership_holdout is not None,
    )
    return replace(metrics, membership=membership)
