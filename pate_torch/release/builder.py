"""Builds the public report of a finished run from the release, the ledger and the evaluation labels.

The epsilon of the guarantee is composed from the events that were *reserved* for all files of the release folder
(labels, the choice of a student, its test). Reserved events do not depend on any vote. The account's total is
composed from all events that were ever reserved. The epsilon that was spent when the run stopped is reported, too, as
the ex-post epsilon.
"""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import to_json
from pate_torch.core import checks
from pate_torch.methods.base import MethodDescription
from pate_torch.privacy.accounts import PURPOSE_STUDENT_CHOICE, Account, Charge
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, PublicAsset, PublicPool, Release
from pate_torch.release import report as reports
from pate_torch.release import store as release_store
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.statement import NOT_PRIVATE
from pate_torch.release.store import ANSWER_FILES, WrittenRelease
from pate_torch.release.table_report import describe_table
from pate_torch.students.base import Student
from pate_torch.students.private_test import PrivateTest
from pate_torch.synthesis.model import TableModel
from pate_torch.teachers.store import TeacherStore

NUM_EXAMPLES = 12
MAX_CONFUSION_CLASSES = 1024  # the confusion matrix of so many classes has a million entries


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicData:
    """Releasable. The public fields of a ``Dataset``, for a report by a program that has no private records."""

    spec: DataSpec
    pool: PublicPool
    evaluation: Evaluation
    provenance: Mapping[str, str]


def build_report(
    *,
    data: Dataset | PublicData,
    written: WrittenRelease,
    reservation_ids: Sequence[str],
    ledger: Ledger | reports.AccountClaim,
    student: Student | None,
    student_name: str,
    seconds: Mapping[str, float],
    owner: OwnerFacts,
    chosen_by: str | None,
    model: Mapping[str, Any],
    baselines: tuple[reports.Accuracy, ...] = (),
    includes_encoder: bool = False,
    private_test: PrivateTest | None = None,
    seed: int = 0,
    trust: Mapping[str, Any] | None = None,
) -> reports.ReleaseReport:
    """Build the report of a finished run, which holds every fact that may be published.

    ``ledger`` is the ledger of the account, or the claim itself if there is no such ledger here. For ``trust`` see
    ``ReleaseReport``. ``reservation_ids`` lists the reservations of this run, without the reservation of reused labels.
    If only labels were released, ``student`` is None and ``student_name`` is empty. ``seconds`` maps each stage to its
    time in seconds. ``seed`` draws the rows of a synthetic table.
    """
    record, release, table = written.record, None, None
    if isinstance(written.release, Release):
        release = written.release
    elif isinstance(written.release.model, TableModel):
        table = describe_table(written.release.model, seed)
    claim = ledger
    if not isinstance(claim, reports.AccountClaim):
        claim = compute_claim(claim, data.spec.name, record, release, reservation_ids)
    has_method = release is not None or table is not None
    method = release_store.load_method_description(record) if has_method else None
    return reports.ReleaseReport(
        record=reports.ReleaseRecord(
            **_describe_release(record, data, release, method),
            assets=tuple(_list_assets(record, data.spec, owner)),
            **_describe_teachers(ledger, record.get("teachers_id")),
            reuses_labels=release is not None and release.id not in reservation_ids,
            student=student_name or None,
            includes_encoder=includes_encoder,
            model=model,
            owner=owner,
            chosen_by=chosen_by,
            seconds=_select_public_times(seconds, written, method, claim),
            creation_date=datetime.date.today().isoformat(),
        ),
        claim=claim,
        evaluation=reports.Evaluation(
            **compute_student_metrics(data, student if data.evaluation.public else None),
            **_compute_label_metrics(data, release),
            examples=() if release is None else select_examples(data, release),
            baselines=baselines,
            private_test=private_test,
        ),
        table=table,
        trust=trust,
    )


def _describe_teachers(ledger: Ledger | reports.AccountClaim, teachers_id: str | None) -> dict[str, Any]:
    is_reusable = False
    if teachers_id is not None and isinstance(ledger, Ledger):
        is_reusable = TeacherStore(ledger.home).has_ensemble(teachers_id)
    return {"teachers_id": teachers_id, "teachers_reusable": is_reusable}


def _select_public_times(
    seconds: Mapping[str, float],
    written: WrittenRelease,
    method: MethodDescription | None,
    claim: reports.AccountClaim,
) -> dict[str, float]:
    """Select the times of stages that depend on public sizes alone."""
    is_public_stage = {
        "labels": method is not None and method.public_time,
        "student": isinstance(written.release, Release) and not claim.has_part(PURPOSE_STUDENT_CHOICE),
    }
    return {stage: duration for stage, duration in seconds.items() if is_public_stage.get(stage)}


def _describe_release(
    record: Mapping[str, Any], data: Dataset | PublicData, release: Release | None, method: MethodDescription | None
) -> dict[str, Any]:
    spec = data.spec
    declared_size = record.get("declared_size", spec.nominal_size if method is not None and method.uses_size else None)
    scalar = bool | int | float | str | None
    return {
        "dataset": spec.name,
        "public_share": data.pool.split,
        "provenance": data.provenance,
        "class_names": spec.class_names,
        "input_kind": spec.kind,
        "encoder": None if spec.encoder is None else spec.encoder.card_without_points,
        "declared_size": declared_size if record["adjacency"] == "add_remove" else None,
        "method": method,
        "mechanism": record["mechanism"],
        "parameters": {key: value for key, value in record["parameters"].items() if isinstance(value, scalar)},
        "sensitivity": record.get("sensitivity", {}),
        "noise": record["noise"],
        "num_teachers": record.get("num_teachers", 0),
        "release_id": None if release is None else release.id,
        "answer_files": tuple(ANSWER_FILES[key] for key in release_store.select_digests(record)),
        "rounds": 1 if release is None else len(release.queries_per_round) or 1,
        "queries_asked": 0 if release is None else len(release.query_Q),
        "queries_answered": 0 if release is None else int(release.answered_Q.sum()),
    }


def _list_assets(record: Mapping[str, Any], spec: DataSpec, owner: OwnerFacts) -> Iterator[PublicAsset]:
    if "pool_sha256" in record:
        facts = {"name": f"public points of {spec.name}", **owner.pool, "sha256": record["pool_sha256"]}
        yield PublicAsset(role="public points", **facts)
    if (card := spec.encoder) is not None:
        facts = {"licence": card.license, "source": card.file, "trained_on": card.trained_on}
        yield PublicAsset(role="encoder", name=card.name, sha256=card.sha256, **facts)
    for facts in record.get("assets", ()):
        try:
            yield PublicAsset(**facts)
        except (TypeError, ValueError) as error:
            raise checks.error("release.json", facts, f"was edited, because assets cannot be read ({error})") from error


def compute_student_metrics(data: Dataset | PublicData, student: Student | None) -> dict[str, Any]:
    """Compute the student's metrics on the test set, which may be published only if ``data.evaluation`` is public.

    Returns:
        ``student_accuracy`` and ``student_size`` (None if there is no student or no test set), and ``confusion``.
    """
    truth_Q = data.evaluation.y
    if student is None or not len(truth_Q):
        return {"student_accuracy": None, "student_size": None, "confusion": ()}
    prediction_Q = student.compute_probabilities(data.evaluation.x).argmax(1)
    return compare_predictions(truth_Q, prediction_Q, data.spec.num_classes)


def compare_predictions(truth_Q: Tensor, prediction_Q: Tensor, num_classes: int) -> dict[str, Any]:
    """Compute the metrics of ``compute_student_metrics`` from predictions."""
    return {
        "student_accuracy": compute_accuracy(prediction_Q, truth_Q),
        "student_size": len(truth_Q),
        "confusion": compute_confusion(truth_Q, prediction_Q, num_classes),
    }


def compute_accuracy(prediction: Tensor, truth_Q: Tensor) -> float:
    """Compute the accuracy of predictions [Q], or the mean accuracy of [K, Q]. Raises ValueError if Q = 0."""
    if not len(truth_Q):
        raise ValueError("cannot compute an accuracy of no points")
    return float((prediction == truth_Q).double().mean())


def compute_confusion(truth_Q: Tensor, prediction_Q: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Count the test points by [truth, predicted]; empty for more than MAX_CONFUSION_CLASSES classes."""
    if num_classes > MAX_CONFUSION_CLASSES:
        return ()
    counts = torch.bincount(truth_Q * num_classes + prediction_Q, minlength=num_classes**2)
    return tuple(map(tuple, counts.view(num_classes, num_classes).tolist()))


def compute_claim(
    ledger: Ledger,
    name: str,
    terms: Mapping[str, Any],
    release: Release | None = None,
    reservation_ids: Sequence[str] = (),
) -> reports.AccountClaim:
    """Compute the guarantee that may be claimed for a release folder, and the state of the account ``name``.

    ``terms`` has the keys ``delta``, ``adjacency`` and ``unit``. ``release`` is None if the folder has no labels.
    ``reservation_ids`` lists the reservations that the reporting run made for the files in the folder.
    """
    own_ids = [*reservation_ids] if release is None else [release.id, *reservation_ids]
    account, claim = ledger.get_account(name), ledger.make_claim(name, own_ids)
    guarantee, ex_post = claim.guarantee, claim.ex_post_guarantee
    total, total_ex_post = account.guarantee, account.ex_post_guarantee
    other_charges = {id_: part for id_, part in ledger.get_charges(name).items() if id_ not in claim.charges}
    return reports.AccountClaim(
        delta=terms["delta"],
        adjacency=terms["adjacency"],
        unit=terms["unit"],
        private=claim.is_private,
        epsilon=None if guarantee is None else guarantee.epsilon,
        accountant="none" if guarantee is None else guarantee.route,
        epsilon_ex_post=None if ex_post is None else ex_post.epsilon,
        parts=tuple(_make_part(account, id_, part, id_ in reservation_ids) for id_, part in claim.charges.items()),
        epsilon_charged=None if total is None else total.epsilon,
        charged_accountant=None if total is None else total.route,
        epsilon_charged_ex_post=None if total_ex_post is None else total_ex_post.epsilon,
        budget_epsilon=account.budget_epsilon,
        other_releases=tuple(_make_part(account, id_, part, False) for id_, part in other_charges.items()),
        epsilon_curve=() if release is None else compute_epsilon_curve(release, terms["delta"]),
        ledger_head=ledger.get_head(),
    )


def _make_part(account: Account, identity: str, charge: Charge, is_current: bool) -> reports.ChargedRelease:
    guarantee = None
    if not charge.insecure:
        guarantee = account.compute_guarantee(charge.reserved_events, cap_holds=account.is_private)
    is_interrupted = not (charge.is_committed or is_current)
    purpose = f"{charge.purpose}, interrupted: charged at its worst case" if is_interrupted else charge.purpose
    return reports.ChargedRelease(
        release_id=identity,
        purpose=f"{purpose}, {NOT_PRIVATE}: seeded noise" if guarantee is None else purpose,
        epsilon=None if guarantee is None else guarantee.epsilon,
        accountant="" if guarantee is None else guarantee.route,
        is_current=is_current,
        events="[]" if guarantee is None else to_json(charge.reserved_events),
    )


def _compute_label_metrics(data: Dataset | PublicData, release: Release | None) -> dict[str, Any]:
    """Compute ``label_accuracy`` and ``label_size`` on the public labels of the pool; None without public labels."""
    pool_y = data.evaluation.pool_y
    if release is None or pool_y is None or not bool(release.answered_Q.any()):
        return {"label_accuracy": None, "label_size": None}
    truth_Q, label_Q = pool_y[release.query_Q[release.answered_Q]], release.label_Q[release.answered_Q]
    return {"label_accuracy": compute_accuracy(label_Q, truth_Q), "label_size": len(truth_Q)}


def compute_epsilon_curve(release: Release, delta: float) -> tuple[float, ...]:
    """Compute the cost of the first q queries, q = 1..Q; empty if the queries have different costs."""
    num_queries = len(release.query_Q)
    if not num_queries or len(release.events) != 1 or release.events[0].count % num_queries:
        return ()
    event, count_per_query = release.events[0], release.events[0].count // num_queries
    events = (replace(event, count=count_per_query * q) for q in range(1, num_queries + 1))
    return tuple(accounting.compute_guarantee([event], delta).epsilon for event in events)


def select_examples(data: Dataset | PublicData, release: Release) -> tuple[reports.Example, ...]:
    """Select NUM_EXAMPLES answered public images with their released labels; empty if the points are not images."""
    if not data.spec.is_image or data.spec.input_shape[0] not in (1, 3):
        return ()
    query_E, label_E = (values_Q[release.answered_Q][:NUM_EXAMPLES] for values_Q in (release.query_Q, release.label_Q))
    rows = zip(data.pool.x[query_E].cpu().numpy(), label_E.tolist(), query_E.tolist(), strict=True)
    return tuple(reports.Example(picture=encode_picture(image), label=y, query=query) for image, y, query in rows)


def encode_picture(image_CHW: np.ndarray) -> str:
    """Encode one uint8 image [Ch, H, W], gray or in color, as a PNG in a data URI."""
    buffer = io.BytesIO()
    pixels = image_CHW[0] if len(image_CHW) == 1 else np.moveaxis(image_CHW, 0, 2)
    from PIL import Image  # imported here, because few processes write a page

    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
