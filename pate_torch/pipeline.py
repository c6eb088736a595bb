"""A run from private data to a released student, stage by stage; the only composer of runs, and free of Hydra.

    data -> shards -> teachers -> votes | mechanism <- ledger | released labels -> student -> report

The account is opened, and the plan priced and held against the cap, before the first teacher is trained: a choice
that cannot work fails in seconds and costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetensors.torch import save_file

from pate_torch import chance, preflight, release_store, results, run_folders
from pate_torch.accounting import sanitised_release
from pate_torch.accounting.events import Event
from pate_torch.accounting.shown import show_delta, show_epsilon
from pate_torch.budget import Budget
from pate_torch.config import Plan, calibrated, fitted
from pate_torch.core.progress import Clock, Stages
from pate_torch.data.partition import deal
from pate_torch.ensembling import (
    DONE,
    Loaded,
    Teachers,
    assist,
    convene,
    enrol,
    load,
    nonprivate_with_peers,
    obtain_teachers,
)
from pate_torch.ledger import Ledger
from pate_torch.protocols import Mechanism, Student
from pate_torch.releasing import fit_student, obtain_release
from pate_torch.reporting.private import OwnerSummary, PrivateBoard, make_private_folder, write_owner_summary
from pate_torch.reporting.released import Baseline, ReleasedReport
from pate_torch.reporting.table import show_closing
from pate_torch.reporting.tensorboard import ReleaseBoard
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.store import TeacherStore
from pate_torch.types import Ballots, Dataset, Release, Votes
from pate_torch.voters import votes_file
from pate_torch.voters.votes_file import Register

__all__ = ["Plan", "run"]


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
    with Stages(quiet=plan.quiet) as stages, contextlib.ExitStack() as opened:
        with clock("data"):
            loaded = load(plan)
        data, held = loaded.data, loaded.validation
        plan = fitted(plan, data, stages)
        owner: OwnerSummary | None = None
        nonprivate: Ensemble | None = None
        sanitised: str | None = None
        forecast: str | None = None
        # Until the account is open nothing is written: a refusal leaves no trace but the run's log.
        if plan.labels is not None:
            preflight.refuse_reuse(plan, data)
            ledger = opened.enter_context(Ledger(preflight.ledger_path(plan), create=False))
            release, record = release_store.read(plan.root, plan.labels, data.pool, data.spec, ledger)
            opened.enter_context(claimed(plan))
            release_store.refuse_used_folder(plan.folder, release.id)
            reused = True
            if plan.selection is not None:
                # The choice is charged: on the account's own terms, and refused before anything is trained.
                fingerprint = TeacherStore(plan.root).content(loaded.everyone)
                budget = open_budget(plan, ledger, data, plan.selection.worst_case(), fingerprint)
                budget.check(plan.selection.worst_case())
        else:
            brought = None
            if plan.votes is not None:
                brought = votes_file.read(plan.votes, num_classes=data.spec.num_classes, num_points=len(data.pool))
                plan = dataclasses.replace(plan, num_teachers=brought.num_teachers, baseline=False)
            mechanism = calibrated(plan)
            planned = worst_case(plan, mechanism, data)
            preflight.refuse(plan, data, mechanism, planned, training=brought is None and plan.census is None)
            forecast = chance.foretold(plan, data, mechanism)
            if forecast is not None:
                stages.say(forecast)
            opened.enter_context(claimed(plan))
            ledger = opened.enter_context(Ledger(preflight.ledger_path(plan)))
            store = TeacherStore(plan.root)
            fingerprint = store.content(loaded.everyone) if brought is None else Register(store).content(brought)
            budget = open_budget(plan, ledger, data, planned, fingerprint)
        make_private_folder(plan.folder / "private")
        board, store = PrivateBoard(plan.folder / "private" / "tensorboard"), TeacherStore(plan.root)
        paid: list[str] = []
        if plan.labels is None:
            if plan.census is not None:
                with clock("census"):
                    teachers = convene(plan, data, store, ledger, stages)
            elif brought is None:
                afford = functools.partial(budget.check, planned)
                teachers = obtain_teachers(plan, data, store, ledger, stages, clock, board, afford)
            else:
                teachers = enrol(brought, data.spec.name, store, ledger)
            with clock("labels"):
                behind: list[Votes | Ballots] = []
                release, record, reused = obtain_release(plan, data, teachers, mechanism, budget, stages, behind.append)
            paid = [] if reused else [release.id]
            if plan.sanitiser is not None and not reused:
                sanitised, publication = _sanitise(plan, data, teachers, mechanism, release, budget)
                paid.append(publication)
            teachers.remember(ledger.head())
            with clock("owner"):
                nonprivate = nonprivate_with_peers(plan, data, stages) if plan.baseline else None
                owner = look(plan, data, teachers, mechanism, release, board, nonprivate, behind)
        private = record["private"] and (held is None or budget.private)
        with ReleaseBoard(plan.folder / "release" / "tensorboard", private=private) as shown:
            with clock("student"):
                choose = None
                if held is not None:
                    assert plan.selection is not None
                    choose = functools.partial(plan.selection.choose, held=held, budget=budget)
                name, student, choice = fit_student(plan, data, release, stages, shown, choose)
            if choice is not None:
                paid.append(choice)
            report = results.report(
                data=data,
                release=release,
                record=record,
                paid=paid,
                student=student,
                student_name=name,
                ledger=ledger,
                seconds=clock.seconds,
                baselines=_publishable(data, owner),
            )
            shown.write(report)
        results.write_release(plan.folder / "release", report)
        owner = examine(plan, loaded, release, record, student, nonprivate, paid, ledger, board, owner)
        owner = dataclasses.replace(
            owner or OwnerSummary(),
            **results.withheld(data, student),
            records=_counted(plan, loaded),
            seconds=clock.seconds,
            forecast=forecast,
        )
        write_owner_summary(owner, plan.folder / "private" / "summary.json")
        board.close()
    show_closing(
        report,
        owner=owner.lines(),
        places={"Released": plan.folder / "release", "Private": plan.folder / "private"},
    )
    if sanitised is not None:
        print(sanitised)
    return report


@contextlib.contextmanager
def claimed(plan: Plan) -> Iterator[None]:
    """The run's folder for this process alone, and the store without what killed runs left half written.

    Raises ValueError where another run writes into the folder, or has finished there.
    """
    make_private_folder(plan.root, "store")
    store = TeacherStore(plan.root)
    with contextlib.ExitStack() as held:
        with store.writing():  # so that a run that begins is not taken for one that was killed
            held.enter_context(run_folders.claim(plan.folder))
            run_folders.sweep(plan.root)
        preflight.refuse_finished(plan)
        store.sweep()
        release_store.discard_torn(plan.folder)
        yield


def _counted(plan: Plan, loaded: Loaded) -> dict[str, int]:
    """PRIVATE. How many records there were, and what became of them."""
    counts = results.counted(loaded.data, loaded.everyone)
    if plan.labels is None and plan.votes is None and getattr(plan.partition, "capacity", None) is not None:
        shards = deal(plan.partition, loaded.data.private, plan.num_teachers, plan.seed)
        counts["left out beyond partition.capacity"] = len(loaded.data.private) - int(shards.mask_KS.sum())
    return counts


def _sanitise(
    plan: Plan, data: Dataset, teachers: Teachers, mechanism: Mechanism, release: Release, budget: Budget
) -> tuple[str, str]:
    """Publish the data-dependent price, at a price of its own: (what to tell the owner about it, the reservation)."""
    assert plan.sanitiser is not None and isinstance(teachers.votes, Votes)
    publication = _publication(plan, mechanism, data)
    votes = teachers.votes.take(release.query_Q)
    epsilon, paid = plan.sanitiser.publish(publication, mechanism, votes, budget, plan.delta, plan.folder / "release")
    told = (
        f"  Sanitised price  epsilon = {show_epsilon(epsilon)} at delta = {show_delta(plan.delta)}"
        f" with confidence {publication.confidence:g} (forward, {plan.partition.adjacency},\n"
        f"                   unit {data.private.unit}, this publication included)"
    )
    return told, paid


def worst_case(plan: Plan, mechanism: Mechanism, data: Dataset) -> tuple[Event, ...]:
    """Everything a run may charge: the labels, the choice of a student, the publication of their price."""
    events = mechanism.worst_case(plan.num_queries, plan.rounds)
    if plan.selection is not None:
        events += plan.selection.worst_case()
    if plan.sanitiser is not None:
        events += plan.sanitiser.worst_case(_publication(plan, mechanism, data))
    return events


def _publication(plan: Plan, mechanism: Mechanism, data: Dataset) -> sanitised_release.Plan:
    assert plan.sanitiser is not None
    return plan.sanitiser.plan(
        mechanism,
        num_queries=plan.num_queries,
        num_teachers=plan.num_teachers,
        num_classes=data.spec.num_classes,
        rounds=plan.rounds,
        delta=plan.delta,
    )


def open_budget(
    plan: Plan, ledger: Ledger, data: Dataset, planned: tuple[Event, ...], fingerprint: str, *, kind: str | None = None
) -> Budget:
    """Open the data set's account, or meet its terms; refuse now what could not be charged later.

    fingerprint: of the records, or of votes in their place. kind: of noise; None: the plan's.
    """
    name, kind = data.spec.name, plan.noise if kind is None else kind
    preflight.refuse_other_ledger(plan, name, ledger)
    preflight.refuse_second_account(plan, name, fingerprint, ledger)
    preflight.refuse_cap(plan, name, planned, ledger)
    cap = plan.budget_epsilon
    if cap is None:
        known = {account.name: account.budget_epsilon for account in ledger.accounts()}
        cap = known.get(name, plan.opening_budget)
    ledger.open_account(
        name,
        budget_epsilon=cap,
        delta=plan.delta,
        adjacency=plan.partition.adjacency,
        unit=data.private.unit,
        planned_events=planned,
        noise=kind,
    )
    return Budget(
        ledger=ledger,
        account=name,
        delta=plan.delta,
        adjacency=plan.partition.adjacency,
        unit=data.private.unit,
        fingerprint=fingerprint,
        run=plan.folder.name,
        kind=kind,
        insecure_seed=plan.insecure_noise_seed,
        remember=functools.partial(TeacherStore(plan.root).remember, name),
    )


def look(
    plan: Plan,
    data: Dataset,
    teachers: Teachers,
    mechanism: Mechanism,
    release: Release,
    board: PrivateBoard,
    nonprivate: Ensemble | None,
    behind: Sequence[Votes | Ballots],
) -> OwnerSummary:
    """PRIVATE. What the owner may see of the run, written into its private folder.

    behind: the votes behind the answers, where they were given in this run; else the first teachers' votes stand in.
    """
    voted = teachers.votes if isinstance(teachers.votes, Votes) else None  # a census is not taken again to be shown
    asked = behind[0] if behind else None if voted is None else voted.take(release.query_Q)
    if asked is not None:
        save_file(
            {"query_Q": release.query_Q, "counts_QC": asked.counts_QC.cpu()},
            plan.folder / "private" / "votes.safetensors",
        )
    if isinstance(asked, Votes):
        board.votes(asked, release.answered_Q)
    return results.owner_summary(
        data=data,
        release=release,
        votes=voted,
        ensemble=teachers.ensemble,
        nonprivate=nonprivate,
        model=mechanism.outcome_model(),
        rounds=plan.rounds,
        delta=plan.delta,
        device=plan.device,
    )


def examine(
    plan: Plan,
    loaded: Loaded,
    release: Release,
    record: Mapping[str, Any],
    student: Student,
    nonprivate: Ensemble | None,
    paid: Sequence[str],
    ledger: Ledger,
    board: PrivateBoard,
    owner: OwnerSummary | None,
) -> OwnerSummary | None:
    """PRIVATE. The owner's figures, with what an attack on the student finds, where the records behind it are here.

    paid: what this run reserved.
    """
    data = loaded.data
    if plan.membership is None or record["adjacency"] != plan.partition.adjacency:
        return owner
    store = TeacherStore(plan.root)
    if not Register(store).behind(record["teachers_id"], store.fingerprint(data.private)):
        return owner  # labels of other records, or of votes that were brought: who taught is not known here
    # In a census every record took part: one shard of all.
    shards = deal(plan.partition, data.private, max(1, record["num_teachers"]), record["seed"])
    sides = plan.membership.sides(data, shards, loaded.others, plan.seed)
    if sides is None:
        return owner
    claim = ledger.claim(data.spec.name, [release.id, *paid])
    found = results.membership(
        sides,
        student=student,
        nonprivate=nonprivate,
        events=claim.planned,
        delta=record["delta"],
        seed=plan.seed,
        private_run=claim.private,
        held_out=loaded.others is not None,
    )
    board.membership(found)
    return dataclasses.replace(owner or OwnerSummary(), membership=found)


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
