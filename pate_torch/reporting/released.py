"""Everything a report may say, and its plain files. Releasable by type: votes, shards and tensors cannot enter.

Writers: ``summary.json`` (fixed keys), ``privacy.json`` (the statement for machines, with a schema),
``README.md`` (the model card); ``report.html`` is written by ``page``. A run that is not private claims no epsilon
in any of them: the numbers are null.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pate_torch.core import checks
from pate_torch.reporting import statement
from pate_torch.reporting.charts import percent
from pate_torch.reporting.intervals import Share
from pate_torch.reporting.statement import PrivacyFacts

SCHEMA_VERSION = 2
"""2: every epsilon is of what was reserved (1: the account's was of what was used), of all that lies in the folder."""
NO_ANSWER = -1

FILES = {
    "report.html": "This report as one page, to be opened in any browser.",
    "summary.json": "The figures, unrounded.",
    "privacy.json": "The privacy statement for machines.",
    "sanitised.json": "The data-dependent price, made private by noise of its own and charged.",
    "release.json": "What was asked, of whom, at what price.",
    "labels.csv": "The questions asked and the labels released; -1 is no answer. Enough to train another student.",
    "cells.csv": "Of a census: the question in whose cell each public point lies, round by round.",
    "scores.safetensors": "Of slopes: what the released model says of every public point, as logits, round by round.",
    "student.safetensors": "The student's weights.",
    "README.md": "The model card.",
    "tensorboard/": "Curves and pictures: tensorboard --logdir tensorboard",
}

NOT_MEASURED = "No accuracy is published: there are no public labels to measure it on."

# Of these, what a release without a student does not hold.
STUDENT_FILES = ("student.safetensors", "tensorboard/")

# And what only a census leaves, and only slopes.
CENSUS_FILES = ("cells.csv",)
SLOPE_FILES = ("scores.safetensors",)

# What a published price leaves, and what lies where labels were released, not where they were used again.
PRICE_FILES = ("sanitised.json",)

# Why a baseline may be shown outside the owner's house.
BECAUSE = {
    "public": "learnt from public data alone",
    "released": "learnt from released labels alone",
    "published": "a published figure",
    "benchmark": "from private records, shown because this is a public benchmark",
}


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """An accuracy to compare with, and the reason why it is releasable (a key of ``BECAUSE``)."""

    name: str
    accuracy: float
    because: str
    size: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("baseline.because", self.because, BECAUSE)
        _ = self.share

    @property
    def share(self) -> Share:
        return Share(value=self.accuracy, size=self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Public points with the labels released for them. image: uint8 [E, Ch, H, W], Ch 1 or 3; query: pool indices."""

    image: np.ndarray
    label: tuple[int, ...]
    query: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = np.shape(self.image)
        if not isinstance(self.image, np.ndarray) or self.image.dtype != np.uint8:
            raise checks.fail("examples.image", type(self.image).__name__, "must be a NumPy array of uint8")
        if len(shape) != 4 or shape[1] not in (1, 3):
            raise checks.fail("examples.image", shape, "must be [E, Ch, H, W] with 1 or 3 channels")
        if not shape[0] == len(self.label) == len(self.query):
            raise checks.fail(
                "examples.label", len(self.label), f"must be one per image ({shape[0]}), as examples.query"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedReport(PrivacyFacts):
    """The privacy facts, what became of the release, and what may be shown of it. ``student``: "" for labels alone.

    ``seconds`` per stage. epsilon_curve: price at ``delta`` of this release's first q questions, q = 1..Q;
    account_curve: the account's total at the same moments. confusion: student's test counts [truth, predicted].
    ``teachers_kept``: whether they can be asked again by their id, or votes alone were there, under an id of their own.
    ``student_size``/``label_size``: how many points the two accuracies were measured on. student_curves: tag ->
    ((step, value), ...). ``created``: a date for people to read.
    """

    student: str
    seconds: Mapping[str, float]
    student_accuracy: float | None = None
    label_accuracy: float | None = None
    teachers_id: str | None = None
    teachers_kept: bool = True
    release_id: str | None = None
    ledger_head: str | None = None
    student_size: int | None = None
    label_size: int | None = None
    class_names: tuple[str, ...] = ()
    epsilon_curve: tuple[float, ...] = ()
    account_curve: tuple[float, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    student_curves: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    examples: Examples | None = None
    baselines: tuple[Baseline, ...] = ()
    created: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seconds", "parameters", "student_curves"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "confusion", tuple(tuple(row) for row in self.confusion))
        for item in fields(self):
            _releasable(item.name, getattr(self, item.name))
        for name in ("student_accuracy", "label_accuracy"):
            if getattr(self, name) is not None:
                checks.between(name, getattr(self, name), 0, 1)
        self._check_shapes()

    def _check_shapes(self) -> None:
        for name in ("epsilon_curve", "account_curve"):
            curve = getattr(self, name)
            if curve and len(curve) != self.queries_asked:
                raise checks.fail(name, len(curve), f"must have one value per question asked ({self.queries_asked})")
            # Routes are computed to nine digits or more; below that a price may seem to fall.
            if any(later < earlier * (1 - 1e-6) for earlier, later in itertools.pairwise(curve)):
                raise checks.fail(name, "decreasing", "a price never falls as questions are added")
        size = len(self.confusion)
        if any(len(row) != size for row in self.confusion):
            raise checks.fail("confusion", size, "must be square")
        if size and self.class_names and len(self.class_names) != size:
            raise checks.fail("class_names", len(self.class_names), f"must have {size} entries")

    @property
    def title(self) -> str:
        """What was released, in a line."""
        what = "a student" if self.student else "labels"
        if self.slopes:
            return f"{self.dataset}: {what} of {'private' if self.private else 'the'} records' slopes"
        if self.census_rounds:
            return f"{self.dataset}: {what} of {'a private' if self.private else 'a'} census"
        if self.num_teachers == 0:
            return f"{self.dataset}: a model trained by {self.mechanism}"
        return f"{self.dataset}: {what} of {self.num_teachers}{' private' if self.private else ''} teachers"

    @property
    def files(self) -> Mapping[str, str]:
        """What lies in the release folder: name -> what it is."""
        census = self.census_rounds and not self.slopes
        priced = any(part.what == "sanitised price" for part in self.parts)
        left = (
            (STUDENT_FILES, self.student),
            (CENSUS_FILES, census),
            (SLOPE_FILES, self.slopes),
            (PRICE_FILES, priced),
        )
        absent = {name for names, is_there in left if not is_there for name in names}
        return {name: what for name, what in FILES.items() if name not in absent}

    @property
    def student_share(self) -> Share | None:
        size = self.student_size or sum(map(sum, self.confusion)) or None
        return None if self.student_accuracy is None else Share(value=self.student_accuracy, size=size)

    @property
    def label_share(self) -> Share | None:
        size = self.label_size or self.queries_answered or None
        return None if self.label_accuracy is None else Share(value=self.label_accuracy, size=size)

    @property
    def class_shares(self) -> tuple[Share | None, ...]:
        """The student's accuracy on each true class; None where the test set has none of it."""
        return tuple(
            Share(value=row[true] / sum(row), size=sum(row)) if sum(row) else None
            for true, row in enumerate(self.confusion)
        )

    @property
    def below_majority(self) -> str | None:
        """In words, that the student is right less often than the commonest class of the test points; else None."""
        counts = [sum(row) for row in self.confusion]
        hits = sum(row[true] for true, row in enumerate(self.confusion))
        most = max(counts, default=0)
        if self.student_accuracy is None or hits >= most:
            return None
        return (
            f"Below the majority class: always saying {self.class_name(counts.index(most))} would be right for "
            f"{percent(most / sum(counts))} of the test points."
        )

    def class_name(self, label: int) -> str:
        return self.class_names[label] if 0 <= label < len(self.class_names) else str(label)


def _releasable(name: str, value: Any) -> None:
    """Plain finite values only. TypeError for anything else: what is private is a type of its own, and stops here."""
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        checks.number(name, value)
    elif isinstance(value, tuple):
        for item in value:
            _releasable(name, item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _releasable(f"{name}.{key}", item)
    elif isinstance(value, Baseline | Examples | statement.OtherRelease) and is_dataclass(value):
        for item in fields(value):
            inner = getattr(value, item.name)
            if not isinstance(inner, np.ndarray):  # checked by Examples
                _releasable(f"{name}.{item.name}", inner)
    else:
        raise TypeError(f"{name}: {type(value).__name__} may not enter a released report (plain values only)")


def summary(report: ReleasedReport) -> dict[str, Any]:
    """The fixed keys of summary.json. Every epsilon of a run that is not private is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "dataset": report.dataset,
        "mechanism": report.mechanism,
        "student": report.student or None,
        "num_teachers": report.num_teachers,
        "queries_asked": report.queries_asked,
        "queries_answered": report.queries_answered,
        "epsilon": report.claimed_epsilon,
        "epsilon_ex_post": report.claimed_epsilon_ex_post,
        "delta": report.delta,
        "accountant": report.accountant,
        "adjacency": report.adjacency,
        "unit": report.unit,
        "epsilon_charged": report.claimed_epsilon_charged,
        "epsilon_charged_ex_post": report.claimed_epsilon_charged_ex_post,
        "budget_epsilon": report.budget_epsilon,
        "student_accuracy": report.student_accuracy,
        "label_accuracy": report.label_accuracy,
        "private": report.private,
        "teachers_id": report.teachers_id,
        "release_id": report.release_id,
        "ledger_head": report.ledger_head,
        "seconds": dict(report.seconds),
    }


def privacy(report: PrivacyFacts) -> dict[str, Any]:
    """The statement for machines; ``privacy_schema`` describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "private": report.private,
        "headline": statement.headline(report),
        "guarantee": {
            "definition": "(epsilon, delta)-differential privacy",
            "epsilon": report.claimed_epsilon,
            "delta": report.delta,
            "adjacency": report.adjacency,
            "unit": report.unit,
            "route": report.accountant,
            "symbols": statement.symbols(report),
            "plain_words": list(statement.plain_words(report)),
        },
        "mechanism": {
            "name": report.mechanism,
            "parameters": dict(report.parameters),
            "noise": report.noise,
            "num_teachers": report.num_teachers,
            "queries_asked": report.queries_asked,
            "queries_answered": report.queries_answered,
        },
        "composition": {
            "dataset": report.dataset,
            "this_release": report.claimed_epsilon,
            "this_release_ex_post": report.claimed_epsilon_ex_post,
            "account_total": report.claimed_epsilon_charged,
            "account_total_ex_post": report.claimed_epsilon_charged_ex_post,
            "account_note": statement.NO_TOTAL if report.epsilon_charged is None else statement.ADAPTIVE,
            "parts": [_listed(part, report.private) for part in report.parts],
            "account_route": report.charged_accountant or report.accountant,
            "account_cap": report.budget_epsilon,
            "labels_reused": report.reused,
        },
        "other_releases": [_listed(other, report.private) for other in report.other_releases],
        "assumptions": list(statement.assumptions(report)),
        "not_covered": list(statement.not_covered(report)),
    }


def _listed(part: statement.OtherRelease, private: bool) -> dict[str, Any]:
    return {
        "release_id": part.release_id,
        "what": part.what,
        "epsilon": part.epsilon if private else None,
        "route": part.accountant or None,
    }


def privacy_schema() -> dict[str, Any]:
    """The JSON schema of privacy.json, shipped with the package."""
    return json.loads(files("pate_torch.reporting").joinpath("privacy.schema.json").read_text(encoding="utf-8"))


def strict_json(content: Mapping[str, Any]) -> str:
    """JSON that every reader accepts: NaN and infinity raise ValueError."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_summary(report: ReleasedReport, path: Path) -> None:
    """summary.json, unrounded."""
    path.write_text(strict_json(summary(report)), encoding="utf-8")


def write_privacy(report: PrivacyFacts, path: Path) -> None:
    """privacy.json."""
    path.write_text(strict_json(privacy(report)), encoding="utf-8")
