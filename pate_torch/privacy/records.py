"""Value types of the pipeline, in the order the data flow; private ones never show their content.

Shape letters, used in names (all of them in NOTATION.md): N private records, K teachers, S capacity of a shard, P
public points, Q questions, R rounds, C classes, D features, B batch. ``votes_QC`` is a [Q, C] tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.privacy import unit_ids as naming
from pate_torch.privacy.schema import TableSchema
from pate_torch.privacy.unit_ids import UnitIds

NO_ANSWER = -1
MAX_BATCH_ELEMENTS = 1 << 26
"""Numbers that a point, or a batch of points for an encoder, may have: what a file asks for is held to that."""
ENCODER_OPTION_CHECKS: dict[str, Callable[[str, Any], Any] | None] = {
    **dict.fromkeys(("batch_size", "max_length", "size"), functools.partial(checks.integer, low=1)),
    **dict.fromkeys(("special_tokens", "headless"), checks.boolean),
    **{"pooling": checks.nonempty_string, "mean": None, "std": None},
}
"""What may decide an encoder's features besides its files: name -> its check."""
ADJACENCIES = ("add_remove", "replace_one")
OPTIONAL_SPEC_FIELDS = ("schema", "resize", "text", "encoder")
"""Fields of a ``DataSpec`` that its plain data hold only for points of some kinds."""
UNKNOWN_CLASS, NOT_FINITE = "of no known class", "with missing or infinite numbers"
NO_TEXT, UNREADABLE_POINT = "without a text", "that could not be read"
"""Why a private record cannot be used."""
LABEL_UNIT = "label of one record"
"""The privacy unit where features are public and only labels are private."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Public facts about a data set, fixed before any record is read (or read from its public part).

    Attributes:
        name: Declared name.
        num_classes: Number C of classes.
        input_shape: Shape of a point.
        class_names: One name for each class.
        mean: Normalization constants per channel (images, after x/255) or per feature; never statistics of private
            records.
        std: Likewise.
        benchmark: A public benchmark, whose private-side accuracies may be shown.
        nominal_size: Publicly declared approximate number of private records, or None.
        schema: How a table becomes rows like these; None: they come from no table.
        resize: How images of other sizes become these ("bilinear"); None: they have this size.
        text: The column of a table that holds the texts which points are (``core.texts``); None: points are no texts.
        encoder: Which frozen encoder points come from; None: they are as the data have them.
    """

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    benchmark: bool = False
    nominal_size: int | None = None
    schema: TableSchema | None = None
    resize: str | None = None
    text: str | None = None
    encoder: EncoderCard | None = None

    def __post_init__(self) -> None:
        checks.integer("num_classes", self.num_classes, low=2, fix="A vote needs at least two classes.")
        if len(self.class_names) != self.num_classes:
            raise checks.error("class_names", self.class_names, f"must have {self.num_classes} entries")
        if len(self.mean) != len(self.std):
            raise checks.error("std", self.std, "must have as many entries as mean")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; without what points of this kind do not have."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        optional_facts = {name: plain.pop(name) for name in OPTIONAL_SPEC_FIELDS}
        plain |= {
            name: getattr(value, "to_dict", lambda v=value: v)() for name, value in optional_facts.items() if value
        }
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> DataSpec:
        """Inverse of ``to_dict``, of values that went through JSON too: the one gate for facts from a stranger's file.

        Raises:
            ValueError: A field is missing, unknown, of another type, or does not fit the others.
        """
        facts = dict(checks.mapping("spec", plain, fields(cls)))
        if missing := [field.name for field in fields(cls) if field.name not in {*facts, *OPTIONAL_SPEC_FIELDS}]:
            raise checks.error("spec", ", ".join(missing), "is missing")
        check_by_key: dict[str, Callable[[str, Any], Any]] = {
            "input_shape": checks.integer,
            "class_names": checks.nonempty_string,
        }
        for key, check in (check_by_key | {"mean": checks.number, "std": checks.number}).items():
            facts[key] = tuple(checks.collection(key, facts[key]))
            for value in facts[key]:
                check(key, value)
        shape, num_constants = facts["input_shape"], len(facts["mean"])
        if not shape or min(shape) < 1 or math.prod(shape) > MAX_BATCH_ELEMENTS or num_constants not in (1, shape[0]):
            message = (
                f"must be positive, of {MAX_BATCH_ELEMENTS} numbers at most,"
                " with as many means as its first axis, or one"
            )
            raise checks.error("input_shape", shape, message)
        for key in ("name", "resize", "text"):
            if key == "name" or facts.get(key) is not None:
                checks.nonempty_string(key, facts.get(key))
        checks.boolean("benchmark", facts["benchmark"])
        if facts["nominal_size"] is not None:
            checks.number("nominal_size", facts["nominal_size"])
        if "schema" in facts:
            facts["schema"] = TableSchema.from_dict(facts["schema"])
            if "encoder" not in facts and shape != (facts["schema"].num_features,):
                raise checks.error("input_shape", shape, "must be as many features as its schema has")
        if "encoder" in facts:
            facts["encoder"] = EncoderCard.from_dict(facts["encoder"])
        return cls(**facts)

    @property
    def is_image(self) -> bool:
        """Whether points are images."""
        return len(self.input_shape) == 3

    @property
    def kind(self) -> str:
        """What points are: "images", "text", records of a "table" that there is a schema of, or "rows" of numbers."""
        if self.encoder is not None and self.encoder.points is not None:
            return self.encoder.points.kind
        return "images" if self.is_image else "text" if self.text else "rows" if self.schema is None else "table"

    def normalize(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 images [..., Ch, H, W] or feature rows [..., D] -> normalized floats, by constants only."""
        mean, std = self.get_constants(dtype, x.device)
        x = x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype)
        return (x - mean) / std

    def get_constants(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, shaped to normalize with. To be read only: all who ask share them."""
        shape = (-1, 1, 1) if self.is_image else (-1,)
        return _make_constant_tensor(tuple(self.mean), shape, dtype, device), _make_constant_tensor(
            tuple(self.std), shape, dtype, device
        )


@dataclass(frozen=True, kw_only=True)
class EncoderCard:
    """Releasable. A frozen encoder, by name and hash: what turned points into features, and what is known of it.

    Attributes:
        name: As its makers, or the owner of the data, call it.
        kind: "torch" (a module), "onnx", "static" (a table of token vectors), or "given" (features came as data).
        sha256: Of the weights' file, or, of a module that brings its own, of its tensors; None: nobody said.
        file: Name of the weights' file.
        tokenizer_sha256: Of the tokenizer's file.
        module: Class of the module.
        options: What else decides the features: how long texts may be, what size images get, how tokens are pooled.
        license: Under which it may be used and passed on, as declared.
        trained_on: As declared.
        disjoint: Whether the owner knows that no private record was among what it was trained on.
        points: What it takes; None: features came as data.
    """

    name: str
    kind: str
    sha256: str | None = None
    file: str | None = None
    tokenizer_sha256: str | None = None
    module: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    license: str | None = None
    trained_on: str | None = None
    disjoint: bool = False
    points: DataSpec | None = None

    def __post_init__(self) -> None:
        checks.nonempty_string("features.name", self.name)
        checks.one_of("kind", self.kind, ("torch", "onnx", "static", "given"))
        checks.boolean("features.disjoint", self.disjoint)
        for key in ("sha256", "file", "tokenizer_sha256", "module", "license", "trained_on"):
            if getattr(self, key) is not None:
                checks.nonempty_string(f"features.{key}", getattr(self, key))
        if self.file is not None and (self.file in (".", "..") or set(self.file) & set("/\\\0")):
            raise checks.error("encoder.file", self.file, "must be the plain name of a file beside the student")
        options = checks.mapping("encoder.options", self.options)
        for key, value in options.items():
            checks.one_of("encoder option", key, ENCODER_OPTION_CHECKS)
            check = ENCODER_OPTION_CHECKS[key]
            if check is not None and value is not None:
                check(f"encoder.options.{key}", value)
            elif check is None:
                [checks.number(f"encoder.options.{key}", number) for number in checks.collection(key, value or ())]
        size, batch = 1 if self.points is None else math.prod(self.points.input_shape), options.get("batch_size") or 1
        if batch * max(size, options.get("max_length") or 1, (options.get("size") or 1) ** 2) > MAX_BATCH_ELEMENTS:
            fix = "Take a smaller one."
            raise checks.error(
                "features.batch_size", batch, f"makes batches of more than {MAX_BATCH_ELEMENTS} numbers", fix
            )

    @property
    def card_without_points(self) -> EncoderCard:
        """What is said of it beside the data, which speak for themselves."""
        return replace(self, points=None)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the features of a point: two encoders that agree in it give the same, but for rounding."""
        plain = {name: getattr(self, name) for name in ("kind", "sha256", "tokenizer_sha256", "module")}
        return plain | {"options": dict(self.options)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; without what is not known."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain |= {"options": dict(self.options), "points": None if self.points is None else self.points.to_dict()}
        return {key: value for key, value in plain.items() if value is not None}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> EncoderCard:
        """Inverse of ``to_dict``, of values that went through JSON too. ValueError: they are no card."""
        points = checks.mapping("encoder", plain, fields(cls)).get("points")
        facts = {"name": None, "kind": None, **plain}
        return cls(**{**facts, "points": None if points is None else DataSpec.from_dict(points)})


@functools.lru_cache(maxsize=32)  # copied to a device once, not at every step
def _make_constant_tensor(
    values: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(shape)


@dataclass(frozen=True, eq=False, repr=False)
class PrivateRecords:
    """PRIVATE. Labeled records; ``from_rows`` makes them of raw rows, and nothing else does.

    Attributes:
        x: uint8 images [N, Ch, H, W], uint8 texts [N, L] (``core.texts``) or float32 rows [N, D].
        y: int64 [N] in 0..C-1.
        unit_id: The stable name of the privacy unit that each record belongs to, [N], fixed when the data are loaded,
            before anything is removed.
        unit: What the unit is ("record", "group:<column>" or LABEL_UNIT).
        origin: The points that ``x`` was made of by an encoder: the same records through another are known again by
            them. None: ``x`` itself, or the points as they were are not kept.
        usable_N: bool [N], whether a record can be used (``units.drop_unusable``). One that cannot has class 0,
            and a fixed public filler where its point is the reason. None: every record can.
        num_unusable_by_reason: How many of the rows cannot be used, by the reason, for the owner.
    """

    x: Tensor
    y: Tensor
    unit_id: UnitIds
    unit: str = "record"
    origin: Tensor | None = None
    usable_N: Tensor | None = None
    num_unusable_by_reason: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (len(self.x) == len(self.y) == len(self.unit_id)):
            raise ValueError("private data: x, y and unit_id must have equal lengths")
        if self.unit not in ("record", LABEL_UNIT) and not (self.unit.startswith("group:") and self.unit != "group:"):
            raise checks.error("unit", self.unit, f"must be 'record', 'group:<what>' or {LABEL_UNIT!r}")
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise ValueError("private data: y must be a 1-D int64 tensor")
        if not isinstance(self.unit_id, UnitIds) or self.unit_id.dtype.kind != "U":
            problem = "must be names that pate_torch.privacy.unit_ids has made, one record at a time"
            raise checks.error("unit_id", type(self.unit_id).__name__, problem, "Use PrivateRecords.from_rows.")

    @classmethod
    def from_rows(
        cls,
        x: Tensor | np.ndarray,
        y: Any,
        unit_ids: Any = None,
        unit: str = "record",
        *,
        num_classes: int | None = None,
        is_readable_N: np.ndarray | None = None,
        key: str = "unit_id",
    ) -> PrivateRecords:
        """Make records of raw rows.

        A row that cannot be used (``find_unusable_rows``) stays in its place, marked, with class 0 and a fixed filler
        as its point: a valid record, as far from the row as any other.

        Guarantee: what becomes of a row is a function of this row, ``unit`` and ``num_classes``, and of no other row:
        its point, its class, its unit's name and whether it can be used.

        Args:
            x: Points [N, ...]: numbers become float32, and uint8 stays.
            y: Labels [N], of any type: integers in 0..C-1, others cannot be used.
            unit_ids: The id of each row's unit [N] (``unit_ids.parse_unit_ids``). None: a hash of the row's content.
            unit: "record", "group:<what>" or LABEL_UNIT.
            num_classes: Number C of classes; None: any.
            is_readable_N: Whether the reader could read a row's point, bool [N]; None: it could read all.
            key: The argument or setting that names the unit ids, for messages.

        Raises:
            ValueError: The id of a unit is missing or ambiguous; x, y and ids are no rows of one number.
        """
        x, y = convert_points(x), convert_labels(y)
        if y.shape != x.shape[:1]:
            raise checks.error("y", y.dtype, "must be integers, one for each point")
        unusable_by_reason = find_unusable_rows(x, y, num_classes, is_readable_N)
        num_unusable_by_reason = {reason: int(rows_N.sum()) for reason, rows_N in unusable_by_reason.items()}
        unusable_N = find_any(len(y), unusable_by_reason.values())
        no_point_N = unusable_N & ~unusable_by_reason.get(UNKNOWN_CLASS, torch.zeros_like(unusable_N))
        if bool(no_point_N.any()):
            x = x.clone()
            x[no_point_N] = _make_filler_point(x)
        y = torch.where(unusable_N, 0, y)
        if unit_ids is not None:
            names = naming.parse_unit_ids(key, unit_ids, len(y))
        elif unit == "record":
            pairs = zip(x.numpy(), y.tolist(), strict=True)
            names = naming.make_content_ids((point.tobytes(), str(label).encode()) for point, label in pairs)
        else:
            raise checks.error(key, None, f"must name the unit of every record where it is {unit}")
        usable_N = ~unusable_N if num_unusable_by_reason else None
        return cls(x, y, names, unit, usable_N=usable_N, num_unusable_by_reason=num_unusable_by_reason)

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return "PrivateRecords(content withheld)"


def find_unusable_rows(
    x: Tensor, y: Tensor, num_classes: int | None = None, is_readable_N: np.ndarray | None = None
) -> dict[str, Tensor]:
    """PRIVATE. Which rows cannot be used, bool [N], by the reason; reasons that no row has are left out.

    Args:
        x: Points, as ``convert_points`` gives them.
        y: Labels, as ``convert_labels`` gives them.
        num_classes: Number C of classes; None: any.
        is_readable_N: Whether the reader could read a row's point; None: it could read all.
    """
    unreadable_N = find_any(len(x), [] if is_readable_N is None else [~torch.from_numpy(is_readable_N)])
    rows_by_reason = {UNREADABLE_POINT: unreadable_N}
    if x.dtype == torch.float32:
        rows_by_reason[NOT_FINITE] = ~x.flatten(1).isfinite().all(1) & ~unreadable_N
    elif x.dim() == 2:  # a text ends at its first zero
        rows_by_reason[NO_TEXT] = (x[:, 0] == 0) & ~unreadable_N
    is_class_N = (y >= 0) if num_classes is None else (y >= 0) & (y < num_classes)
    rows_by_reason[UNKNOWN_CLASS] = ~is_class_N & ~find_any(len(x), rows_by_reason.values())
    return {reason: rows_N for reason, rows_N in rows_by_reason.items() if bool(rows_N.any())}


def find_any(count: int, masks: Iterable[Tensor]) -> Tensor:
    """Which of ``count`` rows at least one mask marks, bool [count]."""
    return torch.stack([torch.zeros(count, dtype=torch.bool), *masks]).any(0)


def convert_points(x: Any) -> Tensor:
    """Points as uint8, where they are uint8, or else as float32: cell by cell, NaN for a cell that is no number."""
    if not isinstance(x, Tensor):
        cells = np.array(x, dtype=object) if isinstance(x, list | tuple) else np.asarray(x)
        if cells.dtype.kind not in "biuf":
            cells = np.vectorize(_to_number, otypes=[np.float64])(cells) if cells.size else cells.astype(np.float64)
        x = torch.from_numpy(np.ascontiguousarray(cells))
    x = x.detach().cpu()
    # By way of float64, which a column of integers becomes where one row has a fraction.
    return x.contiguous() if x.dtype in (torch.uint8, torch.float32) else x.to(torch.float64).to(torch.float32)


def convert_labels(y: Any) -> Tensor:
    """Labels as int64 [N], one by one; -1 for what is no whole number below 2^53."""
    if not isinstance(y, Tensor):
        values = np.array(y, dtype=object) if isinstance(y, list | tuple) else np.asarray(y)
        if values.dtype.kind not in "biuf":
            values = np.array([_to_number(value) for value in values.ravel()], dtype=np.float64)
        y = torch.from_numpy(np.ascontiguousarray(values.astype(np.int64) if values.dtype.kind == "u" else values))
    y = y.detach().cpu()
    y = y if y.dtype.is_floating_point else y.to(torch.int64)
    return torch.where((y == y.round()) & (y.abs() < 2**53), y, -1).to(torch.int64)  # NaN equals nothing


def _to_number(value: Any) -> float:
    """A number as itself; NaN for anything else, and for what no float holds."""
    try:
        return float(value) if isinstance(value, int | float | np.integer | np.floating | np.bool_) else math.nan
    except OverflowError:
        return math.nan


def _make_filler_point(x: Tensor) -> Tensor:
    """The fixed point in the place of one that cannot be used: zeros, or the text "-"."""
    filler = torch.zeros_like(x[0])
    if x.dtype == torch.uint8 and x.dim() == 2:
        filler[0] = ord("-")
    return filler


@dataclass(frozen=True, eq=False)
class PointNames:
    """Releasable. By what whoever holds the public points finds each of them.

    Attributes:
        kind: "id" (in a column of their file), "file" (its path in their folder) or "content" (a hash of its values).
        names: One for each point.
        source: Name of the points' own file or folder; None: they were split off the data, and their owner agreed.
        column: The column of an id.
    """

    kind: str
    names: tuple[str, ...]
    source: str | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, ("id", "file", "content"))
        if self.source is None and self.kind != "content":
            raise checks.error(
                "kind", self.kind, "must be content for points split off the data: their ids are private"
            )

    def describe(self) -> dict[str, str]:
        """What a release says of them."""
        facts = {"source": self.source or "split off the data", "named_by": self.kind}
        return facts | ({} if self.column is None else {"column": self.column})


@dataclass(frozen=True, eq=False)
class PublicPool:
    """Public points without labels.

    Attributes:
        x: As in PrivateRecords, [P, ...].
        split: The share of the owner's file that these were, before the owner made it public; 0 where they came from
            elsewhere.
        names: By what whoever holds them finds each; None: by nothing, and a release tells their positions alone.
    """

    x: Tensor
    split: float = 0.0
    names: PointNames | None = None

    def __post_init__(self) -> None:
        checks.between("split", self.split, 0, 1)
        if self.names is not None and len(self.names.names) != len(self.x):
            raise checks.error("names", len(self.names.names), f"must be one for each of the {len(self.x)} points")

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Labels for measuring, which never reach a student.

    Attributes:
        x: Test records.
        y: Their labels.
        pool_y: The truth about the public pool, if known: public as the pool is, and so are figures on it.
        public: Whether figures on the test set may be published. Where it was split off a private file they are the
            owner's, as everything else that no noise protects.
    """

    x: Tensor
    y: Tensor
    pool_y: Tensor | None = None
    public: bool = True

    def __repr__(self) -> str:
        return "Evaluation(labels withheld)"


@dataclass(frozen=True, kw_only=True)
class PublicAsset:
    """Something public that the release was made with: where it comes from. None: nobody said.

    Attributes:
        role: What it was used for: "public points", "encoder", ...
        name: What it is called.
        sha256: Of its content.
        licence: Under which it may be used.
        source: Where it was had from.
        trained_on: For what was learnt: from which data. Private records among them would break the promise.
    """

    role: str
    name: str
    sha256: str | None = None
    licence: str | None = None
    source: str | None = None
    trained_on: str | None = None

    def __post_init__(self) -> None:
        checks.nonempty_string("asset.role", self.role)
        checks.nonempty_string("asset.name", self.name)


FROM_OWNER = "declared by the owner"
FROM_PUBLIC_POINTS = "read off public points"
FROM_PRIVATE_LABELS = "read off the private labels, whose values the owner declared public"
FROM_DATASET_CODE = "fixed by the code of the data set"
FROM_OWNER_AND_PUBLIC_POINTS = "declared by the owner for some columns, and read off public points for the others"
PROVENANCES = (FROM_OWNER, FROM_PUBLIC_POINTS, FROM_OWNER_AND_PUBLIC_POINTS, FROM_PRIVATE_LABELS, FROM_DATASET_CODE)
"""Where a value comes from that is taken to be public."""
SELECTION_BASES = ("public data", "priced", "private scores")
"""How a release may have been chosen among several settings."""
CLASSES, CATEGORIES, NORMALIZATION_CONSTANTS, NUMBER_OF_RECORDS = (
    "classes",
    "categories",
    "normalization_constants",
    "number_of_records",
)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """PRIVATE, as its private side is. What a source loads.

    Attributes:
        spec: The public facts.
        private: The private side.
        pool: The public pool.
        evaluation: The evaluation side.
        adjacencies: The neighboring relations under which one unit's change leaves every other record where it was, and
            as private or public as it was.
        advice: What to do where a run needs another relation.
        num_dropped_by_reason: PRIVATE. How many records were left out or, under replace_one, filled in, by the reason.
        provenance: Where values come from that are taken to be public, by name: one of ``PROVENANCES``.
            The statement says of the others that nobody stated it.
    """

    spec: DataSpec
    private: PrivateRecords
    pool: PublicPool
    evaluation: Evaluation
    adjacencies: tuple[str, ...] = ADJACENCIES
    advice: str = ""
    num_dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, source in self.provenance.items():
            checks.one_of(f"provenance.{name}", source, PROVENANCES)
        for adjacency in checks.collection("adjacencies", self.adjacencies):
            checks.one_of("adjacencies", adjacency, ADJACENCIES)

    def __repr__(self) -> str:
        return f"Dataset({self.spec.name!r}, content withheld)"


@dataclass(frozen=True, eq=False, repr=False)
class Shards:
    """PRIVATE. Disjoint shards.

    Attributes:
        index_KS: int64, padded with -1.
        mask_KS: bool.
        adjacency: Neighboring relation that they justify.
        unit: What the privacy unit is.
        has_capacity: Records beyond a shard's capacity were dropped, so that a unit more may displace others *of its
            own shard*: the shard stays its own, what is said by each record does not.
    """

    index_KS: Tensor
    mask_KS: Tensor
    adjacency: str
    unit: str = "record"
    has_capacity: bool = False

    def __post_init__(self) -> None:
        checks.one_of("adjacency", self.adjacency, ADJACENCIES)
        used_indices = self.index_KS[self.mask_KS]
        # No asserts: partitions can be a user's own, the guarantee rests on this, and python -O drops asserts.
        if self.index_KS.shape != self.mask_KS.shape or self.index_KS.dim() != 2:
            raise ValueError("shards: index_KS and mask_KS must be [teachers, capacity], alike")
        if len(torch.unique(used_indices)) < len(used_indices):
            raise ValueError("shards overlap: one record would reach two teachers")
        if bool((used_indices < 0).any()):
            raise ValueError("shards: a record that is used must have an index")

    @property
    def num_teachers(self) -> int:
        """Number K of teachers."""
        return self.index_KS.shape[0]

    def get_indices(self, teacher: int) -> Tensor:
        """Indices of one teacher's records, int64 [n_k]."""
        return self.index_KS[teacher][self.mask_KS[teacher]]

    def __repr__(self) -> str:
        return f"Shards(num_teachers={self.num_teachers}, adjacency={self.adjacency!r}, content withheld)"


@dataclass(frozen=True, eq=False)
class NoisyCounts:
    """Releasable. Vote counts with noise.

    Attributes:
        counts_QC: int64 [Q, C], in whole votes.
        sigma: Standard deviation of the noise, in votes.
    """

    counts_QC: Tensor
    sigma: float

    def split(self, sizes: Sequence[int]) -> list[NoisyCounts]:
        """Parts of so many rows each; all rows where no sizes are given."""
        return [NoisyCounts(part, self.sigma) for part in self.counts_QC.split(list(sizes) or [len(self.counts_QC)])]

    @staticmethod
    def from_parts(parts: Sequence[NoisyCounts | None]) -> NoisyCounts | None:
        """Counts of several rounds together; None where one has none."""
        noisy_parts = [part for part in parts if part is not None]
        if not noisy_parts or len(noisy_parts) < len(parts):
            return None
        return NoisyCounts(torch.cat([part.counts_QC.cpu() for part in noisy_parts]), noisy_parts[0].sigma)


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Releasable. Logits z W + b of a point with features z, of length 1.

    Features are taken under the student of the round before: its guide, or what was learnt from the public points
    alone.

    Attributes:
        weight_DC: W, float32.
        bias_C: b, float32.
        neighbors: Public points among which features are moved first (``networks.MeanShift``); 0: none.
        radius: The model was fitted to features over this length, so its probabilities are those of its logits over it.
    """

    weight_DC: Tensor
    bias_C: Tensor
    neighbors: int = 0
    radius: float = 1.0


@dataclass(frozen=True, eq=False)
class Answers:
    """Releasable. What a mechanism lets out for one batch of queries, and what it cost.

    Attributes:
        label_Q: int64; NO_ANSWER (-1) for none.
        events: Those actually incurred.
        score_QC: Released scores in [0, 1] of the classes (soft mechanisms), NaN where unanswered.
        from_student_Q: Marks labels that are the student's own (interactive).
        noisy_counts: The noisy counts, where the mechanism's price is theirs.
        score_PC: Logits of every public point, where that is what left.
        model: The model that gave them.
        reservation_id: The reservation that paid for the noise behind them; None: nothing did, and nothing releases
            them.
    """

    label_Q: Tensor
    events: tuple[PrivacyEvent, ...]
    score_QC: Tensor | None = None
    from_student_Q: Tensor | None = None
    noisy_counts: NoisyCounts | None = None
    score_PC: Tensor | None = None
    model: LinearModel | None = None
    reservation_id: str | None = None

    @property
    def answered_Q(self) -> Tensor:
        """Whether each question has an answer, bool [Q]."""
        return self.label_Q != NO_ANSWER


@dataclass(frozen=True, eq=False)
class DryRunAnswers(Answers):
    """Answers that nobody was charged for, of an audit, a plan or a test: never released, never written."""


@dataclass(frozen=True, eq=False)
class Release:
    """Releasable. Which public points were asked, and what was answered.

    Attributes:
        id: Id of the reservation that paid for it.
        query_Q: Indices into the pool, in order.
        label_Q: int64; NO_ANSWER (-1) for none.
        events: Incurred.
        reserved_events: Reserved.
        noisy_counts: The noisy counts behind the labels, where they were released too.
        score_QC: The classes' scores in [0, 1] behind the labels, where they were released too, NaN where unanswered.
        queries_per_round: How many were asked in each round; empty: all in one.
        cell_RP: The question (its place in query_Q) whose answer speaks for each public point, round by round, int64
            [R, P]; None: answers speak for the points asked.
        score_RPC: The logits of every public point, round by round, float32, where those are the answers.
        model: The model that gave the last round's.
    """

    id: str
    query_Q: Tensor
    label_Q: Tensor
    events: tuple[PrivacyEvent, ...]
    reserved_events: tuple[PrivacyEvent, ...]
    noisy_counts: NoisyCounts | None = None
    score_QC: Tensor | None = None
    queries_per_round: tuple[int, ...] = ()
    cell_RP: Tensor | None = None
    score_RPC: Tensor | None = None
    model: LinearModel | None = None

    @classmethod
    def from_reservation(cls, id: str, reserved_events: tuple[PrivacyEvent, ...]) -> Release:
        """The release in which nothing was asked yet."""
        empty_Q = torch.zeros(0, dtype=torch.int64)
        return cls(id, empty_Q, empty_Q, (), reserved_events)

    def make_context(self, num_queries: int, rounds: int, student_QC: Tensor | None) -> MechanismContext:
        """What a mechanism may know of the answers so far, in the next round."""
        return MechanismContext(
            num_queries=num_queries,
            rounds=rounds,
            round_index=len(self.queries_per_round),
            num_failures=int((~self.answered_Q).sum()),
            num_answered=int(self.answered_Q.sum()),
            student_QC=student_QC,
        )

    def append_round(
        self, query_Q: Tensor, answers: Answers, incurred_events: tuple[PrivacyEvent, ...], cell_P: Tensor | None
    ) -> Release:
        """The release with one more round.

        Args:
            query_Q: The questions, of which a prefix was answered.
            answers: Answers to these.
            incurred_events: Events of all rounds.
            cell_P: The question of this round in whose cell each public point lies, where there are cells.
        """
        num_answers = len(answers.label_Q)
        counts_parts = (
            [answers.noisy_counts] if not self.queries_per_round else [self.noisy_counts, answers.noisy_counts]
        )
        return replace(
            self,
            query_Q=torch.cat([self.query_Q, query_Q[:num_answers]]),
            label_Q=torch.cat([self.label_Q, answers.label_Q.cpu()]),
            events=incurred_events,
            noisy_counts=NoisyCounts.from_parts(counts_parts),
            score_QC=_concatenate_rows(self.score_QC, answers.score_QC),
            queries_per_round=(*self.queries_per_round, num_answers),
            cell_RP=_append_row(self.cell_RP, cell_P),
            score_RPC=_append_row(self.score_RPC, None if answers.score_PC is None else answers.score_PC.cpu()),
            model=answers.model,
        )

    @property
    def answered_Q(self) -> Tensor:
        """Whether each question has an answer, bool [Q]."""
        return self.label_Q != NO_ANSWER

    @property
    def num_pool_rounds(self) -> int:
        """Number of rounds whose answers speak for every public point; 0: they speak for the points asked alone."""
        pool_answers = self.cell_RP if self.score_RPC is None else self.score_RPC
        return 0 if pool_answers is None else len(pool_answers)

    @property
    def round_Q(self) -> Tensor:
        """The round, from 0, in which each question was asked, int64 [Q]."""
        round_sizes = self.queries_per_round or (len(self.query_Q),)
        return torch.repeat_interleave(torch.arange(len(round_sizes)), torch.tensor(round_sizes))


def _concatenate_rows(rows: Tensor | None, new_rows: Tensor | None) -> Tensor | None:
    """The rows of one more round, if there are any."""
    if new_rows is None or rows is None:
        return rows if new_rows is None else new_rows.cpu()
    return torch.cat([rows, new_rows.cpu()])


def _append_row(rows: Tensor | None, new_row: Tensor | None) -> Tensor | None:
    """One row more, if there is one."""
    if new_row is None:
        return rows
    return new_row[None] if rows is None else torch.cat([rows, new_row[None]])


@dataclass(frozen=True, eq=False)
class MechanismContext:
    """All a mechanism may know besides the votes; public by type.

    Attributes:
        num_queries: The total planned for this release, over all rounds.
        rounds: How many calls it is planned in.
        round_index: Which of them this is, from 0.
        num_failures: How many "no answer"s have been released so far.
        num_answered: How many questions have been answered so far.
        student_QC: The student's own class probabilities on these queries (interactive).
    """

    num_queries: int
    rounds: int = 1
    round_index: int = 0
    num_failures: int = 0
    num_answered: int = 0
    student_QC: Tensor | None = None

    @property
    def is_last_round(self) -> bool:
        """Whether no call is planned after this one."""
        return self.round_index >= self.rounds - 1
