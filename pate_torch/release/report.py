"""The report of a release: all facts about a run that may be published, in three records.

A report holds plain values only and refuses votes, shards and tensors. ``owner_metrics.PrivateMetrics`` holds the facts
that only the owner of the data may see.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pate_torch.core import checks
from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.methods.base import MethodDescription, format_one_unit, get_unit_column
from pate_torch.privacy.accounts import PURPOSE_TEST
from pate_torch.privacy.records import LABEL_UNIT, SELECTION_BASES, EncoderCard, PublicAsset
from pate_torch.release.owner_file import OwnerFacts, PicklableFacts
from pate_torch.students.private_test import PrivateTest

Scalar = bool | int | float | str | None

ROUTES = {
    "gdp": "exact Gaussian accounting",
    "rdp": "Rényi accounting",
    "pld": "privacy loss distributions",
    "zcdp": "zero-concentrated accounting",
    "pure": "pure composition",
    "none": "nothing was released",
    "delta": "only delta is charged, as the probability of a failure",
    "cap": "the account's cap, enforced by its filter",
}

FILES = {
    "report.html": "This report as one page, to be opened in any browser.",
    "summary.json": "The figures, unrounded.",
    "privacy.json": "The privacy statement for machines.",
    "private_test.json": "Noisy numbers of correct and wrong predictions on held-out units, by class; charged.",
    "release.json": "The queries, the method that answered them, and the cost.",
    "labels.csv": "The queries and the released labels; -1 means no answer. Another student can be trained on these "
    "labels and the public points. If release.json has the key points, it says how to find the points by name.",
    "first_answers.json": "Noisy class counts of the method's first stage and a noisy share of values outside the "
    "public range, which the same reservation paid for.",
    "cells.csv": "The query to whose cell each public point belongs, in each round.",
    "scores.safetensors": "The logits of every public point in each round, and the linear model of the last round.",
    "guide.safetensors": "The student of all rounds but the last; the training of the final student starts from it.",
    "student.safetensors": "The student's weights.",
    "synthetic.csv": "The synthetic rows. Empty cells are missing values, and other stands for values not declared.",
    "synthesizer.safetensors": "The model of the synthetic table: its columns, the noisy tables, and the distribution "
    "fitted to them. Further rows can be drawn from it at no further privacy cost.",
    "encoder/": "The files of the public encoder that computes the student's input. Their license is the encoder's.",
    "charter.json": "Who took part, with which keys and on which terms; signed.",
    "round-*.json": "What the sites were asked in each round of the charter, and their shares of noise; signed.",
    "round-*.public": "What each round counted: columns, classes, features and questions; signed.",
    "sum-*.json": "The noisy sums over all sites; signed.",
    "README.md": "The model card.",
    "SHA256SUMS": "The hashes of all other files, for sha256sum -c SHA256SUMS. pate verify also checks the claims.",
}
"""The files that a release folder may hold: name -> description."""

INPUT_KINDS = {
    "rows": "an array [N, features]",
    "table": "a DataFrame with the columns of the data",
    "text": "a list of texts",
    "images": "uint8 images [N, channels, height, width]",
}
"""Kind of a student's input (``DataSpec.kind``) -> description."""


def format_percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage: 0.974 -> '97.4 %'."""
    return f"{100 * value:.{digits}f} %"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share from 0 to 1 of ``size`` points; ``size`` is None if the number of points is not known."""

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
        return "" if self.interval is None else "{:.1f} to {:.1f}".format(*(100 * end for end in self.interval))

    def __str__(self) -> str:
        return format_percent(self.value) + (f" ({self.interval_words})" if self.size else "")


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One measured accuracy.

    Attributes:
        description: Measured model, or points on which the accuracy was measured.
        is_primary: True for results of this release, False for baselines.
    """

    name: str
    share: Share
    description: str = ""
    is_primary: bool = False


@dataclass(frozen=True, kw_only=True)
class ChargedRelease:
    """One reservation of the account, for a release in this folder or elsewhere.

    Attributes:
        epsilon: Guarantee of this reservation alone at the terms of the account; None if no guarantee holds.
        accountant: Route by which epsilon was computed.
        is_current: True if the reporting run made this reservation.
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
        return self.release_id, *format_cost(self.epsilon, format_route(self.accountant), missing="none"), self.purpose

    def to_dict(self) -> dict[str, Any]:
        facts = {"release_id": self.release_id, "what": self.purpose, "epsilon": self.epsilon}
        return facts | {"route": self.accountant or None, "events": json.loads(self.events)}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A public point with its released label (-1 means no answer).

    Attributes:
        picture: PNG image of the point, as a data URI.
        query: Index of the point in the pool.
    """

    picture: str
    label: int
    query: int


@dataclass(frozen=True, kw_only=True)
class ColumnReport:
    """Distribution of one column.

    Attributes:
        codes: Text of each code.
        shares: Share of each code among the synthetic rows.
        noisy_shares: Noisy share of the units with each code.
        error: Standard deviation of the noise of a noisy share.
    """

    name: str
    codes: tuple[str, ...]
    shares: tuple[float, ...]
    noisy_shares: tuple[float, ...]
    error: float


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """What a report shows of a synthetic table.

    Attributes:
        associations: Cramer's V of each pair of columns among the synthetic rows without rare values, 0 for independent
            columns.
    """

    num_rows: int
    columns: tuple[ColumnReport, ...]
    associations: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class PublicFacts(PicklableFacts):
    """Base class of the records of a report. Raises TypeError for a field that is no plain value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in fields(self):
            _check_releasable(item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseRecord(PublicFacts):
    """The facts on the data, the mechanism, the queries and the released files.

    Attributes:
        sensitivity: Largest change, by one unit, of the value that noise is added to: the norms l1, l2 and linf (None
            if a norm is unbounded or does not enter the cost), and ``per``, which says whether the change is that of a
            query, a round or a step. Empty if not known.
        noise: "torch" (floating point) or "discrete".
        declared_size: Publicly declared number of records; None if the plan used no declared number.
        public_share: Share of the owner's file that became public points.
        num_teachers: Number K of teachers; 0 if no teachers answered (see ``method``).
        teachers_reusable: True if the trained teachers are stored and can be queried again.
        method: Description of the method that answered; None if a model was trained on the private records.
        reuses_labels: True if the labels are those of an earlier release.
        student: Kind of the student; None if only labels were released.
        input_kind: Kind of the student's input, a key of ``INPUT_KINDS``.
        encoder: Card of the frozen encoder that computed the features; None if there is no encoder.
        assets: Public points, encoders and other public data that the release depends on.
        provenance: Sources of the values that are assumed to be public: name -> source.
        chosen_by: How the owner chose this release among several settings, one of ``SELECTION_BASES``; None if it is
            not stated.
        seconds: Time of each stage whose time may be published, in seconds.
        model: What the method says of the released model (``PrivateMethod.describe_model``); empty if it says nothing.
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
    model: Mapping[str, Scalar]

    @property
    def audit(self) -> Mapping[str, Any]:
        """The owner's audit; empty if the owner did not audit this mechanism."""
        return self.owner.audit if self.owner.audit.get("mechanism") == self.mechanism else {}

    @property
    def mechanism_words(self) -> str:
        """The mechanism with its parameters, as in 'gaussian (sigma = 40)'."""
        values = self.parameter_words
        return self.mechanism + (f" ({', '.join(f'{k} = {v}' for k, v in values.items())})" if values else "")

    @property
    def parameter_words(self) -> dict[str, str]:
        return {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in self.parameters.items() if v is not None}

    def get_class_name(self, label: int) -> str:
        if label < 0:
            return "no answer"
        return self.class_names[label] if label < len(self.class_names) else str(label)


@dataclass(frozen=True, kw_only=True, eq=False)
class AccountClaim(PublicFacts):
    """The guarantee that may be claimed for a release folder, and the state of its account.

    Every epsilon holds at ``delta``. If the noise was not secret, every epsilon is None.

    Attributes:
        private: True if all noise behind the files of the folder was secret.
        epsilon: Guarantee of all files in the folder, composed from the reserved events of ``parts``.
        accountant: Route by which epsilon was computed.
        epsilon_ex_post: Epsilon that was spent when the run stopped. It depends on the answers and is no guarantee.
        parts: Reservations that paid for the folder.
        epsilon_charged: Total of all reservations of the account; None if a release used seeded noise.
        charged_accountant: Route by which the total was computed; None if there is no total.
        epsilon_charged_ex_post: Part of the total that all releases spent.
        budget_epsilon: Cap of the account; None if the account has no cap.
        other_releases: Reservations of the account that paid for releases outside the folder.
        epsilon_curve: Cost of the first q queries, q = 1..Q; empty if the queries have different costs.
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
            checks.optional(checks.non_negative, name, getattr(self, name))
        if self.private and self.epsilon is None:
            raise checks.error("epsilon", None, "must be a number in a private run")
        # Costs are accurate to nine digits, so a decrease below the tolerance is a rounding error.
        if any(later < earlier * (1 - 1e-6) for earlier, later in itertools.pairwise(self.epsilon_curve)):
            raise checks.error("epsilon_curve", "decreasing", "must not decrease: more queries never cost less")
        if not self.private:
            for name in epsilon_names:
                object.__setattr__(self, name, None)
            object.__setattr__(self, "epsilon_curve", ())
            for name in ("parts", "other_releases"):
                parts = tuple(replace(part, epsilon=None, events="[]") for part in getattr(self, name))
                object.__setattr__(self, name, parts)

    @property
    def unit_words(self) -> str:
        return format_one_unit(self.unit)

    @functools.cached_property
    def terms(self) -> dict[str, str]:
        """The terms that every epsilon is stated with: name -> value."""
        verb = "add or remove {}" if self.adjacency == "add_remove" else "replace {} by any other"
        return {
            "delta": format_delta(self.delta),
            "neighbors": f"{verb.format(self.unit_words)} ({self.adjacency})",
            "privacy unit": self.unit,
            "accounting route": format_route(self.accountant),
        }

    @property
    def setting(self) -> str:
        """The terms that all epsilons of an account share: delta, adjacency and unit."""
        return f"delta = {self.terms['delta']}; neighbors: {self.terms['neighbors']}; unit: {self.unit}"

    def format_with_terms(self, epsilon: float) -> str:
        """Format an epsilon, rounded up, with its terms."""
        return f"epsilon = {format_epsilon(epsilon)} ({self.setting}; route: {self.terms['accounting route']})"

    def has_part(self, purpose: str) -> bool:
        return any(part.purpose.startswith(purpose) for part in self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation(PublicFacts):
    """The accuracies of student and labels, measured on public labels or by a private test; None if not measured.

    Attributes:
        student_size: Number of test points for ``student_accuracy``.
        label_size: Number of released labels for ``label_accuracy``.
        confusion: Confusion counts of the student on the test points, [truth, predicted]; empty if not counted.
        examples: Some public points with their released labels; empty if the points are not images.
        baselines: Accuracies of models without privacy, which are published for public benchmarks only.
        private_test: Noisy result of the student on held-out units.
    """

    student_accuracy: float | None
    student_size: int | None
    label_accuracy: float | None
    label_size: int | None
    confusion: tuple[tuple[int, ...], ...]
    examples: tuple[Example, ...]
    baselines: tuple[Accuracy, ...]
    private_test: PrivateTest | None = None

    @property
    def student_share(self) -> Share | None:
        return None if self.student_accuracy is None else Share(value=self.student_accuracy, size=self.student_size)

    @property
    def label_share(self) -> Share | None:
        return None if self.label_accuracy is None else Share(value=self.label_accuracy, size=self.label_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseReport:
    """Everything about a run that may be published.

    Attributes:
        record: Queries, mechanism and released files.
        claim: Guarantee, and the state of the account.
        evaluation: Measured accuracies.
        table: Distributions and associations of a synthetic table; None for another release.
        trust: Whom the guarantee of several sites trusts: the key "trust" of privacy.json without its words. None if
            the trust model is central.
    """

    record: ReleaseRecord
    claim: AccountClaim
    evaluation: Evaluation
    table: TableReport | None = None
    trust: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        record, claim, evaluation = self.record, self.claim, self.evaluation
        for name, part in (("record", ReleaseRecord), ("claim", AccountClaim), ("evaluation", Evaluation)):
            if type(getattr(self, name)) is not part:
                raise TypeError(f"{name}: {type(getattr(self, name)).__name__} may not enter a released report")
        _check_releasable("table", self.table)
        _check_releasable("trust", self.trust)
        checks.integer("queries_answered", record.queries_answered, low=0, high=record.queries_asked)
        checks.one_of("noise", record.noise, ("torch", "discrete"))
        checks.optional(checks.one_of, "chosen_by", record.chosen_by, SELECTION_BASES)
        checks.optional(checks.between, "student_accuracy", evaluation.student_accuracy, 0, 1)
        checks.optional(checks.between, "label_accuracy", evaluation.label_accuracy, 0, 1)
        if len(claim.epsilon_curve) not in (0, record.queries_asked):
            problem = f"must have one value per query asked ({record.queries_asked})"
            raise checks.error("epsilon_curve", len(claim.epsilon_curve), problem)

    @property
    def is_free(self) -> bool:
        """True if this run charged nothing to the account."""
        return self.record.reuses_labels and not any(part.is_current for part in self.claim.parts)

    @property
    def files(self) -> dict[str, str]:
        """The files of the release folder: name -> description. Reused labels stay in the folder of their release."""
        record = self.record
        names = {"report.html", "summary.json", "privacy.json", "README.md", "SHA256SUMS"}
        if self.table is not None:
            names |= {"synthesizer.safetensors", "synthetic.csv", *record.answer_files}
        elif record.method is not None and not record.reuses_labels:
            names |= {"release.json", *record.answer_files}
        names |= {"student.safetensors"} if record.student is not None else set()
        names |= {"charter.json", "round-*.json", "round-*.public", "sum-*.json"} if self.trust is not None else set()
        names |= {"encoder/"} if record.includes_encoder else set()
        names |= {"private_test.json"} if self.claim.has_part(PURPOSE_TEST) else set()
        return {name: description for name, description in FILES.items() if name in names}

    @property
    def accuracies(self) -> tuple[Accuracy, ...]:
        rows, record, evaluation = [], self.record, self.evaluation
        if (share := evaluation.student_share) is not None:
            description = f"{record.student}, on {share.size} test points" if share.size else f"{record.student}"
            rows.append(Accuracy(name="Student", share=share, description=description, is_primary=True))
        if (share := evaluation.label_share) is not None:
            description = f"{record.queries_answered} of {record.queries_asked} queries answered"
            rows.append(Accuracy(name="Released labels", share=share, description=description, is_primary=True))
        return (*rows, *evaluation.baselines)

    @property
    def confusion_names(self) -> list[str]:
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
        """A warning that the student is worse than the majority class of the test points; None if it is not worse."""
        confusion = self.evaluation.confusion
        counts, hits = [sum(row) for row in confusion], sum(row[label] for label, row in enumerate(confusion))
        max_count = max(counts, default=0)
        if self.evaluation.student_accuracy is None or hits >= max_count:
            return None
        name, share = self.record.get_class_name(counts.index(max_count)), format_percent(max_count / sum(counts))
        return (
            f"Below the majority class: the constant prediction {name} has an accuracy of {share} on the test points."
        )


def format_route(accountant: str) -> str:
    """Format a route with its description, as in 'exact Gaussian accounting (gdp)'; an unknown route is unchanged."""
    return f"{ROUTES[accountant]} ({accountant})" if accountant in ROUTES else accountant


def format_cost(epsilon: float | None, route: str, *, missing: str) -> tuple[str, str]:
    """Format an epsilon, rounded up, and its route; ``missing`` and an empty string if epsilon is None."""
    return (missing, "") if epsilon is None else (format_epsilon(epsilon), route)


_RECORDS = (
    *(Accuracy, Share, Example, ChargedRelease, TableReport, ColumnReport),
    *(MethodDescription, PublicAsset, OwnerFacts, EncoderCard, PrivateTest),
)


def _check_releasable(name: str, value: Any) -> None:
    """Raise TypeError for a value that is not plain. Private values have special types, so they are refused."""
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
