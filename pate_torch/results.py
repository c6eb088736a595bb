"""What a run measured, sorted by who may see it: the released report and the owner's own figures.

The claim follows the artefacts: the epsilon reported as the guarantee is composed from what was *reserved* for
everything that lies in the release folder (labels, the choice of a student, a published price), which no vote can
change; the account's from all that was ever reserved. What was incurred is reported beside either, as ex post.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting import epsilon as accounting
from pate_torch.accounting import exact, rdp
from pate_torch.accounting.data_dependent import theorem_rdp
from pate_torch.accounting.events import Event
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.accounting.vote_rows import Array
from pate_torch.audit.membership import Membership, Sides, attack
from pate_torch.ledger.accounts import Charge
from pate_torch.ledger.ledger import CHOICE, Account, Ledger
from pate_torch.protocols import Student
from pate_torch.reporting import private, released, statement
from pate_torch.reporting.card import write_card
from pate_torch.reporting.page import write_page
from pate_torch.reporting.statement import OtherRelease
from pate_torch.teachers.baseline import logits_of_one
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.voting import count
from pate_torch.types import NO_ANSWER, Dataset, PrivateData, Release, Votes

EXAMPLES = 12
EXACT, THEOREM = "Price of these votes, exact", "Price of these votes, theorem"
"""Two figures for the owner, as they are called where they are missing."""

T = TypeVar("T")


def report(
    *,
    data: Dataset,
    release: Release,
    record: Mapping[str, Any],
    paid: Sequence[str],
    student: Student | None,
    student_name: str,
    ledger: Ledger,
    seconds: Mapping[str, float],
    baselines: tuple[released.Baseline, ...] = (),
) -> released.ReleasedReport:
    """Everything releasable about a finished run. Evaluation labels are read here, for the first time.

    student: None where labels were released and nothing trained. ``paid``: the reservations that this run made; the
    labels' own is not among them where they were released before.
    """
    delta, name = record["delta"], data.spec.name
    claimed = claims(ledger, name, [release.id, *paid], now=paid)
    measured = {} if student is None or not data.evaluation.public else figures(data, student)
    correct, answered = label_hits(data, release)
    taken = release.census_rounds
    declared = record.get("declared_size") if taken else data.spec.nominal_size
    return released.ReleasedReport(
        dataset=data.spec.name,
        mechanism=record["mechanism"],
        student=student_name,
        num_teachers=record["num_teachers"],
        queries_asked=len(release.query_Q),
        queries_answered=int(release.answered_Q.sum()),
        delta=delta,
        adjacency=record["adjacency"],
        unit=record["unit"],
        **claimed,
        parameters=_scalars(record["parameters"]),
        noise=record["noise"],
        # Teachers' shapes follow from it, and how far slopes move a model; a census needs none.
        declared_size=declared if record["adjacency"] == "add_remove" else None,
        split=data.pool.split,
        reused=release.id not in paid,
        successors=record.get("succession") is True,
        census_rounds=taken,
        slopes=release.score_RPC is not None,
        seconds=public_seconds(seconds, record, chosen=any(part.what == CHOICE for part in claimed["parts"])),
        **measured,
        label_accuracy=correct / answered if answered else None,
        label_size=answered or None,
        teachers_id=record["teachers_id"],
        teachers_kept=TeacherStore(ledger.path.parent).holds(record["teachers_id"]),
        release_id=release.id,
        ledger_head=ledger.head(),
        class_names=data.spec.class_names,
        epsilon_curve=epsilon_curve(release, delta),
        account_curve=account_curve(ledger, name, release) if release.id in paid else (),
        student_curves={} if student is None else {tag: tuple(points) for tag, points in student.curves.items()},
        examples=examples(data, release),
        baselines=baselines,
        created=datetime.date.today().isoformat(),
    )


def figures(data: Dataset, student: Student) -> dict[str, Any]:
    """What the test set says of a student, by the names of a report's fields; releasable if ``data.evaluation`` is."""
    truth = data.evaluation.y
    if not len(truth):
        return {}
    predicted = student.probabilities(data.evaluation.x).argmax(1)
    return {
        "student_accuracy": _accuracy(predicted, truth),
        "student_size": len(truth),
        "confusion": confusion(truth, predicted, data.spec.num_classes),
    }


def withheld(data: Dataset, student: Student) -> dict[str, Any]:
    """PRIVATE. Those figures where they may not be published, for the owner."""
    return {} if data.evaluation.public else figures(data, student)


def claims(ledger: Ledger, name: str, reservations: Sequence[str], *, now: Sequence[str] = ()) -> dict[str, Any]:
    """What a report may claim of a folder that holds what these reservations paid for, and of the whole account.

    now: those made by the run that reports. The fields of ``PrivacyFacts`` that are claims.
    """
    account, claim = ledger.account(name), ledger.claim(name, reservations)
    guarantee, total, total_ex_post = claim.guarantee, account.guarantee, account.ex_post
    return {
        "epsilon": None if guarantee is None else guarantee.epsilon,
        "accountant": "none" if guarantee is None else guarantee.route,
        "epsilon_ex_post": None if claim.ex_post is None else claim.ex_post.epsilon,
        "private": claim.private,
        "parts": tuple(_part(account, identity, charge, identity in now) for identity, charge in claim.parts.items()),
        "epsilon_charged": None if total is None else total.epsilon,
        "charged_accountant": None if total is None else total.route,
        "epsilon_charged_ex_post": None if total_ex_post is None else total_ex_post.epsilon,
        "budget_epsilon": account.budget_epsilon,
        "other_releases": tuple(
            _part(account, identity, charge, False)
            for identity, charge in ledger.charges(name).items()
            if identity not in claim.parts
        ),
    }


def _part(account: Account, identity: str, charge: Charge, now: bool) -> OtherRelease:
    """One reservation: what it paid for, and its own guarantee."""
    alone = replace(account, private=not charge.insecure)  # its noise is its own; the cap is the account's
    guarantee = alone.claim(charge.planned, capped=account.private)
    what = charge.what if charge.committed or now else f"{charge.what}, interrupted: charged at its worst case"
    if guarantee is None:
        return OtherRelease(release_id=identity, what=f"{what}, {statement.NOT_PRIVATE}: seeded noise", now=now)
    return OtherRelease(release_id=identity, what=what, epsilon=guarantee.epsilon, accountant=guarantee.route, now=now)


def public_seconds(seconds: Mapping[str, float], record: Mapping[str, Any], *, chosen: bool) -> dict[str, float]:
    """The stages whose time tells nothing of how many private records there are, or what they are.

    Votes of teachers that are there already are counted and asked by public sizes; records that answer, and
    all that reads or trains on them, take the longer the more there are. chosen: the student was, by private records.
    """
    shown = {"start"} if chosen else {"start", "student"}
    if record.get("voting") in ("inductive", "transductive", "brought") and not record.get("succession"):
        shown.add("labels")
    return {stage: took for stage, took in seconds.items() if stage in shown}


def counted(data: Dataset, everyone: PrivateData | None = None) -> dict[str, int]:
    """PRIVATE. How many records there are, by what became of them. everyone: with those kept from the teachers."""
    everyone = data.private if everyone is None else everyone
    units, kept = len(np.unique(everyone.unit_id)), len(everyone) - len(data.private)
    rows = {"private": len(everyone)} | ({"private units": units} if units < len(everyone) else {})
    rows |= {"public": len(data.pool), "test": len(data.evaluation.y)}
    rows |= {"private kept from the teachers": kept} if kept else {}
    return rows | {f"left out {why}": count for why, count in data.dropped.items()}


def owner_summary(
    *,
    data: Dataset,
    release: Release,
    votes: Votes | None,
    ensemble: Ensemble | None,
    nonprivate: Ensemble | None,
    model: OutcomeModel | None,
    rounds: int,
    delta: float,
    device: torch.device,
) -> private.OwnerSummary:
    """PRIVATE. What the owner may look at: accuracies without noise, and prices that depend on the votes.

    votes: on the pool; None: of a census. Data-dependent prices compose only when no question depends on an earlier
    answer: with rounds there is none.
    """
    missing: dict[str, str] = {}
    accuracy = mean = alone = None
    truth = data.evaluation.y
    if nonprivate is not None:
        alone = _figure(
            "Model without privacy",
            lambda: _accuracy(nonprivate.predictions(data.evaluation.x, device=device)[0], truth),
            missing,
        )
    if ensemble is not None:  # votes brought from elsewhere say nothing of the test points

        def both() -> tuple[float, float]:
            prediction_KQ = ensemble.predictions(data.evaluation.x, device=device)
            plurality = ensemble_plurality(prediction_KQ, data.spec.num_classes)
            return _accuracy(prediction_KQ, truth), _accuracy(plurality, truth)

        mean, accuracy = _figure("Teachers' accuracies", both, missing) or (None, None)
    asked = None if votes is None else votes.take(release.query_Q)
    exact_epsilon = theorem_epsilon = None
    if model is not None and rounds == 1 and asked is not None and len(asked):
        counts, orders = asked.counts_QC.cpu().numpy(), rdp.ORDERS

        def exactly() -> float | None:
            if not exact.affordable(model, counts):
                missing[EXACT] = (
                    "too much work with so many classes, teachers or questions; the theorems' price stands alone"
                )
                return None
            return _price(exact.exact_rdp(model, counts, orders, direction="two_sided").upper, delta)

        theorem_epsilon = _figure(THEOREM, lambda: _price(theorem_rdp(model, counts, orders), delta), missing)
        exact_epsilon = _figure(EXACT, exactly, missing)
    gaps = None if asked is None else _figure("How teachers agree", lambda: private.gap_quantiles(asked), missing)
    return private.OwnerSummary(
        ensemble_accuracy=accuracy,
        teacher_accuracy_mean=mean,
        epsilon_exact_data_dependent=exact_epsilon,
        epsilon_pate2018=theorem_epsilon,
        gap_quantiles=gaps or {},
        nonprivate_accuracy=alone,
        not_computed=missing,
    )


def _figure(name: str, compute: Callable[[], T], missing: dict[str, str]) -> T | None:
    """PRIVATE. The figure, or None and its failure by the error's name alone.

    The labels are charged by now: no figure for the owner may end the run, whatever goes wrong with it.
    """
    try:
        return compute()
    except Exception as error:
        missing[name] = f"it failed ({type(error).__name__})"
        return None


def _accuracy(prediction: Tensor, truth_Q: Tensor) -> float:
    """Of one model's predictions, [Q], or of many models', [K, Q]."""
    if not len(truth_Q):
        raise ValueError("nothing to measure an accuracy on")
    return float((prediction == truth_Q).double().mean())


def _price(rdp_A: Array, delta: float) -> float:
    epsilon = rdp.to_epsilon(rdp.ORDERS, rdp_A, delta)
    if not math.isfinite(epsilon):
        raise ArithmeticError("no finite epsilon")
    return epsilon


def membership(
    sides: Sides,
    *,
    student: Student,
    nonprivate: Ensemble | None,
    events: Iterable[Event],
    delta: float,
    seed: int,
    private_run: bool,
    held_out: bool,
) -> Membership:
    """PRIVATE. The attack on the released student, beside what its price leaves to any attack.

    At epsilon = 0 the privacy curve's delta is the total variation between neighbours, hence a bound of its own.
    """
    bound = by_plan = None
    if private_run:
        planned = tuple(events)
        bound = statement.advantage_bound(accounting.epsilon(planned, delta).epsilon, delta)
        by_plan = min(bound, accounting.delta(planned, 0.0))
    contrast = None if nonprivate is None else attack(functools.partial(logits_of_one, nonprivate), sides, seed)
    return Membership(
        student=attack(student.logits, sides, seed),
        nonprivate=contrast,
        bound=bound,
        bound_by_plan=by_plan,
        held_out=held_out,
    )


def ensemble_plurality(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """PRIVATE. The noiseless winner of each question, int64 [Q]."""
    return count(prediction_KQ, num_classes).plurality()


def label_hits(data: Dataset, release: Release) -> tuple[int, int]:
    """(released labels that are right, labels that can be checked)."""
    if data.evaluation.pool_y is None:
        return 0, 0
    query = release.query_Q[release.answered_Q]
    return int((data.evaluation.pool_y[query] == release.label_Q[release.answered_Q]).sum()), len(query)


def epsilon_curve(release: Release, delta: float) -> tuple[float, ...]:
    """Price of the first q questions, q = 1..Q, where each costs the same; empty where it does not."""
    each = _per_question(release)
    if each is None:
        return ()
    asked = len(release.query_Q)
    return tuple(accounting.epsilon([replace(each, count=each.count * q)], delta).epsilon for q in range(1, asked + 1))


def _per_question(release: Release) -> Event | None:
    """What every question cost alike, or None."""
    asked = len(release.query_Q)
    if not asked or len(release.events) != 1 or release.events[0].count % asked:
        return None
    return replace(release.events[0], count=release.events[0].count // asked)


def confusion(truth: Tensor, predicted: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Test counts [truth, predicted]."""
    flat = torch.bincount(truth * num_classes + predicted, minlength=num_classes**2)
    return tuple(tuple(row) for row in flat.view(num_classes, num_classes).tolist())


def examples(data: Dataset, release: Release) -> released.Examples | None:
    """A few answered public images with the label released for them."""
    if not data.spec.is_image or data.spec.input_shape[0] not in (1, 3):
        return None
    query = release.query_Q[release.answered_Q][:EXAMPLES]
    label = release.label_Q[release.label_Q != NO_ANSWER][:EXAMPLES]
    return released.Examples(
        image=data.pool.x[query].cpu().numpy(), label=tuple(label.tolist()), query=tuple(query.tolist())
    )


def account_curve(ledger: Ledger, name: str, release: Release) -> tuple[float, ...]:
    """The account's total after each question of this release; empty where questions cost unequally, or none is
    claimed.
    """
    each, asked, account = _per_question(release), len(release.query_Q), ledger.account(name)
    if each is None or not account.private:
        return ()
    before = [e for other, charge in ledger.charges(name).items() if other != release.id for e in charge.planned]
    totals = (account.claim([*before, replace(each, count=each.count * q)]) for q in range(1, asked + 1))
    return tuple(total.epsilon for total in totals if total is not None)


def _scalars(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in parameters.items() if v is None or isinstance(v, bool | int | float | str)}


def write_release(folder: Path, summary: released.ReleasedReport) -> None:
    """All the files of the release folder but the labels and the student."""
    released.write_summary(summary, folder / "summary.json")
    released.write_privacy(summary, folder / "privacy.json")
    write_page(summary, folder / "report.html")
    write_card(summary, folder / "README.md")
