"""What becomes of a private row is a function of this row: its point, its class, its unit's name, and its use.

Every way in is given a row among other rows, then among others again. Rows hold what private files hold: NaN,
infinities, empty texts, unknown categories and classes, several types in one column.
"""

import csv
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from pate_torch.data import table_files
from pate_torch.data.image_folder import ImageFolder
from pate_torch.data.libsvm import Libsvm
from pate_torch.data.tabular import Csv, Embeddings, Text
from pate_torch.privacy import records
from pate_torch.privacy.partition import hold_out, select, select_one_per_unit
from pate_torch.privacy.records import LABEL_UNIT, PrivateRecords
from pate_torch.privacy.schema import TableSchema
from pate_torch.privacy.unit_ids import UnitIds

CELLS = ["1", "2.5", "-3", "1e300", "nan", "inf", "", "old", "1_0"]
LABELS = ["no", "yes", "perhaps", "", "1"]
ROW = st.fixed_dictionaries(
    {
        "a": st.sampled_from(CELLS),
        "b": st.sampled_from(CELLS),
        "color": st.sampled_from(["red", "blue", "ultraviolet", "", "7"]),
        "label": st.sampled_from(LABELS),
        "user": st.sampled_from(["u1", "u2", "007", "2020-01-01"]),
        "number": st.sampled_from(
            [0, 1, 2.5, -3, 7, 40.5, -600, 2**60, 1e300, float("nan"), float("inf"), None, "old", True]
        ),
        "code": st.sampled_from([0, 1, 2, -1, 0.5, float("nan"), 2**60]),
        "person": st.sampled_from([*range(1, 10), 2**60, None]),
    }
)
GOOD = [
    {"a": str(i), "b": "2", "color": ("red", "blue")[i % 2], "label": LABELS[i % 2]}
    | {"user": f"g{i}", "number": i, "code": i % 2, "person": i}
    for i in range(6)
]
"""Ordinary rows: the public ones, and the first of every private file, so that some record can be used."""


def describe(private, index):
    used = private.usable_N is None or bool(private.usable_N[index])
    return str(private.unit_id[index]), used, private.x[index].numpy().tobytes(), int(private.y[index])


def write_parts(rows, folder, suffix, write):
    """Write the private rows, and the public ones where they are not there yet; the paths by their keys."""
    paths = {}
    for key, part in (("path", rows), ("public_path", GOOD), ("test_path", GOOD)):
        file = folder / f"{key}{suffix}"
        if key == "path" or not file.exists():
            write(part, file)
        paths[key] = str(file)
    return paths


def write_tables(rows, folder, columns):
    def write(part, file):
        with file.open("w", newline="") as text:
            writer = csv.writer(text)
            writer.writerows([columns, *([row[name] for name in columns] for row in part)])

    return write_parts(rows, folder, ".csv", write)


def load_csv(rows, folder, **options):
    columns = ["a", "b", "color", "label", *options.values()]
    return Csv(**write_tables(rows, folder, columns), missing="drop", **options).load().private


def load_parquet(rows, folder):
    """pandas gives a column of numbers another type for the sake of a missing one."""
    numeric = [row | {"code": row["code"] if row["code"] == row["code"] else None} for row in rows]
    paths = write_parts(
        numeric, folder, ".parquet", lambda part, file: pd.DataFrame(part)[["color", "code", "user"]].to_parquet(file)
    )
    return Csv(**paths, missing="drop", label="code").load().private


def load_text(rows, folder):
    keys = write_tables(rows, folder, ["color", "label", "user"])
    return Text(**keys, column="color", empty="drop", max_bytes=8).load().private


def load_libsvm(rows, folder, group=None):
    def lines(part):
        for row in part:
            a, b = (cell if cell in CELLS[:6] else "0" for cell in (row["a"], row["b"]))
            qid = f" qid:{sum(map(ord, row['user']))}" if group else ""
            beyond = " 90000:1" if row["number"] == "old" else ""  # no public row has such a feature
            yield f"{LABELS.index(row['label'])}{qid} 1:{a} 2:{b}{beyond}\n"

    paths = write_parts(rows, folder, ".svm", lambda part, file: file.write_text("".join(lines(part))))
    return Libsvm(**paths, group=group).load().private


def load_embeddings(rows, folder):
    """Rows of one text have one vector; "blue" has none."""
    vectors = {"red": (1.0, 2.0), "ultraviolet": (np.nan, 1.0), "7": (np.inf, 1.0), "blue": (1.0, 0.0)}
    private = [row | {"color": row["color"] if row["color"] != "blue" else "nobody"} for row in rows]
    private = [row | {"color": row["color"] or "blank"} for row in private]
    np.save(folder / "v.npy", np.array(list(vectors.values()), np.float32))
    (folder / "ids.txt").write_text("\n".join(vectors))
    keys = write_tables(private, folder, ["color", "label", "user"])
    given = {"id": "color", "vectors": str(folder / "v.npy"), "ids": str(folder / "ids.txt")}
    return Embeddings(**keys, **given).load().private


def load_images(rows, folder):
    """One that is "old" cannot be read. Units are paths, whose order is the records'."""

    def write(part, gallery):
        shutil.rmtree(gallery, ignore_errors=True)
        for number, row in enumerate(part):
            file = gallery / (row["label"] or "none") / f"{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (5, 4), 40 * CELLS.index(row["a"]) % 256 if row["a"] in CELLS else 9).save(file)
            if row["b"] == "old":
                file.write_bytes(b"no image")

    paths = write_parts(rows, folder, "", write)
    return ImageFolder(**paths, size=4, channels=1, classes=LABELS[:2]).load().private


def make_from_lists(rows, folder):
    numbers = [row["number"] for row in rows]
    x = [[number, float(number) if isinstance(number, int | float) else float("nan")] for number in numbers]
    return PrivateRecords.from_rows(x, [row["code"] for row in rows], [row["user"] for row in rows], num_classes=2)


def make_from_frame(rows, folder):
    """As ``PATEClassifier`` takes them in: a table by a public schema, ids as a Series."""
    schema = TableSchema.from_public(pd.DataFrame(GOOD)[["number", "color"]])
    x = schema.encode(pd.DataFrame(rows)[["number", "color"]], unknown="zeros", missing="nan")
    ids = pd.Series([row["person"] for row in rows], name="person")
    return PrivateRecords.from_rows(x, [row["code"] for row in rows], ids, "group:person", num_classes=2)


ENTRIES = {
    "csv by content": load_csv,
    "csv by id": lambda rows, folder: load_csv(rows, folder, id="user"),
    "csv by group": lambda rows, folder: load_csv(rows, folder, group="user"),
    "parquet": load_parquet,
    "text": load_text,
    "libsvm": load_libsvm,
    "libsvm by group": lambda rows, folder: load_libsvm(rows, folder, group="qid"),
    "embeddings": load_embeddings,
    "images": load_images,
    "lists": make_from_lists,
    "data frame": make_from_frame,
}


def check_row_by_row(entry, folder, max_examples=12):
    """Raise AssertionError where a row becomes something else among other rows."""
    others = st.lists(ROW, max_size=3)
    # An image's place is its path's: others come after it, or stand before it in both cases.
    before = st.just([]) if entry == "images" else others

    def load(rows):
        try:
            return ENTRIES[entry](rows, folder)
        except ValueError as error:
            assert "ids" in str(error), error  # of units: the one thing that is refused
            return None

    how = {"derandomize": True, "database": None, "phases": [Phase.generate], "report_multiple_bugs": False}

    @settings(max_examples=max_examples, **how)
    @given(ROW, before, others, before, others)
    def check(row, before, after, other_before, other_after):
        if entry == "images":
            after, other_after = (
                [one | {"label": row["label"]} for one in rows] for rows in (after, other_after)
            )  # in the same folder
        first, second = (
            load([GOOD[0], *start, row, *end]) for start, end in ((before, after), (other_before, other_after))
        )
        assume(first is not None and second is not None)
        place, other_place = (0, 0) if entry == "images" else (1 + len(before), 1 + len(other_before))
        if entry == "images":
            name = f"{row['label'] or 'none'}/001.png"
            place, other_place = (private.unit_id.tolist().index(name) for private in (first, second))
        assert describe(first, place) == describe(second, other_place)

    check()


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_becomes_of_a_row_is_a_function_of_this_row(entry, tmp_path):
    check_row_by_row(entry, tmp_path)


def drop_points_of_mixed_types(monkeypatch):
    convert = records.convert_points
    monkeypatch.setattr(
        records, "convert_points", lambda x: convert(x) * (1 if np.asarray(x).dtype.kind in "biuf" else np.nan)
    )


def scale_by_the_largest(monkeypatch):
    convert = records.convert_points

    def scale(x):
        x = convert(x)
        return x / x.nan_to_num(0, 0, 0).abs().max().clamp(min=1)

    monkeypatch.setattr(records, "convert_points", scale)


def name_units_through_their_column(monkeypatch):
    def parse(key, column, count):
        return np.asarray(column).astype(str).view(UnitIds)

    monkeypatch.setattr(records, "parse_unit_ids", parse)


def number_the_values_of_a_column(monkeypatch):
    def read(file, *_):
        columns = pd.read_csv(file, dtype=str, keep_default_na=False).items()
        yield {name: pa.chunked_array([list(map(str, column.rank(method="dense")))]) for name, column in columns}

    monkeypatch.setattr(table_files, "_iterate_csv", read)


def drop_labels_by_their_column(monkeypatch):
    convert = records.convert_labels

    def parse(y):
        y = convert(y)
        return y if bool((y >= 0).all()) else torch.full_like(y, -1)

    monkeypatch.setattr(records, "convert_labels", parse)


@pytest.mark.parametrize(
    ("plant", "entry"),
    [
        (drop_points_of_mixed_types, "lists"),
        (scale_by_the_largest, "data frame"),
        (name_units_through_their_column, "data frame"),
        (number_the_values_of_a_column, "csv by content"),
        (drop_labels_by_their_column, "lists"),
    ],
)
def test_a_gate_that_looks_at_other_rows_is_found(plant, entry, monkeypatch, tmp_path):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_row_by_row(entry, tmp_path, max_examples=200)


def infer_types_from_all_cells(monkeypatch):
    convert = records.convert_points
    monkeypatch.setattr(records, "convert_points", lambda x: convert(np.asarray(x)))  # one text makes all cells texts


def read_columns_by_pandas(monkeypatch):
    def read(file, *_):
        columns = pd.read_csv(file).items()
        yield {name: pa.chunked_array([["" if v != v else str(v) for v in column]]) for name, column in columns}

    monkeypatch.setattr(table_files, "_iterate_csv", read)


@pytest.mark.parametrize(
    ("convert", "entry"), [(infer_types_from_all_cells, "lists"), (read_columns_by_pandas, "csv by content")]
)
def test_software_that_infers_types_from_whole_columns_changes_no_row(convert, entry, monkeypatch, tmp_path):
    convert(monkeypatch)
    check_row_by_row(entry, tmp_path, max_examples=200)


def test_unusable_rows_are_marked_filled_and_counted():
    x = np.array([[1.0, 2.0], [np.nan, 1.0], [1e300, 0.0], [3.0, 4.0]])
    private = PrivateRecords.from_rows(x, [1, 0, 1, 5], unit_ids=list("abcd"), num_classes=2)
    assert private.usable_N.tolist() == [True, False, False, False] and private.y.tolist() == [1, 0, 0, 0]
    assert private.x.tolist() == [[1, 2], [0, 0], [0, 0], [3, 4]] and private.unit_id.tolist() == list("abcd")
    assert private.num_unusable_by_reason == {records.NOT_FINITE: 2, records.UNKNOWN_CLASS: 1}
    words = torch.tensor([[65, 66, 0], [0, 0, 0]], dtype=torch.uint8)
    private = PrivateRecords.from_rows(words, [0, 1])
    assert private.x.tolist() == [[65, 66, 0], [45, 0, 0]]
    assert private.num_unusable_by_reason == {records.NO_TEXT: 1}
    assert PrivateRecords.from_rows(words[:1], [0]).usable_N is None


def test_a_group_needs_names():
    with pytest.raises(ValueError, match="must name the unit of every record where it is group:patient"):
        PrivateRecords.from_rows(torch.zeros(2, 1), [0, 1], unit="group:patient")


def test_records_are_not_built_around_the_gate_and_selected_freely():
    x, y = torch.arange(6.0)[:, None], torch.tensor([0, 1] * 3)
    for ids in (list("aabbcc"), np.array(list("aabbcc")), np.arange(6)):
        with pytest.raises(ValueError, match=r"Use PrivateRecords\.from_rows"):
            PrivateRecords(x, y, ids)
    private = PrivateRecords.from_rows(x, y, list("aabbcc"), "group:patient")
    assert select(private, np.array([4, 1])).unit_id.tolist() == ["c", "a"]
    assert select_one_per_unit(private, "add_remove").x[:, 0].tolist() == [0, 2, 4]
    rest, held_out = hold_out(private, 0.5, "add_remove", 0, "test")
    assert len(rest) + len(held_out) == 6 and not set(rest.unit_id) & set(held_out.unit_id)
    assert "a" not in repr(private.unit_id).split("(")[0].replace("UnitIds", "") and "withheld" in repr(private.unit_id)
    assert PrivateRecords.from_rows(x, y, private.unit_id, LABEL_UNIT).unit_id is private.unit_id
