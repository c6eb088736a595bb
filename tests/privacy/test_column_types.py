"""One odd record changes the type of a whole column. The key of every other cell stays, whatever software converted it.

The owner's software (pandas, NumPy, a writer of files) chooses the type of a column by all cells. A value must
therefore have one key in every type that can hold it.
"""

import datetime
import decimal
import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from pate_torch import PATEClassifier, TabularSynthesizer, split_public
from pate_torch.api.inputs import parse_cells
from pate_torch.data.table_files import read_table
from pate_torch.data.tabular import _make_row_ids
from pate_torch.privacy.domain import DomainColumn, TableDomain
from pate_torch.privacy.records import convert_points
from pate_torch.privacy.schema import Column, TableSchema, make_key, parse_numbers, to_text_columns
from pate_torch.privacy.unit_ids import parse_unit_ids

DAY, SECOND = pd.Timedelta(days=1), pd.Timedelta(seconds=1)
DAYS = pd.Series(pd.to_datetime(["2020-01-01", "1969-12-31", "2024-02-29"]))
BERLIN = DAYS.dt.tz_localize("Europe/Berlin")
SINGLE = np.float32([0.1, 2.5, 3e-5, 1e10, 16777216, -7, 1e30])

COLUMNS = {
    "integers, one is missing": (pd.Series([1, -7, 10**10, 1_700_000_000_123, 2**53 + 1, 2**62]), [None]),
    "integers, one has a fraction": (pd.Series([1, -7, 10**10, 2**53 + 1]), [0.5]),
    "unsigned integers, one is negative": (pd.Series([1, 2**63 + 5], dtype="uint64"), [-1]),
    "single precision, one is double": (pd.Series(SINGLE), [0.3]),
    "half precision, one is single": (pd.Series(np.float16([0.5, 2.5, 1000])), np.float32([0.3])),
    "numbers with a missing one, one has a fraction": (pd.Series([1.5, np.nan, 3]), [0.25]),
    "decimals, one is finer": (
        pd.Series([decimal.Decimal(c) for c in ("0.05", "0.70", "0.00")]),
        [decimal.Decimal("1E-12")],
    ),
    "booleans, one is missing": (pd.Series([True, False]), [None]),
    "days, one has a time": (DAYS, [pd.Timestamp("2020-05-05 10:11:12")]),
    "days, one has a fraction of a second": (DAYS, [pd.Timestamp("2020-05-05 10:11:12.123456789")]),
    "days, one is missing": (DAYS, [pd.NaT]),
    "seconds, one is finer": (pd.Series(DAYS.to_numpy().astype("M8[s]")), [pd.Timestamp("2020-05-05 10:11:12.5")]),
    "zoned days, one has a fraction": (BERLIN, [pd.Timestamp("2020-05-05 10:11:12.5", tz="Europe/Berlin")]),
    "zoned days, one has another zone": (BERLIN, [pd.Timestamp("2020-05-05 10:11:12", tz="UTC")]),
    "durations of days, one has hours": (pd.Series([DAY, -2 * DAY]), [DAY / 5]),
    "durations, one is finer": (pd.Series([DAY, -1.5 * SECOND]), [pd.Timedelta(nanoseconds=-1700)]),
    "durations in seconds, one is finer": (
        pd.Series(np.array([5, -86400], dtype="m8[s]")),
        [pd.Timedelta(microseconds=1)],
    ),
    "intervals, one is missing": (pd.Series(pd.arrays.IntervalArray.from_breaks([0, 5, 20])), [None]),
    "times, one has a fraction": (pd.Series([datetime.time(10), datetime.time(11, 12)]), [datetime.time(1, 2, 3, 400)]),
}


def add_record(column, odd):
    parts = [column, pd.Series(odd)]
    return pd.concat(parts, ignore_index=True) if len({part.dtype for part in parts}) > 1 else pd.concat(parts)


def to_mixed_objects(column, odd):
    return pd.Series([*column.astype(object), *odd], dtype=object)


def to_numpy(column, odd):
    return pd.Series(np.concatenate([column.to_numpy(), np.array(odd)]))


def to_texts_of_numpy(column, odd):
    return pd.Series(np.concatenate([column.to_numpy(), np.array(["odd"])]))


def get_keys(column, folder, route):
    frame = pd.DataFrame({"value": column})
    if route == "memory":
        return [make_key(cell) for cell in to_text_columns(frame)["value"]]
    file = folder / f"table.{route}"
    frame.to_csv(file, index=False) if route == "csv" else frame.to_parquet(file, index=False)
    return _make_row_ids(read_table("path", file, ",")).tolist()


@pytest.mark.parametrize("route", ["memory", "csv", "parquet"])
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_an_odd_record_changes_the_key_of_no_other_record(name, route, tmp_path):
    column, odd = COLUMNS[name]
    if (route == "parquet" and name.startswith("intervals")) or (route != "memory" and name.startswith("half")):
        pytest.skip("such columns are not written to files")
    ways = [add_record]
    ways += [to_mixed_objects] if route != "parquet" else []
    ways += [to_numpy, to_texts_of_numpy] if column.dtype.kind in "iufb" and None not in odd else []
    expected = get_keys(column, tmp_path, route)
    for way in ways:
        assert get_keys(way(column, odd), tmp_path, route)[: len(column)] == expected, way.__name__


def test_booleans_among_integers_are_integers(tmp_path):
    """NumPy writes True as 1 as soon as one element is a larger number."""
    for route in ("memory", "csv", "parquet"):
        truths = get_keys(pd.Series([True, False]), tmp_path, route)
        assert truths == get_keys(pd.Series(np.array([True, False, 2])), tmp_path, route)[:2]


READ = {
    "booleans of R and Excel": ["TRUE", "FALSE", "TRUE"],
    "booleans in lower case": ["true", "false"],
    "numbers of Java": ["1.0E7", "2.5E-3", "1.0E10"],
    "exponents": ["1e5", "1E+05", "3e-2"],
    "short decimals": [".5", "5.", "-.25"],
    "numbers that single precision holds": ["2930432.75", "20000.0625", "0.1"],
    "infinite numbers": ["inf", "-Infinity", "1.5", "1e400"],
    "leading zeros": ["007", "+3", "000", "-0"],
    "minutes": ["2020-01-05 10:00", "2020-01-06 23:59"],
}
"""Texts of which ``pandas.read_csv`` makes booleans, numbers or times, unless one cell of the column is odd."""


def read_by_pandas(texts):
    return pd.read_csv(
        io.StringIO("\n".join(["value", *texts])), parse_dates=["value"] if " " in texts[0] else None
    ).value


@pytest.mark.parametrize("route", ["memory", "csv", "parquet"])
@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:Could not infer format")
def test_an_odd_cell_of_a_file_that_pandas_reads_changes_no_other_key(name, route, tmp_path):
    read, raw = read_by_pandas(READ[name]), read_by_pandas([*READ[name], "odd"])
    assert read.dtype != raw.dtype
    assert get_keys(raw, tmp_path, route)[:-1] == get_keys(read, tmp_path, route)


def test_an_odd_id_renames_no_other_unit():
    for ids in (
        ["000001", "000002", "10"],
        ["+1", "-2", "-0"],
        ["TRUE", "FALSE"],
        ["2020-01-05 10:00", "2020-01-06 00:00"],
    ):
        read, raw = read_by_pandas(ids), read_by_pandas([*ids, "A1"])
        names = parse_unit_ids("groups", read, len(ids)).tolist()
        assert parse_unit_ids("groups", raw, len(raw)).tolist() == [*names, "A1"]
        assert len(set(names)) == len(ids)
    truths = [parse_unit_ids("groups", np.array([True, False, *odd]), 2 + len(odd)).tolist() for odd in ([], [2])]
    assert truths[0] == truths[1][:2]


def test_an_integer_among_booleans_changes_no_schema():
    truths, numbers = np.array([True, False, False]), np.array([True, False, False, 2])[:3]
    assert TableSchema.from_public({"flag": truths}) == TableSchema.from_public({"flag": numbers})
    texts = [["True", "FALSE", "maybe"], ["1", "0", "maybe"], [True, False, "maybe"]]
    assert len({TableSchema.from_public({"flag": values}) for values in texts}) == 1


@pytest.mark.parametrize("name", [*READ, "negative zero"])
@pytest.mark.filterwarnings("ignore:Could not infer format")
def test_an_odd_cell_changes_no_code_and_no_name_of_another_point(name):
    """Bins compare numbers in double precision, where a text has more digits than a float of single precision."""
    cells = {"negative zero": ["-0", "0", "3"]}.get(name, READ.get(name))
    read, raw = ({"value": read_by_pandas(column), "two": range(len(column))} for column in (cells, [*cells, "odd"]))
    numbers = [
        number for number in parse_numbers([str(cell) for cell in read["value"]]).tolist() if np.isfinite(number)
    ]
    edges = sorted({number + step for number in numbers for step in (-0.004, 0.0, 0.004)}) or [0.0, 1.0]
    columns = {"value": DomainColumn(name="value", kind="real", edges=tuple(edges))}
    columns["two"] = DomainColumn(name="two", kind="integer", edges=(0.0, 9.0))
    domain = TableDomain(columns=tuple(columns.values()))
    assert domain.encode(raw)[:-1].tolist() == domain.encode(read).tolist()
    for categories in (None, tuple(cells)):
        schema = TableSchema((Column("value", categories, 0.0),))
        assert schema.compute_content_ids(raw)[:-1] == schema.compute_content_ids(read)
        found = [torch.from_numpy(schema.encode(table, unknown="zeros", missing="nan")) for table in (raw, read)]
        assert found[0][:-1].numpy().tobytes() == found[1].numpy().tobytes()
    rows = [convert_points(np.array([[cell] for cell in table["value"]], dtype=object)) for table in (raw, read)]
    assert rows[0][:-1].numpy().tobytes() == rows[1].numpy().tobytes() or " " in cells[0]


def test_a_large_label_or_number_changes_no_role_of_another_record():
    """pandas and NumPy choose the type of integers by the largest one."""
    x, y = np.arange(400)[:, None] % 7, np.arange(400) % 40
    parts = [
        split_public(x, labels.astype(kind), publish_split=True, share=0.3) for labels, kind in ((y, "u1"), (y, "i8"))
    ]
    assert parts[0][1].tolist() == parts[1][1].tolist() and parts[0][3].tolist() == parts[1][3].tolist()


def test_no_message_quotes_a_cell():
    assert make_key("ınf") == "ınf"  # of letters that are equal to those of a number in lower case only
    assert make_key(b"7") == make_key(7)
    table = pa.table({"a": ["SECRET"] * 3, "b": [1, 2, 3]})
    for call in (
        lambda: PATEClassifier(epsilon=1.0, account="a", classes=[0, 1]).fit(table, [0, 1, 0], public=table),
        lambda: TabularSynthesizer(epsilon=1.0, account="a", public=table).fit(table),
        lambda: split_public(table, publish_split=True),
    ):
        with pytest.raises(ValueError, match=r"to_pandas") as refused:
            call()
        assert "SECRET" not in str(refused.value)
    assert np.isnan(parse_cells(np.array([[b"SECRET"]], dtype=object))).all()


def test_different_values_have_different_keys(tmp_path):
    for name, (column, _) in COLUMNS.items():
        keys = get_keys(column.dropna(), tmp_path, "memory")
        assert len(set(keys)) == column.count() and "" not in keys, name
    assert len(set(map(make_key, [0.1, 0.2, "0.10000001", 1, "1_0", "12e3", "1200", "", "True!"]))) == 9
