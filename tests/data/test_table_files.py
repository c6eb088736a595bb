"""CSV and Parquet files are read strictly, and vectors with their ids; other files are refused in one line."""

import bz2
import csv
import gzip
import io
import lzma
import re
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pate_torch.data import table_files
from pate_torch.data.table_files import read_table, read_vectors

HEADER = "patient,ward,x,y\n"
ROWS = [f"p{i % 7},w{i % 3},{i / 4},{i % 2}\n" for i in range(60)]
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


SPECIAL_PIECES = st.lists(
    st.sampled_from(['"', '""', ",", "\n", "\r\n", "\r", "a", "1.5", " ", "é", "\u2028", "\x0c", "\0", "\\", "'"])
)
CELLS = st.sampled_from(["", "a", "b ", '""', '"x"', '"1,5"', '"say ""so"""', 'say "so"', '"a"b', '"', "é\x85", "nan"])
CSV_ROWS = st.lists(st.lists(CELLS, max_size=3).map(",".join), max_size=6)


def read_row_by_row(text, quotes):
    """The columns of a CSV file by Python's reader of single rows. None if the file is refused."""
    lines = io.StringIO(text.removeprefix("\ufeff"), newline=None).readlines()
    if quotes and any(line.count('"') % 2 for line in lines):
        return None
    reader = csv.reader(lines, strict=True, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE)
    rows, last_line = [], 0
    try:
        for row in reader:
            if reader.line_num > last_line + 1:
                return None
            last_line = reader.line_num
            rows += [row] if row else []
    except csv.Error:
        return None
    is_header = rows and len(set(rows[0])) == len(rows[0]) and all(name.strip() for name in rows[0])
    if not is_header or len(rows) < 2 or {len(row) for row in rows} != {len(rows[0])}:
        return None
    return {name: list(values) for name, *values in zip(*rows, strict=True)}


def to_lists(table):
    return {name: column.to_pylist() for name, column in table.items()}


def replace_rows(changes):
    return [changes.get(number, row) for number, row in enumerate(ROWS)]


def check_refused(path, message, **options):
    with pytest.raises(ValueError, match=message) as refused:
        read_table("dataset.path", path, ",", **options)
    assert str(refused.value).startswith(f"dataset.path='{path}': ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.bz2", ".csv.xz"])
@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (HEADER, [row.replace("\n", ",\n") for row in ROWS], "line 2 has 5 fields, and the header 4"),
        (HEADER, replace_rows({30: "p0,w0,1,0,7\n"}), "line 32 has 5 fields, and the header 4"),
        (HEADER, replace_rows({30: "p0,w0,1\n"}), "line 32 has 3 fields, and the header 4"),
        ("patient,x,x,y\n", ROWS, "names column 'x' more than once"),
        ("patient,,x,y\n", ROWS, "column 2 of the header has no name"),
        (HEADER, replace_rows({20: 'p0,"w0,1,0\n', 40: 'p0,w0",1,0\n'}), "line 22: a quote is left open"),
        (HEADER, replace_rows({59: 'p0,w0,1,"0'}), "line 61: a quote is left open"),
        (HEADER, replace_rows({5: 'p0,"w"0,1,0\n'}), "line 7: ',' expected after '\"'"),
        ("", [], "has no rows"),
        (HEADER, [], "has no rows"),
    ],
)
def test_a_csv_file_that_does_not_fit_its_header_is_refused(suffix, header, rows, message, tmp_path):
    path = tmp_path / f"t{suffix}"
    content = (header + "".join(rows)).encode()
    path.write_bytes(PACKERS.get(path.suffix, bytes)(content))
    check_refused(path, re.escape(message))


def test_quotes_blank_lines_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbfa,"b, or c"\r\n"1,5",\r\n\r\n"say ""so""",x\r\n')
    table = read_table("dataset.path", path, ",")
    assert to_lists(table) == {"a": ["1,5", 'say "so"'], "b, or c": ["", "x"]}


@settings(max_examples=150)
@given(
    CSV_ROWS.flatmap(lambda rows: st.sampled_from(["\n", "\r\n"]).map(lambda end: end.join(["a,b", *rows, ""])))
    | CSV_ROWS.map("\n".join)
    | SPECIAL_PIECES.map("".join)
    | SPECIAL_PIECES.map(lambda pieces: "a,b\n" + "".join(pieces)),
    st.booleans(),
)
def test_any_text_is_read_as_by_a_reader_of_single_rows_or_refused(tmp_path_factory, text, quotes):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes(text.encode())
    expected = read_row_by_row(text, quotes)
    if expected is None:
        check_refused(path, "dataset.path", quotes=quotes)
    else:
        assert to_lists(read_table("dataset.path", path, ",", quotes=quotes)) == expected


def test_a_large_file_is_read_in_blocks(tmp_path):
    rows = [f'{i},"{"x" * (i % 3)}, {i}"' for i in range(20_000)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["i,text", "", *rows]))
    table = read_table("dataset.path", path, ",")
    assert table["i"].num_chunks > 1
    assert to_lists(table) == read_row_by_row(path.read_text(), quotes=True)


def test_files_without_a_header_and_with_quotation_marks_as_characters(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f'"Odd" number {i}, she said "\tc{i % 2}\n' for i in range(8)))
    table = read_table("dataset.path", path, "\t", columns=["text", "label"], quotes=False)
    assert table["label"].to_pylist() == ["c0", "c1"] * 4
    assert table["text"].to_pylist() == [f'"Odd" number {i}, she said "' for i in range(8)]
    with pytest.raises(ValueError, match="a quote is left open"):
        read_table("dataset.path", path, "\t", columns=["text", "label"])
    with pytest.raises(ValueError, match="line 1 has 2 fields, and the header 3"):
        read_table("dataset.path", path, "\t", columns=["text", "label", "more"], quotes=False)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.bz2", "t.csv.xz", "t.csv.zip", "t.parquet", "t.csv"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_damaged_files_are_refused(name, is_cut, tmp_path):
    content = PACKERS.get(name[5:], lambda text: b"\xff" + text)((HEADER + "".join(ROWS)).encode())
    middle = len(content) // 2
    (tmp_path / name).write_bytes(content[:middle] + (b"" if is_cut else b"\0\xff" * 9 + content[middle + 18 :]))
    check_refused(tmp_path / name, "is not a readable CSV or Parquet file")


def test_other_encodings_and_nested_columns_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes("a,b\nGrüße,1\n".encode("latin-1"))
    check_refused(tmp_path / "a.csv", r"byte 0xfc is not UTF-8.*iconv")
    pd.DataFrame({"a": [[1], [2]], "label": [0, 1]}).to_parquet(tmp_path / "nested.parquet")
    check_refused(tmp_path / "nested.parquet", "column 'a'.*list")


COUNT, WIDTH = 9, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of vectors that cannot be used, and of ids."""
    path, x = tmp_path_factory.mktemp("vectors"), np.zeros((COUNT, WIDTH), np.float32)
    arrays = {"v": x, "flat": x[0], "whole": x.astype(int), "objects": np.array([{}, {}])}
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array, allow_pickle=True)
    (path / "v.txt").write_text("1 2 3")
    (path / "broken.npy").write_bytes(b"nothing")
    save_file({"vectors": torch.zeros(2, 2)}, path / "v.safetensors")
    save_file({"embeddings": torch.ones(2, 2, dtype=torch.int64)}, path / "whole.safetensors")
    pd.DataFrame({"key": ["0", "1"], "embedding": [[1.0, 2.0], [1.0]]}).to_parquet(path / "uneven.parquet")
    pd.DataFrame({"key": ["0"], "name": ["x"], "v": [1.0]}).to_parquet(path / "words.parquet")
    pd.DataFrame({"key": ["0"], "embedding": [["1.5"]]}).to_parquet(path / "texts.parquet")
    pd.DataFrame({"key": ["0"]}).to_parquet(path / "nothing.parquet")
    return path


IDS = [str(i) for i in range(COUNT)]


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("v.npy", None, r"9 vectors, and has none\. Set dataset\.ids"),
        ("v.npy", IDS[:2], "9 vectors, and has 2"),
        ("v.npy", ["0", *IDS[:-1]], "8 differ"),
        ("v.txt", None, r"must be \.npy, \.safetensors or \.parquet"),
        ("broken.npy", IDS, "is not readable"),
        ("objects.npy", IDS, "Python objects in dtype"),
        ("flat.npy", IDS, r"\[N, D\], not float32 \(5,\)"),
        ("whole.npy", IDS, "not int64"),
        ("v.safetensors", None, "no tensor 'embeddings', but vectors"),
        ("uneven.parquet", None, "differ in length"),
        ("whole.safetensors", None, "not torch.int64"),
        ("words.parquet", None, "column 'name' of type .*string holds no numbers: drop .* in dataset.ignore"),
        ("texts.parquet", None, "column 'embedding' of type list<.*string> must hold lists of numbers"),
        ("nothing.parquet", None, "neither a column 'embedding' nor columns of numbers"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(name, ids, message, folder):
    with pytest.raises(ValueError, match=rf"^dataset\.vectors=.*{message}"):
        read_vectors(folder / name, "key", ids)


@pytest.mark.parametrize("kind", ["npy", "safetensors", "lists", "doubles"])
def test_vectors_are_read_in_blocks_as_if_they_were_one_array(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_BLOCK_ROWS", 4)
    x = np.random.default_rng(0).normal(size=(11, WIDTH)).astype(np.float16).astype(np.float32)
    x[6], ids = np.nan, [str(i) for i in range(11)]
    file = tmp_path / f"v.{kind if kind in ('npy', 'safetensors') else 'parquet'}"
    if kind == "npy":
        np.save(file, x.astype(np.float64))
    elif kind == "safetensors":
        save_file({"embeddings": torch.from_numpy(x).half(), "id": torch.arange(11)}, file)
    elif kind == "lists":
        pd.DataFrame({"key": ids, "embedding": [None if i == 6 else row for i, row in enumerate(x)]}).to_parquet(file)
    else:
        pd.DataFrame({"key": ids, **{f"v{d}": x[:, d].astype(np.float64) for d in range(WIDTH)}}).to_parquet(file)
    vectors = read_vectors(file, "key", ids if kind == "npy" else None)
    row_M = np.array([9, -1, 0, 6, 9, 4, 3])
    expected = np.where(row_M[:, None] < 0, np.nan, x[row_M]).astype(np.float32)
    np.testing.assert_array_equal(vectors.gather(row_M).numpy(), expected)
    assert vectors.ids == ids and np.flatnonzero(~vectors.is_finite_N).tolist() == [6]


def test_a_cell_keeps_its_byte_order_mark_at_any_place_of_a_block(tmp_path):
    """If Arrow skipped the mark at the start of a block, a cell would depend on the number of rows before it."""
    file, count = tmp_path / "t.csv", table_files.count_block_rows(2)
    rows = [*(f"r{number},0" for number in range(count)), "\ufeffmarked,1", "z,0"]
    for first in (0, 1):
        file.write_text("\n".join(["a,b", *rows[first:], ""]), encoding="utf-8")
        assert read_table("path", file, ",")["a"][count - first].as_py() == "\ufeffmarked"


def write_column(file, name, cells, **columns):
    """Write a Parquet column of the type that Arrow chooses by all cells. Return the type."""
    table = pa.table(columns | {name: cells})
    pq.write_table(table, file)
    return table.schema.field(name).type


@pytest.mark.parametrize("odd", ["1E-12", "1E-30", "1E-60", "12345678901234567890.5", "-1E+20"])
def test_the_text_of_a_decimal_depends_on_no_other_decimal(odd, tmp_path):
    file, cells = tmp_path / "t.parquet", [Decimal(i) / 100 for i in range(1, 100)]
    cells += [None, Decimal("12000"), Decimal("-0.05"), Decimal("0.00"), Decimal("123456789.125")]
    first_type = write_column(file, "price", cells)
    texts = read_table("path", file, ",")["price"].to_pylist()
    assert texts == ["" if cell is None else repr(float(cell)) for cell in cells]
    assert write_column(file, "price", [*cells, Decimal(odd)]) != first_type
    assert read_table("path", file, ",")["price"].to_pylist() == [*texts, repr(float(odd))]


WHOLE = [0, 1, -7, 16_777_217, 2**53 + 2**29 + 1, None]
NUMBER_TYPES = [pa.int64(), pa.float64(), pa.decimal128(38, 3), pa.decimal256(60, 9)]


def read_all(file, count, **options):
    vectors = read_vectors(file, "key", [str(i) for i in range(count)], **options)
    return vectors.gather(np.arange(count)).numpy()


def test_a_column_of_vectors_is_chosen_by_its_name_and_not_by_its_type(tmp_path):
    file, fixed = tmp_path / "v.parquet", {"label": pa.array([1] * 6), "t.v": pa.array(np.arange(6.0))}
    fixed["__index_level_0__"] = pa.array(np.arange(6.0))  # of rows that were selected by positions
    expected = np.stack([np.arange(6), np.array(WHOLE, np.float64)], 1).astype(np.float32)
    for kind in NUMBER_TYPES:
        pq.write_table(pa.table(fixed | {"t": pa.array(WHOLE, pa.int64()).cast(kind, safe=False)}), file)
        np.testing.assert_array_equal(read_all(file, 6, unused_columns=["label"]), expected)
        assert read_all(file, 6, unused_columns=["label", "t"]).shape == (6, 1)
    truths = [pa.array([True, False, None]), pa.array([1, 0, None]), pa.array([1, 0, None], pa.float32())]
    for column in truths:
        pq.write_table(pa.table({"t": column}), file)
        np.testing.assert_array_equal(read_all(file, 3), np.float32([[1], [0], [np.nan]]))


@pytest.mark.parametrize("whole", [WHOLE, WHOLE[:-1]])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)])
def test_lists_of_all_numbers_are_read_alike(make, whole, tmp_path):
    file, pairs = tmp_path / "v.parquet", [*([number, 1] for number in whole), None, [2, 3]]
    expected = np.array([[np.nan] * 2 if pair is None else pair for pair in pairs], np.float64).astype(np.float32)
    for kind in NUMBER_TYPES:
        lists = [
            None if pair is None else pa.array(pair, pa.int64()).cast(kind, safe=False).to_pylist() for pair in pairs
        ]
        pq.write_table(pa.table({"embedding": pa.array(lists, make(kind))}), file)
        np.testing.assert_array_equal(read_all(file, len(pairs)), expected)


@pytest.mark.parametrize("cells", [[1841, 7], [1841, None], [True, False], [Decimal("1.5")], [b"a"]])
def test_a_column_of_texts_must_be_written_as_text(cells, tmp_path):
    file = tmp_path / "t.parquet"
    for column in (pa.array(cells), pa.array(cells).dictionary_encode()):
        write_column(file, "text", column)
        check_refused(
            file,
            rf"column 'text' of type {re.escape(str(pa.array(cells).type))} holds no texts: write",
            text_column="text",
        )
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    for column in [*(pa.array(["1841", None], kind) for kind in kinds), pa.nulls(2)]:
        write_column(file, "text", column, other=pa.array([1, 2]))
        table = read_table("path", file, ",", text_column="text")
        expected = ["1841" if column[0].is_valid else "", ""]
        assert to_lists(table) == {"text": expected, "other": ["1", "2"]} and table["text"].type == pa.string()
