"""The released half of a run: the answers (found or bought) and the student that learns from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pate_torch import aggregation, release_store
from pate_torch.aggregation import Guide
from pate_torch.budget import Budget
from pate_torch.config import Plan
from pate_torch.core.progress import Stages
from pate_torch.ensembling import Teachers, census, learn_features
from pate_torch.protocols import Mechanism, Student, StudentAlgorithm, StudentTask, silent
from pate_torch.reporting.tensorboard import ReleaseBoard
from pate_torch.students.label_posterior import beliefs, shares
from pate_torch.students.store import save as save_student
from pate_torch.types import Ballots, Dataset, Release, Votes
from pate_torch.voters.gradients import Slopes

Fit = Callable[[str, StudentAlgorithm], Student]
"""Trains one named student on the labels of a release."""


def obtain_release(
    plan: Plan,
    data: Dataset,
    teachers: Teachers,
    mechanism: Mechanism,
    budget: Budget,
    stages: Stages,
    witness: Callable[[Votes | Ballots], None] = silent,
) -> tuple[Release, dict[str, Any], bool]:
    """(release, its record, whether it was reused): the same questions to the same teachers are not paid for twice.

    witness: PRIVATE. Told the votes behind the answers, where they are given now.
    """
    facts = _facts(plan, data, teachers, mechanism, budget)
    same = (
        release_store.find_same(plan.root, facts["key"], data.pool, data.spec, budget.ledger)
        if budget.private
        else None
    )
    if same is not None:
        release, record = same
        release_store.refuse_used_folder(plan.folder, release.id)
        stages.say(f"Reusing release {release.id}: same questions, mechanism and teachers. It costs nothing.")
        return release, record, True
    release_store.refuse_used_folder(plan.folder)

    stage = stages("Fitting the guiding student") if plan.guided else None

    def refit(so_far: Release) -> Guide:
        if not bool(so_far.answered_Q.any()):
            return Guide(None)
        # The seed is the student's own: where the same algorithm guides, the guide is what these answers alone teach.
        task = student_task(data, so_far)
        student = plan.refit.fit(task, seed=plan.seed, device=plan.device, progress=stage or silent)
        student_PC = student.probabilities(data.pool.x)
        if plan.census is not None:
            records = census(plan, data, stages, student)
            return Guide(student_PC, records, records.place_PD)
        return Guide(student_PC)

    written: dict[str, Any] = {}

    def seal(release: Release) -> dict[str, str]:
        written.update(release_store.write(plan.folder / "release", release, facts, data.spec))
        return release_store.digests(written)

    release = aggregation.label(
        votes=teachers.votes,
        pool=data.pool,
        spec=data.spec,
        mechanism=mechanism,
        strategy=plan.strategy,
        budget=budget,
        num_queries=plan.num_queries,
        seed=plan.seed,
        refit=refit if plan.guided else None,
        feature_PD=learn_features(plan, data, stages),
        seal=seal,
        witness=witness,
        progress=stages("Asking the teachers"),
    )
    return release, written, False


def _facts(plan: Plan, data: Dataset, teachers: Teachers, mechanism: Mechanism, budget: Budget) -> dict[str, Any]:
    """What ``release.json`` says beside the answers. Public: configuration, and ids drawn at random."""
    parameters = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}  # type: ignore[arg-type]
    asking: dict[str, Any] = {"strategy": _configuration(plan.strategy), "num_queries": plan.num_queries}
    if plan.representation is not None:
        asking["representation"] = _configuration(plan.representation)
    voting = _voting(plan, teachers)
    if voting == "transductive":
        asking["voting"] = _configuration(plan.transduction)
    if isinstance(plan.census, Slopes):
        asking["voting"] = _configuration(plan.census)
    if plan.guided:
        asking["refit"] = _configuration(plan.refit)
    declared = plan.census.declared(data) if isinstance(plan.census, Slopes) else None
    pool = release_store.digest(data.pool)
    same = {"teachers": teachers.id, "pool": pool, "mechanism": parameters, "asking": asking, "seed": plan.seed}
    return {
        "key": release_store.key(same),
        "dataset": data.spec.name,
        "pool_sha256": pool,
        "teachers_id": teachers.id,
        "num_teachers": teachers.votes.num_teachers,
        "mechanism": mechanism.name,
        "parameters": {k: v for k, v in parameters.items() if k not in ("name", "noise") and v is not False},
        "noise": plan.noise,
        "private": budget.private,
        "query": plan.strategy.name,
        "voting": voting,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "delta": plan.delta,
        "adjacency": plan.partition.adjacency,
        "unit": data.private.unit,
        **({} if declared is None else {"declared_size": declared}),
    }


def student_task(data: Dataset, release: Release) -> StudentTask:
    """What a student learns from: the pool and the answers, with the noisy counts behind them where there are any.

    The answers of a census speak for every public point of their cells, slopes for every public point.
    """
    if release.census_rounds:
        label_S, share_SC = _everywhere(release)
        rounds = torch.arange(release.census_rounds)
        return StudentTask(
            data.spec,
            data.pool.x,
            torch.arange(len(data.pool)).repeat(len(rounds)),
            label_S,
            belief_QC=share_SC,
            round_Q=rounds.repeat_interleave(len(data.pool)),
        )
    answered, believed_QC = release.answered_Q, None
    if release.noisy is not None:  # round by round: how far teachers lead differs with who answers what
        believed_QC = torch.cat([beliefs(part) for part in release.noisy.split(release.rounds)])[answered]
    return StudentTask(
        data.spec,
        data.pool.x,
        release.query_Q[answered],
        release.label_Q[answered],
        belief_QC=believed_QC,
        round_Q=release.round_Q[answered],
    )


def _everywhere(release: Release) -> tuple[Tensor, Tensor]:
    """(label, class shares) of every public point, round after round, [R P] and [R P, C]."""
    if release.score_RPC is not None:
        share_SC = release.score_RPC.flatten(0, 1).softmax(1)
        return share_SC.argmax(1), share_SC
    assert release.cell_RP is not None and release.noisy is not None
    cell_S = release.cell_RP.flatten()
    return release.label_Q[cell_S], shares(release.noisy)[cell_S]


def _voting(plan: Plan, teachers: Teachers) -> str:
    if plan.census is not None:
        return plan.census.name
    if teachers.ensemble is None:
        return "brought"
    return "inductive" if plan.transduction is None else "transductive"


def _configuration(component: Any) -> dict[str, Any]:
    return {"class": type(component).__qualname__, **dataclasses.asdict(component)}


def fit_student(
    plan: Plan,
    data: Dataset,
    release: Release,
    stages: Stages,
    board: ReleaseBoard,
    choose: Callable[[Fit], tuple[str, Student, str]] | None = None,
) -> tuple[str, Student, str | None]:
    """Train and save the student: (its name, the student, the reservation that paid for choosing it, or None).

    Raises ValueError where no question was answered.

    ``choose``: picks among several, given how to fit.
    """
    if not bool(release.answered_Q.any()):
        raise ValueError(
            f"mechanism: none of the {len(release.query_Q)} questions was answered, so there is nothing to learn from. "
            "Lower the threshold, or use more teachers."
        )
    task = student_task(data, release)

    def fit(name: str, algorithm: StudentAlgorithm) -> Student:
        def log(tag: str, value: float, step: int) -> None:
            board.log(tag if choose is None else tag.replace("student/", f"student/{name}/", 1), value, step)

        progress = stages(f"Training the student ({name})")
        return algorithm.fit(task, seed=plan.seed, device=plan.device, progress=progress, log=log)

    alone = plan.student.name
    name, student, paid = (alone, fit(alone, plan.student), None) if choose is None else choose(fit)
    (plan.folder / "release").mkdir(exist_ok=True)
    save_student(student, plan.folder / "release" / "student.safetensors")
    return name, student, paid
