"""The released half of a run: the answers (found or bought) and the student that learns from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pate_torch import labelling, released, rng
from pate_torch.accounting.events import Event
from pate_torch.belief import beliefs
from pate_torch.ensembling import Teachers, learn_features
from pate_torch.noise import NoiseSource
from pate_torch.progress import Stages
from pate_torch.protocols import Mechanism, Student, StudentAlgorithm, StudentTask, silent
from pate_torch.reporting.tensorboard import ReleaseBoard
from pate_torch.runplan import Plan
from pate_torch.students.store import save as save_student
from pate_torch.types import Dataset, Release

Fit = Callable[[str, StudentAlgorithm], Student]
"""Trains one named student on the labels of a release."""


def obtain_release(
    plan: Plan, data: Dataset, teachers: Teachers, mechanism: Mechanism, charge: labelling.Charge, stages: Stages
) -> tuple[Release, dict[str, Any], bool]:
    """(release, its record, whether it was reused): the same questions to the same teachers are not paid for twice."""
    noise = NoiseSource(plan.noise, plan.insecure_noise_seed)
    facts = _facts(plan, data, teachers, mechanism, noise)
    same = released.find_same(plan.root, facts["key"], data.pool, data.spec, charge.ledger) if noise.private else None
    if same is not None:
        release, record = same
        stages.say(f"Reusing release {release.id}: same questions, mechanism and teachers. It costs nothing.")
        return release, record, True

    stage = stages("Fitting the guiding student") if plan.guided else None

    def refit(query_Q: Tensor, label_Q: Tensor) -> Tensor:
        task = StudentTask(data.spec, data.pool.x, query_Q, label_Q)
        guide = plan.refit.fit(task, seed=rng.derive(plan.seed, "refit"), device=plan.device, progress=stage or silent)
        return guide.probabilities(data.pool.x)

    written: dict[str, Any] = {}

    def seal(release: Release) -> None:
        written.update(released.write(plan.folder / "release", release, facts, data.spec))

    release = labelling.label(
        votes=teachers.votes,
        pool=data.pool,
        spec=data.spec,
        mechanism=mechanism,
        strategy=plan.strategy,
        noise=noise,
        charge=charge,
        num_queries=plan.num_queries,
        seed=plan.seed,
        refit=refit if plan.guided else None,
        feature_PD=learn_features(plan, data, stages),
        seal=seal,
        progress=stages("Asking the teachers"),
    )
    return release, written, False


def _facts(plan: Plan, data: Dataset, teachers: Teachers, mechanism: Mechanism, noise: NoiseSource) -> dict[str, Any]:
    """What ``release.json`` says beside the answers. Public: configuration, and ids drawn at random."""
    parameters = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}  # type: ignore[arg-type]
    asking: dict[str, Any] = {"strategy": _configuration(plan.strategy), "num_queries": plan.num_queries}
    if plan.representation is not None:
        asking["representation"] = _configuration(plan.representation)
    voting = _voting(plan, teachers)
    if voting == "transductive":
        asking["voting"] = _configuration(plan.transduction)
    if plan.guided:
        asking["refit"] = _configuration(plan.refit)
    pool = released.digest(data.pool)
    same = {"teachers": teachers.id, "pool": pool, "mechanism": parameters, "asking": asking, "seed": plan.seed}
    return {
        "key": released.key(same),
        "dataset": data.spec.name,
        "pool_sha256": pool,
        "teachers_id": teachers.id,
        "num_teachers": plan.num_teachers,
        "mechanism": mechanism.name,
        "parameters": {k: v for k, v in parameters.items() if k not in ("name", "noise") and v is not False},
        "noise": plan.noise,
        "private": noise.private,
        "query": plan.strategy.name,
        "voting": voting,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "delta": plan.delta,
        "adjacency": plan.partition.adjacency,
        "unit": data.private.unit,
    }


def _voting(plan: Plan, teachers: Teachers) -> str:
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
    choose: Callable[[Fit], tuple[str, Student, tuple[Event, ...]]] | None = None,
) -> tuple[str, Student, tuple[Event, ...]]:
    """Train and save the student: (its name, the student, what choosing it cost). ValueError: no question answered.

    It learns from the unlabelled pool and the answered questions, of these from the noisy counts where there are any.
    ``choose``: picks among several, given how to fit.
    """
    answered = release.answered_Q
    if not bool(answered.any()):
        raise ValueError(
            f"mechanism: none of the {len(release.query_Q)} questions was answered, so there is nothing to learn from. "
            "Lower the threshold, or use more teachers."
        )
    believed_QC = None if release.noisy is None else beliefs(release.noisy)[answered]
    task = StudentTask(
        data.spec, data.pool.x, release.query_Q[answered], release.label_Q[answered], belief_QC=believed_QC
    )

    def fit(name: str, algorithm: StudentAlgorithm) -> Student:
        def log(tag: str, value: float, step: int) -> None:
            board.log(tag if choose is None else tag.replace("student/", f"student/{name}/", 1), value, step)

        progress = stages(f"Training the student ({name})")
        return algorithm.fit(task, seed=plan.seed, device=plan.device, progress=progress, log=log)

    alone = plan.student.name
    name, student, cost = (alone, fit(alone, plan.student), ()) if choose is None else choose(fit)
    (plan.folder / "release").mkdir(exist_ok=True)
    save_student(student, plan.folder / "release" / "student.safetensors")
    return name, student, cost
