"""CSV and Parquet files are read strictly, and vectors with their ids; other files are refused in one line."""

import bz2
import gzip
import lzma
import re

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from pate_torch.data import table_files
from pate_torch.data.table_files import read_table, read_vectors

HEADER = "patient,ward,x,y\n"
ROWS = [f"p{i % 7},w{i % 3},{i / 4},{i % 2}\n" for i in range(60)]
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


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
        (HEADER, [row.replace("\n", ",0\n") for row in ROWS], "line 2 has 5 fields, and the header 4"),
        (HEADER, [row.replace("\n", ",\n") for row in ROWS], "line 2 has 5 fields, and the header 4"),
        (HEADER, replace_rows({30: "p0,w0,1,0,7\n"}), "line 32 has 5 fields, and the header 4"),
        (HEADER, replace_rows({30: "p0,w0,1\n"}), "line 32 has 3 fields, and the header 4"),
        ("patient,x,x,y\n", ROWS, "names column 'x' more than once"),
        ("patient,,x,y\n", ROWS, "column 2 of the header has no name"),
        (HEADER, replace_rows({20: 'p0,"w0,1,0\n', 40: 'p0,w0",1,0\n'}), "line 22: a quote is left open"),
        (HEADER, replace_rows({59: 'p0,w0,1,"0'}), "line 61: a quote is left open"),
        (HEADER, replace_rows({20: 'p"0,"w0,1,0\n', 40: 'x",w"0,1\n'}), "line 22: a quote is left open"),
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
    assert read_table("dataset.path", path, ",") == {"a": ["1,5", 'say "so"'], "b, or c": ["", "x"]}


def test_files_without_a_header_and_with_quotation_marks_as_characters(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f'"Odd" number {i}, she said "\tc{i % 2}\n' for i in range(8)))
    table = read_table("dataset.path", path, "\t", columns=["text", "label"], quotes=False)
    assert table["label"] == ["c0", "c1"] * 4
    assert table["text"] == [f'"Odd" number {i}, she said "' for i in range(8)]
    with pytest.raises(ValueError, match="a quote is left open"):
        read_table("dataset.path", path, "\t", columns=["text", "label"])
    with pytest.raises(ValueError, match="line 1 has 2 fields, and the header 3"):
        read_table("dataset.path", path, "\t", columns=["text", "label", "more"], quotes=False)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.bz2", "t.csv.xz", "t.csv.zip", "t.csv.zst", "t.parquet", "t.csv"])
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
    pd.DataFrame({"key": ["0", "1"], "embedding": [[1.0, 2.0], [1.0]]}).to_parquet(path / "uneven.parquet")
    pd.DataFrame({"key": ["0"], "name": ["x"]}).to_parquet(path / "words.parquet")
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
        ("words.parquet", None, "neither a column 'embedding' nor columns of floating-point"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(name, ids, message, folder):
    with pytest.raises(ValueError, match=rf"^dataset\.vectors=.*{message}"):
        read_vectors(folder / name, "key", ids)


def test_half_precision_vectors_become_float32(tmp_path):
    save_file({"embeddings": torch.ones(2, 3).half(), "id": torch.tensor([4, 7])}, tmp_path / "v.safetensors")
    vectors = read_vectors(tmp_path / "v.safetensors", "id", None)
    assert vectors.ids == ["4", "7"] and torch.equal(vectors.gather(np.array([1, 0])), torch.ones(2, 3))


@pytest.mark.parametrize("kind", ["npy", "safetensors", "lists", "doubles"])
def test_vectors_are_read_in_blocks_as_if_they_were_one_array(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_BLOCK_ROWS", 4)
    x = np.random.default_rng(0).normal(size=(11, WIDTH)).astype(np.float32)
    x[6], ids = np.nan, [f"k{i}" for i in range(11)]
    file = tmp_path / f"v.{kind if kind in ('npy', 'safetensors') else 'parquet'}"
    if kind == "npy":
        np.save(file, x.astype(np.float64))
    elif kind == "safetensors":
        save_file({"embeddings": torch.from_numpy(x)}, file)
    elif kind == "lists":
        pd.DataFrame({"key": ids, "embedding": [None if i == 6 else row for i, row in enumerate(x)]}).to_parquet(file)
    else:
        pd.DataFrame({"key": ids, **{f"v{d}": x[:, d].astype(np.float64) for d in range(WIDTH)}}).to_parquet(file)
    vectors = read_vectors(file, "key", ids if file.suffix != ".parquet" else None)
    row_M = np.array([9, -1, 0, 6, 9, 4, 3])
    expected = np.where(row_M[:, None] < 0, np.nan, x[row_M]).astype(np.float32)
    np.testing.assert_array_equal(vectors.gather(row_M).numpy(), expected)
    assert vectors.ids == ids and np.flatnonzero(~vectors.is_finite_N).tolist() == [6]
