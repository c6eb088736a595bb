"""Tables of an owner: columns, texts and vectors come with their labels and units; other tables are refused."""

import json
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pate_torch.core import texts
from pate_torch.data import tabular
from pate_torch.data.base import get_categories_origin
from pate_torch.data.tabular import Embeddings
from pate_torch.privacy.partition import AddRemove, select_one_per_unit
from pate_torch.privacy.schema import Column, TableSchema, make_key
from pate_torch.privacy.unit_ids import make_content_ids
from tests.data.owner_files import CLASSES, Csv, Text, changed_cell, table, write


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_columns_are_encoded_as_by_hand(suffix, tmp_path):
    frame, fractions = table(), (0.5, 0.3, 0.2)
    frame["flag"] = frame["age"] > 40
    data = Csv(path=write(frame, tmp_path / f"t{suffix}"), id="key", ignore=["user"], fractions=fractions).load()
    assert data.spec.class_names == CLASSES and data.spec.input_shape == (6,)
    assert len(data.private) + len(data.pool) + len(data.evaluation.y) == 120
    row_by_numbers = {(np.float32(row.age), np.float32(row.height)): row for row in frame.itertuples()}
    for x, y in zip(data.private.x, data.private.y, strict=True):
        row = row_by_numbers[tuple(x[:2].numpy())]
        one_hot = [float(row.color == color) for color in ("blue", "green", "red")]
        expected = [row.age, row.height, *one_hot, float(row.flag)]
        assert x.tolist() == pytest.approx(expected, rel=1e-6)
        assert CLASSES[y] == row.label
    z = data.spec.normalize(data.pool.x, torch.float64)
    numbers = [0, 1, 5]  # a column of booleans is one of numbers
    torch.testing.assert_close(z[:, numbers].mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        z[:, numbers].std(0, correction=0), torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0
    )
    assert data.spec.mean[2:5] == (0.0,) * 3 and data.spec.std[2:5] == (1.0,) * 3
    assert data.private.unit == "record" and not data.spec.benchmark and data.spec.nominal_size is None


LONG_NUMBERS = ["9007199254740993", "-12345678901234567890", "0.12345678901234567", "999999999999999.50", "-0.00"]
ID_CELLS = st.sampled_from(["", "a", "1e+20", "1E+20", *LONG_NUMBERS])


@settings(max_examples=25)
@given(st.lists(st.tuples(ID_CELLS | st.floats().map(str), ID_CELLS | st.text(max_size=20)), min_size=1, max_size=6))
def test_the_ids_of_rows_are_those_of_each_row_alone(rows):
    columns = {
        name: pa.chunked_array([column[:2], column[2:]], pa.string()) for name, *column in zip("ab", *rows, strict=True)
    }
    expected = make_content_ids([make_key(cell).encode() for cell in row] for row in rows)
    assert tabular._make_row_ids(columns).tolist() == expected.tolist()


def test_files_of_their_own_and_an_unlabeled_pool(tmp_path):
    pool = table(30, 9).drop(columns=["label", "user", "key"])
    paths = {key: write(table(40, seed), tmp_path / f"{key}.csv") for seed, key in enumerate(("path", "test_path"))}
    data = Csv(**paths, public_path=write(pool, tmp_path / "p.csv"), group="user", id="key").load()
    assert (len(data.private), len(data.pool), len(data.evaluation.y)) == (40, 30, 40)
    assert data.evaluation.pool_y is None and data.private.unit == "group:user"
    public = write(table().drop(columns="age"), tmp_path / "u.csv")
    with pytest.raises(ValueError, match=r"dataset\.public_path=.*lacks the feature columns \['age'\]"):
        Csv(path=paths["path"], public_path=public).load()


def test_declared_classes_categories_and_features(tmp_path):
    path = write(table(), tmp_path / "t.csv")
    declared = {"classes": ["yes", "no"], "categories": {"color": ["red", "blue"]}}
    spec = Csv(path=path, id="key", ignore=["user"], **declared).load().spec
    assert spec.class_names == ("yes", "no") and spec.input_shape == (4,)
    chosen = Csv(path=path, id="key", features=["height", "age"]).load()
    assert chosen.spec.input_shape == (2,) and float(chosen.private.x[0, 0]) > float(chosen.private.x[0, 1])
    # The origin of categories is told column by column.
    schema = TableSchema((Column("age", None), Column("town", ("a", "b")), Column("sex", ("f", "m"))))
    none, number, some, every = (get_categories_origin(schema, d) for d in ((), ("age",), ("town",), ("town", "sex")))
    assert none == number == "read off public points" and every == "declared by the owner" and "some columns" in some


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (table(), {"label": "lable"}, r"dataset\.label='lable'.*Did you mean 'label'"),
        (pd.DataFrame({"age;label": ["1;no"] * 9}), {}, r"dataset\.label='label'.*one column: set dataset\.separator"),
        (table(), {"group": "users"}, r"dataset\.group='users'"),
        (table(), {"id": "kee"}, r"dataset\.id='kee'"),
        (table(), {"ignore": ["nothing"]}, r"dataset\.ignore='nothing'"),
        (table(), {"features": ["label"]}, "leaves no feature column"),
        (table(), {"classes": ["yes"]}, r"dataset\.classes=\['yes'\].*at least two"),
        (table(), {"classes": ["yes", "perhaps"]}, r"dataset\.classes=.*lacks.*'no'"),
        (table().assign(label="yes"), {}, r"dataset\.classes=None: must be declared.*\('yes',\)"),
        (table(), {"max_categories": 2, "ignore": ["user", "key"]}, r"max_categories=2.*3 .*dataset\.group=color"),
        (changed_cell(table(), "user", 3, ""), {"group": "user"}, r"dataset\.group='list': has missing ids"),
        (table(), {"separator": "::"}, r"dataset\.separator='::'"),
        (table(), {"missing": "keep"}, r"dataset\.missing='keep': must be one of drop, error"),
        *(
            (table().assign(age=value), {"id": "key", "ignore": ["user"]}, r"dataset\.missing='error'.*: age\.")
            for value in ("", "NaN", "inf", "1e60")
        ),
    ],
)
def test_tables_are_refused_clearly(frame, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Csv(path=write(frame, tmp_path / "t.csv"), **options).load()


@pytest.mark.parametrize(
    ("consent", "is_shown", "width"),
    [
        ({"publish_test": True}, False, 5),
        ({"benchmark": True}, True, 5),
        ({"publish_test": True, "categories": {"town": ["a", "Oz"]}}, True, 3),
        ({}, False, 4),
    ],
)
def test_consent_to_figures_on_test_records_is_no_consent_to_show_their_values(tmp_path, consent, is_shown, width):
    frame = pd.DataFrame({"key": np.arange(180), "town": ["a", "b", "c"] * 60, "x": np.arange(180.0) + 0.5})
    frame["label"] = ["no", "yes"] * 90

    def load(**changes):
        path = write(frame, tmp_path / "all.csv")
        return tabular.Csv(path=path, group="key", publish_split=True, **changes).load()

    test_values = {float(x) for x in load().evaluation.x[:, -1]}
    frame.loc[frame["x"].isin(test_values), "town"] = "Oz"  # who is a test record is decided by the key alone
    spec = load(**consent).spec
    assert ("Oz" in json.dumps(spec.schema.to_dict()), spec.schema.num_features) == (is_shown, width)
    assert spec.input_shape == (width,)


COUNT, WIDTH = 90, 5


def write_mails(folder, suffix=".csv", **changes):
    rows = {
        "body": [f"text {i} is, {'short' if i % 3 else 'long ' * 30}" for i in range(COUNT)],
        "kind": [("spam", "ham")[i % 2] for i in range(COUNT)],
        "user": [f"u{i // 3}" for i in range(COUNT)],
        "key": [f"k{i}" for i in range(COUNT)],
    }
    frame = pd.DataFrame(rows | changes)
    return frame, write(frame, folder / f"mails{suffix}")


def text(path, **changes):
    options = {"path": path, "column": "body", "label": "kind", "fractions": (0.6, 0.2, 0.2)}
    return Text(**(options | changes))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_texts_come_with_their_labels_and_units(tmp_path, suffix):
    frame, path = write_mails(tmp_path, suffix)
    data = text(path, group="user", max_bytes=64).load()
    assert data.spec.kind == "text" and data.spec.text == "body" and data.spec.class_names == ("ham", "spam")
    assert data.private.unit == "group:user" and data.spec.input_shape == (64,) and data.private.x.dtype == torch.uint8
    class_by_text = {body[:64]: kind for body, kind in zip(frame["body"], frame["kind"], strict=True)}
    for x, y in zip(texts.decode_texts(data.private.x), data.private.y.tolist(), strict=True):
        assert class_by_text[x] == data.spec.class_names[y]
    parts = [set(texts.decode_texts(x)) for x in (data.private.x, data.pool.x, data.evaluation.x)]
    assert sum(map(len, parts)) == COUNT and not parts[0] & parts[1] and not parts[1] & parts[2]
    assert data.adjacencies == ("add_remove",) and data.pool.names.kind == "content"


def test_a_tab_comes_as_a_shell_passes_it_on(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f'"Odd" number {i}, she said "\tc{i % 2}\n' for i in range(80)))
    options = {"separator": "\\t", "columns": ["text", "label"], "column": "text", "label": "label", "quotes": False}
    data = text(str(tmp_path / "a.tsv"), **options).load()
    assert all(x.startswith('"Odd" number') for x in texts.decode_texts(data.private.x))


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        ("a", {"column": "subject"}, "column='subject': must be one of body"),
        ("a", {"max_bytes": 3}, "max_bytes=3"),
        ("a", {"empty": "keep"}, "empty='keep'"),
        ("", {}, r"empty='error': .* \d+ public records"),
    ],
)
def test_texts_are_refused_clearly(tmp_path, body, options, message):
    with pytest.raises(ValueError, match=rf"^dataset\.{message}"):
        text(write_mails(tmp_path, body=[body, "x"] * 45)[1], **options).load()


@pytest.mark.parametrize("body", [np.arange(COUNT), np.where(np.arange(COUNT) > 0, np.arange(COUNT), np.nan)])
def test_numbers_of_a_parquet_file_are_no_texts(body, tmp_path):
    path = write_mails(tmp_path, ".parquet", body=body)[1]
    for options in ({}, {"group": "user"}, {"id": "key"}):
        with pytest.raises(ValueError, match=r"^dataset\.path=.*column 'body' of type .* write the column as text"):
            text(path, **options).load()
    Csv(path=path, label="kind", id="key", ignore=["user"], missing="drop").load()  # numbers are features


IDS = [str(i) for i in range(COUNT)]


def write_vectors(folder, kind, x, ids=IDS):
    """Write vectors in a shuffled order, and return the options of ``Embeddings`` that read them."""
    order = np.random.default_rng(0).permutation(len(ids))
    ids, x = [ids[i] for i in order], x[order]
    file = folder / f"vectors.{kind.split()[0]}"
    if kind == "npy":
        np.save(file, x)
        (folder / "ids.txt").write_text("\n".join(ids) + "\n")
        return {"vectors": str(file), "ids": str(folder / "ids.txt")}
    if kind == "safetensors":
        save_file({"embeddings": torch.from_numpy(x).clone(), "id": torch.tensor([int(i) for i in ids])}, file)
    elif kind == "parquet of lists":
        pd.DataFrame({"key": ids, "embedding": list(x)}).to_parquet(file)
    else:
        pd.DataFrame({"key": ids, **{f"v{d}": x[:, d] for d in range(x.shape[1])}}).to_parquet(file)
    return {"vectors": str(file)}


@pytest.fixture(scope="module")
def id_table(tmp_path_factory):
    frame = pd.DataFrame({"key": IDS, "kind": [("spam", "ham")[i % 2] for i in range(COUNT)]})
    return write(frame, tmp_path_factory.mktemp("ids") / "table.csv")


def embeddings(path, **changes):
    options = {"path": path, "id": "key", "label": "kind", "publish_split": True, "fractions": (0.6, 0.2, 0.2)}
    return Embeddings(**(options | changes))


@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet of lists", "parquet of columns"])
def test_vectors_are_joined_by_id_whatever_their_order(tmp_path, kind, id_table):
    x = np.random.default_rng(1).normal(size=(COUNT, WIDTH)).astype(np.float32)
    options = write_vectors(tmp_path, kind, x) | {"encoder": {"name": "ours", "license": "MIT"}}
    data = embeddings(id_table, **options).load()
    assert data.spec.input_shape == (WIDTH,) and data.spec.encoder.name == "ours" and data.spec.encoder.kind == "given"
    for row, y in zip(data.private.x.numpy(), data.private.y.tolist(), strict=True):
        place = (x == row).all(1).tolist().index(True)
        assert data.spec.class_names[y] == ("spam", "ham")[int(IDS[place]) % 2]
    z = data.spec.normalize(data.pool.x)
    assert torch.allclose(z.mean(0), torch.zeros(WIDTH), atol=1e-5) and float(z.square().mean()) == pytest.approx(1)


@pytest.mark.parametrize("odd", [None, 0.5])
@pytest.mark.parametrize("column", ["tokens", "kind"])
def test_an_odd_cell_beside_the_vectors_changes_no_other_vector(column, odd, tmp_path):
    """A missing cell makes floating-point numbers of a whole column of integers."""
    frame = pd.DataFrame(
        {"key": IDS, "kind": np.arange(COUNT) % 2, "tokens": np.arange(COUNT), "v": np.arange(COUNT) / 7}
    )
    path, file = write(frame, tmp_path / "t.csv"), tmp_path / "v.parquet"

    def load(vectors, **options):
        vectors.to_parquet(file)
        private = embeddings(path, vectors=str(file), classes=[0, 1], **options).load().private
        return dict(zip(private.unit_id.tolist(), map(tuple, private.x.tolist()), strict=True))

    points = load(frame)
    assert {len(point) for point in points.values()} == {2}
    row = next(i for i in range(COUNT) if (i, np.float32(i / 7)) in points.values())  # of a private record
    more = load(changed_cell(frame, column, row, odd).astype({column: float}))
    assert more.keys() == points.keys() and sum(more[name] != points[name] for name in points) <= 1
    assert {len(point) for point in load(frame, ignore=["tokens"]).values()} == {1}


@pytest.mark.parametrize("kind", ["csv", "text", "embeddings"])
def test_a_row_whose_id_occurs_is_a_record_of_its_own(kind, tmp_path):
    """Such a row displaces no other row, and moves none to another shard."""
    np.save(tmp_path / "v.npy", np.arange(20.0)[:, None])
    (tmp_path / "ids.txt").write_text("\n".join(f"v{i}" for i in range(20)))
    vectors = {"vectors": str(tmp_path / "v.npy"), "ids": str(tmp_path / "ids.txt")}
    make, options = {"csv": (Csv, {}), "text": (Text, {"column": "a"}), "embeddings": (Embeddings, vectors)}[kind]

    def load(name, rows):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["visit,a,label", *rows]))
        options["public_path"] = str(tmp_path / "public.csv")
        private = make(path=str(path), id="visit", classes=["n", "y"], **options).load().private
        units, shards = select_one_per_unit(private, "add_remove"), AddRemove().make_shards(private, 5, seed=0)
        places = {name: k for k in range(5) for name in private.unit_id[shards.get_indices(k).numpy()].tolist()}
        return Counter(zip(map(bytes, units.x.numpy()), units.y.tolist(), strict=True)), places

    rows = [f"v{i % 15},{i},{'ny'[i % 2]}" for i in range(20)]
    (tmp_path / "public.csv").write_text("\n".join(["visit,a,label", *rows]))
    units, places = load("t", rows)
    assert units.total() == len(places) == 20
    more_units, more_places = load("more", ["v3,7.5,n", *rows])
    assert not units - more_units and (more_units - units).total() == 1
    assert places.items() <= more_places.items() and len(more_places) == 21


@pytest.mark.parametrize(("rows", "value"), [(COUNT // 2, 0.0), (COUNT, np.nan)])
def test_public_records_without_a_finite_vector_are_refused(rows, value, tmp_path, id_table):
    x = np.full((rows, WIDTH), value, np.float32)
    with pytest.raises(ValueError, match=r"dataset\.vectors=.*has no finite vector of \d+ public records"):
        embeddings(id_table, **write_vectors(tmp_path, "npy", x, IDS[:rows])).load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": None}, r"dataset\.id=None"),
        ({"encoder": {"licence": "MIT"}}, r"dataset\.encoder='licence': must be one of disjoint, license"),
        ({"vectors": None}, r"dataset\.vectors=None"),
        ({"vectors": "missing.npy"}, r"dataset\.vectors='missing\.npy': must exist"),
        ({"roles": "position"}, r"dataset\.roles='position'.*Use dataset\.roles=hash"),
    ],
)
def test_embeddings_are_refused_clearly(changes, message, id_table):
    with pytest.raises(ValueError, match=message):
        embeddings(id_table, **changes).load()
