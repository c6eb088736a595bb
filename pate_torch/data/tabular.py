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
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from pate_torch.core import checks, texts
from pate_torch.data import roles, units
from pate_torch.data.schema import MAX_CATEGORIES, ManyCategories, TableSchema
from pate_torch.types import Dataset, PointNames

_COMPRESSED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_OPEN = "a quote is left open (a quote within a value is written twice; a value ends on its line)"
_NOT_READ = {".zip", ".zst", ".tar", ".tgz", ".7z", ".lz4", ".br"}

Table = dict[str, list[str]]
"""The columns of a table as text, "" for null. Types guessed per column would let one record change every other's."""


@dataclass(frozen=True, kw_only=True)
class Csv:
    """Numeric columns, and one-hot columns of declared or public categories; one row a record.

    x: float32 [N, D]. Numeric features are centered and scaled by the public pool's statistics.

    Attributes:
        name: Declared name.
        path: .csv (also .csv.gz, .bz2, .xz; .tsv with ``separator``) or .parquet, from the working directory or the
            data root.
        public_path: A public file of public points, which may lack the label when there is a test file.
        test_path: A public file of test records. A role without a file is split off by ``fractions``.
        root: The data root.
        seed: Seed of the split.
        roles: Who is split off: "hash" (each unit's own id decides) or "position" (a seeded permutation of the rows'
            positions, which are the units' ids: for replace_one).
        fractions: Private, public and test.
        label: The label's column.
        group: The column that names the privacy unit (say, a user).
        id: Otherwise the column that names the record; None: a record is named by a hash of its own content, and equal
            records are one unit.
        features: The columns to use; None: all but label, group, id and ``ignore``.
        ignore: Columns not to use.
        categories: {column: [values]}; a column without an entry is numeric if its public values all are, else takes
            the values these show. A private value outside the categories becomes all zeros.
        max_categories: Most values that public records may show of a column.
        classes: As for categories.
        missing: What to do with public records whose numeric features are empty or not finite: "error", or "drop" each
            by itself. A private record of this kind, or of another class, is dropped by itself; under replace_one it
            keeps its place, with a public filler in it.
        separator: Between values of a row.
        publish_split: The owner agrees that the public points are split off ``path``, and so become public: their
            categories, and a hash of the features of those that are asked, are released.
        publish_test: The owner agrees that figures on test records split off ``path`` become public.
        nominal_size: Publicly declared approximate number of private records.
        benchmark: Whether the records are public data: accuracies on the private side are then shown.

    Raises:
        ValueError: Names the key, what is allowed and the fix.
    """

    name: str = "csv"
    path: str | None = None
    public_path: str | None = None
    test_path: str | None = None
    root: str | None = None
    seed: int = 0
    roles: str = "hash"
    fractions: Sequence[float] = (0.8, 0.1, 0.1)
    label: str = "label"
    group: str | None = None
    id: str | None = None
    features: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    categories: Mapping[str, Sequence[Any]] | None = None
    max_categories: int = MAX_CATEGORIES
    classes: Sequence[Any] | None = None
    missing: str = "error"
    separator: str = ","
    publish_split: bool = False
    publish_test: bool = False
    nominal_size: int | None = None
    benchmark: bool = False

    def __post_init__(self) -> None:
        roles.check(self)
        roles.check_way(self.roles, single=self._single)
        for key in ("features", "ignore"):
            if getattr(self, key) is not None:
                checks.items(f"dataset.{key}", getattr(self, key))
        if self.categories is not None:
            checks.mapping("dataset.categories", self.categories)
            for column, values in self.categories.items():
                checks.items(f"dataset.categories.{column}", values)
        if not isinstance(self.separator, str) or len(self.separator) != 1:
            raise checks.fail("dataset.separator", self.separator, "must be one character", "A tab is '\\t'.")
        checks.one_of("dataset.missing", self.missing, ("error", "drop"))
        checks.integer("dataset.max_categories", self.max_categories, low=2)

    @property
    def _single(self) -> bool:
        """One file of single records without names."""
        return not (self.public_path or self.test_path or self.group or self.id)

    def load(self) -> Dataset:
        tables = self._tables()
        columns = self._columns(tables[roles.PRIVATE])
        sizes = [num_rows(table) for table in tables.values()]
        if self.roles == "position":
            unit_id = units.positions(sizes[0])
            role_N = roles.by_position(len(unit_id), self.fractions, self.seed)
        else:
            unit_id = np.concatenate([unit_ids(self, table, part == roles.PRIVATE) for part, table in tables.items()])
            part_N = np.repeat(list(tables), sizes)
            role_N = roles.by_hash(unit_id, part_N, set(tables), self.fractions, self.seed)
        roles.check_parts(self.name, *np.bincount(role_N, minlength=3).tolist())
        label = np.array([value for table in tables.values() for value in table[self.label]], dtype=object)
        table = {name: [value for part in tables.values() for value in part[name]] for name in columns}
        schema = self._schema(_rows_of(table, np.isin(role_N, roles.public_roles(self))))
        x = schema.encode(table, unknown="zeros", missing="nan")
        finite_ND = np.isfinite(x)
        looked_at = finite_ND[np.isin(role_N, roles.public_roles(self))]
        if not looked_at.all() and self.missing == "error":
            names = schema.feature_names
            bad = [names[place] for place in schema.numeric if not looked_at[:, place].all()]
            raise checks.fail(
                "dataset.missing",
                self.missing,
                f"stops at numeric columns with empty, infinite or non-numeric public values: {', '.join(bad)}",
                "Clean them, drop such records one by one (dataset.missing=drop), or use dataset.ignore.",
            )
        standardize = np.isin(np.arange(x.shape[1]), schema.numeric).tolist()
        records = roles.Records(
            x=torch.from_numpy(x),
            label=label,
            unit_id=unit_id,
            unit="record" if self.group is None else f"group:{self.group}",
            role_N=role_N,
            usable_N=finite_ND.all(1),
            why="with missing numbers",
        )
        return roles.assemble(
            records,
            self,
            promised=roles.promise(
                self.roles,
                single=self._single,
                apart=bool(self.public_path),
                grouped=self.group is not None,
                benchmark=self.benchmark,
            ),
            standardize=standardize,
            schema=schema.withheld(_rows_of(table, np.isin(role_N, roles.shown_roles(self))), self.categories or ()),
            names=lambda public: self._names(tables, schema, table, public),
            declared=self.categories or (),
        )

    def _tables(self) -> dict[int, Table]:
        """Every file's rows, by the role it was given for (PRIVATE: the main file)."""
        tables: dict[int, Table] = {}
        files = roles.files(self)
        for part, (key, file) in files.items():
            table = read_text(key, file, self.separator, unit=unit_column(self))
            if part == roles.PUBLIC and self.test_path and self.label not in table:
                table[self.label] = [""] * num_rows(table)
            require_column("dataset.label", self.label, table)
            tables[part] = table
        needed = set(self._columns(tables[roles.PRIVATE]))
        for part, table in tables.items():
            if lacking := sorted(needed - set(table)):
                key, file = files[part]
                raise checks.fail(key, str(file), f"lacks the feature columns {lacking} of dataset.path")
        return tables

    def _columns(self, table: Table) -> list[str]:
        special = {self.label, self.group, self.id, *self.ignore}
        for key, names in (
            ("features", self.features or ()),
            ("ignore", self.ignore),
            ("categories", self.categories or ()),
        ):
            for name in names:
                require_column(f"dataset.{key}", name, table)
        columns = [name for name in (self.features or table) if name not in special]
        if not columns:
            raise checks.fail("dataset.features", self.features, "leaves no feature column", f"Columns: {list(table)}.")
        return columns

    def _names(self, tables: Mapping[int, Table], schema: TableSchema, table: Table, rows: np.ndarray) -> PointNames:
        """By what whoever holds the public points finds them: their own ids where their file has them, else content.

        Args:
            tables: The files, the private one first.
            schema: What is hashed: features alone, never an id, a group or a label of the private file.
            table: The feature columns of all files.
            rows: The public points' rows in it.
        """
        source = None
        if self.public_path is not None:
            source, own = Path(self.public_path).name, tables[roles.PUBLIC]
            first = num_rows(tables[roles.PRIVATE])
            for column in (self.id, self.group):
                if column is not None and column in own:
                    names = tuple(own[column][row - first].strip() for row in rows.tolist())
                    if len(set(names)) == len(names):  # a group may own several points
                        return PointNames("id", names, source, column)
        picked = {name: [column[row] for row in rows.tolist()] for name, column in table.items()}
        return PointNames("content", tuple(schema.content_ids(picked)), source)

    def _schema(self, public: Table) -> TableSchema:
        """The schema, declared or as the public side shows it.

        Args:
            public: The feature columns of public records.
        """
        declared = {name: values for name, values in (self.categories or {}).items() if name in public}
        try:
            return TableSchema.of(public, categories=declared, max_categories=self.max_categories)
        except ManyCategories as many:
            named = "" if self.group or self.id else f": is it the unit? dataset.group={many.column}"
            raise checks.fail(
                "dataset.max_categories",
                self.max_categories,
                f"column {many.column!r} has {many.count} different public values{named}",
                f"Or leave it out (dataset.ignore=[{many.column}]), list its values in dataset.categories or raise the "
                "limit.",
            ) from None


class Identified(Protocol):
    """A source whose columns may name units."""

    @property
    def group(self) -> str | None:
        """The column that names the privacy unit."""

    @property
    def id(self) -> str | None:
        """Otherwise the column that names the record; None: a record is named by its content."""


def unit_column(source: Identified) -> tuple[str, str | None]:
    """The setting that names the column of unit ids, and the column."""
    return ("dataset.id", source.id) if source.group is None else ("dataset.group", source.group)


def unit_ids(source: Identified, table: Table, private: bool) -> np.ndarray:
    """Unit ids, str [N]. Public and test files may lack the column: their records are then named by content."""
    key, column = unit_column(source)
    if column is not None and private:
        require_column(key, column, table)
    if column is not None and column in table:
        return np.array(table[column], dtype=str)
    rows = zip(*table.values(), strict=True)
    return np.array([units.content_id(map(str.encode, row)) for row in rows])


def _rows_of(table: Table, chosen_N: np.ndarray) -> Table:
    rows = np.flatnonzero(chosen_N).tolist()
    return {name: [column[row] for row in rows] for name, column in table.items()}


def num_rows(table: Table) -> int:
    """Rows of a table."""
    return len(next(iter(table.values())))


def require_column(key: str, column: str, table: Table) -> None:
    """Raise ValueError, with the columns that there are, for one that is not."""
    if column not in table:
        checks.one_of(key, column, list(table))


def read_text(
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
        unit: The setting that names the column of unit ids, and the column (``unit_column``).

    Raises:
        ValueError: One that is damaged, or whose rows do not fit its header; ids that name no units.
    """
    try:
        parquet = file.suffix in (".parquet", ".pq")
        table = _parquet(file, unit[1]) if parquet else _csv(file, separator, columns, quotes)
    except UnicodeDecodeError as error:
        why = f"is not a readable CSV or Parquet file (it is not UTF-8: byte 0x{error.object[error.start]:02x})"
        raise checks.fail(key, str(file), why, "Convert it: iconv -f LATIN1 -t UTF-8 <file>.") from error
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, pa.ArrowException) as error:
        raise checks.fail(
            key,
            str(file),
            f"is not a readable CSV or Parquet file ({error})",
            "A CSV file has a header line; set dataset.separator if it is not a comma.",
        ) from error
    if not table or not num_rows(table):
        raise checks.fail(key, str(file), "has no rows")
    if unit[1] in table:
        table[unit[1]] = units.name_units(unit[0], table[unit[1]], num_rows(table)).tolist()
    return table


def _csv(file: Path, separator: str, columns: Sequence[str] | None, quotes: bool) -> Table:
    with _opened(file) as lines, _no_collection():
        rows = _rows(lines, separator, quotes)
        names = _names(next(rows, []) if columns is None else list(columns))
        values = list(zip(*rows, strict=True)) or [()] * len(names)
    if len(values) != len(names):
        raise ValueError(f"its rows have {len(values)} fields, and {len(names)} columns are named")
    return {name: list(column) for name, column in zip(names, values, strict=True)}


def _rows(lines: Iterable[str], separator: str, quotes: bool) -> Iterator[list[str]]:
    """The header and every row, each on a line of its own and as long as the header.

    A quote left open takes what follows for its own, up to the next: fields, and whole rows, would go unseen.
    """
    if quotes:
        reader = csv.reader(_balanced(lines), delimiter=separator, strict=True)
    else:
        reader = csv.reader(lines, delimiter=separator, strict=True, quoting=csv.QUOTE_NONE)
    width, before = 0, 0
    try:
        for row in reader:
            line, before = before + 1, reader.line_num
            if before > line:
                raise ValueError(f"line {line}: {_OPEN}")
            if not row:
                continue
            width = width or len(row)
            if len(row) != width:
                raise ValueError(f"line {line} has {len(row)} fields, and the header {width}")
            yield row
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _balanced(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if '"' in line and line.count('"') % 2:
            raise ValueError(f"line {number}: {_OPEN}")
        yield line


def _names(header: list[str]) -> list[str]:
    """The names of the columns, every one with a name of its own."""
    for place, name in enumerate(header, start=1):
        if not name.strip():
            raise ValueError(f"column {place} of the header has no name (pandas writes none with index=False)")
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"the header names column {twice[0]!r} more than once")
    return header


@contextmanager
def _no_collection() -> Iterator[None]:
    """A million rows are as many lists, which Python would search for cycles over and over: four times the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _opened(file: Path) -> IO[str]:
    if file.suffix in _NOT_READ:
        raise ValueError(f"{file.suffix} is not read: pack it as {', '.join(_COMPRESSED)}, or not at all")
    # Universal newlines, so that a line is a line on every system; a mark of byte order is no name's part.
    unpack = _COMPRESSED.get(file.suffix, open)
    return io.TextIOWrapper(unpack(file, "rb"), encoding="utf-8-sig")


def _parquet(file: Path, unit: str | None) -> Table:
    """The columns as text; that of unit ids as it is, since its type decides whether they name units."""
    table = pq.read_table(file)
    # pandas stores an unnamed index as a column: a row's position, which is no feature and would rename others.
    kept = [i for i, name in enumerate(table.column_names) if not re.fullmatch(r"__index_level_\d+__", name)]
    names = _names([table.column_names[i] for i in kept])
    pairs = zip(names, kept, strict=True)
    return {name: table.column(i).to_pylist() if name == unit else _text(table, i) for name, i in pairs}


def _text(table: pa.Table, place: int) -> list[str]:
    column = table.column(place)
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_timestamp(column.type):  # however fine the column is
            return [texts.spell(text) for text in pc.fill_null(column.cast(pa.string()), "").to_pylist()]
        if pa.types.is_decimal(column.type):  # likewise
            column = column.cast(pa.float64())
        if pa.types.is_boolean(column.type):
            column = pc.if_else(column, "True", "False")  # as pandas writes them into a CSV file
        return pc.fill_null(column.cast(pa.string()), "").to_pylist()
    except pa.ArrowNotImplementedError as error:
        raise ValueError(f"column {table.column_names[place]!r} of type {column.type} is no plain value") from error
