"""The report of a release: every fact that may be published of a run, once. Files, pages and tables lay it out.

Releasable by type: votes, shards and tensors cannot enter it. What only the owner may see is ``OwnerSummary``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.core import checks
from pate_torch.methods.description import MethodDescription, format_one_unit, get_unit_column
from pate_torch.privacy.records import LABEL_UNIT, SELECTION_BASES, EncoderCard, PublicAsset
from pate_torch.release.intervals import Share, format_percent

Scalar = bool | int | float | str | None

ROUTES = {
    "gdp": "exact Gaussian accounting",
    "rdp": "Rényi accounting",
    "pld": "privacy loss distributions",
    "zcdp": "zero-concentrated accounting",
    "pure": "pure composition",
    "none": "nothing was released",
    "delta": "only delta is paid: a failure has at most this probability",
    "cap": "the account's cap, kept by its filter",
}

DISCLOSURE_BASES = {
    "public": "learnt from public data alone",
    "released": "learnt from released labels alone",
    "published": "a published figure",
    "benchmark": "from private records, shown because this is a public benchmark",
}
"""Why a baseline may be shown outside the owner's house."""

FILES = {
    "report.html": "This report as one page, to be opened in any browser.",
    "summary.json": "The figures, unrounded.",
    "privacy.json": "The privacy statement for machines.",
    "sanitised.json": "The data-dependent price, made private by noise of its own and charged.",
    "release.json": "What was asked, of whom, at what price.",
    "labels.csv": "The questions asked and the labels released; -1 is no answer. With the public points, enough to "
    "train another student: release.json says how they are named (points), or only their positions are told.",
    "cells.csv": "The question in whose cell each public point lies, round by round.",
    "scores.safetensors": "The logits of every public point, round by round, and the last round's linear model.",
    "guide.safetensors": "The student of all rounds but the last, from which the student goes on.",
    "student.safetensors": "The student's weights.",
    "encoder/": "The encoder's files, through which the student sees points: public, and under a license of their own.",
    "README.md": "The model card.",
    "SHA256SUMS": "The hash of each other file: sha256sum -c SHA256SUMS; pate verify does it, and more.",
}
"""What may lie in a release folder: name -> what it is."""


TUNING_METHODS = {
    "public": "on public data, or a public stand-in",
    "charged": "by private records, and charged to the account",
    "none": "fixed before anybody looked at anything",
}
"""How the parameters of a release may have been chosen."""

UNSTATED_CHOICE = "How this release was chosen among several settings is not stated, so the choice is not covered."

INPUT_KINDS = {
    "rows": "an array [N, features]",
    "table": "a DataFrame with the columns of the data",
    "text": "a list of texts",
    "images": "uint8 images [N, channels, height, width]",
}
"""What a student takes (``DataSpec.kind``) -> in words."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """An accuracy to compare with.

    Attributes:
        disclosure_basis: Why it is releasable, a key of ``DISCLOSURE_BASES``.
        size: Points it was measured on.
    """

    name: str
    accuracy: float
    disclosure_basis: str
    size: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("baseline.disclosure_basis", self.disclosure_basis, DISCLOSURE_BASES)
        _ = self.share

    @property
    def share(self) -> Share:
        """The accuracy with its interval."""
        return Share(value=self.accuracy, size=self.size)


@dataclass(frozen=True, kw_only=True)
class ChargedRelease:
    """What the account paid for once: something released from the private data, in this folder or elsewhere.

    Attributes:
        epsilon: Its own guarantee at the report's delta and adjacency; None if it has none.
        accountant: The route that gave epsilon.
        is_current: Whether the run that reports was charged for it.
        events: What it reserved, as ``accounting.events`` writes it: enough to compose it anew.
    """

    release_id: str
    purpose: str
    epsilon: float | None = None
    accountant: str = ""
    is_current: bool = False
    events: str = "[]"

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            checks.non_negative("reservation.epsilon", self.epsilon)
            if not self.accountant:
                raise checks.error("reservation.accountant", self.accountant, "must name the route that gave epsilon")


@dataclass(frozen=True, kw_only=True)
class OwnerFacts:
    """What only the owner of the data can say of them, in the owner's words; published as it stands. None: not said.

    Attributes:
        contact: Whom to ask.
        collection: How, where and when the records were collected.
        consent: On what ground they are used.
        access: Who can reach the records, and how they are secured.
        retention: How long they, teachers and votes are kept.
        period: The time for which the account's cap holds.
        renewal: What happens to the cap after that.
        tuning: How the parameters were chosen (``TUNING_METHODS``).
        pool: Name, licence and source of the public points.
        audit: The result of an audit of the mechanism, as ``pate audit --output`` writes it.
    """

    contact: str | None = None
    collection: str | None = None
    consent: str | None = None
    access: str | None = None
    retention: str | None = None
    period: str | None = None
    renewal: str | None = None
    tuning: str | None = None
    pool: Mapping[str, str] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                object.__setattr__(self, item.name, MappingProxyType(dict(value)))
            elif value is not None:
                checks.nonempty_string(item.name, value)
        if self.tuning is not None:
            checks.one_of("tuning", self.tuning, TUNING_METHODS)
        for key, value in self.pool.items():
            checks.nonempty_string(f"pool.{checks.one_of('pool key', key, ('name', 'licence', 'source'))}", value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Public points with the labels released for them.

    Attributes:
        image: uint8 [E, Ch, H, W], Ch 1 or 3.
        label: The released labels.
        query: Pool indices.
    """

    image: np.ndarray
    label: tuple[int, ...]
    query: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = np.shape(self.image)
        if not isinstance(self.image, np.ndarray) or self.image.dtype != np.uint8:
            raise checks.error("examples.image", type(self.image).__name__, "must be a NumPy array of uint8")
        if len(shape) != 4 or shape[1] not in (1, 3):
            raise checks.error("examples.image", shape, "must be [E, Ch, H, W] with 1 or 3 channels")
        if not shape[0] == len(self.label) == len(self.query):
            raise checks.error(
                "examples.label", len(self.label), f"must be one per image ({shape[0]}), as examples.query"
            )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One measured accuracy.

    Attributes:
        description: What was measured on what.
        is_primary: Whether it is the release's own, not there to compare.
    """

    name: str
    share: Share
    description: str = ""
    is_primary: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseReport:
    """Everything that may be published of a run.

    If the run is not private, no epsilon is kept, whatever is passed here: none can be shown.

    Attributes:
        num_teachers: 0 where no teachers answered (see ``method``).
        epsilon: The guarantee of everything in the folder, composed from what was reserved for its ``parts``. Every
            epsilon here is at ``delta``.
        accountant: The route that gave epsilon (and the total, unless ``charged_accountant`` names another).
        private: Whether the noise behind everything in the folder was secret.
        epsilon_ex_post: What had been spent when the run stopped; it depends on the answers, and is no guarantee.
        epsilon_charged: The account's total, from what all releases reserved; None if one of them used seeded noise.
        epsilon_charged_ex_post: What they used of it.
        budget_epsilon: The account's cap.
        other_releases: What else was reserved for these data.
        noise: "torch" (floating point) or "discrete".
        declared_size: The publicly declared number of records, if the plan used one.
        public_share: The share of the owner's file that was made public, as the public points.
        reuses_labels: Whether the labels had been released before.
        method: Who answered; None: nobody was asked, a model was trained on the records themselves.
        rounds: Number of rounds of questions.
        answer_files: The files that hold the answers.
        student: What learnt from the answers; None if labels alone were released.
        seconds: Time of each stage that may be shown.
        student_size: How many points ``student_accuracy`` was measured on.
        label_size: How many points ``label_accuracy`` was measured on.
        sensitivity: How far one unit moves what the mechanism opens: l1, l2, linf in its own numbers (None: no bound,
            or no part of the price), and ``per`` what; empty: not known.
        assets: Everything public that it was made with: the public points, encoders.
        owner: What only the owner can say.
        provenance: Where values come from that are taken to be public (``types.SOURCES``), by name.
        chosen_by: How the owner says that this release was chosen among several settings (``SELECTION_BASES``); None:
            not stated.
        teachers_reusable: Whether the teachers can be asked again by their id, or votes alone were there.
        input_kind: What the student takes (``INPUT_KINDS``).
        encoder: The frozen encoder whose features everything here was learnt from; None: points are as they are.
        includes_encoder: Whether its files lie in the folder.
        epsilon_curve: Price of the first q questions, q = 1..Q.
        account_curve: The account's total at the same moments.
        confusion: The student's test counts [truth, predicted].
        creation_date: A date for people to read.
    """

    dataset: str
    mechanism: str
    num_teachers: int
    queries_asked: int
    queries_answered: int
    epsilon: float | None
    delta: float
    accountant: str
    adjacency: str
    unit: str
    private: bool
    epsilon_ex_post: float | None = None
    epsilon_charged: float | None = None
    epsilon_charged_ex_post: float | None = None
    charged_accountant: str | None = None
    parts: tuple[ChargedRelease, ...] = ()
    budget_epsilon: float | None = None
    other_releases: tuple[ChargedRelease, ...] = ()
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    noise: str = "torch"
    declared_size: int | None = None
    public_share: float = 0.0
    reuses_labels: bool = False
    method: MethodDescription | None = None
    rounds: int = 1
    answer_files: tuple[str, ...] = ("labels.csv",)
    student: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    student_accuracy: float | None = None
    student_size: int | None = None
    label_accuracy: float | None = None
    label_size: int | None = None
    teachers_id: str | None = None
    teachers_reusable: bool = True
    release_id: str | None = None
    ledger_head: str | None = None
    class_names: tuple[str, ...] = ()
    input_kind: str = "rows"
    encoder: EncoderCard | None
    includes_encoder: bool
    epsilon_curve: tuple[float, ...] = ()
    account_curve: tuple[float, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    examples: Examples | None = None
    baselines: tuple[Baseline, ...] = ()
    creation_date: str = ""
    sensitivity: Mapping[str, Scalar] = field(default_factory=dict)
    assets: tuple[PublicAsset, ...]
    owner: OwnerFacts
    provenance: Mapping[str, str]
    chosen_by: str | None

    def __post_init__(self) -> None:
        for name in ("seconds", "parameters", "sensitivity", "provenance"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "confusion", tuple(tuple(row) for row in self.confusion))
        for item in fields(self):
            _check_releasable(item.name, getattr(self, item.name))
        self._check_facts()
        self._check_shapes()
        if not self.private:
            self._drop_epsilons()

    def _check_facts(self) -> None:
        checks.integer("num_teachers", self.num_teachers, low=0)
        checks.integer("rounds", self.rounds, low=0)
        checks.integer("queries_asked", self.queries_asked, low=0)
        checks.integer("queries_answered", self.queries_answered, low=0, high=self.queries_asked)
        checks.delta("delta", self.delta)
        checks.one_of("adjacency", self.adjacency, ("add_remove", "replace_one"))
        checks.one_of("noise", self.noise, ("torch", "discrete"))
        checks.one_of("input_kind", self.input_kind, INPUT_KINDS)
        if self.chosen_by is not None:
            checks.one_of("chosen_by", self.chosen_by, SELECTION_BASES)
        checks.boolean("private", self.private)
        checks.boolean("reuses_labels", self.reuses_labels)
        checks.boolean("includes_encoder", self.includes_encoder)
        checks.between("public_share", self.public_share, 0, 1)
        is_group = self.unit.startswith("group:") and len(self.unit) > len("group:")
        if self.unit not in ("record", LABEL_UNIT) and not is_group:
            raise checks.error("unit", self.unit, f"must be 'record', 'group:<column>' or {LABEL_UNIT!r}")
        for name in ("epsilon", "epsilon_ex_post", "epsilon_charged", "epsilon_charged_ex_post", "budget_epsilon"):
            if getattr(self, name) is not None:
                checks.non_negative(name, getattr(self, name))
        for name in ("student_accuracy", "label_accuracy"):
            if getattr(self, name) is not None:
                checks.between(name, getattr(self, name), 0, 1)
        if self.private and self.epsilon is None:
            raise checks.error(
                "epsilon", None, "must be a number in a private run", "Without a price nothing is released."
            )

    def _check_shapes(self) -> None:
        for name in ("epsilon_curve", "account_curve"):
            curve = getattr(self, name)
            if curve and len(curve) != self.queries_asked:
                raise checks.error(name, len(curve), f"must have one value per question asked ({self.queries_asked})")
            # Routes are computed to nine digits or more; below that a price may seem to fall.
            if any(later < earlier * (1 - 1e-6) for earlier, later in itertools.pairwise(curve)):
                raise checks.error(name, "decreasing", "a price never falls as questions are added")
        size = len(self.confusion)
        if any(len(row) != size for row in self.confusion):
            raise checks.error("confusion", size, "must be square")
        if size and self.class_names and len(self.class_names) != size:
            raise checks.error("class_names", len(self.class_names), f"must have {size} entries")

    def _drop_epsilons(self) -> None:
        for name in ("epsilon", "epsilon_ex_post", "epsilon_charged", "epsilon_charged_ex_post"):
            object.__setattr__(self, name, None)
        for name in ("epsilon_curve", "account_curve"):
            object.__setattr__(self, name, ())
        for name in ("parts", "other_releases"):
            object.__setattr__(
                self, name, tuple(replace(part, epsilon=None, events="[]") for part in getattr(self, name))
            )

    # ---- the terms of an epsilon, without which it means nothing

    @property
    def unit_words(self) -> str:
        """The privacy unit in words."""
        return format_one_unit(self.unit)

    @property
    def group(self) -> str:
        """The column that makes the unit; empty unless records are protected in groups."""
        return get_unit_column(self.unit)

    @property
    def adjacency_words(self) -> str:
        """The adjacency in words."""
        verb = "add or remove {}" if self.adjacency == "add_remove" else "replace {} by any other"
        return f"{verb.format(self.unit_words)} ({self.adjacency})"

    @property
    def route_words(self) -> str:
        """The route of epsilon in words."""
        return format_route(self.accountant)

    @property
    def setting(self) -> str:
        """The terms that every epsilon of an account shares: all but the route."""
        return f"delta = {format_delta(self.delta)}; neighbors: {self.adjacency_words}; unit: {self.unit}"

    @property
    def terms(self) -> str:
        """The terms without which an epsilon means nothing."""
        return f"{self.setting}; route: {self.route_words}"

    def format_with_terms(self, epsilon: float) -> str:
        """An epsilon, rounded up, with its terms."""
        return f"epsilon = {format_epsilon(epsilon)} ({self.terms})"

    # ---- what follows from the facts

    @property
    def budget_left(self) -> float | None:
        """The cap less what all releases reserved; what votes left unused of that does not count."""
        if self.budget_epsilon is None or self.epsilon_charged is None:
            return None
        return max(0.0, self.budget_epsilon - self.epsilon_charged)

    @property
    def is_free(self) -> bool:
        """Whether this run added nothing to the account."""
        return self.reuses_labels and not any(part.is_current for part in self.parts)

    @property
    def has_private_choice(self) -> bool:
        """Whether private records chose the student."""
        return any(part.purpose.startswith("choice of a student") for part in self.parts)

    @property
    def audit(self) -> Mapping[str, Any]:
        """The owner's audit, where it is of this mechanism; else nothing."""
        return self.owner.audit if self.owner.audit.get("mechanism") == self.mechanism else {}

    @property
    def mechanism_words(self) -> str:
        """The mechanism as in 'gaussian (sigma = 40)', to six digits; privacy.json has them all."""
        shown_parameters = {
            k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.parameters.items() if v is not None
        }
        return self.mechanism + (
            f" ({', '.join(f'{k} = {v}' for k, v in shown_parameters.items())})" if shown_parameters else ""
        )

    @property
    def input_words(self) -> str:
        """What the student takes, in words."""
        return INPUT_KINDS[self.input_kind]

    @property
    def files(self) -> dict[str, str]:
        """The files of the release folder: name -> what it is. Answers that are used again lie where they came out."""
        answers = ("labels.csv", "cells.csv", "scores.safetensors", "guide.safetensors")
        presence = {
            "student.safetensors": self.student is not None,
            "encoder/": self.includes_encoder,
            "release.json": not self.reuses_labels and self.method is not None,
            **{
                name: name in self.answer_files and not self.reuses_labels and self.method is not None
                for name in answers
            },
            "sanitised.json": any(part.purpose == "sanitised price" for part in self.parts),
        }
        return {name: description for name, description in FILES.items() if presence.get(name, True)}

    @property
    def student_share(self) -> Share | None:
        """The student's accuracy on the test points; None: it may not be published, or was not measured."""
        size = self.student_size or sum(map(sum, self.confusion)) or None
        return None if self.student_accuracy is None else Share(value=self.student_accuracy, size=size)

    @property
    def label_share(self) -> Share | None:
        """The accuracy of the released labels; None: nobody knows the truth."""
        size = self.label_size or self.queries_answered or None
        return None if self.label_accuracy is None else Share(value=self.label_accuracy, size=size)

    @property
    def accuracies(self) -> tuple[Accuracy, ...]:
        """All that were measured: the student's, the labels', those to compare with."""
        rows = []
        if self.student_share is not None:
            size = self.student_share.size
            description = f"{self.student}, on {size} test points" if size else f"{self.student}"
            rows.append(Accuracy(name="Student", share=self.student_share, description=description, is_primary=True))
        if self.label_share is not None:
            description = f"{self.queries_answered} of {self.queries_asked} questions answered"
            rows.append(Accuracy(name="Released labels", share=self.label_share, description=description))
        rows += [
            Accuracy(name=baseline.name, share=baseline.share, description=DISCLOSURE_BASES[baseline.disclosure_basis])
            for baseline in self.baselines
        ]
        return tuple(rows)

    @property
    def class_accuracies(self) -> tuple[Accuracy | None, ...]:
        """The student's accuracy on each true class; None where the test set has none of it."""
        return tuple(
            Accuracy(name=name, share=Share(value=row[true] / sum(row), size=sum(row)), is_primary=True)
            if sum(row)
            else None
            for true, (name, row) in enumerate(zip(self.confusion_names, self.confusion, strict=True))
        )

    @property
    def majority_warning(self) -> str | None:
        """A sentence where the student is right less often than the commonest class of the test points; else None."""
        counts = [sum(row) for row in self.confusion]
        hits = sum(row[true] for true, row in enumerate(self.confusion))
        max_count = max(counts, default=0)
        if self.student_accuracy is None or hits >= max_count:
            return None
        return (
            f"Below the majority class: always saying {self.get_class_name(counts.index(max_count))} would be right "
            f"for {format_percent(max_count / sum(counts))} of the test points."
        )

    @property
    def confusion_names(self) -> list[str]:
        """The classes by row (and column) of ``confusion``."""
        return [self.get_class_name(label) for label in range(len(self.confusion))]

    def get_class_name(self, label: int) -> str:
        """The name of a class; -1 is no answer."""
        if label < 0:
            return "no answer"
        return self.class_names[label] if label < len(self.class_names) else str(label)


def format_route(accountant: str) -> str:
    """A route in words: gdp -> 'exact Gaussian accounting (gdp)'; an unknown name stays as it is."""
    return f"{ROUTES[accountant]} ({accountant})" if accountant in ROUTES else accountant


def _check_releasable(name: str, value: Any) -> None:
    """Plain finite values only. TypeError for anything else: what is private is a type of its own, and stops here."""
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        checks.number(name, value)
    elif isinstance(value, tuple):
        for item in value:
            _check_releasable(name, item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_releasable(f"{name}.{key}", item)
    elif isinstance(
        value, Baseline | Examples | ChargedRelease | MethodDescription | PublicAsset | OwnerFacts | EncoderCard
    ):
        for item in fields(value):
            inner = getattr(value, item.name)
            if not isinstance(inner, np.ndarray):  # checked by Examples
                _check_releasable(f"{name}.{item.name}", inner)
    else:
        raise TypeError(f"{name}: {type(value).__name__} may not enter a released report (plain values only)")
