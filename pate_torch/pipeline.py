"""A run from private data to a released student, stage by stage; the only composer of runs, and free of Hydra.

    data -> shards -> teachers -> votes | mechanism <- ledger | released labels -> student -> report

The account is opened, and the plan priced and held against the cap, before the first teacher is trained: a choice
that cannot work fails in seconds and costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from pate_torch import checks, labelling, released, results, rng, runs
from pate_torch.accounting import calibration
from pate_torch.accounting import epsilon as accounting
from pate_torch.accounting.filters import Filter, Spend
from pate_torch.ledger import Account, Ledger
from pate_torch.noise import NoiseSource
from pate_torch.progress import Stages
from pate_torch.protocols import DatasetSource, Mechanism, QueryStrategy, Student, StudentAlgorithm, StudentTask
from pate_torch.reporting.private import OwnerSummary, PrivateBoard, make_private_folder, write_owner_summary
from pate_torch.reporting.released import Baseline, ReleasedReport
from pate_torch.reporting.table import show_closing
from pate_torch.reporting.tensorboard import ReleaseBoard
from pate_torch.students.store import save as save_student
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.store import Identity, TeacherStore
from pate_torch.teachers.training import TeacherRecipe, train
from pate_torch.types import Dataset, PrivateData, Release, Shards, Votes


class Partition(Protocol):
    """Units to shards; see data/partition.py."""

    adjacency: str

    def shards(self, private: PrivateData, num_teachers: int, seed: int) -> Shards: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Everything a run is made of: the components, then the choices of the top level. Raises ValueError."""

    source: DatasetSource
    partition: Partition
    recipe: TeacherRecipe
    mechanism: Mechanism
    strategy: QueryStrategy
    student: StudentAlgorithm
    refit: StudentAlgorithm
    root: Path
    folder: Path
    seed: int
    num_teachers: int
    num_queries: int
    delta: float
    teachers: str | None = None
    labels: str | None = None
    noise: str = "torch"
    insecure_noise_seed: int | None = None
    budget_epsilon: float | None = None
    opening_budget: float = 10.0
    target_epsilon: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    baseline: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, low=0)
        checks.integer("num_teachers", self.num_teachers, low=1)
        checks.integer("num_queries", self.num_queries, low=1)
        checks.delta("privacy.delta", self.delta)
        for key in ("budget_epsilon", "target_epsilon"):
            if getattr(self, key) is not None:
                checks.positive(f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        if self.teachers is not None:
            runs.checked_id("teachers", self.teachers)
        if self.labels is not None:
            runs.checked_id("labels", self.labels)
            if self.teachers is not None:
                raise checks.fail("labels", self.labels, "a release is reused without teachers", "Leave out teachers.")

    @property
    def rounds(self) -> int:
        return min(self.strategy.rounds, self.num_queries)


@dataclass(eq=False)
class Clock:
    """Seconds per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.monotonic() - began, 3)


def calibrated(plan: Plan) -> Mechanism:
    """The mechanism, its noise set to cost ``privacy.target_epsilon`` where one is given."""
    if plan.target_epsilon is None:
        return plan.mechanism
    mechanism: Any = plan.mechanism
    if "sigma" not in {f.name for f in dataclasses.fields(mechanism)}:
        raise checks.fail(
            "privacy.target_epsilon", plan.target_epsilon, f"mechanism={mechanism.name} has no sigma to calibrate"
        )
    sigma = calibration.smallest_sigma(
        lambda s: dataclasses.replace(mechanism, sigma=s).worst_case(plan.num_queries, plan.rounds),
        epsilon=plan.target_epsilon,
        delta=plan.delta,
    )
    return dataclasses.replace(mechanism, sigma=sigma)


def open_account(plan: Plan, ledger: Ledger, name: str, unit: str, mechanism: Mechanism) -> Account:
    """Open the data set's account, or meet its terms; refuse now what could not be charged later.

    An account is not opened for a plan that its own cap would refuse: a slip of the pen would fix the cap for good.
    """
    planned = mechanism.worst_case(plan.num_queries, plan.rounds)
    known = {account.name: account for account in ledger.accounts()}.get(name)
    budget = plan.budget_epsilon
    if budget is None:
        budget = plan.opening_budget if known is None else known.budget_epsilon
    if known is None:
        terms = Filter.plan(planned, epsilon=budget, delta=plan.delta)
        if not terms.admits(Spend(), terms.price(planned)):
            alone = accounting.epsilon(planned, plan.delta)
            raise checks.fail(
                "privacy.budget_epsilon",
                budget,
                f"this release alone may cost epsilon {alone.epsilon:.6g} at delta {plan.delta:g} ({alone.route})",
                "Ask fewer questions (num_queries), add noise (mechanism.sigma), or open with a larger cap.",
            )
    return ledger.open_account(
        name,
        budget_epsilon=budget,
        delta=plan.delta,
        adjacency=plan.partition.adjacency,
        unit=unit,
        planned_events=planned,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Teachers:
    """PRIVATE. The ensemble of a run and what it says of the public pool."""

    id: str
    ensemble: Ensemble
    votes: Votes
    reused: bool


def identify(plan: Plan, data: Dataset, store: TeacherStore) -> Identity:
    """PRIVATE. What decides the teachers of this run, down to the content of the records."""
    return Identity(
        dataset=data.spec.name,
        fingerprint=store.fingerprint(data.private),
        partition=dataclasses.asdict(plan.partition),  # type: ignore[call-overload]
        configuration=plan.recipe.configuration(),
        seed=plan.seed,
        num_teachers=plan.num_teachers,
    )


def _checkpoints(store: TeacherStore, identity: Identity) -> Path:
    """PRIVATE. Where the finished chunks of an interrupted training wait for the next attempt."""
    return store.folder / f".partial-{released.key(dataclasses.asdict(identity))[:16]}"


def obtain_teachers(
    plan: Plan,
    data: Dataset,
    store: TeacherStore,
    ledger: Ledger,
    stages: Stages,
    clock: Clock,
    board: PrivateBoard,
) -> Teachers:
    """The ensemble that was asked for, one trained before in the same way on the same data, or a new one."""
    with clock("partition"):
        shards = plan.partition.shards(data.private, plan.num_teachers, plan.seed)
        identity = identify(plan, data, store)
    found = plan.teachers or store.find(identity)
    stored = None if found is None else store.load(found)
    if found is not None and stored is not None:
        _same_data(stored.identity, identity, found)
        if stored.ledger_head is not None and not ledger.head_contains(stored.ledger_head):
            raise checks.fail(
                "teachers",
                found,
                "were used with another privacy ledger than the one here",
                f"Bring back the ledger that lay beside them ({ledger.path}): it remembers what was released.",
            )
        if plan.teachers is None:
            _say(plan, f"Reusing teachers {found}: same data, same configuration.")
        ensemble = stored.ensemble
    else:
        checkpoints = _checkpoints(store, identity)
        distributed.broadcast_text(TRAIN)
        with clock("teachers"):
            ensemble = train(
                data.private,
                data.spec,
                shards,
                plan.recipe,
                seed=plan.seed,
                device=plan.device,
                checkpoint_dir=checkpoints,
                progress=stages(f"Training {plan.num_teachers} teachers"),
                log=board.log,
                losses=board.losses,
            )
        found = store.save(ensemble, identity, ledger.head())
        shutil.rmtree(checkpoints, ignore_errors=True)
    ask = ensemble.votes if stored is not None else functools.partial(distributed.votes, ensemble)
    with clock("votes"):
        progress = stages("Counting votes")
        votes = store.votes_cached(found, data.pool.x, lambda: ask(data.pool.x, device=plan.device, progress=progress))
    return Teachers(id=found, ensemble=ensemble, votes=votes, reused=plan.teachers is not None)


def obtain_release(
    plan: Plan, data: Dataset, teachers: Teachers, mechanism: Mechanism, charge: labelling.Charge, stages: Stages
) -> tuple[Release, dict[str, Any], bool]:
    """(release, its record, whether it was reused): the same questions to the same teachers are not paid for twice."""
    noise = NoiseSource(plan.noise, plan.insecure_noise_seed)
    facts = _facts(plan, data, teachers, mechanism, noise)
    same = released.find_same(plan.root, facts["key"], data.pool, data.spec) if noise.private else None
    if same is not None:
        release, record = same
        _say(plan, f"Reusing release {release.id}: same questions, mechanism and teachers. It costs nothing.")
        return release, record, True

    stage = stages("Fitting the guiding student") if plan.rounds > 1 else None

    def refit(query_Q: Tensor, label_Q: Tensor) -> Tensor:
        task = StudentTask(data.spec, data.pool.x, query_Q, label_Q)
        guide = plan.refit.fit(task, seed=rng.derive(plan.seed, "refit"), device=plan.device, progress=stage or _silent)
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
        refit=refit if plan.rounds > 1 else None,
        seal=seal,
        progress=stages("Asking the teachers"),
    )
    return release, written, False


def _facts(plan: Plan, data: Dataset, teachers: Teachers, mechanism: Mechanism, noise: NoiseSource) -> dict[str, Any]:
    """What ``release.json`` says beside the answers. Public: configuration, and ids drawn at random."""
    parameters = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}  # type: ignore[arg-type]
    asking: dict[str, Any] = {"strategy": _configuration(plan.strategy), "num_queries": plan.num_queries}
    if plan.rounds > 1:
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
        "parameters": {k: v for k, v in parameters.items() if k not in ("name", "noise")},
        "noise": plan.noise,
        "private": noise.private,
        "query": plan.strategy.name,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "delta": plan.delta,
        "adjacency": plan.partition.adjacency,
        "unit": data.private.unit,
    }


def _configuration(component: Any) -> dict[str, Any]:
    return {"class": type(component).__qualname__, **dataclasses.asdict(component)}


def _same_data(stored: Identity, here: Identity, name: str) -> None:
    """Refuse teachers of other data, or under another partition: their votes would be charged to the wrong account."""
    for key, fix in (
        ("dataset", "Set dataset.name to the name they were trained under."),
        ("num_teachers", "Set num_teachers to theirs."),
        ("partition", "Use the partition they were trained with."),
        ("fingerprint", "They were trained on other records of the same name; train new ones by leaving out teachers."),
    ):
        if getattr(stored, key) != getattr(here, key):
            there = "another one" if key == "fingerprint" else repr(getattr(stored, key))
            raise checks.fail("teachers", name, f"were trained with {key} {there}", fix)


def _say(plan: Plan, line: str) -> None:
    if not plan.quiet:
        print(line, file=sys.stderr)


def _silent(done: int, total: int) -> None:
    return None


def nonprivate_accuracy(plan: Plan, data: Dataset, stages: Stages) -> float:
    """PRIVATE. Test accuracy of one network trained on every private record: an ensemble of one, with a longer recipe.

    It spends nothing because it is shown to nobody but the owner (or belongs to a public benchmark).
    """
    everyone = Shards(
        torch.arange(len(data.private))[None], torch.ones(1, len(data.private), dtype=torch.bool), "replace_one"
    )
    recipe = dataclasses.replace(plan.recipe, batch_size=max(plan.recipe.batch_size, min(128, len(data.private))))
    progress = stages("Training a model without privacy")
    ensemble = train(data.private, data.spec, everyone, recipe, seed=plan.seed, device=plan.device, progress=progress)
    prediction = ensemble.predictions(data.evaluation.x, device=plan.device)[0]
    return float((prediction == data.evaluation.y).float().mean())


TRAIN, BASELINE, DONE = "train", "baseline", "done"


def assist(plan: Plan) -> None:
    """What the ranks above 0 of a torchrun do: train their teachers, ask them, and nothing with noise or the ledger."""
    data = plan.source.load()
    quiet, store = Stages(quiet=True), TeacherStore(plan.root)
    while (order := distributed.broadcast_text("")) != DONE:
        if order == TRAIN:
            shards = plan.partition.shards(data.private, plan.num_teachers, plan.seed)
            checkpoints = _checkpoints(store, identify(plan, data, store))
            ensemble = train(
                data.private,
                data.spec,
                shards,
                plan.recipe,
                seed=plan.seed,
                device=plan.device,
                checkpoint_dir=checkpoints,
            )
            distributed.votes(ensemble, data.pool.x, device=plan.device)
        elif order == BASELINE:
            nonprivate_accuracy(plan, data, quiet)


def run(plan: Plan) -> ReleasedReport | None:
    """From the plan to the files of DESIGN's layout; returns what was released (None on the ranks that assist).

    Raises ValueError for a choice of the user's that cannot work, before anything is charged.
    """
    if not distributed.is_main():
        assist(plan)
        return None
    report = _run(plan)
    distributed.broadcast_text(DONE)
    return report


def _run(plan: Plan) -> ReleasedReport:
    clock = Clock()
    with Stages(quiet=plan.quiet) as stages:
        with clock("data"):
            data = plan.source.load()
        make_private_folder(plan.root, "store")
        ledger = Ledger(plan.root / "ledger.sqlite")
        make_private_folder(plan.folder / "private")
        board = PrivateBoard(plan.folder / "private" / "tensorboard")
        owner: OwnerSummary | None = None
        if plan.labels is not None:
            release, record = released.read(plan.root, plan.labels, data.pool, data.spec)
            reused = True
        else:
            mechanism = calibrated(plan)
            mechanism.check(
                num_queries=plan.num_queries,
                num_teachers=plan.num_teachers,
                num_classes=data.spec.num_classes,
                rounds=plan.rounds,
            )
            open_account(plan, ledger, data.spec.name, data.private.unit, mechanism)
            store = TeacherStore(plan.root)
            teachers = obtain_teachers(plan, data, store, ledger, stages, clock, board)
            charge = labelling.Charge(
                ledger=ledger,
                account=data.spec.name,
                fingerprint=store.fingerprint(data.private),
                run=plan.folder.name,
            )
            with clock("labels"):
                release, record, reused = obtain_release(plan, data, teachers, mechanism, charge, stages)
            store.set_ledger_head(teachers.id, ledger.head())
            with clock("owner"):
                owner = look(plan, data, teachers, mechanism, release, board, stages)
        with ReleaseBoard(plan.folder / "release" / "tensorboard", private=record["private"]) as shown:
            with clock("student"):
                student = fit_student(plan, data, release, stages, shown)
            report = results.report(
                data=data,
                release=release,
                record=record,
                reused=reused,
                student=student,
                student_name=plan.student.name,
                ledger=ledger,
                seconds=clock.seconds,
                baselines=_publishable(data, owner),
            )
            shown.write(report)
    board.close()
    results.write_release(plan.folder / "release", report)
    show_closing(
        report,
        owner=() if owner is None else owner.lines(),
        places={"Released": plan.folder / "release", "Private": plan.folder / "private"},
    )
    return report


def _publishable(data: Dataset, owner: OwnerSummary | None) -> tuple[Baseline, ...]:
    """The owner's accuracies, where the data set is a public benchmark; else none of them."""
    if owner is None or not data.spec.benchmark:
        return ()
    shown = (("Teachers' plurality, no noise", owner.ensemble_accuracy), ("No privacy", owner.nonprivate_accuracy))
    size = len(data.evaluation.y)
    return tuple(
        Baseline(name=name, accuracy=value, because="benchmark", size=size)
        for name, value in shown
        if value is not None
    )


def look(
    plan: Plan,
    data: Dataset,
    teachers: Teachers,
    mechanism: Mechanism,
    release: Release,
    board: PrivateBoard,
    stages: Stages,
) -> OwnerSummary:
    """PRIVATE. What the owner may see of the run, written into its private folder."""
    asked = teachers.votes.take(release.query_Q)
    save_file(
        {"query_Q": release.query_Q, "counts_QC": asked.counts_QC.cpu()}, plan.folder / "private" / "votes.safetensors"
    )
    board.votes(asked, release.answered_Q)
    summary = results.owner_summary(
        data=data,
        release=release,
        votes=teachers.votes,
        ensemble=teachers.ensemble,
        model=mechanism.outcome_model(),
        rounds=plan.rounds,
        delta=plan.delta,
        nonprivate_accuracy=_with_peers(plan, data, stages) if plan.baseline else None,
        device=plan.device,
    )
    write_owner_summary(summary, plan.folder / "private" / "summary.json")
    return summary


def _with_peers(plan: Plan, data: Dataset, stages: Stages) -> float:
    distributed.broadcast_text(BASELINE)
    return nonprivate_accuracy(plan, data, stages)


def fit_student(plan: Plan, data: Dataset, release: Release, stages: Stages, board: ReleaseBoard) -> Student:
    """Train the student on the answered questions and the unlabelled pool, and save it. ValueError: no answers."""
    answered = release.answered_Q
    if not bool(answered.any()):
        raise ValueError(
            f"mechanism: none of the {len(release.query_Q)} questions was answered, so there is nothing to learn from. "
            "Lower the threshold, or use more teachers."
        )
    task = StudentTask(data.spec, data.pool.x, release.query_Q[answered], release.label_Q[answered])
    student = plan.student.fit(
        task, seed=plan.seed, device=plan.device, progress=stages("Training the student"), log=board.log
    )
    (plan.folder / "release").mkdir(exist_ok=True)
    save_student(student, plan.folder / "release" / "student.safetensors")
    return student
