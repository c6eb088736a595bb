"""Builds the public report of a finished run from the evaluation labels, the ledger and the release itself.

The claim covers the files: the epsilon reported as the guarantee is composed from what was *reserved* for everything in
the release folder (labels, the choice of a student, a published price), which no vote can change; the account's total
from everything that was ever reserved. The epsilon that was actually spent is reported beside both, as ex post.
"""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import to_json
from pate_torch.core import checks
from pate_torch.privacy.accounts import PURPOSE_STUDENT_CHOICE, Account, Charge
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import NO_ANSWER, Dataset, DataSpec, PublicAsset, Release
from pate_torch.release import store as release_store
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.report import (
    AccountClaim,
    Accuracy,
    ChargedRelease,
    Evaluation,
    Example,
    ReleaseRecord,
    ReleaseReport,
)
from pate_torch.release.statement import NOT_PRIVATE
from pate_torch.release.store import WrittenRelease
from pate_torch.students.base import Student
from pate_torch.teachers.store import TeacherStore

NUM_EXAMPLES = 12
MAX_CONFUSION_CLASSES = 1024  # classes whose confusions are counted: a table of a million numbers


def build_report(
    *,
    data: Dataset,
    written: WrittenRelease,
    reservation_ids: Sequence[str],
    ledger: Ledger,
    student: Student | None,
    student_name: str,
    seconds: Mapping[str, float],
    owner: OwnerFacts,
    chosen_by: str | None,
    baselines: tuple[Accuracy, ...] = (),
    includes_encoder: bool = False,
) -> ReleaseReport:
    """Build the report of a finished run: everything about it that may be published.

    Args:
        data: The data of the run.
        written: The release: labels with the content of release.json, or a model with its record (``mechanism``,
            ``parameters``, ``noise``, ``delta``, ``adjacency``, ``unit``, and ``pool_sha256`` and ``declared_size`` if
            public points and a declared number of records were used).
        reservation_ids: The reservations that this run made; that of labels from an earlier run is not among them.
        ledger: The ledger that holds the account.
        student: The student, or the model; None if only labels were released.
        student_name: The kind of the student, as the configuration calls it; empty if there is none.
        seconds: The time of every stage.
        owner: The statements of the owner of the data.
        chosen_by: How this release was chosen among several settings; None if it is not stated.
        baselines: Accuracies to compare with.
        includes_encoder: Whether the files of the data's encoder lie in the release folder.
    """
    release, record = written.release if isinstance(written.release, Release) else None, written.record
    claim = compute_claim(ledger, data.spec.name, record, release, reservation_ids)
    teachers_id = record.get("teachers_id")
    release_record = ReleaseRecord(
        **_describe_mechanism(record, data.spec, release),
        **_describe_answers(record, release),
        teachers_id=teachers_id,
        teachers_reusable=teachers_id is not None and TeacherStore(ledger.path.parent).has_ensemble(teachers_id),
        public_share=data.pool.split,
        reuses_labels=release is not None and release.id not in reservation_ids,
        student=student_name or None,
        includes_encoder=includes_encoder,
        assets=tuple(_list_assets(record, data.spec, owner)),
        owner=owner,
        provenance=data.provenance,
        chosen_by=chosen_by,
        seconds={} if release is None else select_public_seconds(seconds, record, claim),
        creation_date=datetime.date.today().isoformat(),
    )
    evaluation = Evaluation(
        **compute_student_metrics(data, student if data.evaluation.public else None),
        **_compute_label_metrics(data, release),
        examples=() if release is None else select_examples(data, release),
        baselines=baselines,
    )
    return ReleaseReport(record=release_record, claim=claim, evaluation=evaluation)


def _describe_mechanism(record: Mapping[str, Any], spec: DataSpec, release: Release | None) -> dict[str, Any]:
    """The fields of a ReleaseRecord on the data, the method and its mechanism."""
    method = None if release is None else release_store.load_method_description(record)
    declared_size = record.get("declared_size", spec.nominal_size if method is not None and method.uses_size else None)
    scalar = bool | int | float | str | None
    return {
        "dataset": spec.name,
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
    }


def _describe_answers(record: Mapping[str, Any], release: Release | None) -> dict[str, Any]:
    """The fields of a ReleaseRecord on the questions and their answers."""
    if release is None:
        return {"release_id": None, "answer_files": (), "rounds": 1, "queries_asked": 0, "queries_answered": 0}
    return {
        "release_id": release.id,
        "answer_files": release_store.list_answer_files(record),
        "rounds": len(release.queries_per_round) or 1,
        "queries_asked": len(release.query_Q),
        "queries_answered": int(release.answered_Q.sum()),
    }


def _list_assets(record: Mapping[str, Any], spec: DataSpec, owner: OwnerFacts) -> Iterator[PublicAsset]:
    """The public data that the release was made with: public points, the frozen encoder, what the record names."""
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
            raise checks.error("release.json", facts, f"was edited: assets cannot be read ({error})") from error


def compute_student_metrics(data: Dataset, student: Student | None) -> dict[str, Any]:
    """Compute the student's figures on the test set; they may be published if ``data.evaluation`` is public.

    Returns:
        ``student_accuracy``, ``student_size`` and ``confusion`` (counts [truth, prediction], empty for more than
        MAX_CONFUSION_CLASSES classes); None and () if there is no student or no test set.
    """
    truth_Q, num_classes = data.evaluation.y, data.spec.num_classes
    if student is None or not len(truth_Q):
        return {"student_accuracy": None, "student_size": None, "confusion": ()}
    prediction_Q = student.compute_probabilities(data.evaluation.x).argmax(1)
    return {
        "student_accuracy": compute_accuracy(prediction_Q, truth_Q),
        "student_size": len(truth_Q),
        "confusion": compute_confusion(truth_Q, prediction_Q, num_classes),
    }


def compute_accuracy(prediction: Tensor, truth_Q: Tensor) -> float:
    """The accuracy of the predictions of one model, [Q], or of many models, [K, Q]. ValueError for no points."""
    if not len(truth_Q):
        raise ValueError("nothing to measure an accuracy on")
    return float((prediction == truth_Q).double().mean())


def compute_confusion(truth_Q: Tensor, prediction_Q: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Test counts [truth, prediction]; empty for more than MAX_CONFUSION_CLASSES classes."""
    if num_classes > MAX_CONFUSION_CLASSES:
        return ()
    counts = torch.bincount(truth_Q * num_classes + prediction_Q, minlength=num_classes**2)
    return tuple(tuple(row) for row in counts.view(num_classes, num_classes).tolist())


def compute_claim(
    ledger: Ledger,
    name: str,
    terms: Mapping[str, Any],
    release: Release | None = None,
    reservation_ids: Sequence[str] = (),
) -> AccountClaim:
    """Compute the guarantee that may be claimed of a release folder, and the state of its account.

    Args:
        ledger: The ledger that holds the account.
        name: The name of the account.
        terms: A mapping with ``delta``, ``adjacency`` and ``unit``.
        release: The labels in the folder; None if there are none.
        reservation_ids: The reservations that the reporting run made for the files in the folder.
    """
    own_ids = [*reservation_ids] if release is None else [release.id, *reservation_ids]
    account, claim = ledger.get_account(name), ledger.make_claim(name, own_ids)
    guarantee, ex_post = claim.guarantee, claim.ex_post_guarantee
    total, total_ex_post = account.guarantee, account.ex_post_guarantee
    other_charges = {id_: part for id_, part in ledger.get_charges(name).items() if id_ not in claim.charges}
    return AccountClaim(
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


def _make_part(account: Account, identity: str, charge: Charge, is_current: bool) -> ChargedRelease:
    """One reservation with its purpose and its own guarantee."""
    guarantee = None
    if not charge.insecure:
        guarantee = account.compute_guarantee(charge.reserved_events, cap_holds=account.is_private)
    is_interrupted = not (charge.is_committed or is_current)
    purpose = f"{charge.purpose}, interrupted: charged at its worst case" if is_interrupted else charge.purpose
    if guarantee is None:
        purpose = f"{purpose}, {NOT_PRIVATE}: seeded noise"
        return ChargedRelease(release_id=identity, purpose=purpose, is_current=is_current)
    return ChargedRelease(
        release_id=identity,
        purpose=purpose,
        epsilon=guarantee.epsilon,
        accountant=guarantee.route,
        is_current=is_current,
        events=to_json(charge.reserved_events),
    )


def select_public_seconds(
    seconds: Mapping[str, float], record: Mapping[str, Any], claim: AccountClaim
) -> dict[str, float]:
    """Select the stages whose time depends neither on the number of private records nor on their content.

    Stored teachers vote in a time that depends on public sizes. Stages that read private records, or train on them,
    take longer with more records. A model that is trained on private records has no public stage.

    Args:
        seconds: The time of every stage.
        record: The content of release.json.
        claim: The claim, which says whether private records chose the student.
    """
    public_stages = set() if claim.has_part(PURPOSE_STUDENT_CHOICE) else {"student"}
    # A method with a first stage prepares the records within the stage of the labels.
    if release_store.load_method_description(record).public_time and "first_answers_sha256" not in record:
        public_stages.add("labels")
    return {stage: duration for stage, duration in seconds.items() if stage in public_stages}


def _compute_label_metrics(data: Dataset, release: Release | None) -> dict[str, Any]:
    """Compute ``label_accuracy`` and ``label_size`` on the public labels of the pool; None if there are none."""
    pool_y = data.evaluation.pool_y
    if release is None or pool_y is None or not bool(release.answered_Q.any()):
        return {"label_accuracy": None, "label_size": None}
    truth_Q, label_Q = pool_y[release.query_Q[release.answered_Q]], release.label_Q[release.answered_Q]
    return {"label_accuracy": compute_accuracy(label_Q, truth_Q), "label_size": len(truth_Q)}


def compute_epsilon_curve(release: Release, delta: float) -> tuple[float, ...]:
    """The price of the first q questions, q = 1..Q; empty if questions cost unequally."""
    num_queries = len(release.query_Q)
    if not num_queries or len(release.events) != 1 or release.events[0].count % num_queries:
        return ()
    event, count_per_query = release.events[0], release.events[0].count // num_queries
    events = (replace(event, count=count_per_query * q) for q in range(1, num_queries + 1))
    return tuple(accounting.compute_guarantee([event], delta).epsilon for event in events)


def select_examples(data: Dataset, release: Release) -> tuple[Example, ...]:
    """Select a few answered public images with the label released for them; none if the points are no images."""
    if not data.spec.is_image or data.spec.input_shape[0] not in (1, 3):
        return ()
    query_E = release.query_Q[release.answered_Q][:NUM_EXAMPLES]
    label_E = release.label_Q[release.label_Q != NO_ANSWER][:NUM_EXAMPLES]
    images = data.pool.x[query_E].cpu().numpy()
    return tuple(
        Example(picture=encode_picture(image), label=label, query=query)
        for image, label, query in zip(images, label_E.tolist(), query_E.tolist(), strict=True)
    )


def encode_picture(image_CHW: np.ndarray) -> str:
    """Encode one uint8 image [Ch, H, W], gray or in color, as a PNG in a data URI."""
    pixels = image_CHW[0] if image_CHW.shape[0] == 1 else np.ascontiguousarray(np.moveaxis(image_CHW, 0, 2))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
