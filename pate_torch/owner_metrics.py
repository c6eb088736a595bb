"""PRIVATE. Computes what only the owner of the data may see of a run, from its records, votes and teachers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pate_torch.config import RunConfig
from pate_torch.core.progress import Stages
from pate_torch.methods.base import PreparedMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.opening import DataSplits
from pate_torch.privacy.accounts import Claim
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.builder import compute_student_metrics
from pate_torch.release.membership import MembershipResult
from pate_torch.release.private_metrics import (
    PrivateMetrics,
    PrivateWriter,
    attack_student,
    compute_vote_metrics,
    count_records,
)
from pate_torch.release.store import WrittenRelease
from pate_torch.students.base import Student
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.training import train_on_all


def save_votes(
    written: WrittenRelease, prepared: PreparedMethod | None, folder: Path, writer: PrivateWriter | None
) -> None:
    """PRIVATE. Write the votes behind the answers into the private folder of the run.

    A method that opened no votes of its own, and answers of an earlier run, are described by the votes of the teachers
    that are here; records are not asked again.
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
    """PRIVATE. Compute the figures that need no student, and train the model without privacy if one is wanted."""
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


def complete_owner_metrics(
    metrics: PrivateMetrics,
    config: RunConfig,
    splits: DataSplits,
    written: WrittenRelease,
    student: Student,
    nonprivate: TeacherEnsemble | None,
    claim: Claim,
) -> PrivateMetrics:
    """PRIVATE. Add the numbers of records, the accuracy on private test records, and the attack on the student.

    Args:
        metrics: Metrics that need no student.
        config: Choices of the run.
        splits: Data of the run.
        written: Release that the student learned from.
        student: Released student.
        nonprivate: Model without privacy, which is attacked, too. None if there is none.
        claim: Guarantee of everything that was reserved for the student.
    """
    data, method = splits.data, config.method
    records = count_records(data, splits.all_private)
    if config.labels is None and config.partition.max_shard_size is not None and method.ensemble_size is not None:
        shards = assign_shards(config.partition, data.private, method.ensemble_size, config.seed)
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
    """PRIVATE. Attack the student; return None if the attack is not wanted, or if its training records are not here."""
    data, store, test = splits.data, TeacherStore(config.root), config.membership
    if test is None or config.method.releases_model or record["adjacency"] != config.partition.adjacency:
        return None
    if not store.was_trained_on(record["teachers_id"], store.compute_fingerprint(data.private)):
        return None  # labels of other records, or of votes from a file: the members are not known here
    # All records take part in every answer of a method without teachers: they are one shard.
    shards = assign_shards(config.partition, data.private, record["num_teachers"] or 1, record["seed"])
    sides = test.select_records(data, shards, splits.membership_holdout, config.seed)
    if sides is None:
        return None
    return attack_student(
        sides,
        student=student,
        nonprivate=nonprivate,
        events=claim.reserved_events,
        delta=record["delta"],
        seed=config.seed,
        secret=claim.is_private,
        held_out=splits.membership_holdout is not None,
    )
