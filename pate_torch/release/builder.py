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

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent, to_json
from pate_torch.core import checks
from pate_torch.methods.description import MethodDescription
from pate_torch.privacy.accounts import Charge
from pate_torch.privacy.ledger import PURPOSE_STUDENT_CHOICE, Account, Ledger
from pate_torch.privacy.records import NO_ANSWER, Dataset, DataSpec, PublicAsset, Release
from pate_torch.release import store as release_store
from pate_torch.release.report import Baseline, ChargedRelease, Examples, OwnerFacts, ReleaseReport
from pate_torch.release.statement import NOT_PRIVATE
from pate_torch.students.base import Student
from pate_torch.teachers.store import TeacherStore

NUM_EXAMPLES = 12
MAX_COMPOSITIONS = 12
"""Moments of a release at which the account's total is composed anew."""


def build_report(
    *,
    data: Dataset,
    release: Release,
    record: Mapping[str, Any],
    reservation_ids: Sequence[str],
    student: Student | None,
    student_name: str,
    ledger: Ledger,
    seconds: Mapping[str, float],
    owner: OwnerFacts,
    chosen_by: str | None,
    includes_encoder: bool,
    baselines: tuple[Baseline, ...] = (),
) -> ReleaseReport:
    """Everything that may be published of a finished run.

    Args:
        data: The run's data.
        release: The labels.
        record: The release's, as its release.json has it.
        reservation_ids: The reservations that this run made; that of labels from before is not among them.
        student: None if labels were released and nothing was trained.
        student_name: As the configuration calls it.
        ledger: The ledger that holds the account.
        seconds: Time of every stage.
        owner: What only the owner can say of the data.
        chosen_by: How this release was chosen among several settings; None: not stated.
        includes_encoder: Whether the files of the data's encoder lie in the release folder.
        baselines: Accuracies to compare with.
    """
    delta, name = record["delta"], data.spec.name
    claim_fields = compute_claims(ledger, name, [release.id, *reservation_ids], current_ids=reservation_ids)
    student_metrics = {} if student is None or not data.evaluation.public else compute_student_metrics(data, student)
    num_correct, num_checked = count_correct_and_checkable(data, release)
    method = release_store.load_method_description(record)
    declared_size = record.get("declared_size", data.spec.nominal_size if method.uses_size else None)
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
        **claim_fields,
        parameters=_select_scalars(record["parameters"]),
        noise=record["noise"],
        declared_size=declared_size if record["adjacency"] == "add_remove" else None,
        public_share=data.pool.split,
        reuses_labels=release.id not in reservation_ids,
        method=method,
        rounds=len(release.queries_per_round) or 1,
        seconds=select_public_seconds(
            seconds,
            method,
            student_chosen=any(part.purpose == PURPOSE_STUDENT_CHOICE for part in claim_fields["parts"]),
        ),
        answer_files=release_store.list_answer_files(record),
        **student_metrics,
        label_accuracy=num_correct / num_checked if num_checked else None,
        label_size=num_checked or None,
        teachers_id=record["teachers_id"],
        teachers_reusable=TeacherStore(ledger.path.parent).has_ensemble(record["teachers_id"]),
        release_id=release.id,
        ledger_head=ledger.get_head(),
        class_names=data.spec.class_names,
        input_kind=data.spec.kind,
        encoder=None if data.spec.encoder is None else data.spec.encoder.card_without_points,
        includes_encoder=includes_encoder,
        epsilon_curve=compute_epsilon_curve(release, delta),
        account_curve=compute_account_curve(ledger, name, release) if release.id in reservation_ids else (),
        examples=select_examples(data, release),
        baselines=baselines,
        creation_date=datetime.date.today().isoformat(),
        sensitivity=record["sensitivity"],
        assets=(
            make_pool_asset(name, record["pool_sha256"], owner),
            *make_encoder_asset(data.spec),
            *_parse_assets(record),
        ),
        owner=owner,
        provenance=data.provenance,
        chosen_by=chosen_by,
    )


def make_pool_asset(name: str, sha256: str | None, owner: OwnerFacts) -> PublicAsset:
    """The public points of an account, by what their owner says of them."""
    return PublicAsset(
        role="public points",
        name=owner.pool.get("name", f"public points of {name}"),
        sha256=sha256,
        licence=owner.pool.get("licence"),
        source=owner.pool.get("source"),
    )


def make_encoder_asset(spec: DataSpec) -> tuple[PublicAsset, ...]:
    """The frozen encoder of the data, if there is one."""
    card = spec.encoder
    if card is None:
        return ()
    facts = {"licence": card.license, "source": card.file, "trained_on": card.trained_on}
    return (PublicAsset(role="encoder", name=card.name, sha256=card.sha256, **facts),)


def _parse_assets(record: Mapping[str, Any]) -> Iterator[PublicAsset]:
    """What else the release's record names, such as an encoder."""
    for facts in record.get("assets", ()):
        try:
            yield PublicAsset(**facts)
        except (TypeError, ValueError) as error:
            raise checks.error("release.json", facts, f"was edited: assets cannot be read ({error})") from error


def compute_student_metrics(data: Dataset, student: Student) -> dict[str, Any]:
    """The student's accuracy on the test set, by the fields of a report; releasable if ``data.evaluation`` is."""
    truth_Q = data.evaluation.y
    if not len(truth_Q):
        return {}
    prediction_Q = student.compute_probabilities(data.evaluation.x).argmax(1)
    return {
        "student_accuracy": compute_accuracy(prediction_Q, truth_Q),
        "student_size": len(truth_Q),
        "confusion": compute_confusion(truth_Q, prediction_Q, data.spec.num_classes),
    }


def compute_accuracy(prediction: Tensor, truth_Q: Tensor) -> float:
    """The accuracy of one model's predictions, [Q], or of many models', [K, Q]."""
    if not len(truth_Q):
        raise ValueError("nothing to measure an accuracy on")
    return float((prediction == truth_Q).double().mean())


MAX_CONFUSION_CLASSES = 1024
"""Classes whose confusions are counted: a table of a million numbers."""


def compute_confusion(truth_Q: Tensor, prediction_Q: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Test counts [truth, prediction]; none of more than MAX_CONFUSION_CLASSES classes."""
    if num_classes > MAX_CONFUSION_CLASSES:
        return ()
    flat = torch.bincount(truth_Q * num_classes + prediction_Q, minlength=num_classes**2)
    return tuple(tuple(row) for row in flat.view(num_classes, num_classes).tolist())


def compute_claims(
    ledger: Ledger, name: str, reservations: Sequence[str], *, current_ids: Sequence[str] = ()
) -> dict[str, Any]:
    """What a report may claim of a folder that holds what these reservations paid for, and of the whole account.

    Args:
        ledger: The ledger that holds the account.
        name: Name of the account.
        reservations: The reservations for everything in the folder.
        current_ids: Those made by the run that reports.

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
        "parts": tuple(
            _make_part(account, identity, charge, identity in current_ids) for identity, charge in claim.charges.items()
        ),
        "epsilon_charged": None if total is None else total.epsilon,
        "charged_accountant": None if total is None else total.route,
        "epsilon_charged_ex_post": None if total_ex_post is None else total_ex_post.epsilon,
        "budget_epsilon": account.budget_epsilon,
        "other_releases": tuple(
            _make_part(account, identity, charge, False)
            for identity, charge in ledger.get_charges(name).items()
            if identity not in claim.charges
        ),
    }


def _make_part(account: Account, identity: str, charge: Charge, is_current: bool) -> ChargedRelease:
    """One reservation: what it paid for, and its own guarantee."""
    own_account = replace(account, is_private=not charge.insecure)  # its noise is its own; the cap is the account's
    guarantee = own_account.compute_guarantee(charge.reserved_events, cap_holds=account.is_private)
    purpose = (
        charge.purpose
        if charge.is_committed or is_current
        else f"{charge.purpose}, interrupted: charged at its worst case"
    )
    if guarantee is None:
        return ChargedRelease(
            release_id=identity, purpose=f"{purpose}, {NOT_PRIVATE}: seeded noise", is_current=is_current
        )
    return ChargedRelease(
        release_id=identity,
        purpose=purpose,
        epsilon=guarantee.epsilon,
        accountant=guarantee.route,
        is_current=is_current,
        events=to_json(charge.reserved_events),
    )


def select_public_seconds(
    seconds: Mapping[str, float], method: MethodDescription, *, student_chosen: bool
) -> dict[str, float]:
    """The stages whose time depends neither on how many private records there are nor on what they are.

    Votes of teachers that are there already are counted and asked by public sizes; records that answer, and all that
    reads or trains on them, take the longer the more there are.

    Args:
        seconds: Time of every stage.
        method: Who answered.
        student_chosen: Whether the student was chosen by private records.
    """
    public_stages: set[str] = (
        set() if student_chosen else {"student"}
    )  # a public start is learnt only where no teachers are found again
    if method.public_time:
        public_stages.add("labels")
    return {stage: duration for stage, duration in seconds.items() if stage in public_stages}


def count_correct_and_checkable(data: Dataset, release: Release) -> tuple[int, int]:
    """The number of released labels that are right, and of those that can be checked."""
    if data.evaluation.pool_y is None:
        return 0, 0
    query = release.query_Q[release.answered_Q]
    return int((data.evaluation.pool_y[query] == release.label_Q[release.answered_Q]).sum()), len(query)


def compute_epsilon_curve(release: Release, delta: float) -> tuple[float, ...]:
    """The price of the first q questions, q = 1..Q, where each costs the same; empty where it does not."""
    query_event = _find_query_event(release)
    if query_event is None:
        return ()
    num_queries = len(release.query_Q)
    return tuple(
        accounting.compute_guarantee([replace(query_event, count=query_event.count * q)], delta).epsilon
        for q in range(1, num_queries + 1)
    )


def compute_account_curve(ledger: Ledger, name: str, release: Release) -> tuple[float, ...]:
    """The account's total after each question of this release, composed at some of them and rounded up between.

    (A composition takes up to a second.) Empty where questions cost unequally, or no epsilon is claimed.
    """
    query_event, num_queries, account = _find_query_event(release), len(release.query_Q), ledger.get_account(name)
    if query_event is None or not account.is_private:
        return ()
    earlier_events = [
        e
        for release_id, charge in ledger.get_charges(name).items()
        if release_id != release.id
        for e in charge.reserved_events
    ]
    moments = np.unique(np.linspace(1, num_queries, min(num_queries, MAX_COMPOSITIONS)).round().astype(int))
    totals = [
        account.compute_guarantee([*earlier_events, replace(query_event, count=query_event.count * int(q))])
        for q in moments
    ]
    epsilons = [total.epsilon for total in totals if total is not None]
    if len(epsilons) < len(moments):
        return ()
    return tuple(epsilons[i] for i in np.searchsorted(moments, np.arange(1, num_queries + 1)))


def _find_query_event(release: Release) -> PrivacyEvent | None:
    """What every question cost alike, or None."""
    num_queries = len(release.query_Q)
    if not num_queries or len(release.events) != 1 or release.events[0].count % num_queries:
        return None
    return replace(release.events[0], count=release.events[0].count // num_queries)


def select_examples(data: Dataset, release: Release) -> Examples | None:
    """A few answered public images with the label released for them."""
    if not data.spec.is_image or data.spec.input_shape[0] not in (1, 3):
        return None
    query = release.query_Q[release.answered_Q][:NUM_EXAMPLES]
    label = release.label_Q[release.label_Q != NO_ANSWER][:NUM_EXAMPLES]
    return Examples(image=data.pool.x[query].cpu().numpy(), label=tuple(label.tolist()), query=tuple(query.tolist()))


def _select_scalars(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in parameters.items() if v is None or isinstance(v, bool | int | float | str)}
