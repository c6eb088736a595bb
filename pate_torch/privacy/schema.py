"""Schema of a table: the columns, their order and their categories, by which readers of a release encode records.

A schema holds only declared values and values of public records, so it may be published. The encoding of a record does
not depend on other records.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from pate_torch.core import checks, texts

MAX_CATEGORIES: Final = 64
WITHHELD_CATEGORY: Final = " withheld"
"""Placeholder for the name of a category. No value equals the placeholder, because values are stripped."""
_MISSING_TEXTS = {"", "na", "n/a", "nan", "null", "none"}
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T].*)?$")
# All texts that writers of tables use for numbers, and fewer than float() accepts: 1_2 is a name.
_NUMBER_PATTERN = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf(inity)?)", re.I | re.A)
_MISSING_IN_NUMPY = ("nan", "NaT")  # NumPy writes missing values so if one text turns an array into texts


class TooManyCategoriesError(ValueError):
    """Public records have more values in a column than ``max_categories``."""

    def __init__(self, column: str, count: int, max_categories: int) -> None:
        message = f"column {column!r} has {count} different public values"
        fix = "Leave out the column, list its values in categories, or raise the limit."
        super().__init__(str(checks.error("max_categories", max_categories, message, fix)))
        self.column, self.count = column, count


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        categories: Values of the column, of which each becomes a feature that is 0 or 1. None if the column is numeric.
        fill: Number that replaces a missing number. None if a missing number is an error.
    """

    name: str
    categories: tuple[str, ...] | None
    fill: float | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return (self.name,) if self.categories is None else tuple(f"{self.name}={value}" for value in self.categories)


@dataclass(frozen=True)
class TableSchema:
    """Releasable. The columns of a table that are used, in the order of their features."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names):
            raise checks.error("columns", names, "must be one column or more, with different names")

    @classmethod
    def from_public(
        cls, public: Any, *, categories: Mapping[str, Sequence[Any]] | None = None, max_categories: int = MAX_CATEGORIES
    ) -> TableSchema:
        """Read a schema off PUBLIC records. A column is numeric if all its values are, and categorical otherwise.

        The missing value is a category of its own, "", where a categorical column of the public records lacks a value.

        Args:
            public: Public records, in a form that ``encode`` takes. All columns are used. Private records must not be
                given, because the schema would publish a category that a single record has.
            categories: Declared categories, {column: [values]}.
            max_categories: Largest number of different values in a column without declared categories.

        Raises:
            TooManyCategoriesError: A column has more different values.
            ValueError: ``public`` is no table, or lacks a column whose values are declared.
        """
        declared_categories = categories or {}
        table = to_text_columns(public)
        for name in declared_categories:
            checks.one_of("categories", name, list(table))
        columns = []
        for name, text in table.items():
            if name in declared_categories:
                columns.append(Column(name, tuple(map(normalize_class_name, declared_categories[name]))))
            else:
                columns.append(Column(name, _infer_categories(name, text, max_categories)))
        return cls(tuple(columns))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of each feature, such as "age" or "color=red"."""
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

    def encode(self, table: Any, *, unknown: str = "error", missing: str = "error", first_row: int = 0) -> np.ndarray:
        """Encode records, float32 [N, D].

        A number and its text are encoded alike, and so are a missing value and the empty text. Columns that the schema
        does not have are ignored.

        Args:
            table: A DataFrame, or {column: values}, or an array [N, columns], which must be of type object if a column
                is categorical.
            unknown: Treatment of a value that is no category of its column: "error"; "zeros" to encode the value as
                none of the categories; or "warn" for zeros and one warning that names the columns. Use "zeros" for
                private records, because an error would depend on them.
            missing: Treatment of a value in a numeric column that is empty, not finite or no number: "error"; or "nan",
                which gives the fill of the column, or NaN without a fill.
            first_row: Number of the first row, for messages.

        Raises:
            ValueError: Columns or values do not fit. The message names them.
        """
        checks.one_of("unknown", unknown, ("error", "warn", "zeros"))
        checks.one_of("missing", missing, ("error", "nan"))
        takes_array = self._is_numeric() or (isinstance(table, np.ndarray) and table.dtype == object)
        text_by_column = to_text_columns(table, [column.name for column in self.columns], takes_array)
        x_ND, end = np.empty((len(text_by_column[self.columns[0].name]), self.num_features), dtype=np.float32), 0
        unknown_cells: dict[str, str] = {}
        missing_cells: dict[str, str] = {}
        for column in self.columns:
            text = text_by_column[column.name]
            begin, end = end, end + len(column.features)
            x_ND[:, begin:end], bad_N = _encode_column(column, text, fills_all=missing == "nan")
            if bad_N.any():
                row = int(bad_N.argmax())
                cells = missing_cells if column.categories is None else unknown_cells
                cells[column.name] = f"{column.name}={format_value(str(text[row]))!r} (row {first_row + row})"
        if missing_cells and missing == "error":
            fix = "Fill in these values, or leave out such records."
            raise checks.error("table", ", ".join(missing_cells.values()), "must be finite numbers", fix)
        if unknown_cells and unknown == "error":
            message = "must be one of the categories that public records show or the owner declared"
            fix = "Use unknown=zeros to encode other values as none of these categories."
            raise checks.error("table", ", ".join(unknown_cells.values()), message, fix)
        if unknown_cells and unknown == "warn":
            names = ", ".join(map(repr, unknown_cells))
            message = f"Some values of {names} are missing or are not among the known categories."
            warnings.warn(f"{message} They are encoded as in training: as none of the categories.", stacklevel=2)
        return x_ND

    def withhold_categories(self, public: Any, owner_columns: Collection[str] = ()) -> TableSchema:
        """Replace the names of non-public categories by a placeholder. Their features stay, and no input matches them.

        A category is public if a record of ``public`` has it. All categories of ``owner_columns`` were declared and are
        public.
        """
        text_by_column = to_text_columns(public, [column.name for column in self.columns])
        columns = []
        for column in self.columns:
            if column.categories is not None and column.name not in owner_columns:
                public_keys = set(map(make_key, factorize(text_by_column[column.name])[0]))
                shown_categories = tuple(
                    v if make_key(v) in public_keys else WITHHELD_CATEGORY for v in column.categories
                )
                column = replace(column, categories=shown_categories)
            columns.append(column)
        return TableSchema(tuple(columns))

    def compute_content_ids(self, table: Any) -> list[str]:
        """Compute a hash of each record's values. A number and its text have the same hash.

        The file ``labels.csv`` identifies public points without ids by these hashes. Hashes of private records must not
        be published, because whoever guesses all values of a record can check the guess.
        """
        from pate_torch.privacy.unit_ids import compute_content_id  # imports torch, which readers of a release can lack

        text_by_column = to_text_columns(table, [column.name for column in self.columns], self._is_numeric())
        columns: list[Iterable[str]] = []
        for column in self.columns:
            if column.categories is None:
                columns.append(map(repr, parse_numbers(text_by_column[column.name]).tolist()))
            else:
                values, index_N = factorize(text_by_column[column.name])
                columns.append(map(list(map(make_key, values)).__getitem__, index_N.tolist()))
        return [compute_content_id(map(str.encode, row)) for row in zip(*columns, strict=True)]

    def count_unknown(self, x_ND: np.ndarray) -> dict[str, int]:
        """Count the records of each categorical column whose encoded rows ``x_ND`` have none of the categories."""
        ends = np.cumsum([len(column.features) for column in self.columns])
        blocks = zip(self.columns, np.split(x_ND, ends[:-1], axis=1), strict=True)
        return {column.name: int((~x.any(1)).sum()) for column, x in blocks if column.categories is not None}

    def compute_unreadable_shares(self, table: Any) -> dict[str, float]:
        """Compute the share of each column's values that are no number, or no category. Missing values do not count."""
        text_by_column, shares = to_text_columns(table, [column.name for column in self.columns]), {}
        for column in self.columns:
            text = text_by_column[column.name]
            is_present_N = ~map_distinct(text, is_missing, bool)
            bad_N = _encode_column(replace(column, fill=None), text, fills_all=False)[1] & is_present_N
            shares[column.name] = float(bad_N.sum() / max(1, is_present_N.sum()))
        return shares

    def find_unused_columns(self, table: Any) -> list[str]:
        """List the columns of a table that ``encode`` ignores."""
        return [name for name in _get_column_names(table) or [] if name not in {column.name for column in self.columns}]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        columns = [
            {"name": column.name}
            | ({} if column.categories is None else {"categories": list(column.categories)})
            | ({} if column.fill is None else {"fill": column.fill})
            for column in self.columns
        ]
        return {"columns": columns}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> TableSchema:
        """Make a schema from the output of ``to_dict``. Raise ValueError for anything else."""
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
        """Return a schema that fills missing numbers by the mean of the column's PUBLIC values, or 0 without values."""
        x_ND = self.encode(public, unknown="zeros", missing="nan").astype(np.float64)
        columns, numeric_indices = list(self.columns), iter(self.numeric_indices)
        for place, column in enumerate(columns):
            if column.categories is None:
                number_N = x_ND[:, next(numeric_indices)]
                finite_values = number_N[np.isfinite(number_N)]
                columns[place] = replace(column, fill=float(finite_values.mean()) if len(finite_values) else 0.0)
        return TableSchema(tuple(columns))

    def _is_numeric(self) -> bool:
        return all(column.categories is None for column in self.columns)


def normalize_class_name(value: Any) -> str:
    """Return one text for all ways of writing a class or category: 1, 1.0, "1", "+1", "1." and "1E0" become "1"."""
    text = format_value(value)
    if not is_number(text):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else texts.format_number(number)


def make_key(value: Any) -> str:
    """Make the text by which classes and categories are compared: as ``normalize_class_name``, and True equals 1."""
    return texts.replace_boolean(normalize_class_name(value))


def is_number(text: str) -> bool:
    """Whether a name is a plainly written number."""
    return _NUMBER_PATTERN.fullmatch(text) is not None


def _infer_categories(name: str, text: Any, max_categories: int) -> tuple[str, ...] | None:
    """Return the categories of a column of PUBLIC texts. None if all values are numbers, booleans or missing."""
    values = factorize(text)[0]
    if all(is_missing(value) or not math.isnan(texts.parse_canonical_number(value)) for value in values):
        return None
    categories = tuple(sorted(set(map(make_key, values))))
    if (dates := [value for value in categories if value]) and all(map(_DATE.match, dates)):
        problem = f"column {name!r} holds dates, which are neither numbers nor categories"
        fix = "Replace the dates by numbers, such as days since a fixed date, or list them in categories."
        raise checks.error("public", dates[0], problem, fix)
    if len(categories) > max_categories:
        raise TooManyCategoriesError(name, len(categories), max_categories)
    return categories


def factorize(text: Any) -> tuple[list[str], np.ndarray]:
    """Return the distinct values of a column of texts, and the index of each row's value, int64 [N]."""
    if isinstance(text, list):
        index_by_value = {value: index for index, value in enumerate(dict.fromkeys(text))}
        return list(index_by_value), np.array([index_by_value[value] for value in text], dtype=np.int64)
    encoded = text.dictionary_encode().combine_chunks()
    return list(map(format_value, encoded.dictionary.to_pylist())), encoded.indices.to_numpy()


def map_distinct(text: Any, convert: Callable[[str], Any], dtype: Any) -> np.ndarray:
    """Convert each value of a column of texts alone, [N], and each distinct value once."""
    values, index_N = factorize(text)
    return np.array(list(map(convert, values)), dtype=dtype)[index_N]


def is_missing(value: Any) -> bool:
    """Return whether a value counts as missing in a numeric column: None, NaN, pandas.NA, or a text such as "NA"."""
    return format_value(value).casefold() in _MISSING_TEXTS


def parse_numbers(text: Any) -> np.ndarray:
    """Parse each value of a column alone, float64 [N], with NaN for a value that is no number, and 0 for -0.

    The digits are those of ``texts.shorten_numbers``.
    """
    if isinstance(text, list):
        number_N = np.array(list(map(texts.parse_canonical_number, text)), dtype=np.float64)
    else:
        try:
            number_N = text.cast("double").to_numpy()
        except ValueError:  # Arrow accepts fewer texts than float(), with the same results
            number_N = map_distinct(text, texts.parse_canonical_number, np.float64)
    return texts.shorten_numbers(number_N) + 0.0


def _encode_column(column: Column, text: Any, fills_all: bool) -> tuple[np.ndarray, np.ndarray]:
    """Encode one column, float32 [N, features], and mark the values that do not fit, bool [N].

    The fill of the column replaces missing numbers and, with ``fills_all``, every number that is not finite.
    """
    if column.categories is not None:
        return _encode_one_hot(text, column.categories)
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and is found below
        block = parse_numbers(text)[:, None].astype(np.float32)
    bad_N = ~np.isfinite(block[:, 0])
    if column.fill is not None:
        is_filled_N = bad_N if fills_all else bad_N & map_distinct(text, is_missing, bool)
        block[is_filled_N], bad_N = column.fill, bad_N & ~is_filled_N
    return block, bad_N


def _encode_one_hot(text: Any, categories: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    code_by_key = {make_key(value): code for code, value in enumerate(categories)}
    code_N = map_distinct(text, lambda value: code_by_key.get(make_key(value), -1), np.int64)
    return (code_N[:, None] == np.arange(len(categories))).astype(np.float32), code_N < 0


def check_table_type(key: str, table: Any) -> None:
    """Refuse a table whose ``columns`` are its values and not their names, as in Arrow; messages quote names."""
    if hasattr(table, "column_names"):
        raise checks.error(key, type(table).__name__, "must be a DataFrame", "Convert the table by to_pandas().")


def _get_column_names(table: Any) -> list[str] | None:
    """Return the names of a table's columns. None for an array."""
    if not isinstance(table, Mapping) and not hasattr(table, "columns"):
        return None
    check_table_type("table", table)
    return [str(name) for name in (table if isinstance(table, Mapping) else table.columns)]


def to_text_columns(table: Any, required: Sequence[str] | None = None, array: bool = True) -> dict[str, Any]:
    """Convert the required columns of a table, or all columns if None, to text, with "" for a missing value.

    ``array`` is whether the table may be an array, whose columns have no names.
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


def _to_texts(column: Any) -> Any:
    """Convert values to text as a CSV file holds them, one at a time, with "" for a missing value.

    An Arrow column of texts, as ``data.table_files`` reads it, stays. Its values are converted when they are used.
    """
    if hasattr(column, "chunks") and str(column.type) == "string" and not column.null_count:
        return column
    column = column.to_pylist() if hasattr(column, "to_pylist") else column
    if isinstance(column, str | bytes) or not isinstance(column, Iterable):
        raise checks.error("table", type(column).__name__, "must hold a list of values in each column")
    values = np.asarray(column) if hasattr(column, "dtype") else column
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise checks.error("table", f"{values.ndim} dimensions", "must hold one value a record in each column")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        return texts.format_numbers(values)
    return [format_value(value) for value in values]


def format_value(value: Any) -> str:
    """Format a value as text, with "" for a missing value."""
    if value is None:
        return ""
    try:
        is_nan = bool(value != value)  # also the missing times of pandas
    except Exception:  # pandas.NA, arrays and signaling NaN have no such comparison
        is_nan = True
    if is_nan:
        return ""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, np.timedelta64)
    if is_integer and 2**53 <= abs(int(value)) < 10**308:
        value = float(value)  # as in a column of integers with a missing value
    text = texts.to_canonical_text(value)
    return "" if text in _MISSING_IN_NUMPY else text
