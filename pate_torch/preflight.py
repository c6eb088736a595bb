"""What is found out before a run writes, trains or charges anything: a refusal leaves no trace but the run's log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from pate_torch import chance, release_store, run_folders
from pate_torch.accounting import epsilon as accounting
from pate_torch.accounting.events import Event
from pate_torch.accounting.filters import Filter, Spend
from pate_torch.config import Plan
from pate_torch.core import checks
from pate_torch.data.partition import deal
from pate_torch.ensembling import identify, reusable
from pate_torch.ledger import Ledger
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.protocols import Checkable, Mechanism, StudentAlgorithm
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import TeacherStore
from pate_torch.types import Dataset


def ledger_path(plan: Plan) -> Path:
    """Where the ledger of a run lies."""
    return plan.root / "ledger.sqlite"


def refuse(plan: Plan, data: Dataset, mechanism: Mechanism, planned: Iterable[Event], *, training: bool) -> None:
    """Raise ValueError for a plan that cannot work on these data.

    What would fail after the labels are paid for, such as a student's network that cannot take the data, is refused
    here too. training: the teachers are the project's own, trained before or now.
    """
    refuse_adjacency(data, plan.partition.adjacency)
    fix = f"There are {len(data.pool)} public points to ask about."
    checks.integer("num_queries", plan.num_queries, low=1, high=len(data.pool), fix=fix)
    if plan.transduction is not None and len(data.pool) < 2:
        raise checks.fail("voting", "transductive", "needs at least two public points", "Use voting=inductive.")
    mechanism.check(
        num_queries=plan.num_queries,
        num_teachers=plan.voters,
        num_classes=data.spec.num_classes,
        rounds=plan.rounds,
    )
    _refuse_chance(plan, data, mechanism)
    if plan.census is not None:  # one shard of all records: the partition says which units go with its adjacency
        deal(plan.partition, data.private, 1, plan.seed)
        plan.census.check(data)
    if training or plan.baseline:  # which trains a model of the teachers' recipe on all records
        _refuse("teacher", plan.recipe, data)
    if training:
        deal(plan.partition, data.private, plan.num_teachers, plan.seed)
    if plan.guided:
        _refuse("refit", plan.refit, data)
    refuse_students(plan, data)
    path = ledger_path(plan)
    with Ledger(path) if path.exists() else contextlib.nullcontext() as ledger:
        if training and plan.teachers is not None:
            store = TeacherStore(plan.root)
            store.manifest(plan.teachers)  # a wrong id is refused before the fingerprint leaves its key behind
            reusable(plan.teachers, store, identify(plan, data, store), ledger)
        refuse_cap(plan, data.spec.name, planned, ledger)


def _refuse_chance(plan: Plan, data: Dataset, mechanism: Mechanism) -> None:
    """Raise ValueError for labels that are foretold to be no better than chance, unless the owner wants them."""
    voters, classes = plan.voters, data.spec.num_classes
    if isinstance(mechanism, Histogram):  # a question's ballots, at most, where how many there are is declared
        if data.spec.nominal_size is None:
            return
        voters = max(1, data.spec.nominal_size * plan.rounds // plan.num_queries)
        mechanism = Gaussian(sigma=mechanism.sigma, noise=mechanism.noise)
    if voters:
        chance.refuse(mechanism, num_teachers=voters, num_classes=classes, forced=plan.allow_chance)


def refuse_adjacency(data: Dataset, adjacency: str) -> None:
    """Raise ValueError where one unit's change could move other records of these data."""
    if adjacency not in data.adjacencies:
        what = f"cannot be promised for {data.spec.name}: one unit's change could move other records"
        raise checks.fail("partition", adjacency, what, data.advice)


def refuse_students(plan: Plan, data: Dataset) -> None:
    """Raise ValueError for a student that cannot learn from these data."""
    if plan.selection is None:
        _refuse("student", plan.student, data)
        return
    for name, algorithm in plan.selection.candidates.items():
        _refuse(f"selection.candidates.{name}", algorithm, data)


def _refuse(key: str, component: StudentAlgorithm | TeacherRecipe, data: Dataset) -> None:
    if not isinstance(component, Checkable):
        return
    try:
        component.check(data.spec)
    except ValueError as error:
        raise ValueError(checks.under(key, error)) from error


def refuse_cap(plan: Plan, name: str, planned: Iterable[Event], ledger: Ledger | None) -> None:
    """An account is not opened for a plan that its own cap would refuse: a slip would fix the cap for good."""
    if ledger is not None and any(account.name == name for account in ledger.accounts()):
        return
    key = "opening_budget" if plan.budget_epsilon is None else "budget_epsilon"
    budget = getattr(plan, key)
    terms = Filter.plan(planned, epsilon=budget, delta=plan.delta)
    if not terms.admits(Spend(), terms.price(planned)):
        alone = accounting.epsilon(planned, plan.delta)
        raise checks.fail(
            f"privacy.{key}",
            budget,
            f"this run alone may cost epsilon {alone.epsilon:.6g} at delta {plan.delta:g} ({alone.route})",
            "Ask fewer questions (num_queries), add noise (mechanism.sigma), or open with a larger cap.",
        )


def refuse_finished(plan: Plan) -> None:
    """Raise ValueError where the run's folder holds a finished release, before anything is trained."""
    if (plan.folder / "release" / "summary.json").exists():
        release_store.refuse_used_folder(plan.folder)


def refuse_other_ledger(plan: Plan, name: str, ledger: Ledger) -> None:
    """Raise ValueError where something under this root remembers entries of the account that the ledger lacks."""
    for file, head in TeacherStore(plan.root).heads(name).items():
        if not ledger.head_contains(head):
            raise checks.fail(
                "dataset.name",
                name,
                f"was charged in another privacy ledger than {ledger.path}: {file} remembers an entry that it lacks",
                "Bring back the ledger.sqlite (or its newest backup) that lay beside the teachers: it remembers what "
                "was released.",
            )


def refuse_second_account(plan: Plan, name: str, fingerprint: str, ledger: Ledger) -> None:
    """Raise ValueError where these records are charged to another account, unless the owner says they may be."""
    if plan.second_account:
        return
    for account in ledger.accounts():
        if account.name != name and any(c.fingerprint == fingerprint for c in ledger.charges(account.name).values()):
            raise checks.fail(
                "dataset.name",
                name,
                f"these very records are charged to account {account.name!r} already, and no total covers both",
                f"Use dataset.name={account.name}; or say privacy.second_account=true, and add both epsilons yourself.",
            )


def refuse_reuse(plan: Plan, data: Dataset) -> None:
    """Raise ValueError where a student cannot learn from the release that is to be reused, or there is none; or where
    private records cannot choose one.
    """
    if plan.selection is not None:
        refuse_adjacency(data, plan.partition.adjacency)
    run_folders.find_release(plan.root, plan.labels)
    refuse_students(plan, data)
