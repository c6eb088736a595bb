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

import torch
from torch import Tensor

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import to_json
from pate_torch.core import checks
from pate_torch.methods.description import MethodDescription
from pate_torch.privacy.accounts import Charge
from pate_torch.privacy.ledger import PURPOSE_STUDENT_CHOICE, Account, Ledger
from pate_torch.privacy.records import NO_ANSWER, Dataset, DataSpec, PublicAsset, Release
from pate_torch.release import store as release_store
from pate_torch.release.figures import encode_picture
from pate_torch.release.report import (
    AccountClaim,
    Accuracy,
    ChargedRelease,
    Evaluation,
    Example,
    OwnerFacts,
    ReleaseRecord,
    ReleaseReport,
)
from pate_torch.release.statement import NOT_PRIVATE
from pate_torch.students.base import Student
from pate_torch.teachers.store import TeacherStore

NUM_EXAMPLES = 12


def build_report(
    *,
    data: Dataset,
    release: Release | None,
    record: Mapping[str, Any],
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
    """Build the report of a finished run: everything that may be published of it.

    Args:
        data: The data of the run.
        release: The labels; None if a model was trained on the records themselves, and nobody was asked.
        record: The content of release.json. For a model: ``mechanism``, ``parameters``, ``noise``, ``delta``,
            ``adjacency`` and ``unit``, and ``pool_sha256`` and ``declared_size`` where public points and a declared
            number of records were used.
        reservation_ids: The reservations that this run made; that of labels from before is not among them.
        ledger: The ledger that holds the account.
        student: The student, or the model; None if labels were released and nothing was trained.
        student_name: The kind of the student, as the configuration calls it; empty if there is none.
        seconds: The time of every stage.
        owner: What only the owner can say of the data.
        chosen_by: How this release was chosen among several settings; None if it is not stated.
        baselines: Accuracies to compare with.
        includes_encoder: Whether the files of the data's encoder lie in the release folder.
    """
    spec = data.spec
    claim = compute_claim(ledger, spec.name, record, release, reservation_ids)
    method = None if release is None else release_store.load_method_description(record)
    declared_size = record.get("declared_size", spec.nominal_size if method is not None and method.uses_size else None)
    teachers_id = record.get("teachers_id")
    public_seconds: dict[str, float] = {}  # of a model none: each step takes the longer, the more records there are
    if method is not None:
        student_chosen = claim.has_part(PURPOSE_STUDENT_CHOICE)
        public_seconds = select_public_seconds(seconds, method, student_chosen=student_chosen)
        if "first_answers_sha256" in record:
            public_seconds.pop("labels", None)  # the records were prepared within that stage
    release_record = ReleaseRecord(
        dataset=spec.name,
        mechanism=record["mechanism"],
        parameters=_select_scalars(record["parameters"]),
        sensitivity=record.get("sensitivity", {}),
        noise=record["noise"],
        declared_size=declared_size if record["adjacency"] == "add_remove" else None,
        public_share=data.pool.split,
        num_teachers=record.get("num_teachers", 0),
        teachers_id=teachers_id,
        teachers_reusable=teachers_id is not None and TeacherStore(ledger.path.parent).has_ensemble(teachers_id),
        method=method,
        rounds=1 if release is None else len(release.queries_per_round) or 1,
        queries_asked=0 if release is None else len(release.query_Q),
        queries_answered=0 if release is None else int(release.answered_Q.sum()),
        release_id=None if release is None else release.id,
        reuses_labels=release is not None and release.id not in reservation_ids,
        answer_files=() if release is None else release_store.list_answer_files(record),
        student=student_name or None,
        class_names=spec.class_names,
        input_kind=spec.kind,
        encoder=None if spec.encoder is None else spec.encoder.card_without_points,
        includes_encoder=includes_encoder,
        assets=tuple(_list_assets(record, spec, owner)),
        owner=owner,
        provenance=data.provenance,
        chosen_by=chosen_by,
        seconds=public_seconds,
        creation_date=datetime.date.today().isoformat(),
    )
    student_metrics = compute_student_metrics(data, student if data.evaluation.public else None)
    num_correct, num_checked = (0, 0) if release is None else count_correct_and_checkable(data, release)
    evaluation = Evaluation(
        **student_metrics,
        label_accuracy=num_correct / num_checked if num_checked else None,
        label_size=num_checked or None,
        examples=() if release is None else select_examples(data, release),
        baselines=baselines,
    )
    return ReleaseReport(record=release_record, claim=claim, evaluation=evaluation)


def _list_assets(record: Mapping[str, Any], spec: DataSpec, owner: OwnerFacts) -> Iterator[PublicAsset]:
    """Everything public that the release was made with: public points, the frozen encoder, what the record names."""
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
    """Compute the student's figures on the test set; they are releasable if ``data.evaluation`` is public.

    Returns:
        ``student_accuracy``, ``student_size`` and ``confusion``; None and () where there is no student or no test set.
    """
    truth_Q = data.evaluation.y
    if student is None or not len(truth_Q):
        return {"student_accuracy": None, "student_size": None, "confusion": ()}
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


def compute_claim(
    ledger: Ledger,
    name: str,
    terms: Mapping[str, Any],
    release: Release | None = None,
    reservation_ids: Sequence[str] = (),
) -> AccountClaim:
    """Compute what may be claimed of a folder, and of the whole account.

    Args:
        ledger: The ledger that holds the account.
        name: The name of the account.
        terms: A mapping with ``delta``, ``adjacency`` and ``unit``.
        release: The labels in the folder; None if there are none.
        reservation_ids: The reservations that the run that reports made for what lies in the folder.
    """
    own_ids = [*reservation_ids] if release is None else [release.id, *reservation_ids]
    account, claim = ledger.get_account(name), ledger.make_claim(name, own_ids)
    guarantee, ex_post = claim.guarantee, claim.ex_post_guarantee
    total, total_ex_post = account.guarantee, account.ex_post_guarantee
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
        other_releases=tuple(
            _make_part(account, id_, part, False)
            for id_, part in ledger.get_charges(name).items()
            if id_ not in claim.charges
        ),
        epsilon_curve=() if release is None else compute_epsilon_curve(release, terms["delta"]),
        ledger_head=ledger.get_head(),
    )


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
    public_stages = set() if student_chosen else {"student"}
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


def _select_scalars(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in parameters.items() if v is None or isinstance(v, bool | int | float | str)}
