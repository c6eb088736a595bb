"""PRIVATE. What the owner alone may see of a run: accuracies without noise, and an attack on the student."""

from __future__ import annotations

import dataclasses

from safetensors.torch import save_file

from pate_torch.context import LabelRelease, RunContext
from pate_torch.data.partition import deal
from pate_torch.protocols import Student
from pate_torch.reporting.owner import (
    OwnerSummary,
    attack_student,
    count_records,
    owner_summary,
    withheld_figures,
)
from pate_torch.reporting.report import Baseline
from pate_torch.sensitive import Votes
from pate_torch.teachers import distributed
from pate_torch.teachers.baseline import train_on_all
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.types import Dataset
from pate_torch.voters.register import VoterRegister


def save_votes(run: RunContext, release: LabelRelease) -> None:
    """PRIVATE. Write the votes behind the answers into the run's private folder.

    Where the answers are of an earlier run, the votes of those who gave them stand in; records are not asked again.
    """
    votes, voters = release.raw_votes, release.voters
    if votes is None and voters is not None and isinstance(voters.sensitive, Votes):
        votes = voters.sensitive.take(release.labels.query_Q)
    if votes is None:
        return
    table = {"query_Q": release.labels.query_Q, "counts_QC": votes.counts_QC.cpu()}
    save_file(table, run.private_dir / "votes.safetensors")
    if isinstance(votes, Votes) and run.board is not None:
        run.board.votes(votes, release.labels.answered_Q)


def look(run: RunContext, release: LabelRelease) -> tuple[OwnerSummary, Ensemble | None]:
    """PRIVATE. The figures that need no student, and the model without privacy where one is wanted."""
    config, voters = run.config, release.voters
    if voters is None:
        return OwnerSummary(), None
    nonprivate = None
    if config.baseline:
        distributed.broadcast_text(distributed.BASELINE)
        nonprivate = train_on_all(run.data, config.teacher, seed=config.seed, device=config.device, stages=run.stages)
    figures = owner_summary(
        data=run.data,
        release=release.labels,
        votes=voters.sensitive if isinstance(voters.sensitive, Votes) else None,
        ensemble=voters.ensemble,
        nonprivate=nonprivate,
        model=config.mechanism.outcome_model(),
        rounds=config.num_rounds,
        delta=config.privacy.delta,
        device=config.device,
    )
    return figures, nonprivate


def examine(
    run: RunContext, release: LabelRelease, student: Student, figures: OwnerSummary, nonprivate: Ensemble | None
) -> OwnerSummary:
    """PRIVATE. The figures, with those of an attack on the student where the records behind it are here."""
    config, data, facts = run.config, run.data, release.facts
    figures = dataclasses.replace(
        figures,
        **withheld_figures(data, student),
        records=_counted(run),
        seconds=run.clock.seconds,
        forecast=run.forecast,
    )
    if config.membership is None or facts["adjacency"] != config.partition.adjacency:
        return figures
    if not VoterRegister(run.store).behind(facts["teachers_id"], run.store.fingerprint(data.private)):
        return figures  # labels of other records, or of votes that were brought: who taught is not known here
    # Where records answered every one of them took part: one shard of all.
    shards = deal(config.partition, data.private, max(1, facts["num_teachers"]), facts["seed"])
    sides = config.membership.sides(data, shards, run.loaded.others, config.seed)
    if sides is None:
        return figures
    claim = run.ledger.claim(data.spec.name, [release.labels.id, *run.paid])
    found = attack_student(
        sides,
        student=student,
        nonprivate=nonprivate,
        events=claim.planned,
        delta=facts["delta"],
        seed=config.seed,
        private_run=claim.private,
        held_out=run.loaded.others is not None,
    )
    if run.board is not None:
        run.board.membership(found)
    return dataclasses.replace(figures, membership=found)


def publishable(data: Dataset, figures: OwnerSummary) -> tuple[Baseline, ...]:
    """The owner's accuracies, where the data set is a public benchmark; else none of them."""
    if not data.spec.benchmark:
        return ()
    shown = (("Teachers' plurality, no noise", figures.ensemble_accuracy), ("No privacy", figures.nonprivate_accuracy))
    size = len(data.evaluation.y)
    return tuple(
        Baseline(name=name, accuracy=value, because="benchmark", size=size)
        for name, value in shown
        if value is not None
    )


def _counted(run: RunContext) -> dict[str, int]:
    """PRIVATE. How many records there were, and what became of them."""
    config, private = run.config, run.data.private
    counts = count_records(run.data, run.everyone)
    capacity = getattr(config.partition, "capacity", None)
    if config.labels is None and config.num_teachers and capacity is not None:
        shards = deal(config.partition, private, config.num_teachers, config.seed)
        counts["left out beyond partition.capacity"] = len(private) - int(shards.mask_KS.sum())
    return counts
