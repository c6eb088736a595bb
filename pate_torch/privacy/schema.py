"""How a table becomes numbers: its columns, their order and their categories, for whoever has a release to encode by.

Guarantee: a schema holds declared values and values of public records, and nothing else: it may be published. Encoding
by it looks at one record at a time: no record changes another's numbers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from pate_torch.core import checks, texts
from pate_torch.privacy.unit_ids import compute_content_id

MAX_CATEGORIES: Final = 64
WITHHELD_CATEGORY: Final = " withheld"
"""In place of a category's name. No value can be it: values are stripped."""
_MISSING_TEXTS = {"", "na", "n/a", "nan", "null", "none"}
_NUMBER_PATTERN = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")  # not all that float() takes: 1_2 is a name


class TooManyCategoriesError(ValueError):
    """Public records show more values of a column than a schema takes.

    Attributes:
        column: Its name.
        count: How many they show.
    """

    def __init__(self, column: str, count: int, max_categories: int) -> None:
        message = f"column {column!r} has {count} different public values"
        fix = "Leave it out, list its values in categories or raise the limit."
        super().__init__(str(checks.error("max_categories", max_categories, message, fix)))
        self.column, self.count = column, count


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Its name.
        categories: Its values, each a feature that is 0 or 1; None: the column is numeric.
        fill: What stands for a missing number; None: a missing number is an error.
    """

    name: str
    categories: tuple[str, ...] | None
    fill: float | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its features, in order."""
        return (self.name,) if self.categories is None else tuple(f"{self.name}={value}" for value in self.categories)


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table, in the order of their features.

    Guarantee: made of declared and public values alone (``from_public``); may be published.

    Attributes:
        columns: The columns that are used.
    """

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names):
            raise checks.error("columns", names, "must be at least one, each with a name of its own")

    @classmethod
    def from_public(
        cls,
        public: Any,
        *,
        categories: Mapping[str, Sequence[Any]] | None = None,
        max_categories: int = MAX_CATEGORIES,
    ) -> TableSchema:
        """Read a schema off PUBLIC records: a column is numeric if all its values are, else takes those it shows.

        Args:
            public: Public records, as ``encode`` takes them; all columns are used. Never private ones: a category that
                one record alone shows would be published.
            categories: {column: [values]}, declared.
            max_categories: Most values that records may show of a column without an entry.

        Raises:
            TooManyCategoriesError: They show more.
            ValueError: Not a table, or values are declared of a column that is not there.
        """
        declared_categories = categories or {}
        table = _to_text_columns(public)
        for name in declared_categories:
            checks.one_of("categories", name, list(table))
        columns = []
        for name, text in table.items():
            if name in declared_categories:
                values: Iterable[str] | None = [normalize_class_name(value) for value in declared_categories[name]]
            else:
                values = _infer_categories(set(text) - {""})
            column = Column(name, None if values is None else tuple(values))
            if name not in declared_categories and len(column.categories or ()) > max_categories:
                raise TooManyCategoriesError(name, len(column.categories or ()), max_categories)
            columns.append(column)
        return cls(tuple(columns))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for each feature, as "age" or "color=red"."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def num_features(self) -> int:
        """Number D of features."""
        return sum(len(column.features) for column in self.columns)

    @property
    def numeric_indices(self) -> tuple[int, ...]:
        """Positions of the numeric columns among the features."""
        is_numeric_feature = [column.categories is None for column in self.columns for _ in column.features]
        return tuple(index for index, is_numeric in enumerate(is_numeric_feature) if is_numeric)

    def encode(self, table: Any, *, unknown: str = "error", missing: str = "error") -> np.ndarray:
        """Features of records, float32 [N, D].

        A number and its text are the same, as are a missing value and the empty text. Columns that the schema does not
        have are left aside.

        Args:
            table: A DataFrame, or {column: values}; an array [N, columns] where every column is numeric.
            unknown: What becomes of a value outside its column's categories: "error"; "zeros", none of them; or "warn",
                zeros and one warning that names the columns. Private records take zeros: whether there is an error
                would depend on them.
            missing: What becomes of a number that is empty, not finite or none: "error", or "nan": the column's fill,
                where it has one.

        Raises:
            ValueError: Names the columns and values that do not fit.
        """
        checks.one_of("unknown", unknown, ("error", "warn", "zeros"))
        checks.one_of("missing", missing, ("error", "nan"))
        text_by_column = _to_text_columns(table, [column.name for column in self.columns], self._is_numeric())
        blocks: list[np.ndarray] = []
        unknown_values: dict[str, str] = {}
        missing_values: list[str] = []
        for column in self.columns:
            text = text_by_column[column.name]
            block, bad_N = (
                _encode_numbers(text) if column.categories is None else _encode_one_hot(text, column.categories)
            )
            if column.fill is not None:
                missing_N = np.array([value.casefold() in _MISSING_TEXTS for value in text], dtype=bool)
                missing_N = bad_N if missing == "nan" else missing_N
                block[missing_N], bad_N = column.fill, bad_N & ~missing_N
            blocks.append(block)
            if bad_N.any():
                first_bad_row = int(bad_N.argmax())
                cell = f"{column.name}={text[first_bad_row]!r} (row {first_bad_row})"
                if column.categories is None:
                    missing_values.append(cell)
                else:
                    unknown_values[column.name] = cell
        if missing_values and missing == "error":
            message = "are no finite numbers"
            raise checks.error("table", ", ".join(missing_values), message, "Fill them in, or leave such records out.")
        if unknown_values and unknown == "error":
            message = "must be one of the categories that public records show or the owner declared"
            fix = "unknown=zeros takes other values as none of these."
            raise checks.error("table", ", ".join(unknown_values.values()), message, fix)
        if unknown_values and unknown == "warn":
            columns_text = ", ".join(map(repr, unknown_values))
            message = f"Some values of {columns_text} are missing or are not among the known categories"
            warnings.warn(f"{message}. They are encoded as in training: as none of the categories.", stacklevel=2)
        return np.concatenate(blocks, axis=1)

    def withhold_categories(self, public: Any, owner_columns: Collection[str] = ()) -> TableSchema:
        """This schema without the names of categories that nobody may see: their features stay, and no value is one.

        Args:
            public: Records that may be shown as they are.
            owner_columns: Columns whose categories were declared.
        """
        text_by_column = _to_text_columns(public, [column.name for column in self.columns])
        columns = []
        for column in self.columns:
            if column.categories is not None and column.name not in owner_columns:
                public_categories = {normalize_class_name(value) for value in set(text_by_column[column.name])}
                column = Column(
                    column.name, tuple(v if v in public_categories else WITHHELD_CATEGORY for v in column.categories)
                )
            columns.append(column)
        return TableSchema(tuple(columns))

    def compute_content_ids(self, table: Any) -> list[str]:
        """A hash of each record's values as the schema reads them: a number and its text have the same.

        By these ``labels.csv`` names public points that have no names of their own. Whoever can guess all values of a
        record can check the guess: never of records that are not public.

        Args:
            table: As ``encode`` takes it.
        """
        text_by_column = _to_text_columns(table, [column.name for column in self.columns], self._is_numeric())
        columns = [
            [
                repr(_parse_number(value)) if column.categories is None else normalize_class_name(value)
                for value in text_by_column[column.name]
            ]
            for column in self.columns
        ]
        return [compute_content_id(map(str.encode, row)) for row in zip(*columns, strict=True)]

    def find_unused_columns(self, table: Any) -> list[str]:
        """Columns of a table that ``encode`` leaves aside."""
        return [name for name in _get_column_names(table) or [] if name not in {column.name for column in self.columns}]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        columns = [
            {"name": column.name}
            | ({} if column.categories is None else {"categories": list(column.categories)})
            | ({} if column.fill is None else {"fill": column.fill})
            for column in self.columns
        ]
        return {"columns": columns}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> TableSchema:
        """Inverse of ``to_dict``.

        Raises:
            ValueError: It is not what ``to_dict`` gives.
        """
        columns = []
        for item in checks.collection("columns", checks.mapping("schema", facts).get("columns")):
            values = checks.mapping("columns", item).get("categories")
            if values is not None:
                values = tuple(checks.collection("categories", values))
            if not all(isinstance(text, str) for text in (item.get("name"), *(values or ()))):
                raise checks.error("columns", item, "must be texts")
            fill = item.get("fill")
            columns.append(Column(item["name"], values, None if fill is None else checks.number("fill", fill)))
        return cls(tuple(columns))

    def with_fill_values(self, public: Any) -> TableSchema:
        """This schema with the mean of each numeric column's PUBLIC values for what is missing; 0 where all are."""
        x_ND = self.encode(public, unknown="zeros", missing="nan").astype(np.float64)
        features = iter(range(self.num_features))
        columns = []
        for column in self.columns:
            indices = [next(features) for _ in column.features]
            if column.categories is None:
                finite_values = x_ND[:, indices[0]][np.isfinite(x_ND[:, indices[0]])]
                column = replace(column, fill=float(finite_values.mean()) if len(finite_values) else 0.0)
            columns.append(column)
        return TableSchema(tuple(columns))

    def _is_numeric(self) -> bool:
        return all(column.categories is None for column in self.columns)


def normalize_class_name(value: Any) -> str:
    """One spelling for a class or category: 1, 1.0, "1" and "+1" are the same."""
    text = format_value(value)
    if not is_number(text):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else text


def is_number(text: str) -> bool:
    """Whether a name is a number, plainly written."""
    return _NUMBER_PATTERN.fullmatch(text) is not None


def _infer_categories(values: set[str]) -> list[str] | None:
    """The categories of a column that shows these values; None where all are numbers."""
    if all(value.casefold() in _MISSING_TEXTS or not math.isnan(_parse_number(value)) for value in values):
        return None
    return sorted({normalize_class_name(value) for value in values})


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _encode_numbers(text: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, 1], and which are not finite."""
    # Value by value: a column-wise parser may read a number differently for its neighbors' sake.
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which is not finite
        block = np.array([_parse_number(value) for value in text], dtype=np.float64)[:, None].astype(np.float32)
    return block, ~np.isfinite(block[:, 0])


def _encode_one_hot(text: Sequence[str], categories: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, categories], and which are none of them."""
    code_by_category = {value: code for code, value in enumerate(categories)}
    code_by_text = {value: code_by_category.get(normalize_class_name(value), -1) for value in set(text)}
    code_N = np.array([code_by_text[value] for value in text], dtype=np.int64)
    return (code_N[:, None] == np.arange(len(categories))).astype(np.float32), code_N < 0


def _get_column_names(table: Any) -> list[str] | None:
    """Names of a table's columns; None: it is an array."""
    columns = table if isinstance(table, Mapping) else getattr(table, "columns", None)
    return None if columns is None else [str(name) for name in columns]


def _to_text_columns(table: Any, required: Sequence[str] | None = None, array: bool = True) -> dict[str, list[str]]:
    """The columns of a table as text, "" for what is missing.

    Args:
        table: As ``TableSchema.encode`` takes it.
        required: The columns to read, in order; None: all.
        array: Whether an array will do.
    """
    names = _get_column_names(table)
    if names is None:
        values = np.asarray(table)
        if not array or values.ndim != 2 or (required is not None and values.shape[1] != len(required)):
            message = "must be a DataFrame or {column: values}"
            message += f", or an array of {len(required or ())} columns" if array and required else ""
            raise checks.error("table", f"{type(table).__name__} {('*', *values.shape[1:])}", message)
        column_names = list(required) if required is not None else [str(index) for index in range(values.shape[1])]
        text_by_column = {name: _to_texts(values[:, index]) for index, name in enumerate(column_names)}
    else:
        required = names if required is None else required
        if missing_columns := [name for name in required if name not in names]:
            raise checks.error("table", names, f"lacks the columns {', '.join(missing_columns)}")
        if duplicates := [name for name in required if names.count(name) > 1]:
            raise checks.error("table", names, f"has more than one column {', '.join(sorted(set(duplicates)))}")
        keys = dict(zip(names, table if isinstance(table, Mapping) else table.columns, strict=True))
        text_by_column = {name: _to_texts(table[keys[name]]) for name in required}
    if len(set(map(len, text_by_column.values()))) != 1:
        raise checks.error("table", list(text_by_column), "must have columns of one length")
    return text_by_column


def _to_texts(column: Any) -> list[str]:
    """Values as a CSV file would hold them, one at a time; "" for those that are missing."""
    if isinstance(column, str | bytes) or not isinstance(column, Iterable):
        raise checks.error("table", type(column).__name__, "must hold a list of values in each column")
    # An array gives its values in their own precision: of float32, .1 is "0.1" and not what a double makes of it.
    values = np.asarray(column) if hasattr(column, "dtype") else column
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise checks.error("table", f"{values.ndim} dimensions", "must hold one value a record in each column")
    return [format_value(value) for value in values]


def format_value(value: Any) -> str:
    """A value as text, a function of this one value; "" for one that is missing."""
    if value is None:
        return ""
    try:
        is_missing = bool(value != value)  # NaN, and the missing times of pandas
    except TypeError:  # the missing value of pandas is neither equal to itself nor not
        is_missing = True
    if is_missing:
        return ""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, np.timedelta64)
    if is_integer and 2**53 <= abs(int(value)) < 2**64:
        value = float(value)  # as one missing value makes all integers of its column
    return texts.to_canonical_text(value)
