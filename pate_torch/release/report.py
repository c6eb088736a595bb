"""The report of a release: every fact that may be published of a run, once. Files, pages and tables lay it out.

Releasable by type: votes, shards and tensors cannot enter it. What only the owner may see is ``PrivateMetrics``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

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

FILES = {
    "report.html": "This report as one page, to be opened in any browser.",
    "summary.json": "The figures, unrounded.",
    "privacy.json": "The privacy statement for machines.",
    "sanitised.json": "The data-dependent price, made private by noise of its own and charged.",
    "release.json": "What was asked, of whom, at what price.",
    "labels.csv": "The questions asked and the labels released; -1 is no answer. With the public points, enough to "
    "train another student: release.json says how they are named (points), or only their positions are told.",
    "first_answers.json": "Noisy class counts that a method bought first, paid for by the same reservation.",
    "cells.csv": "The question in whose cell each public point lies, round by round.",
    "scores.safetensors": "The logits of every public point, round by round, and the last round's linear model.",
    "guide.safetensors": "The student of all rounds but the last, from which the student goes on.",
    "student.safetensors": "The student's weights.",
    "encoder/": "The encoder's files, through which the student sees points: public, and under a license of their own.",
    "README.md": "The model card.",
    "SHA256SUMS": "The hash of each other file: sha256sum -c SHA256SUMS; pate verify does it, and more.",
}
"""What may lie in a release folder: name -> what it is."""

ANSWER_FILES = ("release.json", "labels.csv", "cells.csv", "scores.safetensors", "guide.safetensors")

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
class Accuracy:
    """One measured accuracy.

    Attributes:
        description: What was measured on what.
        is_primary: True for results of this release, False for baselines.
    """

    name: str
    share: Share
    description: str = ""
    is_primary: bool = False


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


@dataclass(frozen=True, kw_only=True)
class Example:
    """A public point with the label released for it.

    Attributes:
        picture: The point as a PNG image, a data URI.
        label: The released label.
        query: The index of the point in the pool.
    """

    picture: str
    label: int
    query: int

    def __post_init__(self) -> None:
        if not self.picture.startswith("data:image/png;base64,"):
            raise checks.error("example.picture", self.picture[:20], "must be a PNG image in a data URI")


@dataclass(frozen=True)
class PublicFacts:
    """The base class of the records of a report: they hold plain finite values, and nothing that is private."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                object.__setattr__(self, item.name, MappingProxyType(dict(value)))
            _check_releasable(item.name, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseRecord(PublicFacts):
    """What was asked of whom, by which mechanism, and what was released.

    Attributes:
        parameters: The parameters of the mechanism.
        sensitivity: How far one unit moves what the mechanism opens: l1, l2, linf in its own numbers (None: no bound,
            or no part of the price), and ``per`` what; empty if it is not known.
        noise: "torch" (floating point) or "discrete".
        declared_size: The publicly declared number of records; None if the plan used none.
        public_share: The share of the owner's file that was made public, as the public points.
        num_teachers: The number of teachers; 0 where no teachers answered (see ``method``).
        teachers_id: The id of the teachers; None if there are none.
        teachers_reusable: True if the trained teachers are stored and can be queried again.
        method: Who answered; None if nobody was asked, and a model was trained on the records themselves.
        rounds: The number of rounds of questions.
        reuses_labels: Whether the labels had been released before.
        answer_files: The files that hold the answers.
        student: What learnt from the answers; None if labels alone were released.
        input_kind: What the student takes, a key of ``INPUT_KINDS``.
        encoder: The frozen encoder whose features everything here was learnt from; None if points are as they are.
        includes_encoder: Whether the files of the encoder lie in the folder.
        assets: Everything public that the release was made with: the public points, encoders.
        owner: What the owner of the data states.
        provenance: Where values come from that are taken to be public: name -> source.
        chosen_by: How the owner says that this release was chosen among several settings (``SELECTION_BASES``); None
            if it is not stated.
        seconds: The time of each stage that may be shown.
        creation_date: A date for people to read.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("num_teachers", self.num_teachers, low=0)
        checks.integer("rounds", self.rounds, low=0)
        checks.integer("queries_asked", self.queries_asked, low=0)
        checks.integer("queries_answered", self.queries_answered, low=0, high=self.queries_asked)
        checks.one_of("noise", self.noise, ("torch", "discrete"))
        checks.one_of("input_kind", self.input_kind, INPUT_KINDS)
        if self.chosen_by is not None:
            checks.one_of("chosen_by", self.chosen_by, SELECTION_BASES)
        checks.boolean("reuses_labels", self.reuses_labels)
        checks.boolean("includes_encoder", self.includes_encoder)
        checks.between("public_share", self.public_share, 0, 1)

    @property
    def audit(self) -> Mapping[str, Any]:
        """The owner's audit if it is of this mechanism; else empty."""
        return self.owner.audit if self.owner.audit.get("mechanism") == self.mechanism else {}

    @property
    def mechanism_words(self) -> str:
        """The mechanism as in 'gaussian (sigma = 40)', to six digits; privacy.json has them all."""
        shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.parameters.items() if v is not None}
        return self.mechanism + (f" ({', '.join(f'{k} = {v}' for k, v in shown.items())})" if shown else "")

    @property
    def input_words(self) -> str:
        """What the student takes, in words."""
        return INPUT_KINDS[self.input_kind]

    def get_class_name(self, label: int) -> str:
        """The name of a class; -1 is no answer."""
        if label < 0:
            return "no answer"
        return self.class_names[label] if label < len(self.class_names) else str(label)


@dataclass(frozen=True, kw_only=True, eq=False)
class AccountClaim(PublicFacts):
    """What the account paid for a release, and what may be claimed of it.

    A claim that is not private holds no epsilon, whatever it is built from: none can be shown.

    Attributes:
        private: Whether the noise behind everything in the folder was secret.
        epsilon: The guarantee of everything in the folder, composed from what was reserved for its ``parts``. Every
            epsilon of a claim is at ``delta``.
        accountant: The route that gave epsilon.
        epsilon_ex_post: What had been spent when the run stopped; it depends on the answers, and is no guarantee.
        parts: What the folder was paid for.
        epsilon_charged: The account's total, from what all releases reserved; None if one of them used seeded noise.
        charged_accountant: The route that gave the total; None if there is no total.
        epsilon_charged_ex_post: What all releases used of the total.
        budget_epsilon: The account's cap.
        other_releases: What else was reserved for these data.
        epsilon_curve: The price of the first q questions, q = 1..Q; empty where questions cost unequally.
        ledger_head: The hash of the newest entry of the ledger.
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
        is_group = self.unit.startswith("group:") and len(self.unit) > len("group:")
        if self.unit not in ("record", LABEL_UNIT) and not is_group:
            raise checks.error("unit", self.unit, f"must be 'record', 'group:<column>' or {LABEL_UNIT!r}")
        epsilon_names = ("epsilon", "epsilon_ex_post", "epsilon_charged", "epsilon_charged_ex_post")
        for name in (*epsilon_names, "budget_epsilon"):
            if getattr(self, name) is not None:
                checks.non_negative(name, getattr(self, name))
        if self.private and self.epsilon is None:
            problem = "must be a number in a private run"
            raise checks.error("epsilon", None, problem, "Without a price nothing is released.")
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
    def setting(self) -> str:
        """The terms that every epsilon of an account shares: all but the route."""
        return f"delta = {format_delta(self.delta)}; neighbors: {self.adjacency_words}; unit: {self.unit}"

    @property
    def terms(self) -> str:
        """The terms without which an epsilon means nothing."""
        return f"{self.setting}; route: {format_route(self.accountant)}"

    def format_with_terms(self, epsilon: float) -> str:
        """An epsilon, rounded up, with its terms."""
        return f"epsilon = {format_epsilon(epsilon)} ({self.terms})"

    def has_part(self, purpose: str) -> bool:
        """Whether something was paid for this purpose."""
        return any(part.purpose.startswith(purpose) for part in self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation(PublicFacts):
    """How good student and labels are, measured on public labels; None where there are none.

    Attributes:
        student_size: The number of points that ``student_accuracy`` was measured on.
        label_size: The number of released labels that ``label_accuracy`` was measured on.
        confusion: The student's test counts [truth, predicted]; empty if they were not counted.
        examples: Some public points with the labels released for them; empty if the points are no images.
        baselines: Accuracies of models without privacy, which are private but for a public benchmark.
    """

    student_accuracy: float | None
    student_size: int | None
    label_accuracy: float | None
    label_size: int | None
    confusion: tuple[tuple[int, ...], ...]
    examples: tuple[Example, ...]
    baselines: tuple[Accuracy, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student_accuracy", "label_accuracy"):
            if getattr(self, name) is not None:
                checks.between(name, getattr(self, name), 0, 1)
        size = len(self.confusion)
        if any(len(row) != size for row in self.confusion):
            raise checks.error("confusion", size, "must be square")

    @property
    def student_share(self) -> Share | None:
        """The student's accuracy on the test points; None if it may not be published, or was not measured."""
        return None if self.student_accuracy is None else Share(value=self.student_accuracy, size=self.student_size)

    @property
    def label_share(self) -> Share | None:
        """The accuracy of the released labels; None if nobody knows the truth."""
        return None if self.label_accuracy is None else Share(value=self.label_accuracy, size=self.label_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseReport:
    """Everything that may be published of a run.

    Attributes:
        record: What was asked and answered.
        claim: What the account paid.
        evaluation: How it was evaluated.
    """

    record: ReleaseRecord
    claim: AccountClaim
    evaluation: Evaluation

    def __post_init__(self) -> None:
        for name, part in (("record", ReleaseRecord), ("claim", AccountClaim), ("evaluation", Evaluation)):
            if type(getattr(self, name)) is not part:
                raise TypeError(f"{name}: {type(getattr(self, name)).__name__} may not enter a released report")
        length, asked = len(self.claim.epsilon_curve), self.record.queries_asked
        if length not in (0, asked):
            raise checks.error("epsilon_curve", length, f"must have one value per question asked ({asked})")
        num_classes, names = len(self.evaluation.confusion), self.record.class_names
        if num_classes and names and len(names) != num_classes:
            raise checks.error("class_names", len(names), f"must have {num_classes} entries")

    @property
    def is_free(self) -> bool:
        """Whether this run added nothing to the account."""
        return self.record.reuses_labels and not any(part.is_current for part in self.claim.parts)

    @property
    def files(self) -> dict[str, str]:
        """The files of the release folder: name -> what it is. Answers that are used again lie where they came out."""
        record = self.record
        answer_files = () if record.reuses_labels or record.method is None else ("release.json", *record.answer_files)
        presence = {
            "student.safetensors": record.student is not None,
            "encoder/": record.includes_encoder,
            "sanitised.json": self.claim.has_part("sanitised price"),
            **{name: name in answer_files for name in ANSWER_FILES},
        }
        return {name: description for name, description in FILES.items() if presence.get(name, True)}

    @property
    def accuracies(self) -> tuple[Accuracy, ...]:
        """All that were measured: the student's, the labels', those to compare with."""
        rows, record, evaluation = [], self.record, self.evaluation
        if evaluation.student_share is not None:
            size = evaluation.student_size
            description = f"{record.student}, on {size} test points" if size else f"{record.student}"
            share = evaluation.student_share
            rows.append(Accuracy(name="Student", share=share, description=description, is_primary=True))
        if evaluation.label_share is not None:
            description = f"{record.queries_answered} of {record.queries_asked} questions answered"
            rows.append(Accuracy(name="Released labels", share=evaluation.label_share, description=description))
        return (*rows, *evaluation.baselines)

    @property
    def class_accuracies(self) -> tuple[Accuracy | None, ...]:
        """The student's accuracy on each true class; None where the test set has none of it."""
        return tuple(
            Accuracy(name=name, share=Share(value=row[true] / sum(row), size=sum(row)), is_primary=True)
            if sum(row)
            else None
            for true, (name, row) in enumerate(zip(self.confusion_names, self.evaluation.confusion, strict=True))
        )

    @property
    def majority_warning(self) -> str | None:
        """A sentence where the student is right less often than the commonest class of the test points; else None."""
        confusion = self.evaluation.confusion
        counts, hits = [sum(row) for row in confusion], sum(row[true] for true, row in enumerate(confusion))
        max_count = max(counts, default=0)
        if self.evaluation.student_accuracy is None or hits >= max_count:
            return None
        name, share = self.record.get_class_name(counts.index(max_count)), max_count / sum(counts)
        return (
            f"Below the majority class: always saying {name} would be right for {format_percent(share)} of the test "
            "points."
        )

    @property
    def confusion_names(self) -> list[str]:
        """The classes by row (and column) of the confusion matrix."""
        return [self.record.get_class_name(label) for label in range(len(self.evaluation.confusion))]


def format_route(accountant: str) -> str:
    """A route in words: gdp -> 'exact Gaussian accounting (gdp)'; an unknown name stays as it is."""
    return f"{ROUTES[accountant]} ({accountant})" if accountant in ROUTES else accountant


_RECORDS = (Accuracy, Share, Example, ChargedRelease, MethodDescription, PublicAsset, OwnerFacts, EncoderCard)


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
    elif isinstance(value, _RECORDS):
        for field_ in fields(value):
            _check_releasable(f"{name}.{field_.name}", getattr(value, field_.name))
    else:
        raise TypeError(f"{name}: {type(value).__name__} may not enter a released report (plain values only)")
