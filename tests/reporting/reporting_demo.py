"""A made-up report to look at and to test with: no number in it was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from pate_torch.methods.teacher_votes import describe
from pate_torch.privacy.records import PublicAsset
from pate_torch.release.report import Baseline, ChargedRelease, Examples, OwnerFacts, ReleaseReport

QUERIES = 286
EPSILON = 2.4353597494239


AUDIT = {
    **{"mechanism": "gaussian", "audited": "Gaussian(sigma=2.0)", "version": "0.1.0", "claimed": 4.37, "proven": 2.39},
    **{"delta": 1e-5, "confidence": 0.95, "runs": 500, "queries": 2, "faults": (), "sound": True},
}


def examples(count: int = 24) -> Examples:
    digits = load_digits()
    image = (digits.images[:count] / 16 * 255).astype(np.uint8)[:, None]
    return Examples(
        image=image, label=tuple(int(y) for y in digits.target[:count]), query=tuple(range(11, 11 + 7 * count, 7))
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


def demo(**changes: Any) -> ReleaseReport:
    """A plausible private run; ``changes`` replace fields."""
    counts = confusion()
    hits = sum(row[c] for c, row in enumerate(counts)) / sum(map(sum, counts))
    growth = tuple(EPSILON * (q / QUERIES) ** 0.55 for q in range(1, QUERIES + 1))
    fields: dict[str, Any] = dict(
        dataset="digits",
        mechanism="gaussian",
        parameters={"sigma": 40.0},
        num_teachers=250,
        method=describe(250, changes.get("unit", "record")),
        queries_asked=QUERIES,
        queries_answered=QUERIES,
        epsilon=EPSILON,
        delta=1e-5,
        accountant="gdp",
        adjacency="add_remove",
        unit="record",
        private=True,
        epsilon_charged=(1.6**2 + EPSILON**2) ** 0.5,
        epsilon_charged_ex_post=(1.6**2 + EPSILON**2) ** 0.5,
        budget_epsilon=4.0,
        student="fixmatch",
        seconds={"teachers": 41.2, "votes": 1.4, "labels": 0.2, "student": 63.5},
        student_accuracy=hits,
        label_accuracy=0.951,
        teachers_id="00000000000000aa",
        release_id="00000000000000bb",
        ledger_head="c" * 64,
        class_names=tuple("0123456789"),
        epsilon_curve=growth,
        account_curve=tuple((1.6**2 + e * e) ** 0.5 for e in growth),
        confusion=counts,
        student_curves={
            "student/loss": tuple((s, 2.3 * 0.985**s + 0.05 * (s % 3)) for s in range(0, 300, 5)),
            "student/confident_share": tuple((s, 1 - 0.9 * 0.98**s) for s in range(0, 300, 5)),
        },
        examples=examples(),
        baselines=(
            Baseline(name="Published PATE", accuracy=0.98, disclosure_basis="published"),
            Baseline(name="Ensemble without noise", accuracy=0.981, disclosure_basis="benchmark", size=1000),
            Baseline(name="Clusters of the public points", accuracy=0.81, disclosure_basis="public", size=1000),
        ),
        other_releases=(
            ChargedRelease(
                release_id="00000000000000cc", purpose="100 questions, gaussian", epsilon=1.35647, accountant="gdp"
            ),
        ),
        creation_date="made-up figures, for tests",
        sensitivity={"l1": 2.0, "l2": 2**0.5, "linf": 1.0, "per": "question"},
        assets=(
            PublicAsset(role="public points", name="handwriting of volunteers", sha256="d" * 64, licence="CC0-1.0"),
            PublicAsset(role="encoder", name="shapes", sha256="e" * 64, trained_on="drawings"),
        ),
        encoder=None,
        includes_encoder=False,
        owner=OwnerFacts(contact="somebody", tuning="public", audit=AUDIT),
        provenance={"classes": "declared by the owner", "normalization_constants": "read off public points"},
        chosen_by=None,
    )
    return ReleaseReport(**(fields | changes))
