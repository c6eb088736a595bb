"""The report of a release: three nested records of every fact about a run that may be published.

A report holds plain values alone: it refuses votes, shards and tensors. What only the owner of the data may see is in
``owner_metrics.PrivateMetrics``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.core import checks
from pate_torch.methods.base import MethodDescription, format_one_unit, get_unit_column
from pate_torch.privacy.records import LABEL_UNIT, SELECTION_BASES, EncoderCard, PublicAsset
from pate_torch.release.owner_file import OwnerFacts

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

FILES = {
    "report.html": "This report as one page, to be opened in any browser.",
    "summary.json": "The figures, unrounded.",
    "privacy.json": "The privacy statement for machines.",
    "sanitised.json": "The data-dependent price, with noise that was charged to the account.",
    "release.json": "The questions, the method that answered them, and the price.",
    "labels.csv": "The questions and the released labels; -1 is no answer. Another student can be trained on them with "
    "the public points, which are identified as release.json says (points), or by their position.",
    "first_answers.json": "Noisy class counts that a method bought first, paid for by the same reservation.",
    "cells.csv": "The question in whose cell each public point lies, round by round.",
    "scores.safetensors": "The logits of every public point, round by round, and the last round's linear model.",
    "guide.safetensors": "The student of all rounds but the last, from which the student goes on.",
    "student.safetensors": "The student's weights.",
    "encoder/": "The files of the encoder that computes the student's input: public, with their own license.",
    "README.md": "The model card.",
    "SHA256SUMS": "The hash of each other file. sha256sum -c SHA256SUMS checks them; pate verify checks more.",
}
"""The files that a release folder may hold: name -> description."""

INPUT_KINDS = {
    "rows": "an array [N, features]",
    "table": "a DataFrame with the columns of the data",
    "text": "a list of texts",
    "images": "uint8 images [N, channels, height, width]",
}
"""The kinds of input of a student (``DataSpec.kind``) -> in words."""


def format_percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage: 0.974 -> '97.4 %'."""
    return f"{100 * value:.{digits}f} %"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share from 0 to 1 of ``size`` points; the size is None if it is not known."""

    value: float
    size: int | None = None

    @functools.cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of Wilson (1927), without continuity correction; None if the size is not known."""
        if self.size is None:
            return None
        from scipy.stats import binomtest  # takes half a second to import, and few commands need it

        interval = binomtest(round(self.value * self.size), self.size).proportion_ci(method="wilson")
        return float(interval.low), float(interval.high)

    @property
    def interval_words(self) -> str:
        """The interval in percent, as in '96.1 to 98.3'; empty if there is none."""
        return "" if self.interval is None else "{:.1f} to {:.1f}".format(*(100 * end for end in self.interval))

    def __str__(self) -> str:
        """Return '97.4 % (96.1 to 98.3)'."""
        return format_percent(self.value) + (f" ({self.interval_words})" if self.size else "")


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One measured accuracy.

    Attributes:
        description: Points that the accuracy was measured on, or the model.
        is_primary: True for results of this release, False for baselines.
    """

    name: str
    share: Share
    description: str = ""
    is_primary: bool = False


@dataclass(frozen=True, kw_only=True)
class ChargedRelease:
    """One reservation of the account: something released from the private data, in this folder or elsewhere.

    Attributes:
        epsilon: Guarantee of this reservation alone at the report's delta and adjacency; None if it has none.
        accountant: Route that gave epsilon.
        is_current: Whether the run that reports was charged for it.
        events: Reserved events in the JSON of ``accounting.events``.
    """

    release_id: str
    purpose: str
    epsilon: float | None = None
    accountant: str = ""
    is_current: bool = False
    events: str = "[]"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table: id, epsilon, route, purpose."""
        return self.release_id, *format_price(self.epsilon, format_route(self.accountant), missing="none"), self.purpose


@dataclass(frozen=True, kw_only=True)
class Example:
    """A public point with the label released for it (-1 is no answer).

    Attributes:
        picture: PNG image of the point, as a data URI.
        query: Index of the point in the pool.
    """

    picture: str
    label: int
    query: int


@dataclass(frozen=True)
class PublicFacts:
    """Base class of the records of a report. TypeError for a field that is no plain value; ValueError for NaN."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                object.__setattr__(self, item.name, MappingProxyType(dict(value)))
            _check_releasable(item.name, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseRecord(PublicFacts):
    """Which questions were asked of whom, through which mechanism, and what was released.

    Attributes:
        sensitivity: Largest change of the opened value by one unit: l1, l2, linf (None: no bound, or no part of the
            price) and ``per`` what; empty if it is not known.
        noise: "torch" (floating point) or "discrete".
        declared_size: Publicly declared number of records; None if the plan used none.
        public_share: Share of the owner's file that was made public, as the public points.
        num_teachers: Number K of teachers; 0 if no teachers answered (see ``method``).
        teachers_reusable: True if the trained teachers are stored and can be queried again.
        method: Description of the method that answered; None if a model was trained on the records themselves.
        reuses_labels: Whether the labels had been released before.
        student: Kind of the student; None if only labels were released.
        input_kind: Kind of the student's input, a key of ``INPUT_KINDS``.
        encoder: Card of the frozen encoder that made the features; None if points are taken as they are.
        assets: Public points, encoders and other public data that the release was made with.
        provenance: Sources of the values that are taken to be public: name -> source.
        chosen_by: How the owner chose this release among several settings, one of ``SELECTION_BASES``; None if it is
            not stated.
        seconds: Time of each stage whose time may be published, in seconds.
    """

    dataset: str
    mechanism: str
    parameters: Mapping[str, Scalar]
    sensitivity: Mapping[str, Scalar]
    noise: str
    declared_size: int | None
    public_share: float
    num_teachers: int
    teachers_id: str | None
    teachers_reusable: bool
    method: MethodDescription | None
    rounds: int
    queries_asked: int
    queries_answered: int
    release_id: str | None
    reuses_labels: bool
    answer_files: tuple[str, ...]
    student: str | None
    class_names: tuple[str, ...]
    input_kind: str
    encoder: EncoderCard | None
    includes_encoder: bool
    assets: tuple[PublicAsset, ...]
    owner: OwnerFacts
    provenance: Mapping[str, str]
    chosen_by: str | None
    seconds: Mapping[str, float]
    creation_date: str

    @property
    def audit(self) -> Mapping[str, Any]:
        """The owner's audit if it tested this mechanism; else empty."""
        return self.owner.audit if self.owner.audit.get("mechanism") == self.mechanism else {}

    @property
    def mechanism_words(self) -> str:
        """The mechanism as in 'gaussian (sigma = 40)', with six digits; privacy.json has all digits."""
        values = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.parameters.items() if v is not None}
        return self.mechanism + (f" ({', '.join(f'{k} = {v}' for k, v in values.items())})" if values else "")

    def get_class_name(self, label: int) -> str:
        """The name of a class; the label -1 is no answer."""
        if label < 0:
            return "no answer"
        return self.class_names[label] if label < len(self.class_names) else str(label)


@dataclass(frozen=True, kw_only=True, eq=False)
class AccountClaim(PublicFacts):
    """What the account paid for a release, and the guarantee that may be claimed.

    Every epsilon is at ``delta``. If the noise was not secret, all epsilons are None, whatever is passed.

    Attributes:
        private: Whether the noise behind everything in the folder was secret.
        epsilon: Guarantee of everything in the folder, composed from what was reserved for its ``parts``.
        accountant: Route that gave epsilon.
        epsilon_ex_post: Epsilon that was spent when the run stopped. It depends on the answers, so it is no guarantee.
        parts: Reservations that paid for the folder.
        epsilon_charged: Total of the account, from what all releases reserved; None if one of them used seeded noise.
        charged_accountant: Route that gave the total; None if there is no total.
        epsilon_charged_ex_post: Epsilon that all releases spent of the total.
        budget_epsilon: Cap of the account; None if there is none.
        other_releases: Reservations of the account that paid for something outside the folder.
        epsilon_curve: Price of the first q questions, q = 1..Q; empty if questions cost unequally.
    """

    delta: float
    adjacency: str
    unit: str
    private: bool
    epsilon: float | None
    accountant: str
    epsilon_ex_post: float | None
    parts: tuple[ChargedRelease, ...]
    epsilon_charged: float | None
    charged_accountant: str | None
    epsilon_charged_ex_post: float | None
    budget_epsilon: float | None
    other_releases: tuple[ChargedRelease, ...]
    epsilon_curve: tuple[float, ...]
    ledger_head: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.delta("delta", self.delta)
        checks.one_of("adjacency", self.adjacency, ("add_remove", "replace_one"))
        checks.boolean("private", self.private)
        if self.unit not in ("record", LABEL_UNIT) and not get_unit_column(self.unit):
            raise checks.error("unit", self.unit, f"must be 'record', 'group:<column>' or {LABEL_UNIT!r}")
        epsilon_names = ("epsilon", "epsilon_ex_post", "epsilon_charged", "epsilon_charged_ex_post")
        for name in (*epsilon_names, "budget_epsilon"):
            if getattr(self, name) is not None:
                checks.non_negative(name, getattr(self, name))
        if self.private and self.epsilon is None:
            raise checks.error("epsilon", None, "must be a number in a private run")
        # Routes are computed to nine digits or more; below that a price may seem to fall.
        if any(later < earlier * (1 - 1e-6) for earlier, later in itertools.pairwise(self.epsilon_curve)):
            raise checks.error("epsilon_curve", "decreasing", "a price never falls as questions are added")
        if not self.private:
            for name in epsilon_names:
                object.__setattr__(self, name, None)
            object.__setattr__(self, "epsilon_curve", ())
            for name in ("parts", "other_releases"):
                parts = tuple(replace(part, epsilon=None, events="[]") for part in getattr(self, name))
                object.__setattr__(self, name, parts)

    @property
    def unit_words(self) -> str:
        """The privacy unit in words."""
        return format_one_unit(self.unit)

    @functools.cached_property
    def terms(self) -> dict[str, str]:
        """The terms without which an epsilon means nothing: name -> value."""
        verb = "add or remove {}" if self.adjacency == "add_remove" else "replace {} by any other"
        return {
            "delta": format_delta(self.delta),
            "neighbors": f"{verb.format(self.unit_words)} ({self.adjacency})",
            "privacy unit": self.unit,
            "accounting route": format_route(self.accountant),
        }

    @property
    def setting(self) -> str:
        """The terms that all epsilons of an account share: all but the route."""
        return f"delta = {self.terms['delta']}; neighbors: {self.terms['neighbors']}; unit: {self.unit}"

    def format_with_terms(self, epsilon: float) -> str:
        """Format an epsilon, rounded up, with its terms."""
        return f"epsilon = {format_epsilon(epsilon)} ({self.setting}; route: {self.terms['accounting route']})"

    def has_part(self, purpose: str) -> bool:
        """Whether a part was paid for this purpose."""
        return any(part.purpose.startswith(purpose) for part in self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation(PublicFacts):
    """Accuracies of student and labels, measured on public labels; None if there are none.

    Attributes:
        student_size: Number of points that ``student_accuracy`` was measured on.
        label_size: Number of released labels that ``label_accuracy`` was measured on.
        confusion: Test counts of the student [truth, predicted]; empty if they were not counted.
        examples: Some public points with the labels released for them; empty if the points are no images.
        baselines: Accuracies of models without privacy, which are published for a public benchmark alone.
    """

    student_accuracy: float | None
    student_size: int | None
    label_accuracy: float | None
    label_size: int | None
    confusion: tuple[tuple[int, ...], ...]
    examples: tuple[Example, ...]
    baselines: tuple[Accuracy, ...]

    @property
    def student_share(self) -> Share | None:
        """The student's accuracy on the test points; None if it may not be published or was not measured."""
        return None if self.student_accuracy is None else Share(value=self.student_accuracy, size=self.student_size)

    @property
    def label_share(self) -> Share | None:
        """The accuracy of the released labels; None if their true labels are not known."""
        return None if self.label_accuracy is None else Share(value=self.label_accuracy, size=self.label_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseReport:
    """Everything about a run that may be published.

    Attributes:
        record: Questions, mechanism and released files.
        claim: Guarantee, and the state of the account.
        evaluation: Measured accuracies.
    """

    record: ReleaseRecord
    claim: AccountClaim
    evaluation: Evaluation

    def __post_init__(self) -> None:
        record, claim, evaluation = self.record, self.claim, self.evaluation
        for name, part in (("record", ReleaseRecord), ("claim", AccountClaim), ("evaluation", Evaluation)):
            if type(getattr(self, name)) is not part:
                raise TypeError(f"{name}: {type(getattr(self, name)).__name__} may not enter a released report")
        checks.integer("queries_answered", record.queries_answered, low=0, high=record.queries_asked)
        checks.one_of("noise", record.noise, ("torch", "discrete"))
        if record.chosen_by is not None:
            checks.one_of("chosen_by", record.chosen_by, SELECTION_BASES)
        for name, value in (("student", evaluation.student_accuracy), ("label", evaluation.label_accuracy)):
            if value is not None:
                checks.between(f"{name}_accuracy", value, 0, 1)
        if len(claim.epsilon_curve) not in (0, record.queries_asked):
            problem = f"must have one value per question asked ({record.queries_asked})"
            raise checks.error("epsilon_curve", len(claim.epsilon_curve), problem)

    @property
    def is_free(self) -> bool:
        """Whether this run added nothing to the account."""
        return self.record.reuses_labels and not any(part.is_current for part in self.claim.parts)

    @property
    def files(self) -> dict[str, str]:
        """The files of the release folder: name -> description. Answers that are used again lie in another folder."""
        record = self.record
        names = {"report.html", "summary.json", "privacy.json", "README.md", "SHA256SUMS"}
        if record.method is not None and not record.reuses_labels:
            names |= {"release.json", *record.answer_files}
        names |= {"student.safetensors"} if record.student is not None else set()
        names |= {"encoder/"} if record.includes_encoder else set()
        names |= {"sanitised.json"} if self.claim.has_part("sanitised price") else set()
        return {name: description for name, description in FILES.items() if name in names}

    @property
    def accuracies(self) -> tuple[Accuracy, ...]:
        """All accuracies: of the student, of the labels, and of the baselines."""
        rows, record, evaluation = [], self.record, self.evaluation
        if (share := evaluation.student_share) is not None:
            description = f"{record.student}, on {share.size} test points" if share.size else f"{record.student}"
            rows.append(Accuracy(name="Student", share=share, description=description, is_primary=True))
        if (share := evaluation.label_share) is not None:
            description = f"{record.queries_answered} of {record.queries_asked} questions answered"
            rows.append(Accuracy(name="Released labels", share=share, description=description))
        return (*rows, *evaluation.baselines)

    @property
    def confusion_names(self) -> list[str]:
        """The classes by row (and column) of the confusion matrix."""
        return [self.record.get_class_name(label) for label in range(len(self.evaluation.confusion))]

    @functools.cached_property
    def class_accuracies(self) -> tuple[Accuracy | None, ...]:
        """The student's accuracy on each true class; None if no test point has the class."""
        return tuple(
            Accuracy(name=name, share=Share(value=row[true] / sum(row), size=sum(row)), is_primary=True)
            if any(row)
            else None
            for true, (name, row) in enumerate(zip(self.confusion_names, self.evaluation.confusion, strict=True))
        )

    @property
    def majority_warning(self) -> str | None:
        """A sentence if the student is right less often than the largest class of the test points; else None."""
        confusion = self.evaluation.confusion
        counts, hits = [sum(row) for row in confusion], sum(row[label] for label, row in enumerate(confusion))
        max_count = max(counts, default=0)
        if self.evaluation.student_accuracy is None or hits >= max_count:
            return None
        name, share = self.record.get_class_name(counts.index(max_count)), format_percent(max_count / sum(counts))
        return f"Below the majority class: always saying {name} would be right for {share} of the test points."


def format_route(accountant: str) -> str:
    """Format a route in words: gdp -> 'exact Gaussian accounting (gdp)'; an unknown name stays as it is."""
    return f"{ROUTES[accountant]} ({accountant})" if accountant in ROUTES else accountant


def format_price(epsilon: float | None, route: str, *, missing: str) -> tuple[str, str]:
    """Format an epsilon, rounded up, and its route; ``missing`` and nothing if there is no epsilon."""
    return (missing, "") if epsilon is None else (format_epsilon(epsilon), route)


_RECORDS = (Accuracy, Share, Example, ChargedRelease, MethodDescription, PublicAsset, OwnerFacts, EncoderCard)


def _check_releasable(name: str, value: Any) -> None:
    """Raise TypeError for anything but plain values: private values have types of their own, and stop here."""
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
    elif isinstance(value, _RECORDS):
        for field_ in fields(value):
            _check_releasable(f"{name}.{field_.name}", getattr(value, field_.name))
    else:
        raise TypeError(f"{name}: {type(value).__name__} may not enter a released report (plain values only)")
