"""The public report of a finished run: what the evaluation labels, the ledger and the release itself say.

The claim follows the artefacts: the epsilon reported as the guarantee is composed from what was *reserved* for
everything that lies in the release folder (labels, the choice of a student, a published price), which no vote can
change; the account's from all that was ever reserved. What was incurred is reported beside either, as ex post.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch import release_store
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent, to_json
from pate_torch.core import checks
from pate_torch.ledger.accounts import Charge
from pate_torch.ledger.ledger import PURPOSE_STUDENT_CHOICE, Account, Ledger
from pate_torch.methods.description import MethodDescription
from pate_torch.protocols import Student
from pate_torch.reporting.report import Baseline, ChargedRelease, Examples, OwnerFacts, ReleaseReport
from pate_torch.reporting.statement import NOT_PRIVATE
from pate_torch.teachers.store import TeacherStore
from pate_torch.types import NO_ANSWER, Dataset, DataSpec, PublicAsset, Release

EXAMPLES = 12
COMPOSED = 12
"""Moments of a release at which the account's total is composed anew."""


def build_report(
    *,
    data: Dataset,
    release: Release,
    record: Mapping[str, Any],
    paid: Sequence[str],
    student: Student | None,
    student_name: str,
    ledger: Ledger,
    seconds: Mapping[str, float],
    owner: OwnerFacts,
    chosen_by: str | None,
    encoder_here: bool,
    baselines: tuple[Baseline, ...] = (),
) -> ReleaseReport:
    """Everything that may be published of a finished run.

    Args:
        data: The run's data.
        release: The labels.
        record: The release's, as its release.json has it.
        paid: The reservations that this run made; that of labels from before is not among them.
        student: None if labels were released and nothing was trained.
        student_name: As the configuration calls it.
        ledger: The ledger that holds the account.
        seconds: Time of every stage.
        owner: What only the owner can say of the data.
        chosen_by: How this release was chosen among several settings; None: not stated.
        encoder_here: Whether the files of the data's encoder lie in the release folder.
        baselines: Accuracies to compare with.
    """
    delta, name = record["delta"], data.spec.name
    claimed = claims(ledger, name, [release.id, *paid], now=paid)
    measured = {} if student is None or not data.evaluation.public else student_figures(data, student)
    correct, answered = label_hits(data, release)
    voters = release_store.load_method_description(record)
    declared = record.get("declared_size", data.spec.nominal_size if voters.uses_size else None)
    return ReleaseReport(
        dataset=name,
        mechanism=record["mechanism"],
        student=student_name or None,
        num_teachers=record["num_teachers"],
        queries_asked=len(release.query_Q),
        queries_answered=int(release.answered_Q.sum()),
        delta=delta,
        adjacency=record["adjacency"],
        unit=record["unit"],
        **claimed,
        parameters=_scalars(record["parameters"]),
        noise=record["noise"],
        declared_size=declared if record["adjacency"] == "add_remove" else None,
        split=data.pool.split,
        reused=release.id not in paid,
        voters=voters,
        rounds=len(release.queries_per_round) or 1,
        seconds=public_seconds(
            seconds, voters, chosen=any(part.what == PURPOSE_STUDENT_CHOICE for part in claimed["parts"])
        ),
        answer_files=release_store.list_answer_files(record),
        **measured,
        label_accuracy=correct / answered if answered else None,
        label_size=answered or None,
        teachers_id=record["teachers_id"],
        teachers_kept=TeacherStore(ledger.path.parent).holds(record["teachers_id"]),
        release_id=release.id,
        ledger_head=ledger.get_head(),
        class_names=data.spec.class_names,
        takes=data.spec.kind,
        encoder=None if data.spec.encoder is None else data.spec.encoder.card_without_points,
        encoder_here=encoder_here,
        epsilon_curve=epsilon_curve(release, delta),
        account_curve=account_curve(ledger, name, release) if release.id in paid else (),
        student_curves={} if student is None else {tag: tuple(points) for tag, points in student.curves.items()},
        examples=examples(data, release),
        baselines=baselines,
        created=datetime.date.today().isoformat(),
        sensitivity=record["sensitivity"],
        assets=(pool_asset(name, record["pool_sha256"], owner), *encoder_asset(data.spec), *_assets(record)),
        owner=owner,
        declared_values=data.provenance,
        chosen_by=chosen_by,
    )


def pool_asset(name: str, sha256: str | None, owner: OwnerFacts) -> PublicAsset:
    """The public points of an account, by what their owner says of them."""
    return PublicAsset(
        role="public points",
        name=owner.pool.get("name", f"public points of {name}"),
        sha256=sha256,
        licence=owner.pool.get("licence"),
        source=owner.pool.get("source"),
    )


def encoder_asset(spec: DataSpec) -> tuple[PublicAsset, ...]:
    """The frozen encoder of the data, if there is one."""
    card = spec.encoder
    if card is None:
        return ()
    facts = {"licence": card.license, "source": card.file, "trained_on": card.trained_on}
    return (PublicAsset(role="encoder", name=card.name, sha256=card.sha256, **facts),)


def _assets(record: Mapping[str, Any]) -> Iterator[PublicAsset]:
    """What else the release's record names, such as an encoder."""
    for facts in record.get("assets", ()):
        try:
            yield PublicAsset(**facts)
        except (TypeError, ValueError) as error:
            raise checks.error("release.json", facts, f"was edited: assets cannot be read ({error})") from error


def student_figures(data: Dataset, student: Student) -> dict[str, Any]:
    """The student's accuracy on the test set, by the fields of a report; releasable if ``data.evaluation`` is."""
    truth = data.evaluation.y
    if not len(truth):
        return {}
    predicted = student.compute_probabilities(data.evaluation.x).argmax(1)
    return {
        "student_accuracy": accuracy_of(predicted, truth),
        "student_size": len(truth),
        "confusion": confusion(truth, predicted, data.spec.num_classes),
    }


def accuracy_of(prediction: Tensor, truth_Q: Tensor) -> float:
    """The accuracy of one model's predictions, [Q], or of many models', [K, Q]."""
    if not len(truth_Q):
        raise ValueError("nothing to measure an accuracy on")
    return float((prediction == truth_Q).double().mean())


MOST_COUNTED = 1024
"""Classes whose confusions are counted: a table of a million numbers."""


def confusion(truth: Tensor, predicted: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Test counts [truth, predicted]; none of more than MOST_COUNTED classes."""
    if num_classes > MOST_COUNTED:
        return ()
    flat = torch.bincount(truth * num_classes + predicted, minlength=num_classes**2)
    return tuple(tuple(row) for row in flat.view(num_classes, num_classes).tolist())


def claims(ledger: Ledger, name: str, reservations: Sequence[str], *, now: Sequence[str] = ()) -> dict[str, Any]:
    """What a report may claim of a folder that holds what these reservations paid for, and of the whole account.

    Args:
        ledger: The ledger that holds the account.
        name: Name of the account.
        reservations: The reservations for everything in the folder.
        now: Those made by the run that reports.

    Returns:
        The fields of a ``ReleaseReport`` that are claims.
    """
    account, claim = ledger.get_account(name), ledger.make_claim(name, reservations)
    guarantee, total, total_ex_post = claim.guarantee, account.guarantee, account.ex_post_guarantee
    return {
        "epsilon": None if guarantee is None else guarantee.epsilon,
        "accountant": "none" if guarantee is None else guarantee.route,
        "epsilon_ex_post": None if claim.ex_post_guarantee is None else claim.ex_post_guarantee.epsilon,
        "private": claim.is_private,
        "parts": tuple(_part(account, identity, charge, identity in now) for identity, charge in claim.charges.items()),
        "epsilon_charged": None if total is None else total.epsilon,
        "charged_accountant": None if total is None else total.route,
        "epsilon_charged_ex_post": None if total_ex_post is None else total_ex_post.epsilon,
        "budget_epsilon": account.budget_epsilon,
        "other_releases": tuple(
            _part(account, identity, charge, False)
            for identity, charge in ledger.get_charges(name).items()
            if identity not in claim.charges
        ),
    }


def _part(account: Account, identity: str, charge: Charge, now: bool) -> ChargedRelease:
    """One reservation: what it paid for, and its own guarantee."""
    alone = replace(account, is_private=not charge.insecure)  # its noise is its own; the cap is the account's
    guarantee = alone.compute_guarantee(charge.reserved_events, cap_holds=account.is_private)
    what = charge.purpose if charge.is_committed or now else f"{charge.purpose}, interrupted: charged at its worst case"
    if guarantee is None:
        return ChargedRelease(release_id=identity, what=f"{what}, {NOT_PRIVATE}: seeded noise", now=now)
    return ChargedRelease(
        release_id=identity,
        what=what,
        epsilon=guarantee.epsilon,
        accountant=guarantee.route,
        now=now,
        events=to_json(charge.reserved_events),
    )


def public_seconds(seconds: Mapping[str, float], voters: MethodDescription, *, chosen: bool) -> dict[str, float]:
    """The stages whose time depends neither on how many private records there are nor on what they are.

    Votes of teachers that are there already are counted and asked by public sizes; records that answer, and all that
    reads or trains on them, take the longer the more there are.

    Args:
        seconds: Time of every stage.
        voters: Who answered.
        chosen: Whether the student was chosen by private records.
    """
    shown: set[str] = (
        set() if chosen else {"student"}
    )  # a public start is learnt only where no teachers are found again
    if voters.public_time:
        shown.add("labels")
    return {stage: took for stage, took in seconds.items() if stage in shown}


def label_hits(data: Dataset, release: Release) -> tuple[int, int]:
    """The number of released labels that are right, and of those that can be checked."""
    if data.evaluation.pool_y is None:
        return 0, 0
    query = release.query_Q[release.answered_Q]
    return int((data.evaluation.pool_y[query] == release.label_Q[release.answered_Q]).sum()), len(query)


def epsilon_curve(release: Release, delta: float) -> tuple[float, ...]:
    """The price of the first q questions, q = 1..Q, where each costs the same; empty where it does not."""
    each = _per_question(release)
    if each is None:
        return ()
    asked = len(release.query_Q)
    return tuple(
        accounting.compute_guarantee([replace(each, count=each.count * q)], delta).epsilon for q in range(1, asked + 1)
    )


def account_curve(ledger: Ledger, name: str, release: Release) -> tuple[float, ...]:
    """The account's total after each question of this release, composed at some of them and rounded up between.

    (A composition takes up to a second.) Empty where questions cost unequally, or no epsilon is claimed.
    """
    each, asked, account = _per_question(release), len(release.query_Q), ledger.get_account(name)
    if each is None or not account.is_private:
        return ()
    before = [
        e for other, charge in ledger.get_charges(name).items() if other != release.id for e in charge.reserved_events
    ]
    moments = np.unique(np.linspace(1, asked, min(asked, COMPOSED)).round().astype(int))
    totals = [account.compute_guarantee([*before, replace(each, count=each.count * int(q))]) for q in moments]
    known = [total.epsilon for total in totals if total is not None]
    if len(known) < len(moments):
        return ()
    return tuple(known[at] for at in np.searchsorted(moments, np.arange(1, asked + 1)))


def _per_question(release: Release) -> PrivacyEvent | None:
    """What every question cost alike, or None."""
    asked = len(release.query_Q)
    if not asked or len(release.events) != 1 or release.events[0].count % asked:
        return None
    return replace(release.events[0], count=release.events[0].count // asked)


def examples(data: Dataset, release: Release) -> Examples | None:
    """A few answered public images with the label released for them."""
    if not data.spec.is_image or data.spec.input_shape[0] not in (1, 3):
        return None
    query = release.query_Q[release.answered_Q][:EXAMPLES]
    label = release.label_Q[release.label_Q != NO_ANSWER][:EXAMPLES]
    return Examples(image=data.pool.x[query].cpu().numpy(), label=tuple(label.tolist()), query=tuple(query.tolist()))


def _scalars(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in parameters.items() if v is None or isinstance(v, bool | int | float | str)}
