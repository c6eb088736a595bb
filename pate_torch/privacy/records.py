"""Data classes of the pipeline, in the order in which data flow from private records to a release.

The ``repr`` of a private object never shows its content. The suffix of a name gives the shape (NOTATION.md): N private
records, K teachers, S capacity of a shard, P public points, Q queries, R rounds, C classes, D features, B batch. For
example, ``votes_QC`` is a [Q, C] tensor.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.texts import parse_number
from pate_torch.privacy.schema import TableSchema
from pate_torch.privacy.unit_ids import UnitIds, make_content_ids, number_copies, parse_unit_ids
from pate_torch.privacy.whitening import Whitening

NO_ANSWER = -1
MAX_BATCH_ELEMENTS = 1 << 26
"""Largest number of elements of one point, or of one encoder batch, that a file may specify."""
ENCODER_OPTION_CHECKS: dict[str, Callable[[str, Any], Any] | None] = {
    **dict.fromkeys(("batch_size", "max_length", "size"), functools.partial(checks.integer, low=1)),
    **dict.fromkeys(("special_tokens", "headless"), checks.boolean),
    **{"pooling": checks.nonempty_string, "mean": None, "std": None},
}
"""Check of each encoder option that affects features, by name. None if the option is a list of numbers."""
ADJACENCIES = ("add_remove", "replace_one")
OPTIONAL_SPEC_FIELDS = ("class_type", "low", "high", "schema", "resize", "text", "encoder")
"""Fields of a ``DataSpec`` that ``to_dict`` leaves out if they are not set."""
OUTSIDE_STEPS = 1 << 15
"""Number of steps in a share of 1 (``DataSpec.compute_outside_share``)."""
UNKNOWN_CLASS, NOT_FINITE = "of no known class", "with missing or infinite numbers"
NO_TEXT, UNREADABLE_POINT = "without a text", "that could not be read"
"""Reasons why a private record cannot be used, worded as the end of "records ..."."""
_BLOCK_ROWS = 4096
"""Number of points that are checked at a time."""
LABEL_UNIT = "label of one record"
"""Privacy unit of data whose features are public, so that only labels are private."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Public facts about a data set, fixed before any private record is read.

    Attributes:
        num_classes: Number C of classes.
        mean: Normalization mean for each channel (of images, after x/255) or each feature. It is never a statistic of
            private records.
        std: Normalization standard deviation, in the same form as ``mean``.
        low: Smallest value of each feature among the public points, to which points are clipped before they are
            normalized. A feature that is constant among the public points is thus ignored. None if nothing is clipped.
        high: Largest value of each feature among the public points. None if ``low`` is None.
        benchmark: Whether the data are a public benchmark, so that accuracies on its private records may be shown.
        nominal_size: Publicly declared approximate number of private records. None if it is not declared.
        class_type: Type of the declared classes, "bool", "int" or "float". None if the classes are their names.
        schema: Description of how a table row becomes a point. None if points come from no table.
        resize: Interpolation ("bilinear") by which images of other sizes are resized. None if all have one size.
        text: Name of the table column that holds the texts (``core.texts``). None if points are no texts.
        encoder: Frozen encoder that produced the points. None if points are not encoded.
    """

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    benchmark: bool = False
    nominal_size: int | None = None
    class_type: str | None = None
    schema: TableSchema | None = None
    resize: str | None = None
    text: str | None = None
    encoder: EncoderCard | None = None

    def __post_init__(self) -> None:
        checks.integer("num_classes", self.num_classes, low=2, fix="A vote needs at least two classes.")
        low, high = self.low or (), self.high or ()
        if {len(low), len(high)} not in ({0}, {len(self.mean)}) or not all(map(operator.le, low, high)):
            raise checks.error("low", self.low, "must have as many entries as mean and high, and be at most high")
        if len(self.class_names) != self.num_classes:
            raise checks.error("class_names", self.class_names, f"must have {self.num_classes} entries")
        if len(self.mean) != len(self.std):
            raise checks.error("std", self.std, "must have as many entries as mean")
        checks.optional(checks.one_of, "class_type", self.class_type, ("bool", "int", "float"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without the optional fields that are not set."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["schema"] = None if self.schema is None else self.schema.to_dict()
        plain["encoder"] = None if self.encoder is None else self.encoder.to_dict()
        optional_facts = {name: plain.pop(name) for name in OPTIONAL_SPEC_FIELDS}
        return plain | {name: value for name, value in optional_facts.items() if value}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> DataSpec:
        """Check and read the output of ``to_dict``, which may come from a file that somebody else wrote.

        Raises:
            ValueError: A field is missing, unknown, of a wrong type, or inconsistent with the others.
        """
        facts = dict(checks.mapping("spec", plain, fields(cls)))
        if missing := [field.name for field in fields(cls) if field.name not in {*facts, *OPTIONAL_SPEC_FIELDS}]:
            raise checks.error("spec", ", ".join(missing), "is missing")
        check_by_key: dict[str, Callable[[str, Any], Any]] = {"input_shape": checks.integer, "mean": checks.number}
        check_by_key |= {"std": checks.number, "class_names": checks.nonempty_string}
        check_by_key |= {key: checks.number for key in ("low", "high") if key in facts}
        for key, check in check_by_key.items():
            facts[key] = tuple(checks.collection(key, facts[key]))
            for value in facts[key]:
                check(key, value)
        shape, num_constants = facts["input_shape"], len(facts["mean"])
        if not shape or min(shape) < 1 or math.prod(shape) > MAX_BATCH_ELEMENTS or num_constants not in (1, shape[0]):
            message = f"must be positive, of at most {MAX_BATCH_ELEMENTS} numbers, with one mean or one per channel"
            raise checks.error("input_shape", shape, message)
        checks.nonempty_string("name", facts["name"])
        for key in ("resize", "text"):
            checks.optional(checks.nonempty_string, key, facts.get(key))
        checks.boolean("benchmark", facts["benchmark"])
        checks.optional(checks.number, "nominal_size", facts["nominal_size"])
        if "schema" in facts:
            facts["schema"] = TableSchema.from_dict(facts["schema"])
            if "encoder" not in facts and shape != (facts["schema"].num_features,):
                raise checks.error("input_shape", shape, "must be as many features as its schema has")
        if "encoder" in facts:
            facts["encoder"] = EncoderCard.from_dict(facts["encoder"])
        return cls(**facts)

    @property
    def is_image(self) -> bool:
        return len(self.input_shape) == 3

    @property
    def kind(self) -> str:
        """Kind of the points before encoding: "images", "text", "table" (with a schema) or "rows" (of numbers)."""
        if self.encoder is not None and self.encoder.points is not None:
            return self.encoder.points.kind
        return "images" if self.is_image else "text" if self.text else "rows" if self.schema is None else "table"

    def normalize(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalize uint8 images [..., Ch, H, W] or feature rows [..., D] by the constants ``mean`` and ``std``."""
        mean, std = self.get_constants(dtype, x.device)
        x = x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype)
        return (self.clip(x) - mean) / std

    def clip(self, x: Tensor) -> Tensor:
        """Clip feature rows [..., D] to the range of the public points, if ``low`` and ``high`` are set."""
        if self.low is None or self.high is None:
            return x
        low, high = (_make_constant_tensor(values, (-1,), x.dtype, x.device) for values in (self.low, self.high))
        return x.clamp(low, high)

    def compute_outside_share(self, x_ND: Tensor) -> Tensor:
        """PRIVATE. Compute the share of each record's numeric columns that lie outside the public range, int64 [N].

        The unit is 1/OUTSIDE_STEPS. The share is rounded down and is a function of the record alone. A number that was
        missing or not finite lies inside, because the public mean replaced it. The share is 0 without a public range.
        """
        if self.low is None or self.high is None:
            return torch.zeros(len(x_ND), dtype=torch.int64)
        columns = list(range(len(self.low)) if self.schema is None else self.schema.numeric_indices)
        low, high = (torch.tensor(values, dtype=torch.float64)[columns] for values in (self.low, self.high))
        numbers = x_ND[:, columns].double()
        num_outside_N = ((numbers < low) | (numbers > high)).sum(1)
        return num_outside_N * OUTSIDE_STEPS // max(1, len(columns))

    def get_constants(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``mean`` and ``std`` as tensors that broadcast. They are shared, so callers must not change them."""
        shape = (-1, 1, 1) if self.is_image else (-1,)
        mean, std = (_make_constant_tensor(tuple(values), shape, dtype, device) for values in (self.mean, self.std))
        return mean, std


@dataclass(frozen=True, kw_only=True)
class EncoderCard:
    """Releasable. Name, hashes and declared facts of a frozen encoder.

    Attributes:
        name: Name of the encoder, as its authors or the owner of the data call it.
        kind: "torch" (a module), "onnx", "static" (a table of token vectors), or "given" (features that the data hold).
        sha256: SHA-256 of the weights file, or of the tensors of a module that brings its own weights. None if it is
            not declared.
        file: Name of the weights file. None if there is none.
        tokenizer_sha256: SHA-256 of the tokenizer file. None if there is none.
        module: Class name of the module. None if the encoder is no module.
        options: Other settings that affect the features (``ENCODER_OPTION_CHECKS``).
        trained_on: Declared training data. None if they are not declared.
        disjoint: Whether the owner declares that no private record was among the training data.
        points: Specification of the encoder's input. None if the data are features already.
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
            checks.optional(checks.nonempty_string, f"features.{key}", getattr(self, key))
        if self.file is not None and (self.file in (".", "..") or set(self.file) & set("/\\\0")):
            raise checks.error("encoder.file", self.file, "must be the plain name of a file beside the student")
        options = dict(checks.mapping("encoder.options", self.options))
        for key, value in options.items():
            checks.one_of("encoder option", key, ENCODER_OPTION_CHECKS)
            check = ENCODER_OPTION_CHECKS[key]
            if check is not None and value is not None:
                check(f"encoder.options.{key}", value)
            elif value is not None:
                options[key] = tuple(checks.number(f"encoder.options.{key}", v) for v in checks.collection(key, value))
        object.__setattr__(self, "options", options)
        size, batch = 1 if self.points is None else math.prod(self.points.input_shape), options.get("batch_size") or 1
        if batch * max(size, options.get("max_length") or 1, (options.get("size") or 1) ** 2) > MAX_BATCH_ELEMENTS:
            problem = f"makes batches of more than {MAX_BATCH_ELEMENTS} numbers"
            raise checks.error("features.batch_size", batch, problem, "Take a smaller batch size.")

    @property
    def card_without_points(self) -> EncoderCard:
        return replace(self, points=None)

    @property
    def identity(self) -> dict[str, Any]:
        """Facts that determine the features: two encoders with equal facts differ by rounding errors only."""
        plain = {name: getattr(self, name) for name in ("kind", "sha256", "tokenizer_sha256", "module")}
        return plain | {"options": dict(self.options)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without the fields that are None."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain |= {"options": dict(self.options), "points": None if self.points is None else self.points.to_dict()}
        return {key: value for key, value in plain.items() if value is not None}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> EncoderCard:
        """Check and read the output of ``to_dict``. Raises ValueError for unknown, missing or wrong fields."""
        points = checks.mapping("encoder", plain, fields(cls)).get("points")
        facts = {"name": None, "kind": None, **plain}
        return cls(**{**facts, "points": None if points is None else DataSpec.from_dict(points)})


@functools.lru_cache(maxsize=32)  # avoids a copy to the device at every training step
def _make_constant_tensor(
    values: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(shape)


@dataclass(frozen=True, eq=False, repr=False)
class PrivateRecords:
    """PRIVATE. Labeled records. Raw rows become records by ``from_rows`` only.

    Attributes:
        x: Points: uint8 images [N, Ch, H, W], uint8 texts [N, L] (``core.texts``) or float32 rows [N, D].
        y: Labels in 0..C-1, int64 [N].
        unit_id: Stable name of the privacy unit of each record, [N]. Names are fixed when the data are loaded, before
            any record is removed.
        unit: Kind of the privacy unit: "record", "group:<column>" or LABEL_UNIT.
        origin: Original points, by which the same records are recognized behind another encoder. None if ``x`` is not
            encoded, or if the original points are not kept.
        usable_N: Whether each record can be used, bool [N]. An unusable record has class 0 and, if its point is the
            reason, a fixed public filler point. None if every record can be used.
        num_unusable_by_reason: Number of unusable rows for each reason, for the owner.
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
            problem = "must be UnitIds, which pate_torch.privacy.unit_ids makes for one record at a time"
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

        An unusable row (see ``find_unusable_rows``) keeps its place and becomes a valid record that is marked as
        unusable: its class becomes 0 and, if the point is the reason, its point becomes a fixed filler.

        Guarantee:
            The point, the class, the unit name and the usability of a record are functions of its row, ``unit`` and
            ``num_classes``. No other row affects these values, except that equal records without ids are numbered, so
            that adding or removing one of them adds or removes the last number.

        Args:
            x: Points [N, ...]. Values of type uint8 stay, and other numbers become float32.
            y: Labels [N] of any type. Values that are no integers in 0..C-1 make their row unusable.
            unit_ids: Id of the privacy unit of each row, [N] (``unit_ids.parse_unit_ids``). If None, a hash of the
                content of each row, with a number for each copy of a row.
            unit: Kind of the privacy unit: "record", "group:<column>" or LABEL_UNIT.
            num_classes: Number C of classes. None if labels have no upper bound.
            is_readable_N: Whether the reader could read the point of each row, bool [N]. None if it could read all.
            key: Name of the argument or setting that holds the unit ids, for error messages.

        Raises:
            ValueError: A unit id is missing or ambiguous, or x, y and ids differ in length.
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
            names = parse_unit_ids(key, unit_ids, len(y))
        elif unit == "record":
            pairs = zip(x.numpy(), y.tolist(), strict=True)
            # An unusable row looks like its filler. It must not take the number of a record that equals the filler.
            marks = ([b"unusable"] if is_unusable else [] for is_unusable in unusable_N.tolist())
            parts = ((p.tobytes(), str(y).encode(), *mark) for (p, y), mark in zip(pairs, marks, strict=True))
            names = number_copies(make_content_ids(parts))
        else:
            raise checks.error(key, None, f"must name the unit of every record where it is {unit}")
        usable_N = ~unusable_N if num_unusable_by_reason else None
        return cls(x, y, names, unit, usable_N=usable_N, num_unusable_by_reason=num_unusable_by_reason)

    def __len__(self) -> int:
        return len(self.y)


def find_unusable_rows(
    x: Tensor, y: Tensor, num_classes: int | None = None, is_readable_N: np.ndarray | None = None
) -> dict[str, Tensor]:
    """PRIVATE. Return a bool [N] mask of the rows that cannot be used, for each reason that occurs.

    ``x`` and ``y`` are outputs of ``convert_points`` and ``convert_labels``. ``PrivateRecords.from_rows`` explains the
    other arguments.
    """
    unreadable_N = find_any(len(x), [] if is_readable_N is None else [~torch.from_numpy(is_readable_N)])
    rows_by_reason = {UNREADABLE_POINT: unreadable_N}
    if x.dtype == torch.float32:
        is_finite_N = torch.cat([block.isfinite().all(1) for block in x.flatten(1).split(_BLOCK_ROWS)])
        rows_by_reason[NOT_FINITE] = ~is_finite_N & ~unreadable_N
    elif x.dim() == 2:  # a text ends at its first zero
        rows_by_reason[NO_TEXT] = (x[:, 0] == 0) & ~unreadable_N
    is_class_N = (y >= 0) if num_classes is None else (y >= 0) & (y < num_classes)
    rows_by_reason[UNKNOWN_CLASS] = ~is_class_N & ~find_any(len(x), rows_by_reason.values())
    return {reason: rows_N for reason, rows_N in rows_by_reason.items() if bool(rows_N.any())}


def find_any(count: int, masks: Iterable[Tensor]) -> Tensor:
    """Return the union of bool [count] masks."""
    return torch.stack([torch.zeros(count, dtype=torch.bool), *masks]).any(0)


def convert_points(x: Any) -> Tensor:
    """Convert points to float32, cell by cell, with NaN for a cell that is no number; uint8 points stay."""
    if not isinstance(x, Tensor):
        cells = np.array(x, dtype=object) if isinstance(x, list | tuple) else np.asarray(x)
        if cells.dtype.kind not in "biuf":
            cells = np.array(list(map(parse_number, cells.flat)), dtype=np.float64).reshape(cells.shape)
        x = torch.from_numpy(np.ascontiguousarray(cells))
    x = x.detach().cpu()
    if x.dtype == torch.uint8:
        return x.contiguous()
    # Numbers are converted to float64 first, as in a column of integers that has a fraction in one row. An integer has
    # no negative zero, so there is none.
    return (x if x.dtype == torch.float32 else x.to(torch.float64).to(torch.float32)) + 0.0


def convert_labels(y: Any) -> Tensor:
    """Convert labels to int64 [N], one by one, with -1 for a value that is no whole number below 2^53."""
    if not isinstance(y, Tensor):
        values = np.array(y, dtype=object) if isinstance(y, list | tuple) else np.asarray(y)
        if values.dtype.kind not in "biuf":
            values = np.array(list(map(parse_number, values.flat)), dtype=np.float64)
        y = torch.from_numpy(np.ascontiguousarray(values.astype(np.int64) if values.dtype.kind == "u" else values))
    y = y.detach().cpu()
    y = y if y.dtype.is_floating_point else y.to(torch.int64)
    return torch.where((y == y.round()) & (y.abs() < 2**53), y, -1).to(torch.int64)  # NaN equals nothing


def _make_filler_point(x: Tensor) -> Tensor:
    """Return the fixed point that replaces an unusable point: zeros, or the text "-"."""
    filler = torch.zeros_like(x[0])
    if x.dtype == torch.uint8 and x.dim() == 2:
        filler[0] = ord("-")
    return filler


@dataclass(frozen=True, eq=False)
class PointNames:
    """Releasable. Identifiers of the public points, for readers who hold these points.

    Attributes:
        kind: "id" (value of a column of the file), "file" (path within the folder) or "content" (hash of the values).
        names: Identifier of each point.
        source: Name of the file or folder of the points. None if the points were split off the private data.
        column: Name of the column that holds the ids. None if ``kind`` is not "id".
    """

    kind: str
    names: tuple[str, ...]
    source: str | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, ("id", "file", "content"))
        if self.source is None and self.kind != "content":
            problem = "must be 'content' for points that were split off the data, because their ids are private"
            raise checks.error("kind", self.kind, problem)

    def describe(self) -> dict[str, str]:
        """Return source, kind and column of the identifiers, for a release."""
        facts = {"source": self.source or "split off the data", "named_by": self.kind}
        return facts | ({} if self.column is None else {"column": self.column})


@dataclass(frozen=True, eq=False)
class PublicPool:
    """Public points without labels.

    Attributes:
        x: Points [P, ...], in the form of ``PrivateRecords.x``.
        split: Share of the private file that the owner made public as this pool. 0 if the points have another source.
        names: Identifier of each point for readers who hold the pool. If None, a release identifies points by index.
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
    """Test records, and labels that measure accuracy and that no student is trained on.

    Attributes:
        pool_y: True labels of the public pool, which are public, too. None if they are not known.
        public: Whether accuracies on the test set may be published. False if the test set was split off private data.
    """

    x: Tensor
    y: Tensor
    pool_y: Tensor | None = None
    public: bool = True


@dataclass(frozen=True, kw_only=True)
class PublicAsset:
    """A public input of a release and its declared origin. A field is None if it is not declared.

    Attributes:
        role: Use of the asset, such as "public points" or "encoder".
        source: Place from which the asset was obtained.
        trained_on: Training data of a trained asset. If they contained private records, the guarantee would not hold.
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
"""Possible origins of a value that is treated as public."""
SELECTION_BASES = ("public data", "priced", "private scores")
"""Possible bases on which the settings of a release were chosen."""
CLASSES, CATEGORIES = "classes", "categories"
NORMALIZATION_CONSTANTS, NUMBER_OF_RECORDS = "normalization_constants", "number_of_records"
"""Names of the values whose provenance is recorded."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """PRIVATE. Data set that a source loads, with private records, public points and test records.

    Attributes:
        adjacencies: Neighboring relations under which a change of one unit leaves the position and the role (private
            or public) of every other record unchanged.
        advice: Advice for a run whose neighboring relation is not among ``adjacencies``.
        num_dropped_by_reason: PRIVATE. Number of unusable records for each reason, which were left out or, under
            replace_one, filled in.
        provenance: Origin (one of ``PROVENANCES``) of each value that is treated as public. The privacy statement
            lists a value without an entry as not stated.
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
    """PRIVATE. Disjoint shards of the private records.

    Attributes:
        index_KS: Record indices of each shard, int64, padded with -1.
        mask_KS: Whether an entry of ``index_KS`` is a record, bool.
        adjacency: Neighboring relation for which one unit affects one shard.
        unit: Kind of the privacy unit.
        has_capacity: Whether records beyond the capacity of a shard were dropped. An added unit may then displace
            other units of its shard, so a change of one unit still affects one shard, but several records.
    """

    index_KS: Tensor
    mask_KS: Tensor
    adjacency: str
    unit: str = "record"
    has_capacity: bool = False

    def __post_init__(self) -> None:
        checks.one_of("adjacency", self.adjacency, ADJACENCIES)
        used_indices = self.index_KS[self.mask_KS]
        # Not asserts, because the guarantee depends on these checks of a user's partition, and python -O drops asserts.
        if self.index_KS.shape != self.mask_KS.shape or self.index_KS.dim() != 2:
            raise ValueError("shards: index_KS and mask_KS must both be [teachers, capacity]")
        if len(torch.unique(used_indices)) < len(used_indices):
            raise ValueError("shards overlap: one record would reach two teachers")
        if bool((used_indices < 0).any()):
            raise ValueError("shards: index_KS must not be negative where mask_KS is True")

    @property
    def num_teachers(self) -> int:
        return self.index_KS.shape[0]

    def get_indices(self, teacher: int) -> Tensor:
        """Return the indices of one teacher's records, int64 [n_k]."""
        return self.index_KS[teacher][self.mask_KS[teacher]]

    def __repr__(self) -> str:
        return f"Shards(num_teachers={self.num_teachers}, adjacency={self.adjacency!r}, content withheld)"


@dataclass(frozen=True, eq=False)
class NoisyCounts:
    """Releasable. Vote counts with noise.

    Attributes:
        counts_QC: Counts, int64 [Q, C], in whole votes.
        sigma: Standard deviation of the noise, in votes.
    """

    counts_QC: Tensor
    sigma: float

    def split(self, sizes: Sequence[int]) -> list[NoisyCounts]:
        """Split the rows into parts of these sizes, or return one part with all rows if no sizes are given."""
        return [NoisyCounts(part, self.sigma) for part in self.counts_QC.split(list(sizes) or [len(self.counts_QC)])]

    @staticmethod
    def from_parts(parts: Sequence[NoisyCounts | None]) -> NoisyCounts | None:
        """Concatenate the counts of several rounds. None if a round released no counts."""
        noisy_parts = [part for part in parts if part is not None]
        if not noisy_parts or len(noisy_parts) < len(parts):
            return None
        return NoisyCounts(torch.cat([part.counts_QC.cpu() for part in noisy_parts]), noisy_parts[0].sigma)


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Releasable. A linear model with logits z W + b, where z are whitened and clipped features.

    Attributes:
        weight_DC: Weights W, float32 [D, C]. The last row belongs to the constant feature.
        bias_C: Biases b, float32 [C], which are not multiplied by the constant feature.
        whitening: Map from features of length 1 to z (``Whitening.whiten_and_clip``).
        neighbors: Number of public neighbors of the mean-shift step that precedes the model (``networks.MeanShift``).
            0 if there is no such step.
    """

    weight_DC: Tensor
    bias_C: Tensor
    whitening: Whitening
    neighbors: int = 0


@dataclass(frozen=True, eq=False)
class Answers:
    """Releasable. The output of a mechanism for one batch of queries, and its cost.

    Attributes:
        label_Q: Labels, int64, NO_ANSWER (-1) where a query has no answer.
        events: Privacy events that the answers incurred.
        score_QC: Released class scores in [0, 1], NaN where unanswered. None if the mechanism releases labels only.
        from_student_Q: Whether each label comes from the guide student (interactive mechanism), bool [Q]. None if the
            mechanism uses no student.
        noisy_counts: Noisy counts behind the labels. None if the cost of the mechanism does not cover their release.
        score_PC: Released logits of every public point. None if labels were released.
        model: Released model that gave these logits. None if no model was released.
        reservation_id: Id of the reservation that paid for the noise. Answers without one cannot be released.
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
        """Whether each query has an answer, bool [Q]."""
        return self.label_Q != NO_ANSWER


@dataclass(frozen=True, eq=False)
class DryRunAnswers(Answers):
    """Answers of an audit, a plan or a test. No account was charged, and the answers are never written."""


@dataclass(frozen=True, eq=False)
class Release:
    """Releasable. The queries about public points, and their answers.

    Attributes:
        id: Id of the reservation that paid for the release.
        query_Q: Indices of the queried points in the pool, in the order of the queries.
        label_Q: Labels, int64, NO_ANSWER (-1) where a query has no answer.
        events: Privacy events that were incurred.
        noisy_counts: Noisy counts behind the labels. None if they were not released.
        score_QC: Class scores in [0, 1] behind the labels, NaN where unanswered. None if they were not released.
        queries_per_round: Number of queries in each round. Empty if there was one round.
        cell_RP: Position in ``query_Q`` of the query whose answer holds for each public point, int64 [R, P]. None
            if an answer holds for the queried point alone.
        score_RPC: Logits of every public point after each round, float32 [R, P, C]. None if labels were released.
        model: Model of the last round. None if no model was released.
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

    def append_round(
        self, query_Q: Tensor, answers: Answers, incurred_events: tuple[PrivacyEvent, ...], cell_P: Tensor | None
    ) -> Release:
        """Return the release with one more round.

        Args:
            query_Q: Indices of this round's queries in the pool. Those beyond the last answer are dropped.
            answers: Answers of this round.
            incurred_events: Events of all rounds so far.
            cell_P: Position in ``query_Q`` of the query whose cell holds each public point. None without cells.
        """
        num_answers = len(answers.label_Q)
        earlier_counts = [self.noisy_counts] if self.queries_per_round else []
        return replace(
            self,
            query_Q=torch.cat([self.query_Q, query_Q[:num_answers]]),
            label_Q=torch.cat([self.label_Q, answers.label_Q.cpu()]),
            events=incurred_events,
            noisy_counts=NoisyCounts.from_parts([*earlier_counts, answers.noisy_counts]),
            score_QC=_append(self.score_QC, answers.score_QC),
            queries_per_round=(*self.queries_per_round, num_answers),
            cell_RP=_append(self.cell_RP, None if cell_P is None else cell_P[None]),
            score_RPC=_append(self.score_RPC, None if answers.score_PC is None else answers.score_PC[None]),
            model=answers.model,
        )

    @property
    def answered_Q(self) -> Tensor:
        """Whether each query has an answer, bool [Q]."""
        return self.label_Q != NO_ANSWER

    @property
    def num_pool_rounds(self) -> int:
        """Number of rounds whose answers hold for every public point. 0 if answers hold for queried points only."""
        pool_answers = self.cell_RP if self.score_RPC is None else self.score_RPC
        return 0 if pool_answers is None else len(pool_answers)

    @property
    def round_Q(self) -> Tensor:
        """The round, counted from 0, of each query, int64 [Q]."""
        round_sizes = self.queries_per_round or (len(self.query_Q),)
        return torch.repeat_interleave(torch.arange(len(round_sizes)), torch.tensor(round_sizes))


def _append(rows: Tensor | None, new_rows: Tensor | None) -> Tensor | None:
    if new_rows is None:
        return rows
    return new_rows.cpu() if rows is None else torch.cat([rows, new_rows.cpu()])


@dataclass(frozen=True, eq=False)
class MechanismContext:
    """Public inputs of a mechanism, besides the sensitive votes.

    Attributes:
        num_queries: Number of queries planned for this release, over all rounds.
        round_index: Index of this round, from 0.
        num_failures: Number of earlier queries without an answer.
        num_answered: Number of earlier queries with an answer.
        student_QC: Class probabilities of the guide student on these queries, for an interactive mechanism. None for
            other mechanisms.
    """

    num_queries: int
    rounds: int = 1
    round_index: int = 0
    num_failures: int = 0
    num_answered: int = 0
    student_QC: Tensor | None = None

    @property
    def is_last_round(self) -> bool:
        return self.round_index >= self.rounds - 1
