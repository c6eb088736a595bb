"""Tables of an owner: numeric and categorical columns, texts, or ids of precomputed vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pate_torch.core import checks, texts
from pate_torch.data.base import compute_common_scale, get_categories_origin, resolve_path
from pate_torch.data.file_source import PATH_FIELDS, FileRecords, FileSource, Points, hash_points
from pate_torch.data.table_files import Table, count_rows, read_table, read_vectors
from pate_torch.privacy.records import Dataset, EncoderCard
from pate_torch.privacy.schema import MAX_CATEGORIES, TableSchema, TooManyCategoriesError, make_key
from pate_torch.privacy.unit_ids import (
    PRIVATE,
    PUBLIC,
    UnitIds,
    compute_content_id,
    format_unit_id,
    make_row_ids,
    parse_unit_ids,
)

ENCODER_KEYS = ("name", "sha256", "license", "trained_on", "disjoint")  # facts about the encoder of vectors


@dataclass(frozen=True, kw_only=True)
class TableSource(FileSource):
    """CSV files (.csv, .tsv, also compressed as .gz, .bz2 or .xz) or Parquet files with one record in each row.

    Attributes:
        label: Column of the class.
        id: Column of names by which a release identifies public points, and by which vectors are found. It does not
            determine the privacy unit: without a ``group``, each row is a unit of its own, whose id is a hash of the
            whole row, so that equal rows are one unit. None if records have no names.
        separator: Character between the values of a row.
        columns: Names of the columns of files without a header line. None if there is a header line.
        quotes: Whether quotation marks enclose values. If False, quotation marks are ordinary characters.
    """

    label: str = "label"
    id: str | None = None
    separator: str = ","
    columns: Sequence[str] | None = None
    quotes: bool = True

    required_columns: ClassVar[tuple[str, ...]] = ("label",)
    """Attributes whose columns every file must have."""

    def __post_init__(self) -> None:
        if self.separator == "\\t":  # a tab that was typed in a shell
            object.__setattr__(self, "separator", "\t")
        super().__post_init__()
        if not isinstance(self.separator, str) or len(self.separator) != 1 or not self.separator.isascii():
            raise checks.error("dataset.separator", self.separator, "must be one ASCII character", "A tab is '\\t'.")
        checks.boolean("dataset.quotes", self.quotes)
        checks.optional(checks.collection, "dataset.columns", self.columns)

    @property
    def _has_unnamed_records(self) -> bool:
        return super()._has_unnamed_records and not self.id

    @property
    def _text_column(self) -> str | None:
        """Column of texts, which a Parquet file must hold as text."""
        return None

    @property
    def _text_columns(self) -> tuple[str, ...]:
        """Columns in which different texts are different values, such as "7" and "7.0"."""
        return tuple(name for name in (self.id, self._text_column) if name is not None)

    def _read_file(self, role: int, key: str, path: Path) -> FileRecords:
        id_key, id_column = ("dataset.id", self.id) if self.group is None else ("dataset.group", self.group)
        options = {"columns": self.columns, "quotes": self.quotes, "text_column": self._text_column}
        table = read_table(key, path, self.separator, id_column=id_column, **options)
        if role == PUBLIC and self.test_path and self.label not in table:
            table[self.label] = pa.chunked_array([[""] * count_rows(table)])
        # A file of another separator seems to have one column.
        fix = "The file has one column: set dataset.separator, if it is not a comma." if len(table) == 1 else ""
        for name in self.required_columns:
            checks.one_of(f"dataset.{name}", getattr(self, name), list(table), fix)
        if id_column is not None and role == PRIVATE:
            checks.one_of(id_key, id_column, list(table))
        names = None  # public and test files may lack the column
        if id_column is not None and id_column in table:
            names = parse_unit_ids(id_key, table[id_column].to_pylist(), count_rows(table))
            table[id_column] = pa.chunked_array([pa.array(np.asarray(names))])
        # Rows of one id are single records. If the id were the unit, an added row could displace another row.
        unit_ids = _make_row_ids(table, self._text_columns) if names is None or self.group is None else names
        id_columns = [name for name in (self.id, self.group) if name is not None and name in table and role == PUBLIC]
        return FileRecords(
            content=table,
            labels=table[self.label].to_pylist(),
            unit_ids=unit_ids,
            point_names={("id", name): table[name].to_pylist() for name in id_columns},
        )


@dataclass(frozen=True, kw_only=True)
class Csv(TableSource):
    """Numeric columns, and one-hot columns of declared or public categories. x: float32 [N, D].

    Numeric features are centered and scaled by statistics of the public points.

    Attributes:
        features: Columns to use. None for all columns except label, group, id and ``ignore``.
        ignore: Columns to leave out.
        categories: Declared categories, {column: [values]}. A column without declared categories is numeric if all its
            public values are numbers; otherwise its public values are the categories. A private value that is not a
            category becomes zeros.
        max_categories: Largest number of different public values in a column of categories.
        missing: "error" to stop at public records whose numeric features are empty or not finite, or "drop" to drop
            such records. Such private records are always dropped; under replace_one, a public filler takes their place.
    """

    name: str = "csv"
    features: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    categories: Mapping[str, Sequence[Any]] | None = None
    max_categories: int = MAX_CATEGORIES
    missing: str = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("features", "ignore"):
            checks.optional(checks.collection, f"dataset.{key}", getattr(self, key))
        checks.optional(checks.mapping, "dataset.categories", self.categories)
        for column, values in (self.categories or {}).items():
            checks.collection(f"dataset.categories.{column}", values)
        checks.one_of("dataset.missing", self.missing, ("error", "drop"))
        checks.integer("dataset.max_categories", self.max_categories, low=2)

    def _build_points(self, files: dict[int, FileRecords], role_N: np.ndarray) -> Points:
        names = self._select_columns(files[PRIVATE].content)
        for role, file in files.items():
            if missing_columns := sorted(set(names) - set(file.content)):
                key, message = PATH_FIELDS[role], f"lacks the feature columns {missing_columns} of dataset.path"
                raise checks.error(f"dataset.{key}", getattr(self, key), message)
        table = {name: _concatenate_column(files, name) for name in names}
        public_N = np.isin(role_N, self._public_roles)
        schema = self._build_schema(_select_rows(table, np.flatnonzero(public_N)))
        x = schema.encode(table, unknown="zeros", missing="nan")
        is_finite_ND = np.isfinite(x[public_N])
        if not is_finite_ND.all() and self.missing == "error":
            bad_columns = [schema.feature_names[i] for i in schema.numeric_indices if not is_finite_ND[:, i].all()]
            message = "stops at numeric columns with empty, infinite or non-numeric public values: "
            fix = "Clean the columns, add them to dataset.ignore, or drop the records (dataset.missing=drop)."
            raise checks.error("dataset.missing", self.missing, message + ", ".join(bad_columns), fix)
        releasable_table = _select_rows(table, np.flatnonzero(np.isin(role_N, self._releasable_roles)))
        owner_columns = self.categories or ()
        return Points(
            gather=torch.from_numpy(x).__getitem__,
            # The hash covers the features only, because ids, groups and labels of the private file are private.
            make_content_ids=lambda public, _: schema.compute_content_ids(_select_rows(table, public)),
            options={
                "standardize": np.isin(np.arange(x.shape[1]), schema.numeric_indices).tolist(),
                "schema": schema.withhold_categories(releasable_table, owner_columns),
                "categories_origin": get_categories_origin(schema, owner_columns),
            },
        )

    def _select_columns(self, table: Table) -> list[str]:
        for key in ("features", "ignore", "categories"):
            for name in getattr(self, key) or ():
                checks.one_of(f"dataset.{key}", name, list(table))
        non_features = {self.label, self.group, self.id, *self.ignore}
        columns = [name for name in (self.features or table) if name not in non_features]
        if not columns:
            fix = f"Columns: {list(table)}."
            raise checks.error("dataset.features", self.features, "leaves no feature column", fix)
        return columns

    def _build_schema(self, public: Table) -> TableSchema:
        declared_categories = {name: values for name, values in (self.categories or {}).items() if name in public}
        try:
            return TableSchema.from_public(public, categories=declared_categories, max_categories=self.max_categories)
        except TooManyCategoriesError as error:
            hint = "" if self.group or self.id else f"If the column names the unit, set dataset.group={error.column}. "
            message = f"is below the {error.count} different public values of column {error.column!r}"
            fix = f"{hint}Set dataset.ignore=[{error.column}], declare dataset.categories or raise the limit."
            raise checks.error("dataset.max_categories", self.max_categories, message, fix) from None


@dataclass(frozen=True, kw_only=True)
class Text(TableSource):
    """One text in each record, for ``features=encoder``. x: UTF-8, uint8 [N, max_bytes] (``core.texts``).

    Attributes:
        column: Column of the texts.
        max_bytes: Largest length of a text in bytes. Longer texts are cut. The length is declared, so that it depends
            on no text.
        empty: "error" to stop at public records without a text, or "drop" to drop such records. A private record
            without a text is always dropped; under replace_one, a public filler takes its place.
    """

    name: str = "text"
    column: str = "text"
    max_bytes: int = 2048
    empty: str = "error"

    required_columns = ("label", "column")

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.nonempty_string("dataset.column", self.column)
        checks.integer("dataset.max_bytes", self.max_bytes, low=4)
        checks.one_of("dataset.empty", self.empty, ("error", "drop"))

    @property
    def _text_column(self) -> str:
        return self.column

    def _build_points(self, files: dict[int, FileRecords], role_N: np.ndarray) -> Points:
        column = _concatenate_column(files, self.column).to_pylist()
        x = encode_text_column(f"column {self.column}", column, self.max_bytes)
        num_missing = int((x[:, 0].numpy()[np.isin(role_N, self._public_roles)] == 0).sum())
        if num_missing and self.empty == "error":
            message = f"stops at {num_missing} public records without a text in column {self.column!r}"
            fix = "Remove these records, or set dataset.empty=drop."
            raise checks.error("dataset.empty", self.empty, message, fix)

        def make_content_ids(_: np.ndarray, public_x: torch.Tensor) -> list[str]:
            return [compute_content_id([text.encode()]) for text in texts.decode_texts(public_x)]

        return Points(gather=x.__getitem__, make_content_ids=make_content_ids, options={"text": self.column})


@dataclass(frozen=True, kw_only=True)
class Embeddings(TableSource):
    """Precomputed vectors, which are joined to a table of ids and labels. x: float32 [N, D].

    Vectors are centered, and scaled by one common factor. Each vector must be a function of one record alone, because
    no guarantee holds if another record can change a vector.

    Attributes:
        vectors: File of the vectors of all ids (``read_vectors``).
        ids: Text file of ids, one in each line, in the order of the vectors. None if the file of vectors holds the ids.
        ignore: Columns to leave out of vectors that are columns of a Parquet file, beside id, label and group.
        encoder: Declared facts (``ENCODER_KEYS``) about the encoder, for the privacy statement.
    """

    name: str = "embeddings"
    id: str | None = "id"
    vectors: str | None = None
    ids: str | None = None
    ignore: Sequence[str] = ()
    encoder: Mapping[str, Any] | None = None

    required_columns = ("label", "id")

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.nonempty_string("dataset.id", self.id)
        checks.collection("dataset.ignore", self.ignore)
        checks.optional(checks.mapping, "dataset.encoder", self.encoder)
        for key in self.encoder or ():
            checks.one_of("dataset.encoder", key, ENCODER_KEYS)
        self._make_encoder_card()

    def _make_encoder_card(self) -> EncoderCard:
        return EncoderCard(kind="given", **({"name": "an undeclared encoder"} | dict(self.encoder or {})))

    def load(self) -> Dataset:
        data = super().load()
        mean, std = compute_common_scale(data.pool.x)
        return replace(data, spec=replace(data.spec, mean=mean, std=std, encoder=self._make_encoder_card()))

    def _build_points(self, files: dict[int, FileRecords], role_N: np.ndarray) -> Points:
        path, id_column = resolve_path("dataset.vectors", self.vectors, self.root), str(self.id)
        unused_columns = [name for name in (self.label, self.group, *self.ignore) if name is not None]
        vectors = read_vectors(path, id_column, None if self.ids is None else self._read_ids(), unused_columns)
        record_ids = [format_unit_id(name) for name in _concatenate_column(files, id_column).to_pylist()]
        row_N = pc.fill_null(pc.index_in(pa.array(record_ids), pa.array(vectors.ids)), -1).to_numpy()
        is_missing_N = ((row_N < 0) | ~vectors.is_finite_N[row_N]) & np.isin(role_N, self._public_roles)
        if is_missing_N.any():
            first_id = record_ids[int(is_missing_N.argmax())]
            message = f"has no finite vector of {is_missing_N.sum()} public records, such as {first_id!r}"
            raise checks.error("dataset.vectors", str(path), message, "Add a vector for each public record.")
        return Points(
            gather=lambda rows: vectors.gather(row_N[rows]),
            make_content_ids=lambda _, public_x: hash_points(public_x),
            options={"standardize": False},
        )

    def _read_ids(self) -> list[str]:
        path = resolve_path("dataset.ids", self.ids, self.root)
        try:
            return [format_unit_id(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise checks.error("dataset.ids", str(path), "is not UTF-8", "Write one id in each line.") from error


def encode_text_column(key: str, column: Sequence[str], length: int) -> torch.Tensor:
    """Encode texts as uint8 [N, length], each by itself, with zeros for a missing text."""
    has_text_N = [texts.is_text(text) for text in column]
    x = texts.encode_texts(key, [text if has else "-" for text, has in zip(column, has_text_N, strict=True)], length)
    x[~torch.tensor(has_text_N, dtype=torch.bool)] = 0
    return x


def _make_row_ids(table: Table, text_columns: tuple[str, ...] = ()) -> UnitIds:
    blocks = (zip(table, batch.columns, strict=True) for batch in pa.table(table).to_batches())
    return make_row_ids([c if name in text_columns else _make_keys(c) for name, c in block] for block in blocks)


_KEY_PATTERN = r"^([A-Za-z]*|0|-?[1-9][0-9]{0,14}|-?(0|[1-9][0-9]{0,2})\.[0-9]{0,2}[1-9])$"
"""Pattern of most texts that are their own key. Those of the next pattern are not, but match."""

_WORD_PATTERN = r"(?i)^(true|false|nan|nat|inf|infinity)$"
"""Pattern of words that stand for booleans, missing values and numbers."""

_NUMBER_PATTERN = r"^-?[0-9]{1,15}\.[0-9]{1,20}$"
"""Pattern of numbers whose keys are computed all at once."""


def _make_keys(text: pa.Array) -> pa.Array:
    """Compute ``make_key`` of each cell. One odd value changes the texts of its column, and must change no other key.

    A missing value, for example, turns a column of integers of pandas into floats.
    """
    is_other = pc.invert(pc.match_substring_regex(text, _KEY_PATTERN))
    is_other = pc.or_(is_other, pc.match_substring_regex(text, _WORD_PATTERN))
    if not pc.any(is_other).as_py():
        return text
    values = text.filter(is_other).dictionary_encode()
    is_number_V = pc.match_substring_regex(values.dictionary, _NUMBER_PATTERN).to_numpy(zero_copy_only=False)
    keys_V = np.array(values.dictionary.to_pylist(), dtype=object)
    keys_V[~is_number_V] = list(map(make_key, keys_V[~is_number_V]))
    # One cast parses all numbers, and each has the text that it has as a cell of an array.
    number_V = values.dictionary.filter(pa.array(is_number_V)).cast(pa.float64()).to_numpy()
    keys_V[is_number_V] = [name.removesuffix(".0") for name in texts.format_numbers(number_V + 0.0)]  # -0.0 becomes 0.0
    return pc.replace_with_mask(text, is_other, pa.array(keys_V, pa.string()).take(values.indices))


def _concatenate_column(files: dict[int, FileRecords], name: str) -> pa.ChunkedArray:
    return pa.chunked_array(chunk for file in files.values() for chunk in file.content[name].chunks)


def _select_rows(table: Table, rows: np.ndarray) -> Table:
    return {name: column.take(rows) for name, column in table.items()}
