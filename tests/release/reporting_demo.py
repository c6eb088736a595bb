"""A made-up report to look at and to test with: no number in it was measured."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from pate_torch.methods import gradients, reverse_knn
from pate_torch.methods.base import MethodDescription
from pate_torch.methods.teacher_votes import describe
from pate_torch.privacy.records import LABEL_UNIT, PublicAsset
from pate_torch.release.builder import encode_picture
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.report import (
    AccountClaim,
    Accuracy,
    ChargedRelease,
    ColumnReport,
    Evaluation,
    Example,
    ReleaseRecord,
    ReleaseReport,
    Share,
    TableReport,
)

QUERIES = 286
EPSILON = 2.4353597494239
AUDIT = {
    **{"mechanism": "gaussian", "audited": "Gaussian(sigma=2.0)", "version": "0.1.0", "claimed": 4.37, "proven": 2.39},
    **{"delta": 1e-5, "confidence": 0.95, "runs": 500, "queries": 2, "faults": (), "sound": True},
}


def examples(count: int = 24) -> tuple[Example, ...]:
    digits = load_digits()
    images = (digits.images[:count] / 16 * 255).astype(np.uint8)[:, None]
    return tuple(
        Example(picture=encode_picture(image), label=int(y), query=11 + 7 * i)
        for i, (image, y) in enumerate(zip(images, digits.target, strict=False))
    )


def confusion(classes: int = 10, each: int = 100) -> tuple[tuple[int, ...], ...]:
    rows = []
    for true in range(classes):
        row = [0] * classes
        row[(true + 3) % classes] = true % 4
        row[(true + 5) % classes] += true % 3
        row[true] += each - sum(row)
        rows.append(tuple(row))
    return tuple(rows)


def baseline(name: str, accuracy: float, size: int | None = 1000) -> Accuracy:
    return Accuracy(name=name, share=Share(value=accuracy, size=size), description="to compare with")


def table(**changes: Any) -> TableReport:
    """Two columns of a synthetic table; ``changes`` replace fields of the first."""
    first = {"name": "smoker", "codes": ("missing", "false", "true"), "shares": (0.0, 0.75, 0.25)}
    first |= {"noisy_shares": (-0.02, 0.7, 0.32), "error": 0.015} | changes
    ward = ColumnReport(name="ward", codes=("missing", "A"), shares=(0.01, 0.99), noisy_shares=(0.0, 1.0), error=0.01)
    columns = (ColumnReport(**first), ward)
    return TableReport(num_rows=4172, columns=columns, associations=((1.0, 0.37), (0.37, 1.0)))


def demo(**changes: Any) -> ReleaseReport:
    """A plausible private run; ``changes`` replace fields, of whichever record they are."""
    counts = confusion()
    hits = sum(row[c] for c, row in enumerate(counts)) / sum(map(sum, counts))
    other = ChargedRelease(
        release_id="00000000000000cc", purpose="100 queries, gaussian", epsilon=1.35647, accountant="gdp"
    )
    values: dict[str, Any] = {
        # what was asked and answered
        **{"dataset": "digits", "mechanism": "gaussian", "parameters": {"sigma": 40.0}, "noise": "torch", "rounds": 1},
        "sensitivity": {"l1": 2.0, "l2": 2**0.5, "linf": 1.0, "per": "query"},
        **{"num_teachers": 250, "teachers_id": "00000000000000aa", "teachers_reusable": True},
        "method": describe(250, changes.get("unit", "record")),
        **{"queries_asked": QUERIES, "queries_answered": QUERIES, "declared_size": None, "public_share": 0.0},
        **{"release_id": "00000000000000bb", "reuses_labels": False, "answer_files": ("labels.csv",)},
        **{"student": "fixmatch", "class_names": tuple("0123456789"), "input_kind": "rows"},
        **{"encoder": None, "includes_encoder": False, "model": {}},
        "assets": (
            PublicAsset(role="public points", name="handwriting of volunteers", sha256="d" * 64, licence="CC0-1.0"),
            PublicAsset(role="encoder", name="shapes", sha256="e" * 64, trained_on="drawings"),
        ),
        **{"owner": OwnerFacts(contact="somebody", tuning="public", audit=AUDIT), "chosen_by": None},
        "provenance": {"classes": "declared by the owner", "normalization_constants": "read off public points"},
        "seconds": {"teachers": 41.2, "votes": 1.4, "labels": 0.2, "student": 63.5},
        "creation_date": "made-up figures, for tests",
        # what the account paid
        **{"delta": 1e-5, "adjacency": "add_remove", "unit": "record", "private": True, "budget_epsilon": 4.0},
        **{"epsilon": EPSILON, "accountant": "gdp", "epsilon_ex_post": None, "charged_accountant": None},
        **dict.fromkeys(("epsilon_charged", "epsilon_charged_ex_post"), (1.6**2 + EPSILON**2) ** 0.5),
        **{"parts": (), "other_releases": (other,), "ledger_head": "c" * 64},
        "epsilon_curve": tuple(EPSILON * (q / QUERIES) ** 0.55 for q in range(1, QUERIES + 1)),
        # how it was evaluated
        **{"student_accuracy": hits, "student_size": 1000, "label_accuracy": 272 / 286, "label_size": QUERIES},
        **{"confusion": counts, "examples": examples()},
        **{"private_test": None, "table": None, "trust": None},
        "baselines": (
            baseline("Published PATE", 0.98, None),
            baseline("Ensemble without noise", 0.981),
            baseline("Clusters of the public points", 0.81),
        ),
    }
    assert values.keys() >= changes.keys(), changes.keys() - values.keys()
    values |= changes

    def make(record: Any) -> Any:
        return record(**{field.name: values[field.name] for field in fields(record)})

    records = {"record": make(ReleaseRecord), "claim": make(AccountClaim), "evaluation": make(Evaluation)}
    return ReleaseReport(**records, table=values["table"], trust=values["trust"])


NO_QUERIES = {"queries_asked": 0, "queries_answered": 0, "epsilon_curve": (), "examples": (), "label_accuracy": None}
TABLE_METHOD = MethodDescription(
    subject="marginal tables", procedure="Tables were counted.", assumptions=("One count.",), product="table"
)
TABLE_ACCURACIES = (
    Accuracy(name="Most frequent value", share=Share(value=0.57, size=1000), description="the constant prediction"),
    Accuracy(name="Logistic regression", share=Share(value=0.79, size=1000), is_primary=True),
)
WORDS = "abandon ability able about above absent absorb abstract absurd abuse access accident"
TRUST = {
    **{"colluding": 1, "charter_sha256": "a" * 64, "fingerprint": f"{WORDS} {WORDS}", "max_sites_per_unit": 2},
    "sites": tuple({"name": name, "signing_key": 8 * f"{i}1234567"} for i, name in enumerate(("Anna", "B | *C*", "D"))),
    "costs": tuple({"colluding": u, "epsilon": 2.4353597494239 + (u - 1) / 7, "route": "gdp"} for u in range(3)),
    "rounds": tuple({"sha256": f"{slot}" * 64, "used": slot == 1} for slot in range(2)),
}
FORMS = {
    "sites": {
        **{"trust": TRUST, "method": reverse_knn.describe("group:user"), "mechanism": "histogram", "noise": "discrete"},
        **{"unit": "group:user", "num_teachers": 0, "teachers_id": None, "epsilon_curve": (), "budget_epsilon": None},
        **{"dataset": "sites", "epsilon_ex_post": EPSILON, "ledger_head": None, "examples": (), "baselines": ()},
        **{"student_accuracy": None, "label_accuracy": None, "confusion": (), "owner": OwnerFacts()},
    },
    "teachers": {},
    "gradients": {
        **{"method": gradients.describe("group:user", 5), "mechanism": "gradient_descent", "rounds": 2},
        **{"unit": "group:user", "adjacency": "replace_one", "num_teachers": 0, "noise": "discrete"},
        **{"epsilon_ex_post": 2.1, "charged_accountant": "rdp", "reuses_labels": True, "declared_size": 60000},
    },
    "reverse_knn": {
        **{"method": reverse_knn.describe(LABEL_UNIT), "mechanism": "histogram", "rounds": 2, "num_teachers": 0},
        **{"unit": LABEL_UNIT, "adjacency": "replace_one", "chosen_by": "public data", "input_kind": "table"},
    },
    "dpsgd": {
        **{"method": None, "mechanism": "dpsgd", "num_teachers": 0, "teachers_id": None, "release_id": None},
        **{"label_size": None, "answer_files": (), "input_kind": "images", **NO_QUERIES},
    },
    "table": {
        **{"method": TABLE_METHOD, "mechanism": "marginals", "num_teachers": 0, "teachers_id": None},
        **{"parameters": {"sigma": 12.0, "order": 2, "rounds": 0}, "release_id": None, "student": None, **NO_QUERIES},
        **{"student_accuracy": None, "label_size": None, "confusion": (), "table": table(), "assets": ()},
        **{"provenance": {"categories": "declared by the owner"}, "other_releases": ()},
        **{"class_names": (), "answer_files": ("first_answers.json",), "baselines": TABLE_ACCURACIES},
    },
    "not_private": {"private": False, "epsilon_ex_post": 2.1},
    "delta_alone": {"epsilon": 0.0, "accountant": "delta", "epsilon_curve": ()},
}
