"""A domain gives each cell a code that depends on this cell alone, and refuses schemas that it cannot use by name."""

import datetime
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.privacy.domain import OTHER, DomainColumn, TableDomain

FACTS = {
    "target": "ill",
    "columns": {
        "age": {"type": "integer", "low": 0, "high": 100, "bins": 10},
        "ward": {"type": "category", "values": ["a", 1, "2.0"]},
        "weight": {"type": "real", "edges": [0, 0.5, 2.5, 10]},
        "seen": {"type": "date", "low": "2020-01-01", "high": "2020-12-31", "bins": 12},
        "ill": {"type": "boolean"},
    },
}
DOMAIN = TableDomain.from_dict(FACTS)
COLUMN = {column.name: column for column in DOMAIN.columns}
DAY = datetime.date(2020, 3, 1)
CELLS = st.sampled_from(
    [
        *(None, float("nan"), float("inf"), "", "NA", "a", " a ", "b", 1, 1.0, "1", "+1", 2, 2**60, -3, 0.5, "0.5"),
        *(1e300, "1e400", "1_2", True, False, np.bool_(True), "TRUE", "yes", "no", "2020-03-01", DAY, "2020-13-01"),
        *(np.float32(0.1), datetime.datetime(2020, 3, 1, 5), pd.Timestamp("2020-12-31"), pd.NaT, pd.NA),
        np.datetime64("2021-05-05"),
    ]
)


def encode(name, *cells):
    column = COLUMN[name]
    return TableDomain(columns=(column, COLUMN["ill" if name != "ill" else "age"])).encode(
        {name: list(cells), "ill": [None] * len(cells), "age": [None] * len(cells)} | {name: list(cells)}
    )[:, 0].tolist()  # fmt: skip


# ---- cells -------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.lists(st.tuples(*[CELLS] * 5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_code_of_a_cell_depends_on_no_other_cell(rows, random):
    def encode_rows(chosen, as_frame):
        table = dict(zip(COLUMN, map(list, zip(*chosen, strict=True)), strict=True))
        return DOMAIN.encode(pd.DataFrame(table) if as_frame else table)

    code_NJ = encode_rows(rows, as_frame=False)
    assert code_NJ.dtype == np.int64 and (code_NJ >= 0).all() and (code_NJ < DOMAIN.sizes).all()
    order = random.sample(range(len(rows)), random.randint(1, len(rows)))  # some rows, in another order
    for as_frame in (False, True):  # a DataFrame gives a column a type that depends on all of its cells
        assert (encode_rows([rows[row] for row in order], as_frame) == code_NJ[order]).all()


def test_missing_and_unknown_values_have_codes_of_their_own():
    missing = (None, "", "NA", float("nan"), pd.NA, " nan ")
    for name in COLUMN:
        assert encode(name, *missing) == [0] * len(missing)
    assert encode("ward", "b", False, 1e300) == [1, 1, 1] and COLUMN["ward"].names[1] == OTHER
    assert encode("ward", "a", " a ", 1, "1.0", True, 2, "other") == [2, 2, 3, 3, 3, 4, 1]
    for name in ("age", "weight", "seen", "ill"):  # what cannot be read is missing
        assert encode(name, "a word", "1_2x", float("inf")) == [0, 0, 0]


def test_booleans_of_every_spelling():
    true, false = (True, np.True_, "true", "TRUE", 1, 1.0, "1", "Yes"), (False, "False", 0, "0.0", "no")
    assert encode("ill", *true) == [2] * len(true) and encode("ill", *false) == [1] * len(false)
    assert encode("ill", 2, "maybe") == [0, 0]


def test_numbers_lie_in_the_bin_that_begins_at_or_below_them():
    assert COLUMN["age"].edges == tuple(map(float, range(0, 101, 10)))
    assert encode("age", -5, 0, 9, 9.99, 10, "10", 99, 100, 1e9) == [1, 1, 1, 1, 2, 2, 10, 10, 10]
    assert encode("weight", -1, 0, 0.4999, 0.5, 2.4999, 2.5, 10, 11) == [1, 1, 1, 2, 2, 3, 3, 3]
    assert encode("weight", np.float32(0.5), "0.5", 1e400) == [2, 2, 0]


def test_dates_of_every_type():
    days = ("2020-02-01", datetime.date(2020, 2, 1), datetime.datetime(2020, 2, 1, 23), pd.Timestamp("2020-02-01"))
    edges = COLUMN["seen"].edges
    expected = sum(edge <= (days[1] - datetime.date(1970, 1, 1)).days for edge in edges[:-1])
    assert encode("seen", *days, np.datetime64("2020-02-01")) == [expected] * 5
    assert encode("seen", "1950-01-01", "2090-01-01", "2020-02-30") == [1, 12, 0]


# ---- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        *DOMAIN.columns,
        DomainColumn(name="narrow", kind="real", edges=(0.0, 0.001, 0.002, 1000.0)),  # narrower than the digits shown
        DomainColumn(name="tiny", kind="real", edges=(-1e-9, 0.0, 1e-9)),
        DomainColumn(name="counts", kind="integer", edges=(-2.0, -1.0, 0.0, 7.0)),
        DomainColumn(name="days", kind="date", edges=(-1.0, 0.0, 5.0)),
    ],
    ids=lambda column: column.name,
)
def test_cells_that_were_decoded_have_the_same_codes(column):
    code_N = np.tile(np.arange(column.size), 400)
    domain = TableDomain(columns=(column, DomainColumn(name="second", kind="boolean")))
    cells = column.decode(code_N, np.random.default_rng(0))
    assert (domain.encode({column.name: cells, "second": [None] * len(code_N)})[:, 0] == code_N).all()
    assert all(cell is None for cell in cells[:: column.size]) and None not in cells[1 : column.size]
    assert len(column.names) == column.size
    if column.kind == "integer":  # every whole number of the range occurs, and no other
        numbers = {cell for cell in cells if cell is not None}
        assert numbers == set(range(int(column.edges[0]), int(column.edges[-1]) + 1))


@pytest.mark.parametrize("source", ["declared", "read off public rows"])
def test_a_domain_can_be_written_and_read(source):
    domain = DOMAIN if source == "declared" else TableDomain.from_public(PUBLIC, target="ward")
    again = TableDomain.from_dict(json.loads(json.dumps(domain.to_dict())))
    assert again == domain and again.source == domain.source == source


# ---- public rows -------------------------------------------------------------------------------------------------

PUBLIC = {
    "age": [*range(20, 80), None],
    "ward": (["a", "b", "other", "", 3] * 13)[:61],
    "weight": [float(value) for value in np.linspace(40, 90, 61).round(2)],
    "seen": [(DAY + datetime.timedelta(days=day)).isoformat() for day in range(61)],
    "ill": [True, False, None] * 20 + [True],
    "grade": ([1, 2, 3] * 21)[:61],
}


def test_a_domain_is_read_off_public_rows(monkeypatch):
    monkeypatch.setattr("pate_torch.privacy.domain.NUM_BINS", 4)
    columns = {column.name: column for column in TableDomain.from_public(PUBLIC).columns}
    kinds = dict(zip(PUBLIC, ("integer", "category", "real", "date", "category", "category"), strict=True))
    assert {name: column.kind for name, column in columns.items()} == kinds
    assert columns["ward"].values == ("3", "a", "b") and columns["grade"].values == ("1", "2", "3")
    assert columns["ill"].values == ("0", "1")  # as if one cell had turned the booleans into integers
    assert columns["age"].edges == (20, 34, 49, 64, 79) and columns["weight"].edges[::4] == (40, 90)
    for name in ("age", "weight"):  # bins of about equally many public numbers, none beyond them
        numbers = [value for value in PUBLIC[name] if value is not None]
        domain = TableDomain(columns=(columns[name], columns["ill"]))
        counts = np.bincount(domain.encode({name: numbers, "ill": numbers})[:, 0])
        assert counts[0] == 0 and counts[1:].max() - counts[1:].min() <= 2
        drawn = columns[name].decode(np.full(2000, 4), np.random.default_rng(0))
        assert max(drawn) <= max(numbers)


@pytest.mark.parametrize("cell", ["2020-01-01", 7.25])
def test_a_public_column_with_one_value_has_one_bin_or_category(cell):
    (column, _) = TableDomain.from_public({"one": [cell, cell, None], "b": [True, False, True]}).columns
    assert column.size == (2 if column.kind == "date" else 3)


def test_public_columns_without_a_use_are_refused_by_name():
    both = {"fine": [True, False] * 40}
    with pytest.raises(ValueError, match=r"public\.empty=.*has no values"):
        TableDomain.from_public({"empty": [None, "NA"] * 40, **both})
    with pytest.raises(ValueError, match=r"public\.names=.*80 different values"):
        TableDomain.from_public({"names": [f"person {i}" for i in range(80)], **both})
    with pytest.raises(ValueError, match="columns="):
        TableDomain.from_public(both)


def test_nothing_is_read_off_private_rows():
    before = DOMAIN.to_dict()
    private = {name: ["zebra", None, 1] for name in COLUMN} | {"unused": ["x", "y", "z"]}
    assert DOMAIN.encode(private).shape == (3, 5)
    assert DOMAIN.to_dict() == before and "zebra" not in json.dumps(DOMAIN.to_dict())
    with pytest.raises(ValueError, match="lacks the columns age"):
        DOMAIN.encode({name: cells for name, cells in private.items() if name != "age"})


# ---- schemas that are refused -----------------------------------------------------------------------------------


def change(name, **facts):
    return {"columns": FACTS["columns"] | {name: facts}}


@pytest.mark.parametrize(
    "facts,words",
    [
        ({"columns": FACTS["columns"], "colums": {}}, "schema='colums': is no key"),
        ({}, r"schema\.columns=None"),
        ({"columns": {"age": {"type": "boolean"}}}, "columns="),
        ({"columns": FACTS["columns"], "target": "size"}, "target='size'"),
        ({"columns": {**FACTS["columns"], 7: {"type": "boolean"}}}, "columns=7"),
        (change("age", low=0, high=1), r"schema\.columns\.age\.type=None"),
        (change("age", type="number"), r"schema\.columns\.age\.type='number'"),
        (change("age", type="integer", low=0), r"schema\.columns\.age\.high=None"),
        (change("age", type="integer", low=5, high=5), r"schema\.columns\.age\.high=5"),
        (change("age", type="integer", low=0, high=9, bins=0), r"schema\.columns\.age\.bins=0"),
        (change("age", type="integer", low=0, high=float("inf")), r"schema\.columns\.age\.high=inf"),
        (change("age", type="integer", edges=[0, 0.2, 0.8, 2]), r"columns\.age\.edges=.*whole numbers"),
        (change("age", type="integer", low=0, high=9, values=[1]), r"schema\.columns\.age\.values=.*type=integer"),
        (change("weight", type="real", edges=[1, 1]), r"columns\.weight\.edges="),
        (change("weight", type="real", edges=[1]), r"columns\.weight\.edges="),
        (change("weight", type="real", edges="12"), r"schema\.columns\.weight\.edges='12'"),
        (change("seen", type="date", low="2020-01-01", high="soon"), r"schema\.columns\.seen\.high='soon'"),
        (change("ward", type="category"), r"columns\.ward\.values=\(\)"),
        (change("ward", type="category", values="abc"), r"schema\.columns\.ward\.values='abc'"),
        (change("ward", type="category", values=["a", 1, 1.0]), r"columns\.ward\.values=.*different"),
        (change("ward", type="category", values=["a", ""]), r"columns\.ward\.values="),
        (change("ward", type="category", values=[True, False]), r"schema\.columns\.ward\.values=.*quotation marks"),
        (change("ill", type="boolean", values=["a"]), r"schema\.columns\.ill\.values="),
        ({"columns": {**FACTS["columns"], "ill": "boolean"}}, r"columns\.ill="),
    ],
)
def test_a_bad_schema_is_refused_by_the_name_of_its_key(facts, words):
    with pytest.raises(ValueError, match=words):
        TableDomain.from_dict(facts)
