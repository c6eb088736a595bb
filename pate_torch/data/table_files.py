"""Strict readers of tables (CSV, Parquet) and of vectors (.npy, safetensors, Parquet)."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pate_torch.core import checks, texts
from pate_torch.core.files import read_tensors
from pate_torch.privacy.unit_ids import parse_unit_ids

_DECOMPRESSORS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_OPEN_QUOTE_MESSAGE = "a quote is left open (write a quote within a value twice, and each value on one line)"
_BLOCK_ROWS = 1024  # vectors that are read at a time
_INDEX_PATTERN = re.compile(r"__index_level_\d+__")
"""Pattern of the name under which pandas stores an unnamed index, as a column of positions.

One removed row would change all later positions."""
_UNSUPPORTED_SUFFIXES = {".zip", ".zst", ".tar", ".tgz", ".7z", ".lz4", ".br"}

Table = dict[str, pa.ChunkedArray]
"""Text values of each column, with "" for null. Types are not guessed, because one value could then change others."""


def read_table(key: str, file: Path, separator: str, **options: Any) -> Table:
    """Read a whole CSV or Parquet file. The arguments and the errors are those of ``iterate_tables``."""
    blocks = list(iterate_tables(key, file, separator, **options))
    return {name: pa.chunked_array(c for block in blocks for c in block[name].chunks) for name in blocks[0]}


def iterate_tables(
    key: str,
    file: Path,
    separator: str,
    *,
    columns: Sequence[str] | None = None,
    quotes: bool = True,
    id_column: str | None = None,
    text_column: str | None = None,
) -> Iterator[Table]:
    """Read a CSV or Parquet file in blocks of ``count_block_rows`` rows.

    Args:
        key: Name of the setting, for messages.
        file: CSV file (.gz, .bz2 and .xz are decompressed) or Parquet file (.parquet, .pq).
        separator: Character between the values of a row of a CSV file.
        columns: Names of the columns of a CSV file without a header line.
        quotes: Whether quotation marks enclose values of a CSV file. If False, quotes are ordinary characters.
        id_column: Column of a Parquet file that is not converted to text, because unit ids of some types are refused.
        text_column: Column that a Parquet file must hold as text. The texts of other types are no cell's own.
    """
    block: Table = {}
    try:
        is_parquet = file.suffix in (".parquet", ".pq")
        if is_parquet:
            blocks = _iterate_parquet(file, id_column, text_column)
        else:
            blocks = _iterate_csv(file, separator, columns, quotes)
        for block in blocks:
            yield block
    except UnicodeDecodeError as error:
        message = f"is not a readable CSV or Parquet file (byte 0x{error.object[error.start]:02x} is not UTF-8)"
        raise checks.error(key, str(file), message, "Convert the file: iconv -f LATIN1 -t UTF-8 <file>.") from error
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, pa.ArrowException) as error:
        message = f"is not a readable CSV or Parquet file ({error})"
        fix = "A CSV file has a header line. If the separator is not a comma, set dataset.separator."
        raise checks.error(key, str(file), message, fix) from error
    if not block:
        raise checks.error(key, str(file), "has no rows")


def count_block_rows(num_values: int) -> int:
    """Count the rows of a block, 1024 to 16,384 in batches of 1024, by the number of values in a row."""
    return 1024 * max(1, min(16, 512 // max(1, num_values)))


def count_rows(table: Table) -> int:
    """Count the rows of a table."""
    return len(next(iter(table.values())))


def _iterate_csv(file: Path, separator: str, columns: Sequence[str] | None, quotes: bool) -> Iterator[Table]:
    with _open_text(file) as lines:
        rows = _iterate_rows(lines, separator, quotes, 0 if columns is None else len(columns))
        names = _split_row(next(rows, "\n"), separator, quotes) if columns is None else list(columns)
        _check_header(names)
        parsing = pa.csv.ParseOptions(delimiter=separator, quote_char='"' if quotes else False)
        types = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        while block := "".join(itertools.islice(rows, count_block_rows(len(names)))).encode():
            block = b"\xef\xbb\xbf" + block  # Arrow skips the byte order mark of a block, and so none of a cell
            reading = pa.csv.ReadOptions(column_names=names, block_size=len(block) + 1, use_threads=False)
            try:
                columns = pa.csv.read_csv(pa.BufferReader(block), reading, parsing, types).columns
            except pa.ArrowException:  # whose message may quote a private row
                raise ValueError("Arrow cannot parse the rows") from None
            yield dict(zip(names, columns, strict=True))


def _iterate_rows(lines: Iterable[str], separator: str, quotes: bool, width: int) -> Iterator[str]:
    """Iterate over the lines that Arrow can read. If ``width`` is 0, the first row sets the number of fields.

    Arrow would read all text after an open quote as one value.
    """
    for number, line in enumerate(lines, start=1):
        if line == "\n":
            continue
        count = line.count(separator) + 1
        if quotes and '"' in line:
            try:
                count = len(_split_row(line, separator, quotes))
            except csv.Error as error:
                is_open = line.count('"') % 2 or "unexpected end" in str(error)
                raise ValueError(f"line {number}: {_OPEN_QUOTE_MESSAGE if is_open else error}") from error
        width = width or count
        if count != width:
            raise ValueError(f"line {number} has {count} fields, and the header {width}")
        yield line


def _split_row(line: str, separator: str, quotes: bool) -> list[str]:
    if quotes and line.count('"') % 2:
        raise csv.Error(_OPEN_QUOTE_MESSAGE)
    return next(csv.reader([line], delimiter=separator, strict=True)) if quotes else line.strip("\n").split(separator)


def _check_header(header: list[str]) -> None:
    for number, name in enumerate(header, start=1):
        if not name.strip():
            raise ValueError(f"column {number} of the header has no name (in pandas, write with index=False)")
    if duplicates := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"the header names column {duplicates[0]!r} more than once")


def _open_text(file: Path) -> IO[str]:
    if file.suffix in _UNSUPPORTED_SUFFIXES:
        raise ValueError(f"{file.suffix} is not supported: use {', '.join(_DECOMPRESSORS)} or an uncompressed file")
    # The encoding utf-8-sig, because a byte order mark is not part of the first column name.
    decompress = _DECOMPRESSORS.get(file.suffix, open)
    return io.TextIOWrapper(decompress(file, "rb"), encoding="utf-8-sig")


def _iterate_parquet(file: Path, id_column: str | None, text_column: str | None) -> Iterator[Table]:
    parquet = pq.ParquetFile(file, buffer_size=1 << 16)  # without a buffer, whole row groups are read
    names = parquet.schema_arrow.names
    indices = [i for i, name in enumerate(names) if not _INDEX_PATTERN.fullmatch(name)]
    _check_header([names[i] for i in indices])
    if text_column is not None and text_column in names:
        check_text_type(text_column, parquet.schema_arrow.field(text_column).type)
    for batch in parquet.iter_batches(count_block_rows(len(names))):
        columns = {names[i]: batch.column(i) for i in indices}
        texts_by_name = {name: c if name == id_column else _to_texts(name, c) for name, c in columns.items()}
        yield {name: pa.chunked_array([column]) for name, column in texts_by_name.items()}


def check_text_type(name: str, kind: pa.DataType) -> None:
    """Refuse numbers as texts: one missing number changes the type of all, and "1841" becomes "1841.0"."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):
        raise ValueError(f"column {name!r} of type {kind} holds no texts: write the column as text")


def _to_texts(name: str, column: pa.Array) -> pa.Array:
    """Convert a column to the text that pandas writes into a CSV file."""
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # One odd value changes the type of the column. The text of a value must not depend on this type.
        if pa.types.is_timestamp(column.type) and column.type.tz is not None:
            column = column.cast(pa.timestamp(column.type.unit, "UTC"))
        if pa.types.is_timestamp(column.type) or pa.types.is_time(column.type):
            text = pc.fill_null(column.cast(pa.string()), "").to_pylist()
            return pa.array(map(texts.to_canonical_text, text), pa.string())
        if pa.types.is_duration(column.type):
            numbers = column.cast(pa.duration("us"), safe=False).cast(pa.int64()).to_pylist()
            return pa.array(["" if n is None else str(n / 10**6) for n in numbers], pa.string())
        if pa.types.is_decimal(column.type) or pa.types.is_floating(column.type):
            return pa.array(texts.format_numbers(_to_doubles(column)), pa.string())
        if pa.types.is_boolean(column.type):
            column = pc.if_else(column, "True", "False")
        return pc.fill_null(column.cast(pa.string()), "")
    except pa.ArrowNotImplementedError as error:
        raise ValueError(f"column {name!r} of type {column.type} must hold one plain value in each row") from error


def _to_doubles(column: pa.Array) -> np.ndarray:
    """Convert numbers of any type to float64 [N], with NaN for null.

    Decimals are parsed from their texts. Arrow would divide them by a power of ten, which all cells of the column set,
    and the rounding of the quotient would depend on it.
    """
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


@dataclass(frozen=True, eq=False, repr=False)
class Vectors:
    """PRIVATE. Vectors [N, D = width] in a file, and the id and the finiteness of each.

    ``iterate_blocks`` reads the vectors in order, as blocks [B, D], so that no vector is in memory twice.
    """

    ids: list[str]
    is_finite_N: np.ndarray
    iterate_blocks: Callable[[], Iterator[np.ndarray]]
    width: int

    def gather(self, row_M: np.ndarray) -> Tensor:
        """Read the vectors at the indices ``row_M``, float32 [M, D]. NaN stands for a vector of index -1."""
        x, begin = np.full((len(row_M), self.width), np.nan, dtype=np.float32), 0
        order_M = np.argsort(row_M, kind="stable")
        for block in self.iterate_blocks():
            first, last = np.searchsorted(row_M, [begin, begin + len(block)], sorter=order_M)
            x[order_M[first:last]] = block[row_M[order_M[first:last]] - begin]
            begin += len(block)
        return torch.from_numpy(x)


def read_vectors(
    file: Path, id_column: str, declared_ids: list[str] | None, unused_columns: Collection[str] = ()
) -> Vectors:
    """Read the ids and check the vectors.

    Args:
        file: .npy [N, D]; .safetensors with ``embeddings`` [N, D] and optionally integers ``id`` [N]; or .parquet with
            a column ``embedding`` of lists, or else columns of numbers.
        id_column: Column of the ids in a Parquet file.
        declared_ids: Ids in the order of the vectors. None if the file of vectors holds the ids.
        unused_columns: Other columns of a Parquet file that are no numbers of the vectors.
    """
    key = "dataset.vectors"
    if file.suffix not in (".npy", ".safetensors", ".parquet"):
        raise checks.error(key, str(file), "must be .npy, .safetensors or .parquet")
    try:
        ids, width, iterate_blocks = _open_vectors(file, id_column, unused_columns)
        with np.errstate(over="ignore"):
            finite_parts = [np.isfinite(block.astype(np.float32, copy=False)).all(1) for block in iterate_blocks()]
    except (ValueError, OSError, EOFError, KeyError, pa.ArrowException) as error:
        raise checks.error(key, str(file), f"is not readable ({error})") from error
    is_finite_N = np.concatenate([np.zeros(0, dtype=bool), *finite_parts])
    ids = ids if declared_ids is None else declared_ids
    if ids is None or len(ids) != len(is_finite_N) or len(set(ids)) < len(ids):
        found = "none" if ids is None else f"{len(ids)}, of which {len(set(ids))} differ"
        fix = "Set dataset.ids to a file with one id in each line, in the order of the vectors."
        message = f"needs one id for each of its {len(is_finite_N)} vectors, and has {found}"
        raise checks.error(key, str(file), message, fix)
    return Vectors(ids, is_finite_N, iterate_blocks, width)


def _open_vectors(
    file: Path, id_column: str, unused_columns: Collection[str]
) -> tuple[list[str] | None, int, Callable[[], Iterator[np.ndarray]]]:
    """Return the ids, or None if the file has none, the width of the vectors, and ``Vectors.iterate_blocks``."""
    ids: list[str] | None = None
    if file.suffix == ".parquet":
        names = pq.read_schema(file).names
        if id_column in names:
            column = pq.read_table(file, columns=[id_column]).column(0)
            ids = parse_unit_ids(f"column {id_column}", column.to_pylist(), len(column)).tolist()
        return ids, *_open_parquet_vectors(file, {id_column, *unused_columns})

    def load() -> dict[str, Any]:
        return {"embeddings": np.load(file, mmap_mode="r")} if file.suffix == ".npy" else read_tensors(file)

    tensors = load()
    if "embeddings" not in tensors:
        raise ValueError(f"it has no tensor 'embeddings', but {', '.join(sorted(tensors)) or 'none'}")
    array = tensors["embeddings"]
    if "id" in tensors:
        ids = [str(value) for value in tensors["id"].tolist()]
    shape, is_tensor = tuple(array.shape), isinstance(array, Tensor)
    is_float = array.is_floating_point() if is_tensor else np.issubdtype(array.dtype, np.floating)
    if not is_float or len(shape) != 2:
        raise ValueError(f"it must hold floating-point vectors [N, D], not {array.dtype} {shape}")

    def iterate_blocks() -> Iterator[np.ndarray]:
        for begin in range(0, shape[0], _BLOCK_ROWS):  # mapped anew, because the pages of a map stay in memory
            block = load()["embeddings"][begin : begin + _BLOCK_ROWS]
            yield block.float().numpy() if isinstance(block, Tensor) else block

    return ids, shape[1], iterate_blocks


def _open_parquet_vectors(file: Path, unused_columns: set[str]) -> tuple[int, Callable[[], Iterator[np.ndarray]]]:
    schema = pq.read_schema(file)
    is_list = "embedding" in schema.names
    columns = _select_vector_columns(schema, unused_columns)

    def iterate_batches() -> Iterator[pa.RecordBatch]:
        parquet_file = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        return parquet_file.iter_batches(_BLOCK_ROWS, columns=columns)

    def iterate_blocks() -> Iterator[np.ndarray]:
        for batch in iterate_batches():
            if not is_list:
                yield np.stack([_to_singles(batch.column(name)) for name in columns], 1)
                continue
            lists = batch.column(0)
            if not pc.all(pc.equal(pc.list_value_length(lists), width), min_count=0).as_py():
                raise ValueError("its vectors differ in length")
            block = np.full((len(lists), width), np.nan, dtype=np.float32)
            block[lists.is_valid().to_numpy(zero_copy_only=False)] = _to_singles(lists.flatten()).reshape(-1, width)
            yield block

    widths = (pc.max(pc.list_value_length(batch.column(0))).as_py() for batch in iterate_batches() if is_list)
    width = next(filter(None, widths), 0) if is_list else len(columns)
    return width, iterate_blocks


def _select_vector_columns(schema: pa.Schema, unused_columns: set[str]) -> list[str]:
    """Select columns by their names alone, because one odd cell can change the type of a column."""
    if "embedding" in schema.names:
        kind = schema.field("embedding").type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not _is_numeric(kind.value_type):
            raise ValueError(f"column 'embedding' of type {kind} must hold lists of numbers")
        return ["embedding"]
    columns = [name for name in schema.names if name not in unused_columns and not _INDEX_PATTERN.fullmatch(name)]
    if not columns:
        raise ValueError("it has neither a column 'embedding' nor columns of numbers")
    for name in columns:
        if not _is_numeric(schema.field(name).type):
            fix = "drop the column from the file, or list it in dataset.ignore"
            raise ValueError(f"column {name!r} of type {schema.field(name).type} holds no numbers: {fix}")
    return columns


def _is_numeric(kind: pa.DataType) -> bool:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return is_number or pa.types.is_boolean(kind)


def _to_singles(column: pa.Array) -> np.ndarray:
    """Convert numbers of any type to float32 [N] by way of float64, which each type of number can become."""
    with np.errstate(over="ignore"):
        return _to_doubles(column).astype(np.float32) + 0  # -0.0 becomes 0.0
