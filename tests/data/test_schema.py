"""A table's schema: the same numbers as a CSV file gives, from a DataFrame, a mapping or an array, and named errors."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.data import tabular
from pate_torch.data.base import get_categories_origin
from pate_torch.privacy.schema import Column, TableSchema, TooManyCategoriesError, normalize_class_name

MISSING = {"", "na", "n/a", "nan", "null", "none"}
SCHEMA = TableSchema((Column("age", None), Column("color", ("blue", "red")), Column("member", ("False", "True"))))
FRAME = pd.DataFrame({"color": ["red", "blue"], "age": [3.5, 40], "member": [True, False], "label": ["a", "b"]})
CODED = [[3.5, 0, 1, 0, 1], [40, 1, 0, 1, 0]]


def before(table, public, declared):
    """float32 [N, D] as tables were encoded before there were schemas, to hold the schema's numbers against."""

    def number(text):
        try:
            return float(text)
        except ValueError:
            return math.nan

    blocks = []
    for name, column in table.items():
        text = [value.strip() for value in column]
        shown = {text[row] for row in public} - {""}
        if name in declared:
            values = [normalize_class_name(value) for value in declared[name]]
        elif all(value.casefold() in MISSING or not math.isnan(number(value)) for value in shown):
            with np.errstate(over="ignore"):
                blocks.append(np.array([number(value) for value in text])[:, None].astype(np.float32))
            continue
        else:
            values = sorted({normalize_class_name(value) for value in shown})
        place = {value: code for code, value in enumerate(values)}
        code_N = np.array([place.get(normalize_class_name(value), -1) for value in text])
        blocks.append((code_N[:, None] == np.arange(len(values))).astype(np.float32))
    return np.concatenate(blocks, axis=1)


CELLS = st.sampled_from(
    ["1", "1.0", "+1", " 2.50", "1_2", "1e400", "-0", "nan", "NA", "", " ", "red", "True", "é", "inf"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=8), st.data())
def test_a_schema_encodes_tables_to_the_bit_as_before_there_was_one(rows, data):
    table = dict(zip("abc", map(list, zip(*rows, strict=True)), strict=True))
    public = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    declared = data.draw(st.sampled_from([{}, {"b": [1, "red", ""]}, {"a": []}]))
    schema = TableSchema.from_public({k: [v[row] for row in public] for k, v in table.items()}, categories=declared)
    coded = schema.encode(table, unknown="zeros", missing="nan")
    assert coded.dtype == np.float32 and coded.tobytes() == before(table, public, declared).tobytes()
    assert coded.shape[1] == schema.num_features == len(schema.feature_names)
    for row in range(len(rows)):  # one record at a time
        alone = schema.encode({k: [v[row]] for k, v in table.items()}, unknown="zeros", missing="nan")
        assert alone.tobytes() == coded[row : row + 1].tobytes()


def test_csv_reads_what_its_schema_encodes(tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"age": random.normal(40, 9, 200), "color": random.choice(["red", "blue"], 200)})
    frame["member"], frame["label"] = frame["age"] > 40, random.choice(["no", "yes"], 200)
    frame.to_csv(tmp_path / "all.csv", index=False)
    data = tabular.Csv(path=str(tmp_path / "all.csv"), publish_split=True).load()
    schema = TableSchema.from_public(frame.drop(columns="label"))
    coded = {row.tobytes() for row in schema.encode(frame)}
    assert schema.feature_names == ("age", "color=blue", "color=red", "member=False", "member=True")
    assert {row.numpy().tobytes() for row in data.private.x} < coded
    assert {row.numpy().tobytes() for row in data.pool.x} < coded


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
    assert SCHEMA.encode(table).tolist() == CODED


def test_numbers_and_their_text_are_one_category_and_one_number():
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
    "change,message",
    [
        ({"color": ["green", "red"]}, r"color='green' \(row 0\).*one of the categories.*unknown=zeros"),
        ({"color": ["red", None]}, r"color='' \(row 1\)"),
        ({"color": ["red", float("nan")], "member": [1, True]}, r"color='' \(row 1\), member='1' \(row 0\)"),
        ({"age": ["old", 3]}, r"age='old' \(row 0\).*no finite numbers"),
        ({"age": [3, pd.NA]}, r"age='' \(row 1\)"),
        ({"age": [3, 1e300]}, r"age='1e\+300' \(row 1\)"),
        ({"age": [3]}, "columns of one length"),
        ({"age": "34"}, "list of values"),
        ({"age": np.zeros((2, 2))}, "one value a record"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        SCHEMA.encode({**{name: FRAME[name] for name in FRAME}, **change})


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
    coded = SCHEMA.encode(strange, unknown="zeros", missing="nan")
    assert np.isnan(coded[0, 0]) and (coded[:, 1:3] == 0).all()


def test_a_schema_is_read_off_public_values_or_declared():
    assert TableSchema.from_public(FRAME, categories={"age": [3.5, 4]}).columns[1] == Column("age", ("3.5", "4"))
    with pytest.raises(TooManyCategoriesError, match=r"max_categories=2: column 'key' has 3 different public values"):
        TableSchema.from_public({"key": ["a", "b", "c"]}, max_categories=2)
    with pytest.raises(ValueError, match=r"categories='colour'.*color"):
        TableSchema.from_public(FRAME, categories={"colour": ["red"]})
    assert SCHEMA.numeric_indices == (0,) and SCHEMA.num_features == 5


def test_a_schema_goes_through_json_and_damage_is_refused():
    written = json.dumps(SCHEMA.to_dict())
    assert TableSchema.from_dict(json.loads(written)) == SCHEMA
    for damaged in (None, {}, {"columns": [1]}, {"columns": [{"name": 3}]}, {"columns": []}):
        with pytest.raises(ValueError):
            TableSchema.from_dict(damaged)
    with pytest.raises(ValueError, match=re.escape("must be texts")):
        TableSchema.from_dict({"columns": [{"name": "a", "categories": [1]}]})


def test_a_schema_needs_no_pandas():
    code = "import sys, pate_torch.privacy.schema as s; s.TableSchema.from_public({'a': [1]});"
    code += "assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "agreed,shown,width",
    [
        ({"publish_test": True}, False, 5),
        ({"benchmark": True}, True, 5),
        ({"publish_test": True, "categories": {"town": ["a", "Oz"]}}, True, 3),
        ({}, False, 4),
    ],
)
def test_who_agreed_to_figures_on_test_records_has_not_agreed_to_show_their_values(tmp_path, agreed, shown, width):
    frame = pd.DataFrame({"key": np.arange(180), "town": ["a", "b", "c"] * 60, "x": np.arange(180.0) + 0.5})
    frame["label"] = ["no", "yes"] * 90

    def load(**changes):
        frame.to_csv(tmp_path / "all.csv", index=False)
        return tabular.Csv(path=str(tmp_path / "all.csv"), id="key", publish_split=True, **changes).load()

    tested = {float(x) for x in load().evaluation.x[:, -1]}
    frame.loc[frame["x"].isin(tested), "town"] = "Oz"  # who is a test record is decided by the key alone
    spec = load(**agreed).spec
    assert ("Oz" in json.dumps(spec.schema.to_dict()), spec.schema.num_features) == (shown, width)
    assert spec.input_shape == (width,)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ((), "read off public points"),
        (("town", "sex"), "declared by the owner"),
        (("town",), "declared by the owner for some columns, and read off public points for the others"),
        (("age",), "read off public points"),
    ],
)
def test_a_statement_says_of_which_columns_the_categories_were_declared(declared, expected):
    columns = (Column("age", None), Column("town", ("a", "b")), Column("sex", ("f", "m")))
    assert get_categories_origin(TableSchema(columns), declared) == expected
