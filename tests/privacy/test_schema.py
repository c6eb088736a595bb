"""A schema encodes a DataFrame, a mapping and an array alike, one record at a time, and names what does not fit."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.privacy.schema import (
    Column,
    TableSchema,
    TooManyCategoriesError,
    _to_texts,
    format_value,
    normalize_class_name,
)

SCHEMA = TableSchema((Column("age", None), Column("color", ("blue", "red")), Column("member", ("False", "True"))))
FRAME = pd.DataFrame({"color": ["red", "blue"], "age": [3.5, 40], "member": [True, False], "label": ["a", "b"]})
ENCODED = [[3.5, 0, 1, 0, 1], [40, 1, 0, 1, 0]]
CELLS = st.sampled_from(
    ["1", "1.0", "+1", " 2.50", "1_2", "1e400", "-0", "nan", "NA", "", " ", "red", "True", "é", "inf"]
)


NUMBERS = {"1": 1, "1.0": 1, "+1": 1, " 2.50": 2.5, "1_2": 12, "-0": -0.0, "True": 1}


def encode_cell(column, cell):
    """The features of one cell; NaN for a number that is not finite."""
    if column.categories is None:
        return [NUMBERS.get(cell, np.nan)]
    names = ["1" if name == "True" else name for name in (normalize_class_name(cell.strip()), *column.categories)]
    # Of categories that mean the same, the last one counts.
    return [float(name == names[0] and name not in names[place + 1 :]) for place, name in enumerate(names) if place]


@settings(max_examples=60)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=8), st.data())
def test_a_schema_encodes_each_cell_by_itself(rows, data):
    table = dict(zip("abc", map(list, zip(*rows, strict=True)), strict=True))
    public = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    declared = data.draw(st.sampled_from([{}, {"b": [1, "red", ""]}, {"a": []}]))
    schema = TableSchema.from_public({k: [v[row] for row in public] for k, v in table.items()}, categories=declared)
    x = schema.encode(table, unknown="zeros", missing="nan")
    assert x.dtype == np.float32 and x.shape[1] == schema.num_features == len(schema.feature_names)
    for row, cells in enumerate(rows):
        expected = [v for column, cell in zip(schema.columns, cells, strict=True) for v in encode_cell(column, cell)]
        np.testing.assert_array_equal(np.where(np.isfinite(x[row]), x[row], np.nan), np.float32(expected))
        alone = schema.encode({k: [v[row]] for k, v in table.items()}, unknown="zeros", missing="nan")
        assert alone.tobytes() == x[row : row + 1].tobytes()


@pytest.mark.parametrize(
    "table",
    [
        FRAME,
        FRAME[["member", "age", "color"]],
        FRAME.astype({"age": "float32", "color": "category", "member": "boolean"}),
        FRAME.astype(str),
        FRAME.convert_dtypes(),
        {"age": ["3.5", " 40 "], "color": ["red", "blue "], "member": ["True", "False"]},
        {"age": (3.5, 40), "color": np.array(["red", "blue"]), "member": np.array([True, False])},
    ],
)
def test_tables_of_every_kind_encode_the_same(table):
    assert SCHEMA.encode(table).tolist() == ENCODED


def test_numbers_and_their_text_are_one_category_and_one_number():
    spellings = (1, 1.0, "1", "+1", " 1.0", -1.0, "1_2", "cat", 0.5)
    names = ["1", "1", "1", "1", "1", "-1", "1_2", "cat", "0.5"]
    assert [normalize_class_name(value) for value in spellings] == names
    schema = TableSchema((Column("code", ("1", "2", "0.1")), Column("value", None)))
    numbers = {"code": [1, 2.0, np.float32(0.1)], "value": [0.1, 7, np.float64(1e-3)]}
    texts = {"code": ["1.0", "+2", "0.1"], "value": ["0.1", "7.0", "1e-3"]}
    assert (schema.encode(numbers) == schema.encode(texts)).all()
    assert (schema.encode(numbers)[:, :3] == np.eye(3)).all()


def test_arrays_are_taken_where_every_column_is_numeric():
    schema = TableSchema.from_public(np.array([[1.0, 2.0]]))
    assert schema.feature_names == ("0", "1") and schema.numeric_indices == (0, 1)
    assert schema.encode([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert schema.encode(pd.DataFrame([[1, 2]])).tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="an array of 2 columns"):
        schema.encode([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"must be a DataFrame or \{column: values\}\."):
        SCHEMA.encode(np.zeros((2, 5)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"color": ["green", "red"]}, r"color='green' \(row 0\).*one of the categories.*unknown=zeros"),
        ({"color": ["red", None]}, r"color='' \(row 1\)"),
        ({"color": ["red", float("nan")], "member": [2, True]}, r"color='' \(row 1\), member='2' \(row 0\)"),
        ({"age": ["old", 3]}, r"age='old' \(row 0\).*must be finite numbers"),
        ({"age": [3, pd.NA]}, r"age='' \(row 1\)"),
        ({"age": [3, 1e300]}, r"age='1e\+300' \(row 1\)"),
        ({"age": [3]}, "columns of one length"),
        ({"age": "34"}, "list of values"),
        ({"age": np.zeros((2, 2))}, "one value a record"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SCHEMA.encode({**{name: FRAME[name] for name in FRAME}, **changes})


def test_missing_columns_are_named_and_others_left_aside():
    with pytest.raises(ValueError, match="lacks the columns age, member"):
        SCHEMA.encode(FRAME[["color", "label"]])
    assert SCHEMA.find_unused_columns(FRAME) == ["label"]
    with pytest.raises(ValueError, match="more than one column age"):
        SCHEMA.encode(pd.concat([FRAME, FRAME[["age"]]], axis=1))


def test_unknown_categories_become_zeros_where_one_says_so():
    strange = FRAME.assign(color=["green", None], age=["", 1])
    with pytest.raises(ValueError, match="age=''"):
        SCHEMA.encode(strange, unknown="zeros")
    x = SCHEMA.encode(strange, unknown="zeros", missing="nan")
    assert np.isnan(x[0, 0]) and (x[:, 1:3] == 0).all()


def test_a_schema_is_read_off_public_values_or_declared():
    assert TableSchema.from_public(FRAME, categories={"age": [3.5, 4]}).columns[1] == Column("age", ("3.5", "4"))
    with pytest.raises(TooManyCategoriesError, match=r"max_categories=2: column 'key' has 3 different public values"):
        TableSchema.from_public({"key": ["a", "b", "c"]}, max_categories=2)
    with pytest.raises(ValueError, match=r"categories='colour'.*color"):
        TableSchema.from_public(FRAME, categories={"colour": ["red"]})
    assert SCHEMA.numeric_indices == (0,) and SCHEMA.num_features == 5


@pytest.mark.parametrize(
    "damaged",
    [None, {}, *({"columns": columns} for columns in ([1], [{"name": 3}], [], [{"name": "a", "categories": [1]}]))],
)
def test_a_schema_goes_through_json_and_damage_is_refused(damaged):
    assert TableSchema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA
    with pytest.raises(ValueError):
        TableSchema.from_dict(damaged)


NUMBER_TEXTS = ["0x1p3", "+.5", "1e-400", "1e39", "Infinity", "-nan", "nan(1)", "\u0661", "1e5 ", "9" * 400, "5e-324"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(NUMBER_TEXTS) | CELLS | st.floats().map(str), min_size=1, max_size=5), st.booleans())
def test_an_arrow_column_is_encoded_as_a_list(cells, has_fill):
    """Arrow parses numbers faster than Python, and to the same numbers."""
    tables = [{"a": cells}, {"a": pa.chunked_array([cells[:2], cells[2:]], pa.string())}]
    of_list, of_arrow = (TableSchema.from_public(table) for table in tables)
    assert of_list == of_arrow
    number = TableSchema((Column("a", None, 1.0 if has_fill else None),))
    for schema in (of_list, number):
        rows = [schema.encode(table, unknown="zeros", missing="nan") for table in tables]
        np.testing.assert_array_equal(*rows)
        ids = [schema.compute_content_ids(table) for table in tables]
        assert ids[0] == ids[1]
        assert len({schema.withhold_categories(table) for table in tables}) == 1
    messages = []
    for table in tables:
        try:
            messages.append(number.encode(table).tolist())
        except ValueError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_column_of_numbers_has_the_texts_of_its_values(dtype):
    """A column is converted faster than single values, and to the same texts."""
    whole = [0, -1, 427, 2**53 - 1, 2**53, -(2**53), 2**53 + 1, -(2**63)]
    values = np.array(whole, dtype)
    if dtype is np.float64:
        others = [0.1, -0.0, 1e-5, 1e16, 1e300, 5e-324, np.nan, np.inf, -np.inf, 1 / 3]
        values = np.concatenate([values, others, np.random.default_rng(0).standard_normal(1000)])

    assert _to_texts(values) == [format_value(value) for value in values]


@pytest.mark.parametrize("make", [pa.array, lambda values: pa.chunked_array([values])])
def test_arrow_columns_of_users_are_read_as_lists(make):
    values = {"word": ["x", None, "y", "x"], "size": [1.5, None, 2.0, 3.25], "flag": [True, False, True, False]}
    schema = TableSchema.from_public(values)
    columns = {name: make(column) for name, column in values.items()}
    np.testing.assert_array_equal(schema.encode(columns, missing="nan"), schema.encode(values, missing="nan"))
