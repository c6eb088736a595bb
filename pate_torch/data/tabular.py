"""Tables of a user's own: CSV, read strictly, and Parquet by pyarrow."""

from __future__ import annotations

import bz2
import csv
import gc
import gzip
import io
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from pate_torch.core import checks, texts
from pate_torch.data import roles
from pate_torch.data.file_source import FileSource, Part, Points
from pate_torch.privacy.records import PointNames
from pate_torch.privacy.schema import MAX_CATEGORIES, TableSchema, TooManyCategoriesError
from pate_torch.privacy.unit_ids import UnitIds, make_content_ids, parse_unit_ids

_DECOMPRESSORS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_OPEN_QUOTE_MESSAGE = "a quote is left open (a quote within a value is written twice; a value ends on its line)"
_UNSUPPORTED_SUFFIXES = {".zip", ".zst", ".tar", ".tgz", ".7z", ".lz4", ".br"}

Table = dict[str, list[str]]
"""The columns of a table as text, "" for null. Types guessed per column would let one record change every other's."""


@dataclass(frozen=True, kw_only=True)
class TableSource(FileSource):
    """CSV (.csv, also .csv.gz, .bz2, .xz; .tsv with ``separator``) or Parquet, one row a record.

    Attributes:
        label: The label's column.
        group: The column that names the privacy unit (say, a user).
        id: Otherwise the column that names the record; None: a record is named by a hash of its own content, and equal
            records are one unit.
        separator: Between values of a row.
    """

    label: str = "label"
    id: str | None = None
    separator: str = ","

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.separator, str) or len(self.separator) != 1:
            raise checks.error("dataset.separator", self.separator, "must be one character", "A tab is '\\t'.")

    @property
    def _has_unnamed_records(self) -> bool:
        return super()._has_unnamed_records and not self.id

    @property
    def _unit_column(self) -> tuple[str, str | None]:
        """The setting that names the column of unit ids, and the column."""
        return ("dataset.id", self.id) if self.group is None else ("dataset.group", self.group)

    def _read_table(self, key: str, path: Path) -> Table:
        return read_table(key, path, self.separator, unit=self._unit_column)

    def _get_required_columns(self) -> dict[str, str]:
        """Columns that every file must have, by their keys, beside the label."""
        return {}

    def _read_part(self, role: int, key: str, path: Path) -> Part:
        table = self._read_table(key, path)
        if role == roles.PUBLIC and self.test_path and self.label not in table:
            table[self.label] = [""] * count_rows(table)
        for name, column in ({"dataset.label": self.label} | self._get_required_columns()).items():
            check_column(name, column, table)
        return Part(content=table, label=table[self.label], make_unit_ids=lambda: self._make_unit_ids(table, role))

    def _make_unit_ids(self, table: Table, role: int) -> UnitIds:
        """Unit ids [N]. Public and test files may lack the column: their records are then named by content."""
        key, column = self._unit_column
        if column is not None and role == roles.PRIVATE:
            check_column(key, column, table)
        if column is not None and column in table:
            return parse_unit_ids(key, table[column], count_rows(table))
        return make_content_ids(
            (_spell_number(cell).encode() for cell in row) for row in zip(*table.values(), strict=True)
        )

    def _make_point_names(self, parts: dict[int, Part], points: Points, public: np.ndarray) -> PointNames | None:
        """Public points by their own ids where their file has them, else by content."""
        if self.public_path is not None:
            public_table, first_row = parts[roles.PUBLIC].content, len(parts[roles.PRIVATE].label)
            for column in (self.id, self.group):
                if column is not None and column in public_table:
                    names = tuple(public_table[column][row - first_row].strip() for row in public.tolist())
                    if len(set(names)) == len(names):  # a group may own several points
                        return PointNames("id", names, Path(self.public_path).name, column)
        return super()._make_point_names(parts, points, public)


@dataclass(frozen=True, kw_only=True)
class LabeledTable(TableSource):
    """A table whose points are something else than its columns: texts, vectors by id.

    Attributes:
        columns: Names of the columns of files without a header line; None: their first line has them.
        quotes: Whether quotation marks enclose values; else they are characters like others.
    """

    columns: Sequence[str] | None = None
    quotes: bool = True

    def __post_init__(self) -> None:
        if self.separator == "\\t":  # as a shell passes it on
            object.__setattr__(self, "separator", "\t")
        super().__post_init__()
        checks.boolean("dataset.quotes", self.quotes)
        if self.columns is not None:
            checks.collection("dataset.columns", self.columns)

    def _read_table(self, key: str, path: Path) -> Table:
        header, unit = self.columns, self._unit_column
        return read_table(key, path, self.separator, columns=header, quotes=self.quotes, unit=unit)


@dataclass(frozen=True, kw_only=True)
class Csv(TableSource):
    """Numeric columns, and one-hot columns of declared or public categories.

    x: float32 [N, D]. Numeric features are centered and scaled by the public pool's statistics.

    Attributes:
        roles: Who is split off: "hash" (each unit's own id decides) or "position" (a seeded permutation of the rows'
            positions, which are the units' ids: for replace_one).
        features: The columns to use; None: all but label, group, id and ``ignore``.
        ignore: Columns not to use.
        categories: {column: [values]}; a column without an entry is numeric if its public values all are, else takes
            the values these show. A private value outside the categories becomes all zeros.
        max_categories: Most values that public records may show of a column.
        missing: What to do with public records whose numeric features are empty or not finite: "error", or "drop" each
            by itself. A private record of this kind, or of another class, is dropped by itself; under replace_one it
            keeps its place, with a public filler in it.
    """

    name: str = "csv"
    roles: str = "hash"
    features: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    categories: Mapping[str, Sequence[Any]] | None = None
    max_categories: int = MAX_CATEGORIES
    missing: str = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("features", "ignore"):
            if getattr(self, key) is not None:
                checks.collection(f"dataset.{key}", getattr(self, key))
        if self.categories is not None:
            checks.mapping("dataset.categories", self.categories)
            for column, values in self.categories.items():
                checks.collection(f"dataset.categories.{column}", values)
        checks.one_of("dataset.missing", self.missing, ("error", "drop"))
        checks.integer("dataset.max_categories", self.max_categories, low=2)

    @property
    def _role_assignment(self) -> str:
        return self.roles

    def _read_parts(self) -> dict[int, Part]:
        parts = super()._read_parts()
        required_columns = set(self._select_columns(parts[roles.PRIVATE].content))
        for role, key, path in self._list_files():
            if missing_columns := sorted(required_columns - set(parts[role].content)):
                raise checks.error(key, str(path), f"lacks the feature columns {missing_columns} of dataset.path")
        return parts

    def _build_points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        table = {
            name: [value for part in parts.values() for value in part.content[name]]
            for name in self._select_columns(parts[roles.PRIVATE].content)
        }
        public_N = self._is_public(role_N)
        schema = self._build_schema(_select_rows(table, np.flatnonzero(public_N)))
        x = schema.encode(table, unknown="zeros", missing="nan")
        finite_ND = np.isfinite(x)
        if not finite_ND[public_N].all() and self.missing == "error":
            bad_columns = [schema.feature_names[i] for i in schema.numeric_indices if not finite_ND[public_N, i].all()]
            raise checks.error(
                "dataset.missing",
                self.missing,
                f"stops at numeric columns with empty, infinite or non-numeric public values: {', '.join(bad_columns)}",
                "Clean them, drop such records one by one (dataset.missing=drop), or use dataset.ignore.",
            )
        releasable_table = _select_rows(table, np.flatnonzero(self._is_releasable(role_N)))
        return Points(
            x=torch.from_numpy(x),
            standardize=np.isin(np.arange(x.shape[1]), schema.numeric_indices).tolist(),
            schema=schema.withhold_categories(releasable_table, self.categories or ()),
            owner_columns=self.categories or (),
            # Of features alone, never of an id, a group or a label of the private file.
            make_content_ids=lambda public: schema.compute_content_ids(_select_rows(table, public)),
        )

    def _select_columns(self, table: Table) -> list[str]:
        non_features = {self.label, self.group, self.id, *self.ignore}
        for key, names in (
            ("features", self.features or ()),
            ("ignore", self.ignore),
            ("categories", self.categories or ()),
        ):
            for name in names:
                check_column(f"dataset.{key}", name, table)
        columns = [name for name in (self.features or table) if name not in non_features]
        if not columns:
            raise checks.error(
                "dataset.features", self.features, "leaves no feature column", f"Columns: {list(table)}."
            )
        return columns

    def _build_schema(self, public: Table) -> TableSchema:
        """The schema, declared or as the public side shows it.

        Args:
            public: The feature columns of public records.
        """
        declared_categories = {name: values for name, values in (self.categories or {}).items() if name in public}
        try:
            return TableSchema.from_public(public, categories=declared_categories, max_categories=self.max_categories)
        except TooManyCategoriesError as error:
            hint = "" if self.group or self.id else f": is it the unit? dataset.group={error.column}"
            raise checks.error(
                "dataset.max_categories",
                self.max_categories,
                f"column {error.column!r} has {error.count} different public values{hint}",
                f"Or leave it out (dataset.ignore=[{error.column}]), list its values in dataset.categories or raise the"
                " limit.",
            ) from None


def _spell_number(text: str) -> str:
    """A cell as content ids are made of it: large whole numbers as in a column of fractions, which have fewer digits.

    One missing value makes a column of whole numbers one of fractions, and must rename no other record.
    """
    if len(text) < 16 and "e+" not in text:
        return text
    try:
        return repr(float(text)) if abs(float(text)) >= 2**53 else text
    except ValueError:
        return text


def _select_rows(table: Table, rows: np.ndarray) -> Table:
    return {name: [column[row] for row in rows.tolist()] for name, column in table.items()}


def count_rows(table: Table) -> int:
    """Rows of a table."""
    return len(next(iter(table.values())))


def check_column(key: str, column: str, table: Table) -> None:
    """Raise ValueError, with the columns that there are, for one that is not."""
    if column not in table:
        checks.one_of(key, column, list(table))


def read_table(
    key: str,
    file: Path,
    separator: str,
    *,
    columns: Sequence[str] | None = None,
    quotes: bool = True,
    unit: tuple[str, str | None] = ("", None),
) -> Table:
    """Read a CSV or Parquet file.

    Args:
        key: The setting that names it, for messages.
        file: The file.
        separator: Between values of a row of a CSV file.
        columns: Names of the columns of a CSV file without a header line; None: its first line has them.
        quotes: Whether quotation marks enclose values of a CSV file; else they are characters like others.
        unit: The setting that names the column of unit ids, and the column.

    Raises:
        ValueError: One that is damaged, or whose rows do not fit its header; ids that name no units.
    """
    try:
        is_parquet = file.suffix in (".parquet", ".pq")
        table = _read_parquet(file, unit[1]) if is_parquet else _read_csv(file, separator, columns, quotes)
    except UnicodeDecodeError as error:
        message = f"is not a readable CSV or Parquet file (it is not UTF-8: byte 0x{error.object[error.start]:02x})"
        raise checks.error(key, str(file), message, "Convert it: iconv -f LATIN1 -t UTF-8 <file>.") from error
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, pa.ArrowException) as error:
        raise checks.error(
            key,
            str(file),
            f"is not a readable CSV or Parquet file ({error})",
            "A CSV file has a header line; set dataset.separator if it is not a comma.",
        ) from error
    if not table or not count_rows(table):
        raise checks.error(key, str(file), "has no rows")
    if unit[1] in table:
        table[unit[1]] = parse_unit_ids(unit[0], table[unit[1]], count_rows(table)).tolist()
    return table


def _read_csv(file: Path, separator: str, columns: Sequence[str] | None, quotes: bool) -> Table:
    with _open_text(file) as lines, _pause_garbage_collection():
        rows = _iterate_rows(lines, separator, quotes)
        names = _check_header(next(rows, []) if columns is None else list(columns))
        values = list(zip(*rows, strict=True)) or [()] * len(names)
    if len(values) != len(names):
        raise ValueError(f"its rows have {len(values)} fields, and {len(names)} columns are named")
    return {name: list(column) for name, column in zip(names, values, strict=True)}


def _iterate_rows(lines: Iterable[str], separator: str, quotes: bool) -> Iterator[list[str]]:
    """The header and every row, each on a line of its own and as long as the header.

    A quote left open takes what follows for its own, up to the next: fields, and whole rows, would go unseen.
    """
    if quotes:
        reader = csv.reader(_iterate_balanced_lines(lines), delimiter=separator, strict=True)
    else:
        reader = csv.reader(lines, delimiter=separator, strict=True, quoting=csv.QUOTE_NONE)
    width, last_line = 0, 0
    try:
        for row in reader:
            line, last_line = last_line + 1, reader.line_num
            if last_line > line:
                raise ValueError(f"line {line}: {_OPEN_QUOTE_MESSAGE}")
            if not row:
                continue
            width = width or len(row)
            if len(row) != width:
                raise ValueError(f"line {line} has {len(row)} fields, and the header {width}")
            yield row
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _iterate_balanced_lines(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if '"' in line and line.count('"') % 2:
            raise ValueError(f"line {number}: {_OPEN_QUOTE_MESSAGE}")
        yield line


def _check_header(header: list[str]) -> list[str]:
    """The names of the columns, every one with a name of its own."""
    for number, name in enumerate(header, start=1):
        if not name.strip():
            raise ValueError(f"column {number} of the header has no name (pandas writes none with index=False)")
    if duplicates := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"the header names column {duplicates[0]!r} more than once")
    return header


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """A million rows are as many lists, which Python would search for cycles over and over: four times the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open_text(file: Path) -> IO[str]:
    if file.suffix in _UNSUPPORTED_SUFFIXES:
        raise ValueError(f"{file.suffix} is not read: pack it as {', '.join(_DECOMPRESSORS)}, or not at all")
    # Universal newlines, so that a line is a line on every system; a mark of byte order is no name's part.
    unpack = _DECOMPRESSORS.get(file.suffix, open)
    return io.TextIOWrapper(unpack(file, "rb"), encoding="utf-8-sig")


def _read_parquet(file: Path, unit: str | None) -> Table:
    """The columns as text; that of unit ids as it is, since its type decides whether they name units."""
    table = pq.read_table(file)
    # pandas stores an unnamed index as a column: a row's position, which is no feature and would rename others.
    column_indices = [i for i, name in enumerate(table.column_names) if not re.fullmatch(r"__index_level_\d+__", name)]
    names = _check_header([table.column_names[i] for i in column_indices])
    pairs = zip(names, column_indices, strict=True)
    return {name: table.column(i).to_pylist() if name == unit else _to_texts(table, i) for name, i in pairs}


def _to_texts(table: pa.Table, index: int) -> list[str]:
    column = table.column(index)
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_timestamp(column.type):  # however fine the column is
            return [texts.to_canonical_text(text) for text in pc.fill_null(column.cast(pa.string()), "").to_pylist()]
        if pa.types.is_decimal(column.type):  # likewise
            column = column.cast(pa.float64())
        if pa.types.is_boolean(column.type):
            column = pc.if_else(column, "True", "False")  # as pandas writes them into a CSV file
        return pc.fill_null(column.cast(pa.string()), "").to_pylist()
    except pa.ArrowNotImplementedError as error:
        raise ValueError(f"column {table.column_names[index]!r} of type {column.type} is no plain value") from error
