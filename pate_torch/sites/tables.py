"""Tables that can be added up over sites: class sums, gradients, a histogram of cells, and marginal tables.

The joiner writes a public file with everything that all sites must count alike: columns, classes, features, questions.
The round file holds the hash of the public file. Each kind of table states how far one unit can change the table, which
fixes the cost.

- ``class_sums``: the sum of the whitened features of the records of each class. The gradient of a linear softmax model
  with equal weights, the first step of ``method=gradients``, is a function of these sums.
- ``gradients``: class sums in a first round, then the sum of the clipped gradients at the weights of each round.
- ``histogram``: the number of units of each class at each question (``method=reverse_knn``).
- ``marginals``: the number of units with each combination of codes of some columns (``methods.synthetic``).
- ``votes``: the number of teachers that vote for each class at each question (the module ``votes``).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor, nn

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.progress import do_nothing
from pate_torch.methods.base import get_unit_column
from pate_torch.methods.record_method import map_records_batch_invariant
from pate_torch.methods.reverse_knn import CellCounter
from pate_torch.methods.synthetic import SyntheticTable
from pate_torch.privacy import sensitive
from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.partition import select_one_per_unit
from pate_torch.privacy.records import DataSpec, EncoderCard, PrivateRecords
from pate_torch.privacy.schema import make_key
from pate_torch.privacy.whitening import Whitening
from pate_torch.sites import rounds, shares
from pate_torch.sites.charter import Charter, Terms
from pate_torch.sites.points import Encode, check_spec, convert_columns, get_raw_spec
from pate_torch.sites.rounds import MAX_INPUT, Round
from pate_torch.sites.signed import is_integer, is_list_of, is_one_of

COUNT_STEPS = 1 << 28
"""Whole numbers in one unit of a table of counts, so that noise of whole numbers is fine enough for an exact cost."""
RawRows = tuple[np.ndarray | Tensor, np.ndarray, int | None, np.ndarray | None]
"""Points [N, ...], classes [N], the number of classes, and whether each point could be read, bool [N]. The number of
classes is None if every whole number is a class, and the last item is None if all points could be read."""
NUM_VECTORS = {"add_remove": 1, "replace_one": 2}
"""Number of vectors or counts that a unit adds or takes away."""


@dataclass(frozen=True, eq=False, repr=False)
class SiteTable:
    """PRIVATE. Table of whole numbers of the records of one site.

    Attributes:
        numbers: Table without noise, int64.
        sensitivity: Sensitivity of the whole table, in multiples of ``unit``.
        unit: Change of a number of the table that is a change by 1 in ``sensitivity``.
        records: PRIVATE. Records that were counted.
        on_new_head: Function that stores the hash of the newest ledger entry with the teachers, if there are teachers.
    """

    numbers: np.ndarray
    sensitivity: sensitive.Sensitivity
    unit: int
    records: PrivateRecords
    on_new_head: Callable[[str], object] = do_nothing

    def check_sensitivity(self, priced_squared_length: int) -> None:
        """Raise ValueError if one unit can change the table by more than the cost covers."""
        squared_length = round(self.sensitivity.l2**2, 6) * self.unit**2 if self.sensitivity.l2 < math.inf else math.inf
        if not squared_length <= priced_squared_length or not self.sensitivity.linf * self.unit < math.inf:
            problem = "is more than the cost of the round covers"
            raise checks.error("sensitivity", self.sensitivity, problem)


@dataclass(frozen=True, kw_only=True, eq=False)
class TableKind(ABC):
    """Releasable. What is counted in a round, and how; the content of a public file.

    Attributes:
        name: Kind of the table, one of ``rounds.KINDS``.
        unit_length: Whole number in the table that stands for one count, or for the length 1 of a feature vector.
        label: Column with the class of each record. Empty if there is none.
    """

    name: ClassVar[str]
    unit_length: ClassVar[int] = COUNT_STEPS
    label: str = ""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""

    @abstractmethod
    def compute_squared_length(self, adjacency: str) -> int:
        """Compute the square of the L2 sensitivity of the table to one unit at one site, in whole numbers."""

    def compute_events(
        self, charter: Charter, share: Fraction, colluding: int | None = None
    ) -> tuple[PrivacyEvent, ...]:
        """Compute the privacy events of a round, for units with records at M sites, whose changes' lengths add up.

        The noise is that of the shares of all sites but ``colluding``, or all but t of the charter if it is None.
        """
        terms = charter.terms
        honest = len(charter.sites) - (terms.colluding if colluding is None else colluding)
        squared_length = terms.max_sites_per_unit**2 * self.compute_squared_length(terms.adjacency)
        return shares.compute_events(squared_length, math.prod(self.shape), share, honest)

    @abstractmethod
    def count(self, records: PrivateRecords, adjacency: str) -> SiteTable:
        """PRIVATE. Count records, each by its own values and by public values alone."""

    @property
    def encoder(self) -> EncoderCard | None:
        """Description of the encoder of the points. None if points are not encoded."""
        return None

    @property
    def text_column(self) -> str | None:
        """Column of the texts. None if the points are no texts."""
        return None

    @abstractmethod
    def make_points(self, table: Mapping[str, Any]) -> RawRows:
        """PRIVATE. Make the points of the rows of a table, which are not encoded yet, and their classes."""

    @abstractmethod
    def to_content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return facts for JSON, and arrays of float64, from which ``from_content`` makes the kind again."""

    @classmethod
    @abstractmethod
    def from_content(cls, label: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> TableKind:
        """Make the kind of table."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds that are planned together, with equal noise; each is charged by itself."""
        return 1

    @property
    def round_fields(self) -> dict[str, Any]:
        """Fields of ``Round`` that differ between the rounds of this table: "body" and "options"."""
        return {}

    def with_round(self, current_round: Round) -> TableKind:
        """Return this kind with the fields of the round. Raise ValueError if the round has fields of another kind."""
        if len(current_round.body):
            raise checks.error("round", self.name, "has numbers that this kind of table does not read")
        return self

    def compute_bound(self, terms: Terms) -> int:
        """Compute the upper bound on the absolute value of each number of the sum over all sites."""
        return terms.max_records * self.unit_length

    def read_records(self, table: Mapping[str, Any], unit: str, encode: Encode | None = None) -> PrivateRecords:
        """PRIVATE. Convert the rows of ``points.read_columns`` to records, each by its own cells alone."""
        columns, group = dict(table), get_unit_column(unit)
        for name in filter(None, (group, self.label)):
            checks.one_of("data", name, list(columns), "The round asks for this column.")
        unit_ids = columns.pop(group).to_pylist() if group else None
        x, y_N, num_classes, readable_N = self.make_points(columns)
        records = PrivateRecords.from_rows(x, y_N, unit_ids, unit, num_classes=num_classes, is_readable_N=readable_N)
        return records if encode is None else replace(records, x=encode(records.x))

    def to_file(self, charter: Charter, joiner_key: Ed25519PrivateKey) -> bytes:
        """Make the public file, signed by the joiner."""
        facts, arrays = self.to_content()
        content = {
            "kind": self.name,
            "label": self.label,
            "facts": json.dumps(facts, sort_keys=True, allow_nan=False),
            "names": list(arrays),
            "shapes": [list(array.shape) for array in arrays.values()],
        }
        body = b"".join(np.ascontiguousarray(array, dtype="<f8").tobytes() for array in arrays.values())
        return charter.make_file("public", content, joiner_key, body)


def read_public_file(charter: Charter, raw: bytes) -> TableKind:
    """Read a public file and check its signature and its numbers."""
    file = charter.read_file(raw, "public", _PUBLIC_FIELDS, source="")
    content, arrays, start = file.content, {}, 0
    numbers = np.frombuffer(file.body[: len(file.body) // 8 * 8], dtype="<f8")
    if not (np.abs(numbers) <= MAX_INPUT).all():  # which no NaN satisfies
        raise file.make_error("has numbers that are not finite or exceed 2^40", "No site answers such a round.")
    for name, shape in zip(content["names"], content["shapes"], strict=False):
        arrays[name] = numbers[start : start + math.prod(shape)]
        start += math.prod(shape)
        if len(arrays[name]) == math.prod(shape):
            arrays[name] = arrays[name].reshape(shape)
    if start != len(numbers) or len(file.body) % 8:
        raise file.make_error("has another number of numbers than it states")
    try:
        facts = json.loads(content["facts"], parse_constant=_refuse_constant, parse_float=_parse_finite)
        table = KINDS[content["kind"]].from_content(content["label"], facts, arrays)
        for number in (math.prod(table.shape), table.compute_squared_length("add_remove")):
            checks.integer("table", number, low=1)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise file.make_error(f"does not describe a table of the kind {content['kind']} ({reason})") from None
    return table


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        _refuse_constant(text)
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not finite")


@dataclass(frozen=True, kw_only=True, eq=False)
class PointTable(TableKind):
    """Releasable. Base class of the kinds of tables whose records have features and a class.

    Attributes:
        spec: Public facts of the records, with their schema.
    """

    spec: DataSpec

    @property
    def encoder(self) -> EncoderCard | None:
        return self.spec.encoder

    @property
    def text_column(self) -> str | None:
        return get_raw_spec(self.spec).text

    def make_points(self, table: Mapping[str, Any]) -> RawRows:
        index_by_key = {make_key(name): index for index, name in enumerate(self.spec.class_names)}
        label_N = [index_by_key.get(make_key(value), -1) for value in table[self.label].to_pylist()]
        x, is_readable_N = convert_columns(get_raw_spec(self.spec), table)
        return x, np.array(label_N, dtype=np.int64), self.spec.num_classes, is_readable_N


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassSums(PointTable):
    """Releasable. Sums of the whitened features of the records of each class.

    Attributes:
        whitening: Map from features of unit length to whitened features, which are clipped to length 1.
    """

    name = "class_sums"
    unit_length = sensitive.UNIT_NORM
    whitening: Whitening

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whitening.axis_DE.shape[1] + 1, self.spec.num_classes

    def compute_squared_length(self, adjacency: str) -> int:
        """Compute the squared sensitivity: a unit adds a vector of length at most 1, or replaces it by another."""
        return (NUM_VECTORS[adjacency] * self.unit_length) ** 2

    def count(self, records: PrivateRecords, adjacency: str) -> SiteTable:
        records = select_one_per_unit(records, adjacency)
        sums = self._make_sums(records, adjacency)
        return SiteTable(sums.compute_class_sums().numpy(), sums.sensitivity, self.unit_length, records)

    def _make_sums(self, records: PrivateRecords, adjacency: str) -> sensitive.GradientSums:
        z_ND = map_records_batch_invariant(
            lambda feature_BD: sensitive.quantize(self.whitening.whiten_and_clip(feature_BD)).short(),
            nn.Flatten(),
            records,
            self.spec,
            do_nothing,
        )
        return sensitive.GradientSums(
            z_ND=z_ND.reshape(-1, self.shape[0]),
            y_N=records.y,
            z_PD=torch.zeros(0, self.shape[0]),
            feature_PD=torch.zeros(0, self.shape[0] - 1),
            num_classes=self.spec.num_classes,
            sensitivity=sensitive.make_vector_sum_sensitivity(adjacency, math.prod(self.shape)),
            scale=1.0,
        )

    def to_content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        tensors = {name: value.double().numpy() for name, value in self.whitening.to_tensors().items()}
        return {"spec": self.spec.to_dict()}, tensors | {"radius": np.array([self.whitening.radius])}

    @classmethod
    def from_content(cls, label: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> ClassSums:
        center_D, axis_DE = (torch.from_numpy(arrays[name].copy()).float() for name in ("center_D", "axis_DE"))
        spec, radius = DataSpec.from_dict(facts["spec"]), float(arrays["radius"][0])
        if axis_DE.dim() != 2 or center_D.shape != axis_DE.shape[:1]:
            raise ValueError("its center and axes have wrong shapes")
        check_spec(spec, len(center_D))
        checks.positive("radius", radius)
        return cls(label=label, spec=spec, whitening=Whitening(center_D, axis_DE, radius))


CLIP_STEPS = 64
"""Clipping norms are multiples of 1/64, so that class sums times the norm are whole numbers."""
_DESCENT_FACTS = ("steps", "clip_norm", "num_public", "constant")


@dataclass(frozen=True, kw_only=True, eq=False)
class Descent(ClassSums):
    """Releasable. Steps of gradient descent, each of which is a round of its own.

    The first round asks for class sums times the clipping norm, which decide the size of all steps. A later round asks
    for the sum of the clipped gradients at the weights in its round file. One unit changes the sums of every round by a
    vector of length at most the clipping norm, so all rounds have the same noise.

    Attributes:
        steps: Number of rounds.
        clip_norm: Clipping norm of a record's residual e_y - softmax(z W), a multiple of 1/64 of at most 1.
        num_public: Number of public points.
        constant: Mean of the last whitened feature among the public points. The feature is the intercept's 1, clipped.
        weight_DC: Weights at which the gradients are computed, float64. None in the first round.
        step_length: Factor from the sum of gradients over the clipping norm to the change of the weights. 0 in the
            first round.
    """

    name = "gradients"
    steps: int
    clip_norm: float
    num_public: int
    constant: float
    weight_DC: torch.Tensor | None = None
    step_length: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, 1, 1 << 16)
        if not (checks.between("clip", self.clip_norm, 1 / CLIP_STEPS, 1) * CLIP_STEPS).is_integer():
            raise checks.error("clip", self.clip_norm, f"must be one of 1/{CLIP_STEPS}, 2/{CLIP_STEPS}, ..., 1")

    @property
    def num_rounds(self) -> int:
        return self.steps

    @property
    def settings(self) -> tuple[Any, ...]:
        """Settings that two descents under one charter must share to be one descent."""
        return self.label, self.spec.class_names, self.steps, self.clip_norm

    @property
    def round_fields(self) -> dict[str, Any]:
        if self.weight_DC is None:
            return {}
        return {"body": self.weight_DC.numpy().ravel(), "options": {"step_length": repr(self.step_length)}}

    def with_round(self, current_round: Round) -> Descent:
        body = current_round.body
        if not len(body):
            return self
        if len(body) != math.prod(self.shape):
            raise checks.error("round", self.name, f"must hold weights of the shape {self.shape}")
        step_length = float(current_round.options.get("step_length", 0))
        return replace(self, weight_DC=torch.from_numpy(body.copy()).reshape(self.shape), step_length=step_length)

    def compute_squared_length(self, adjacency: str) -> int:
        """Compute the squared sensitivity: a unit adds a vector of length at most ``clip_norm``, or replaces it."""
        return (NUM_VECTORS[adjacency] * round(self.clip_norm * self.unit_length)) ** 2

    def count(self, records: PrivateRecords, adjacency: str) -> SiteTable:
        records = select_one_per_unit(records, adjacency)
        sums = self._make_sums(records, adjacency)
        if self.weight_DC is None:  # multiples of GRID_STEPS, which is a multiple of CLIP_STEPS
            total_DC = sums.compute_class_sums() // CLIP_STEPS * round(self.clip_norm * CLIP_STEPS)
        else:
            total_DC = sums.compute_gradient_sum(self.weight_DC, self.clip_norm)
        return SiteTable(total_DC.numpy(), sums.sensitivity, round(self.clip_norm * self.unit_length), records)

    def to_content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        facts, arrays = super().to_content()
        return facts | {name: getattr(self, name) for name in _DESCENT_FACTS}, arrays

    @classmethod
    def from_content(cls, label: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Descent:
        sums = ClassSums.from_content(label, facts, arrays)
        return cls(**vars(sums), **{name: facts[name] for name in _DESCENT_FACTS})


@dataclass(frozen=True, kw_only=True, eq=False)
class CellCounts(PointTable):
    """Releasable. Number of units of each class whose nearest question is the same, for each question.

    Attributes:
        query_QD: Features of the questions, of length 1, float32 [Q, D].
    """

    name = "histogram"
    query_QD: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.query_QD), self.spec.num_classes

    def compute_squared_length(self, adjacency: str) -> int:
        """Compute the squared sensitivity: a unit changes one count by 1, or two counts if it is replaced."""
        return NUM_VECTORS[adjacency] * COUNT_STEPS**2

    def count(self, records: PrivateRecords, adjacency: str) -> SiteTable:
        sensitivity = sensitive.COUNT_SENSITIVITY[adjacency]
        counter = CellCounter(records, self.spec, nn.Flatten(), self.query_QD, sensitivity)
        cells = counter.select(torch.arange(len(self.query_QD)))
        return SiteTable(cells.counts_QC.long().numpy() * COUNT_STEPS, cells.sensitivity, self.unit_length, records)

    def to_content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"spec": self.spec.to_dict()}, {"query_QD": self.query_QD.double().numpy()}

    @classmethod
    def from_content(cls, label: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> CellCounts:
        spec, query_QD = DataSpec.from_dict(facts["spec"]), torch.from_numpy(arrays["query_QD"].copy()).float()
        if query_QD.dim() != 2:
            raise ValueError("its questions have a wrong shape")
        check_spec(spec, query_QD.shape[1])
        return cls(label=label, spec=spec, query_QD=query_QD)


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginalCounts(TableKind):
    """Releasable. Number of units with each combination of codes of some columns.

    Attributes:
        method: Settings of the synthetic table: the domain, and the order of the tables.
    """

    name = "marginals"
    method: SyntheticTable

    @property
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """Columns of each table."""
        assert self.method.order is not None
        return self.method.list_cliques(self.method.order)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.method.count_cells(self.cliques),)

    def compute_squared_length(self, adjacency: str) -> int:
        """Compute the squared sensitivity: a unit changes one count of each table, or two counts if it is replaced."""
        return NUM_VECTORS[adjacency] * len(self.cliques) * COUNT_STEPS**2

    def make_points(self, table: Mapping[str, Any]) -> RawRows:
        code_NJ = self.method.domain.encode(table)
        return code_NJ.astype(np.float32), code_NJ[:, self.method.target_index], None, None

    def count(self, records: PrivateRecords, adjacency: str) -> SiteTable:
        records = select_one_per_unit(records, adjacency)
        sizes = self.method.domain.sizes
        tables = sensitive.MarginalTables.from_units(records.x.long(), sizes, self.cliques, adjacency)
        return SiteTable(tables.counts_M.long().numpy() * COUNT_STEPS, tables.sensitivity, self.unit_length, records)

    def to_content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"domain": self.method.domain.to_dict(), "order": self.method.order}, {}

    @classmethod
    def from_content(cls, label: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> MarginalCounts:
        order = checks.integer("order", facts["order"], 1, 3)
        table = cls(label=label, method=SyntheticTable(domain=TableDomain.from_dict(facts["domain"]), order=order))
        if table.shape[0] > rounds.MAX_NUMBERS:
            raise ValueError(f"its tables have more than {rounds.MAX_NUMBERS:,} counts")
        return table


KINDS: dict[str, type[TableKind]] = {kind.name: kind for kind in (ClassSums, Descent, CellCounts, MarginalCounts)}
"""Name of a kind -> class. The module ``votes`` adds its kind."""
_is_any_text = lambda value: isinstance(value, str)  # noqa: E731
_PUBLIC_FIELDS = {
    "kind": is_one_of(*rounds.KINDS),
    "label": _is_any_text,
    "facts": _is_any_text,
    "names": is_list_of(_is_any_text, high=8),
    "shapes": is_list_of(is_list_of(is_integer(1, rounds.MAX_NUMBERS), 1, 2), high=8),
}
