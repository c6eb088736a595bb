"""A user's own data: read right, refused clearly, and never learnt from where it is private."""

import bz2
import gzip
import lzma
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import dump_svmlight_file

from pate_torch.data import image_folder, libsvm, roles, tabular
from pate_torch.data.base import DatasetSource
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.data.libsvm import make_hashing_matrix
from pate_torch.data.tensors import Tensors
from pate_torch.privacy import units
from pate_torch.privacy.partition import ReplaceOne
from pate_torch.privacy.records import NOT_FINITE, UNREADABLE_POINT, PrivateRecords
from pate_torch.privacy.schema import normalize_class_name
from pate_torch.privacy.unit_ids import compute_content_id
from pate_torch.privacy.units import get_unit_ids, select_one_per_unit
from tests.worlds import check_adjacency

# The owner of most tables here has agreed.
Csv, Libsvm, ImageFolder = (
    partial(kind, publish_split=True, publish_test=True)
    for kind in (tabular.Csv, libsvm.Libsvm, image_folder.ImageFolder)
)

CLASSES = ("no", "yes")


def table(rows=120, seed=0):
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": random.integers(18, 90, rows),
            "height": random.normal(170, 10, rows).round(2),
            "color": random.choice(["red", "green", "blue"], rows),
            "user": [f"u{i % 40}" for i in range(rows)],
            "key": [f"k{i}" for i in range(rows)],
            "label": random.choice(CLASSES, rows),
        }
    )


def write(frame, path):
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return str(path)


def rows_of(private):
    """The private side as a mapping from unit id to its records, exactly."""
    rows = {}
    for name, x, y in zip(private.unit_id, private.x, private.y, strict=True):
        rows.setdefault(str(name), []).append((x.numpy().tobytes(), int(y)))
    return rows


def same_public_side(a, b):
    assert a.spec == b.spec
    assert torch.equal(a.pool.x, b.pool.x)
    assert torch.equal(a.evaluation.x, b.evaluation.x) and torch.equal(a.evaluation.y, b.evaluation.y)


# --- roles -----------------------------------------------------------------------------------------------------------


def test_hash_roles_follow_the_fractions_and_each_id_alone():
    ids = np.array([f"person{i}" for i in range(20_000)])
    main = np.zeros(len(ids), dtype=int)
    role = roles.assign_by_hash(ids, main, {roles.PRIVATE}, (0.7, 0.2, 0.1), 3)
    assert np.abs(np.bincount(role) / len(ids) - (0.7, 0.2, 0.1)).max() < 0.015  # over four deviations
    some = np.arange(0, len(ids), 7)
    np.testing.assert_array_equal(
        roles.assign_by_hash(ids[some], main[some], {roles.PRIVATE}, (0.7, 0.2, 0.1), 3), role[some]
    )
    assert (roles.assign_by_hash(ids, main, {roles.PRIVATE}, (0.7, 0.2, 0.1), 4) != role).mean() > 0.3


@pytest.mark.parametrize(
    ("parts", "allowed"),
    [
        ({0, 1, 2}, {0: {0}, 1: {1}, 2: {2}}),
        ({0, 1}, {0: {0}, 1: {1, 2}}),
        ({0, 2}, {0: {0, 1}, 2: {2}}),
        ({0}, {0: {0, 1, 2}}),
    ],
)
def test_files_given_for_a_role_keep_it(parts, allowed):
    ids = np.array([str(i) for i in range(3000)])
    part = np.array(sorted(parts))[np.arange(3000) % len(parts)]
    role = roles.assign_by_hash(ids, part, parts, (0.8, 0.1, 0.1), 0)
    assert {p: set(role[part == p].tolist()) for p in parts} == allowed


@pytest.mark.parametrize(
    ("count", "sizes"), [(8124, [6499, 163, 1462]), (48842, [39073, 977, 8792]), (72309, [57847, 1447, 13015])]
)
def test_position_roles_have_the_sizes_printed_in_lzcw21(count, sizes):
    assert np.bincount(roles.assign_by_position(count, (0.8, 0.02, 0.18), 0)).tolist() == sizes


@pytest.mark.parametrize("trial", range(10))
def test_a_replaced_row_moves_no_other_where_positions_decide(trial, tmp_path):
    draw, frame = np.random.default_rng(trial), table(200, trial)
    options = {"ignore": ["user", "key"], "classes": CLASSES, "categories": {"color": ["red", "green", "blue"]}}
    options["roles"], options["seed"] = "position", trial
    before = Csv(path=write(frame, tmp_path / "a.csv"), **options).load()
    position = int(draw.choice(before.private.unit_id))
    new = table(1, 1000 + trial) if trial % 2 else frame.iloc[[int(draw.integers(200))]]  # or equal to another row
    frame.iloc[position] = new.iloc[0]
    after = Csv(path=write(frame, tmp_path / "b.csv"), **options).load()
    same_public_side(before, after)
    assert len(before.private) == 160 and after.private.unit_id.tolist() == before.private.unit_id.tolist()
    kept = before.private.unit_id != str(position)
    assert kept.sum() == 159 and torch.equal(before.private.x[kept], after.private.x[kept])
    assert torch.equal(before.private.y[kept], after.private.y[kept])
    left, right = (ReplaceOne().make_shards(data.private, 7, trial) for data in (before, after))
    assert torch.equal(left.index_KS, right.index_KS)


def test_where_ids_decide_a_replaced_row_moves_others(tmp_path):
    """Why replace_one is refused then."""
    frame, counts = table(200)[["age", "height", "label"]], set()
    for trial in range(20):
        other = frame.copy()
        other.iloc[trial] = table(1, 1000 + trial)[["age", "height", "label"]].iloc[0]
        counts.add(len(Csv(path=write(other, tmp_path / "t.csv")).load().private))
    assert len(counts) > 1


@pytest.mark.parametrize("kind", [Csv, Libsvm])
@pytest.mark.parametrize(
    ("options", "parts", "adjacencies", "advice"),
    [
        ({}, "path", {"add_remove"}, "Use dataset.roles=position, or give"),
        ({"benchmark": True}, "path", {"add_remove"}, "Use dataset.roles=position, or give"),
        ({}, "path test_path", {"add_remove"}, "Give the public records a file of their own (dataset.public_path)."),
        ({}, "path public_path", {"add_remove", "replace_one"}, ""),
        ({"group": ...}, "path public_path", {"add_remove"}, "Use partition=add_remove"),
        ({"roles": "position"}, "path", {"replace_one"}, "Use partition=replace_one, or dataset.roles=hash."),
        ({"roles": "position", "benchmark": True}, "path", {"add_remove", "replace_one"}, ""),
    ],
)
def test_tables_say_which_neighbors_they_can_bear(kind, options, parts, adjacencies, advice, tmp_path):
    x, y = sparse()
    path = (
        svm(tmp_path, x, y, query_id=np.arange(200))
        if kind is Libsvm
        else write(table()[["age", "label", "user"]], tmp_path / "t.csv")
    )
    if "group" in options:
        options = {"group": "qid" if kind is Libsvm else "user"}
    apart = shutil.copy(path, tmp_path / f"apart{Path(path).suffix}")
    files = dict.fromkeys(parts.split(), apart) | {"path": path}
    data = kind(**files, **options).load()
    assert set(data.adjacencies) == adjacencies
    for adjacency in ("add_remove", "replace_one"):
        if adjacency in adjacencies:
            check_adjacency(data, adjacency)
        else:
            with pytest.raises(ValueError, match=f"partition='{adjacency}'.*{re.escape(advice)}"):
                check_adjacency(data, adjacency)


def test_what_is_replaced_in_a_folder_of_images_may_move_others(tmp_path):
    own, public = gallery(tmp_path / "a"), gallery(tmp_path / "b", 5)
    for options in ({}, {"public_path": public}, {"public_path": public, "test_path": public, "benchmark": True}):
        data = ImageFolder(path=own, size=8, **options).load()
        check_adjacency(data, "add_remove")
        for one in (data, LabelPrivacyDataset(source=ImageFolder(path=own, size=8, **options)).load()):
            with pytest.raises(ValueError, match=r"Use partition=add_remove \(and labels_only=false\)"):
                check_adjacency(one, "replace_one")


def test_units_are_ids_or_positions():
    private = PrivateRecords.from_rows(
        torch.arange(4.0)[:, None], torch.zeros(4).long(), np.array(["b", "a", "b", "a"])
    )
    assert get_unit_ids(private, "add_remove").tolist() == ["b", "a", "b", "a"]
    assert get_unit_ids(private, "replace_one").tolist() == ["0", "1", "2", "3"]
    assert select_one_per_unit(private, "add_remove").x[:, 0].tolist() == [1, 0]
    assert select_one_per_unit(private, "replace_one").x[:, 0].tolist() == [0, 1, 2, 3]


def test_class_names_have_one_spelling():
    assert [normalize_class_name(v) for v in (1, 1.0, "1", "+1", " 1.0", -1.0, "1_2", "cat", 0.5)] == [
        *("1", "1", "1", "1", "1", "-1", "1_2", "cat", "0.5")
    ]
    assert roles.build_class_list(None, ["10", "9", "-1"]) == ("-1", "9", "10")
    assert roles.build_class_list([1, -1], ["1"]) == ("1", "-1")


def test_content_ids_tell_boundaries_apart():
    assert compute_content_id([b"ab", b"c"]) != compute_content_id([b"a", b"bc"])
    assert compute_content_id([b"ab", b"c"]) == compute_content_id([b"ab", b"c"])


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.0), (0.5, 0.5), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1)])
def test_fractions_are_checked(fractions):
    for source in (Csv, Libsvm, ImageFolder):
        with pytest.raises(ValueError, match=r"dataset\.fractions"):
            source(fractions=fractions)


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_tables_are_encoded_as_by_hand(suffix, tmp_path):
    frame = table()
    dataset = Csv(
        path=write(frame, tmp_path / f"t{suffix}"), id="key", ignore=["user"], fractions=(0.5, 0.3, 0.2)
    ).load()
    assert dataset.spec.class_names == CLASSES and dataset.spec.input_shape == (5,)
    assert len(dataset.private) + len(dataset.pool) + len(dataset.evaluation.y) == 120
    by_key = frame.set_index("key")
    for name, x, y in zip(dataset.private.unit_id, dataset.private.x, dataset.private.y, strict=True):
        row = by_key.loc[name]
        one_hot = [float(row.color == c) for c in ("blue", "green", "red")]
        assert x.tolist() == pytest.approx([row.age, row.height, *one_hot], rel=1e-6)
        assert CLASSES[y] == row.label
    z = dataset.spec.normalize(dataset.pool.x, torch.float64)
    torch.testing.assert_close(z[:, :2].mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(z[:, :2].std(0, correction=0), torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)
    assert dataset.spec.mean[2:] == (0.0,) * 3 and dataset.spec.std[2:] == (1.0,) * 3
    assert dataset.private.unit == "record" and not dataset.spec.benchmark and dataset.spec.nominal_size is None


def test_csv_and_parquet_agree(tmp_path):
    frame = table()
    frame["flag"] = frame["age"] > 40
    csv, parquet = (Csv(path=write(frame, tmp_path / f"t{end}"), id="key").load() for end in (".csv", ".parquet"))
    same_public_side(csv, parquet)
    assert rows_of(csv.private) == rows_of(parquet.private)


@pytest.mark.parametrize(
    ("kind", "options", "unit"),
    [
        *(
            (kind, options, unit)
            for kind in (".csv", ".parquet")
            for options, unit in (({"group": "user"}, "group:user"), ({"id": "key"}, "record"), ({}, "record"))
        ),
        (".svm", {}, "record"),
        ("images", {"fractions": (0.5, 0.3, 0.2)}, "record"),
        ("images", {"group": "^(p[0-9]+)_", "fractions": (0.5, 0.3, 0.2)}, "group:file name"),
    ],
)
def test_removing_a_private_unit_changes_nothing_else(kind, options, unit, tmp_path):
    frame, (x, y) = table(), sparse()

    def load(gone=None):
        """All records, or those of other units than ``gone``."""
        content = None if gone is None else np.frombuffer(rows[gone][0][0], dtype=np.float32)
        if kind == ".svm":
            kept = slice(None) if gone is None else np.abs(x[:, : len(content)] - content).max(1) >= 1e-6
            return Libsvm(path=svm(tmp_path, x[kept], y[kept])).load()
        if kind == "images":
            shutil.rmtree(tmp_path / "g", ignore_errors=True)
            path = gallery(tmp_path / "g")
            for file in (tmp_path / "g").rglob("*.png"):
                if gone and (file.relative_to(path).as_posix() == gone or file.name.startswith(f"{gone}_")):
                    file.unlink()
            return ImageFolder(path=path, size=8, **options).load()
        column = next(iter(options.values()), None)
        if gone is None:
            kept = slice(None)
        elif column is None:  # found by its features; without duplicates in the table, one row
            kept = ~(np.isclose(frame.age, content[0]) & np.isclose(frame.height, content[1]))
        else:
            kept = frame[column] != gone
        return Csv(path=write(frame[kept], tmp_path / f"t{kind}"), **options).load()

    whole = load()
    assert whole.private.unit == unit
    rows = rows_of(whole.private)
    for gone in sorted(rows)[:3]:
        fewer = load(gone)
        same_public_side(whole, fewer)
        assert rows_of(fewer.private) == {name: value for name, value in rows.items() if name != gone}


def test_a_strange_private_record_changes_nobody_else(tmp_path):
    """Unknown class, unknown category, text in a numeric column, a huge value: each touches its own record only."""
    frame, public, test = table(60), table(30, 1), table(30, 2)
    files = {"public_path": write(public, tmp_path / "public.csv"), "test_path": write(test, tmp_path / "test.csv")}
    plain = Csv(path=write(frame, tmp_path / "a.csv"), id="key", ignore=["user"], missing="drop", **files).load()
    strange = frame.iloc[:4].astype(object)
    strange["key"] = ["s0", "s1", "s2", "s3"]
    strange.loc[0, "label"], strange.loc[1, "color"] = "perhaps", "ultraviolet"
    strange.loc[2, "age"], strange.loc[3, "height"] = "old", 1e30
    more = pd.concat([frame.astype(object), strange], ignore_index=True)
    loaded = Csv(path=write(more, tmp_path / "b.csv"), id="key", ignore=["user"], **files).load()
    same_public_side(plain, loaded)
    filled = units.drop_unusable(loaded, "replace_one").private
    assert len(filled) == 64 and filled.x.isfinite().all() and not filled.x[-2].any() and not filled.y[-4]
    assert loaded.num_dropped_by_reason == {NOT_FINITE: 1, "of no known class": 1}
    loaded = units.drop_unusable(loaded, "add_remove")
    rows = rows_of(loaded.private)
    assert set(rows) - set(rows_of(plain.private)) == {"s1", "s3"}
    assert {name: rows[name] for name in rows_of(plain.private)} == rows_of(plain.private)
    assert np.frombuffer(rows["s1"][0][0], dtype=np.float32)[2:].tolist() == [0, 0, 0]


def test_equal_records_share_a_unit_and_a_role(tmp_path):
    frame = table()[["age", "height", "label"]]
    dataset = Csv(path=write(pd.concat([frame, frame]), tmp_path / "t.csv")).load()
    assert set(map(len, rows_of(dataset.private).values())) == {2}


def test_separate_files_and_an_unlabeled_pool(tmp_path):
    files = {part: write(table(40, seed), tmp_path / f"{part}.csv") for seed, part in enumerate(("private", "test"))}
    pool = table(30, 9).drop(columns=["label", "user", "key"])
    source = Csv(
        path=files["private"],
        test_path=files["test"],
        public_path=write(pool, tmp_path / "p.csv"),
        group="user",
        id="key",
    )
    dataset = source.load()
    assert (len(dataset.private), len(dataset.pool), len(dataset.evaluation.y)) == (40, 30, 40)
    assert dataset.evaluation.pool_y is None and dataset.private.unit == "group:user"


def test_declared_classes_and_categories(tmp_path):
    path = write(table(), tmp_path / "t.csv")
    source = Csv(path=path, id="key", ignore=["user"], classes=["yes", "no"], categories={"color": ["red", "blue"]})
    dataset = source.load()
    assert dataset.spec.class_names == ("yes", "no") and dataset.spec.input_shape == (4,)
    chosen = Csv(path=path, id="key", features=["height", "age"]).load()
    assert chosen.spec.input_shape == (2,) and float(chosen.private.x[0, 0]) > float(chosen.private.x[0, 1])


def broken(frame, column, row, value):
    frame = frame.astype(object)
    frame.loc[row, column] = value
    return frame


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (
            table(),
            {"label": "lable"},
            r"dataset\.label='lable': must be one of age, color.*label, user.*Did you mean 'label'",
        ),
        (table(), {"group": "users"}, r"dataset\.group='users'"),
        (table(), {"id": "kee"}, r"dataset\.id='kee'"),
        (table(), {"ignore": ["nothing"]}, r"dataset\.ignore='nothing'"),
        (table(), {"features": ["label"]}, r"leaves no feature column"),
        (table(0), {}, r"dataset\.path=.*has no rows"),
        (table(), {"classes": ["yes"]}, r"dataset\.classes=\['yes'\].*at least two"),
        (table(), {"classes": ["yes", "perhaps"]}, r"is too short.*'no'"),
        (table().assign(label="yes"), {}, r"dataset\.classes=None: must be declared.*\('yes',\)"),
        (
            table(),
            {"max_categories": 2, "ignore": ["user", "key"]},
            r"3 different public values: is it the unit\? dataset\.group=color\.",
        ),
        (
            table(),
            {"fractions": [0.998, 0.001, 0.001], "group": "user"},
            r"has no (public|test) records",
        ),
        (broken(table(), "user", 3, ""), {"group": "user"}, r"dataset\.group='list': has missing ids"),
        *(
            (table().assign(age=value), {"id": "key", "ignore": ["user"]}, r"dataset\.missing='error'.*: age\.")
            for value in ("", "NaN", "inf", "1e60")
        ),
    ],
)
def test_tables_are_refused_clearly(frame, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Csv(path=write(frame, tmp_path / "t.csv"), **options).load()


def test_unreadable_tables_are_named(tmp_path):
    for name, content in (
        ("a.csv", b"a,label\n1,2,3\n4\n5,6,7,8\n"),
        ("b.csv", b""),
        ("c.parquet", b"PAR1"),
        ("d.csv", b"\xff\xfe\x81"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"dataset\.path=.*{name}.*(not a readable|has no rows|must be one of)"):
            Csv(path=str(tmp_path / name)).load()
    pd.DataFrame({"a": [[1], [2]], "label": [0, 1]}).to_parquet(tmp_path / "nested.parquet")
    with pytest.raises(ValueError, match=r"column 'a'.*no plain value"):
        Csv(path=str(tmp_path / "nested.parquet")).load()
    with pytest.raises(ValueError, match="lacks the feature columns"):
        Csv(
            path=write(table(), tmp_path / "t.csv"), public_path=write(table().drop(columns="age"), tmp_path / "u.csv")
        ).load()


@pytest.mark.parametrize("source", [Csv, Libsvm, ImageFolder])
def test_missing_paths_are_named(source, tmp_path):
    with pytest.raises(ValueError, match=r"dataset\.path=None.*Set dataset\.path"):
        source().load()
    with pytest.raises(ValueError, match=r"dataset\.path='gone'.*Looked for .*gone and .*gone"):
        source(path="gone", root=str(tmp_path)).load()


def test_paths_are_found_below_the_data_root(tmp_path, monkeypatch):
    write(table(), tmp_path / "t.csv")
    monkeypatch.setenv("PATE_DATA", str(tmp_path))
    assert len(Csv(path="t.csv", id="key").load().private) > 80


# --- LIBSVM ----------------------------------------------------------------------------------------------------------


def sparse(rows=200, features=30, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, features)).round(3) * (random.random((rows, features)) < 0.4)
    return x, random.choice([-1, 1], rows)


def svm(tmp_path, x, y, name="t.svm", **options):
    dump_svmlight_file(x, y, str(tmp_path / name), zero_based=False, **options)
    return str(tmp_path / name)


@pytest.mark.parametrize("packed", [False, True])
def test_libsvm_by_position_covers_the_file_once(packed, tmp_path):
    x, y = sparse()
    path = svm(tmp_path, x, y)
    if packed:
        (tmp_path / "t.svm.gz").write_bytes(gzip.compress((tmp_path / "t.svm").read_bytes()))
        path += ".gz"
    dataset = Libsvm(path=path, roles="position", num_features=30, benchmark=True, nominal_size=160).load()
    assert (len(dataset.private), len(dataset.pool), len(dataset.evaluation.y)) == (160, 20, 20)
    position = dataset.private.unit_id.astype(int)
    np.testing.assert_allclose(dataset.private.x.numpy(), x[position].astype(np.float32))
    assert dataset.private.x.dtype == torch.float32
    assert [(-1, 1)[code] for code in dataset.private.y] == y[position].tolist()
    assert dataset.spec.class_names == ("-1", "1") and dataset.spec.benchmark and dataset.spec.nominal_size == 160
    truth = {row.tobytes(): label for row, label in zip(x.astype(np.float32) + 0.0, y, strict=True)}  # no -0
    pool_y = [truth[row.numpy().tobytes()] for row in dataset.pool.x]
    assert [(-1, 1)[code] for code in dataset.evaluation.pool_y] == pool_y  # still in step after the shuffle
    other = Libsvm(path=path, roles="position", num_features=30, seed=1).load()
    assert set(other.private.unit_id) != set(dataset.private.unit_id)


def test_qid_is_a_group(tmp_path):
    x, y = sparse()
    dataset = Libsvm(
        path=svm(tmp_path, x, y, query_id=np.arange(200) % 25), group="qid", fractions=(0.5, 0.3, 0.2)
    ).load()
    assert dataset.private.unit == "group:qid"
    assert set(map(len, rows_of(dataset.private).values())) == {8}
    with pytest.raises(ValueError, match=r"dataset\.group='qid'.*every row"):
        Libsvm(path=svm(tmp_path, x, y), group="qid").load()


def test_many_features_are_hashed_and_inner_products_survive(tmp_path):
    x, y = sparse(200, 50)
    dense = Libsvm(path=svm(tmp_path, x, y), roles="position", num_features=50).load()
    small = Libsvm(
        path=svm(tmp_path, x, y), roles="position", num_features=50, feature_limit=49, projected_dim=16
    ).load()
    assert small.spec.input_shape == (16,)
    by_hand = dense.private.x.numpy() @ make_hashing_matrix(50, 16).toarray()
    np.testing.assert_allclose(small.private.x.numpy(), by_hand, atol=1e-5)
    matrix = make_hashing_matrix(3000, 4000)
    assert (matrix.getnnz(axis=1) == 1).all() and set(matrix.data.tolist()) == {-1.0, 1.0}
    np.testing.assert_array_equal(
        matrix[:100].toarray(), make_hashing_matrix(100, 4000).toarray()
    )  # a feature's place is its own
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 3000))
    assert abs((a @ matrix) @ (b @ matrix) - a @ b) < 4 * 3000 / np.sqrt(4000)


def test_standardizing_libsvm_uses_the_pool(tmp_path):
    x, y = sparse()
    x[:, 3] = 5
    dataset = Libsvm(path=svm(tmp_path, x, y), standardize=True).load()
    pool = dataset.pool.x.double()
    torch.testing.assert_close(torch.tensor(dataset.spec.mean, dtype=torch.float64), pool.mean(0))
    assert dataset.spec.std[3] == 1.0  # constant in the pool
    torch.testing.assert_close(torch.tensor(dataset.spec.std[0]), pool[:, 0].std(correction=0).float())


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1 1:x\n", {}, "not a readable LIBSVM file"),
        ("<html>\n", {}, "not a readable LIBSVM file"),
        ("", {}, "has no rows"),
        ("1 0:1 2:3\n", {}, r"zero_based=true"),
        ("1 1:nan\n" * 9, {"roles": "position", "fractions": (0.2, 0.6, 0.2)}, "public records.*not finite"),
        ("1 1:1e60\n" * 9, {"roles": "position", "fractions": (0.2, 0.6, 0.2)}, "public records.*not finite"),
        ("1 1:1\n" * 9, {}, "has no|must be declared"),
        ("1 1:1\n", {"roles": "hush"}, r"dataset\.roles='hush'.*hash"),
        ("1 1:1\n", {"roles": "position", "group": "qid"}, r"dataset\.roles=hash"),
        ("1 1:1\n", {"num_features": 0}, r"dataset\.num_features=0"),
        ("1 1:1\n", {"group": "user"}, r"dataset\.group='user': must be one of qid"),
    ],
)
def test_libsvm_files_are_refused_clearly(text, options, message, tmp_path):
    (tmp_path / "t.svm").write_text(text)
    with pytest.raises(ValueError, match=message):
        Libsvm(path=str(tmp_path / "t.svm"), **options).load()


def test_zero_based_files(tmp_path):
    (tmp_path / "t.svm").write_text("".join(f"{i % 2} 0:{i} 2:1\n" for i in range(100)))
    dataset = Libsvm(path=str(tmp_path / "t.svm"), zero_based=True, roles="position").load()
    assert dataset.spec.input_shape == (3,)
    assert dataset.private.x[:, 0].tolist() == dataset.private.unit_id.astype(float).tolist()


# --- images ----------------------------------------------------------------------------------------------------------


def picture(path, seed, size=(12, 9), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shade = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(shade).convert(mode).save(path)


def gallery(folder, count=30, classes=("cat", "dog")):
    for name in classes:
        for i in range(count):
            picture(folder / name / f"p{i % 10}_{i}.png", i)
    return str(folder)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_read_resized_and_labeled_by_folder(channels, tmp_path):
    dataset = ImageFolder(path=gallery(tmp_path / "g"), size=8, channels=channels).load()
    assert dataset.spec.input_shape == (channels, 8, 8) and dataset.spec.class_names == ("cat", "dog")
    assert len(dataset.private) + len(dataset.pool) + len(dataset.evaluation.y) == 60
    assert dataset.private.x.dtype == torch.uint8
    for name, x, y in list(zip(dataset.private.unit_id, dataset.private.x, dataset.private.y, strict=True))[:5]:
        assert ("cat", "dog")[y] == name.split("/")[0]
        image = Image.open(tmp_path / "g" / name).convert("L" if channels == 1 else "RGB").resize((8, 8), 2)
        np.testing.assert_array_equal(x.numpy(), np.atleast_3d(np.array(image)).transpose(2, 0, 1))


def test_the_pool_is_not_sorted_by_class(tmp_path):
    """Image folders come class by class; a strategy that asks in order must not see one class only."""
    dataset = ImageFolder(path=gallery(tmp_path / "g"), size=8, fractions=(0.3, 0.6, 0.1)).load()
    first = dataset.evaluation.pool_y[: len(dataset.pool) // 3]
    assert 0.2 < float(first.double().mean()) < 0.8


def test_public_and_test_folders(tmp_path):
    for i in range(7):
        picture(tmp_path / "pool" / f"{i}.png", i)
    private, test = gallery(tmp_path / "a", classes=("cat", "dog", "eel")), gallery(tmp_path / "t", 5)
    dataset = ImageFolder(path=private, public_path=str(tmp_path / "pool"), test_path=test, size=8).load()
    dataset = units.drop_unusable(dataset, "add_remove")
    assert (len(dataset.private), len(dataset.pool), len(dataset.evaluation.y)) == (60, 7, 10)  # no eels in public
    assert dataset.evaluation.pool_y is None and dataset.spec.class_names == ("cat", "dog")


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA"])
def test_eight_bit_modes_are_converted(mode, tmp_path):
    gallery(tmp_path / "g")
    picture(tmp_path / "g" / "cat" / "odd_1.png", 0, mode=mode)
    assert ImageFolder(path=str(tmp_path / "g"), size=8).load().spec.num_classes == 2


def test_image_folders_are_refused_clearly(tmp_path):
    folder, own = tmp_path / "g", gallery(tmp_path / "own", 5)
    gallery(folder)
    deep = folder / "cat" / "deep_1.png"
    Image.fromarray(np.full((9, 9), 60_000, dtype=np.uint16)).save(deep)
    with pytest.raises(ValueError, match=r"image mode='I;16'.*deep_1\.png.*eight bits"):
        ImageFolder(path=own, public_path=str(folder)).load()
    deep.write_bytes(b"\x89PNG\r\n\x1a\n not an image")
    with pytest.raises(ValueError, match=r"deep_1\.png.*not a readable image"):
        ImageFolder(path=own, public_path=str(folder)).load()
    deep.unlink()
    with pytest.raises(ValueError, match=r"dataset\.group='\^\(q\)'.*does not match"):
        ImageFolder(path=str(folder), group="^(q)").load()
    with pytest.raises(ValueError, match=r"dataset\.group='\('.*regular expression"):
        ImageFolder(path=str(folder), group="(")
    with pytest.raises(ValueError, match=r"dataset\.channels=2"):
        ImageFolder(channels=2)
    with pytest.raises(ValueError, match=r"no images in class folders"):
        ImageFolder(path=str(folder / "cat")).load()
    with pytest.raises(ValueError, match=r"must be a folder"):
        ImageFolder(path=str(next((folder / "cat").iterdir()))).load()
    with pytest.raises(ValueError, match=r"dataset\.classes=\['cat', 'eel'\].*too short.*dog"):
        ImageFolder(path=str(folder), classes=["cat", "eel"]).load()


def test_a_private_image_that_cannot_be_read_contributes_nothing_and_stops_nobodys_run(tmp_path):
    own, public = gallery(tmp_path / "own", 5), gallery(tmp_path / "public")
    source = ImageFolder(path=own, public_path=public, size=8)
    whole = source.load()
    Image.fromarray(np.full((9, 9), 60_000, dtype=np.uint16)).save(tmp_path / "own" / "cat" / "p0_0.png")
    (tmp_path / "own" / "dog" / "p1_1.png").write_bytes(b"\x89PNG\r\n\x1a\n not an image")
    damaged = source.load()
    same_public_side(whole, damaged)
    assert damaged.num_dropped_by_reason == {UNREADABLE_POINT: 2}
    filled = units.drop_unusable(damaged, "replace_one").private
    assert len(filled) == 10 and not filled.x[0].any() and filled.unit_id.tolist() == whole.private.unit_id.tolist()
    rows = rows_of(units.drop_unusable(damaged, "add_remove").private)
    gone = {"cat/p0_0.png", "dog/p1_1.png"}
    assert rows == {name: row for name, row in rows_of(whole.private).items() if name not in gone}


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensors(**changed):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator)
    given = {
        "x": x[:20],
        "y": torch.arange(20) % 3,
        "pool_x": x[20:26],
        "test_x": x[26:],
        "test_y": torch.arange(4) % 3,
    }
    return Tensors(**({"name": "mine", "class_names": 3} | given | changed))


def test_tensors_pass_through_with_the_pools_statistics():
    source = tensors()
    dataset = source.load()
    assert isinstance(source, DatasetSource) and "withheld" in repr(source)
    assert torch.equal(dataset.private.x, source.x) and dataset.private.y.dtype == torch.int64
    assert dataset.spec.mean == pytest.approx(source.pool_x.double().mean(0).tolist())
    assert len(set(dataset.private.unit_id)) == 20
    fewer = tensors(x=source.x[1:], y=source.y[1:]).load()
    assert fewer.private.unit_id.tolist() == dataset.private.unit_id.tolist()[1:] and fewer.spec == dataset.spec
    named = tensors(unit_id=[f"u{i % 5}" for i in range(20)], unit="group:u", mean=[0] * 4, std=[1] * 4).load()
    assert named.private.unit == "group:u" and named.spec.mean == (0.0,) * 4
    image = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    images = tensors(x=image, y=torch.tensor([0, 1]), pool_x=image, test_x=image, test_y=torch.tensor([0, 1]))
    assert images.load().spec.input_shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.full((20, 4), float("nan"))}, "no integer in 0..2 beside a finite point"),
        ({"pool_x": torch.full((20, 4), float("nan"))}, "pool_x.*must be finite"),
        ({"x": torch.zeros(20, 1, 8, 8)}, "uint8 images"),
        ({"pool_x": torch.zeros(5, 3)}, "pool_x"),
        ({"test_x": torch.zeros(0, 4), "test_y": torch.zeros(0).long()}, "test_x.*at least one"),
        ({"y": torch.arange(20) + 3}, r"no integer in 0\.\.2"),
        ({"y": torch.zeros(19).long()}, "must be integers, one for each point"),
        ({"y": torch.full((20,), 0.5)}, r"no integer in 0\.\.2"),
        ({"unit_id": ["a"]}, "unit_id"),
        ({"class_names": 1}, "class_names=1"),
        ({"mean": [0.0] * 4}, "together with mean"),
    ],
)
def test_tensors_are_refused_clearly(changed, message):
    with pytest.raises(ValueError, match=message):
        tensors(**changed).load()


def test_sources_satisfy_the_protocol_and_check_the_name():
    for source in (Csv, Libsvm, ImageFolder):
        assert isinstance(source(), DatasetSource)
        with pytest.raises(ValueError, match=re.escape("dataset.name='a b'")):
            source(name="a b")


# --- what becomes public ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["public_path", "test_path"])
def test_the_private_file_is_not_the_public_one_too(tmp_path, key):
    path = write(table(), tmp_path / "t.csv")
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*every private record would be public"):
        Csv(name="t", path=path, label="label", **{key: str(tmp_path / "sub" / ".." / "t.csv")}).load()
    gallery(tmp_path / "g" / "private")
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*or a folder around it"):
        ImageFolder(name="g", path=str(tmp_path / "g" / "private"), **{key: str(tmp_path / "g")}).load()


@pytest.mark.parametrize("kind", [tabular.Csv, libsvm.Libsvm, image_folder.ImageFolder])
def test_nothing_private_becomes_public_without_a_word(kind, tmp_path):
    x, y = sparse()
    path = {
        tabular.Csv: lambda: write(table()[["age", "height", "label"]], tmp_path / "t.csv"),
        libsvm.Libsvm: lambda: svm(tmp_path, x, y),
        image_folder.ImageFolder: lambda: gallery(tmp_path / "g"),
    }[kind]()
    copy = shutil.copytree if kind is image_folder.ImageFolder else shutil.copy
    apart = str(copy(path, tmp_path / f"apart{Path(path).suffix}"))
    ask = r"dataset\.publish_split=False: about 10% of its records.*would become public.*dataset\.publish_split=true"
    with pytest.raises(ValueError, match=ask):
        kind(path=path).load()
    with pytest.raises(ValueError, match=r"about 11% of its records"):  # a test file leaves less to be parted
        kind(path=path, test_path=apart).load()
    with pytest.raises(ValueError, match=ask):
        kind(path=path, publish_test=True).load()
    for options, split, public in (
        ({"publish_split": True}, 0.1, False),
        ({"publish_split": True, "publish_test": True}, 0.1, True),
        ({"publish_split": True, "test_path": apart}, 1 / 9, True),
        ({"public_path": apart}, 0, True),
        ({"benchmark": True}, 0, True),
    ):
        data = kind(path=path, **options).load()
        assert data.pool.split == pytest.approx(split) and data.evaluation.public is public
    with pytest.raises(ValueError, match=r"dataset\.publish_split='yes': must be true or false"):
        kind(path=path, publish_split="yes")


def test_the_refusal_speaks_of_units(tmp_path):
    path = write(table(), tmp_path / "t.csv")
    with pytest.raises(ValueError, match=r"about 10% of its units \(dataset\.group=user\), with all their records"):
        tabular.Csv(path=path, group="user").load()


@pytest.mark.parametrize("agreed", [False, True])
def test_private_test_records_are_not_looked_at(agreed, tmp_path):
    """Neither a class nor a category nor a column's kind comes from test records that are the owner's alone."""
    frame = table(200).drop(columns=["user"])
    source = tabular.Csv(path=write(frame, tmp_path / "t.csv"), id="key", publish_split=True, publish_test=agreed)
    role = roles.assign_by_hash(frame.key.to_numpy(), np.zeros(200, dtype=int), {0}, source.fractions, 0)
    row = int(np.flatnonzero(role == roles.TEST)[0])
    changed = broken(broken(frame, "label", row, "perhaps"), "color", row, "ultraviolet")
    write(changed, tmp_path / "t.csv")
    data = source.load()
    assert ("perhaps" in data.spec.class_names) is agreed
    assert data.spec.input_shape == (5 + agreed,)
    assert data.num_dropped_by_reason == ({} if agreed else {"of no known class": 1})


# --- strict CSV ------------------------------------------------------------------------------------------------------

HEADER = "patient,ward,x,y\n"
GOOD = [f"p{i % 7},w{i % 3},{i / 4},{i % 2}\n" for i in range(60)]


def with_line(row, text):
    return [*GOOD[:row], text, *GOOD[row + 1 :]]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.bz2", ".csv.xz"])
@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (HEADER, [row.replace("\n", ",0\n") for row in GOOD], "line 2 has 5 fields, and the header 4"),
        (HEADER, [row.replace("\n", ",\n") for row in GOOD], "line 2 has 5 fields, and the header 4"),
        (HEADER, with_line(30, "p0,w0,1,0,7\n"), "line 32 has 5 fields, and the header 4"),
        (HEADER, with_line(30, "p0,w0,1\n"), "line 32 has 3 fields, and the header 4"),
        ("patient,x,x,y\n", GOOD, "names column 'x' more than once"),
        ("patient,,x,y\n", GOOD, "column 2 of the header has no name"),
        (HEADER, [*with_line(20, 'p0,"w0,1,0\n')[:40], 'p0,w0",1,0\n', *GOOD[41:]], "line 22: a quote is left open"),
        (HEADER, with_line(59, 'p0,w0,1,"0'), "line 61: a quote is left open"),
        (HEADER, [*with_line(20, 'p"0,"w0,1,0\n')[:40], 'x",w"0,1\n', *GOOD[41:]], "line 22: a quote is left open"),
        (HEADER, with_line(5, 'p0,"w"0,1,0\n'), "line 7: ',' expected after '\"'"),
    ],
)  # fmt: skip
def test_a_csv_file_that_does_not_fit_its_header_is_refused(suffix, header, rows, message, tmp_path):
    path = tmp_path / f"t{suffix}"
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wt") as file:
        file.write(header + "".join(rows))
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        Csv(path=str(path), label="y", group="patient").load()
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_quotes_blank_lines_and_a_mark_of_byte_order_are_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbfa,"b, or c"\r\n"1,5",\r\n\r\n"say ""so""",x\r\n')
    assert tabular.read_table("dataset.path", path, ",") == {"a": ["1,5", 'say "so"'], "b, or c": ["", "x"]}


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.bz2", "t.csv.xz", "t.csv.zip", "t.csv.zst", "t.parquet", "t.csv"])
@pytest.mark.parametrize("cut", [False, True])
def test_damaged_files_are_refused_in_one_line(name, cut, tmp_path):
    whole = (HEADER + "".join(GOOD)).encode()
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(
        name[5:], lambda text: b"\xff" + text
    )
    content = packed(whole)
    middle = len(content) // 2
    (tmp_path / name).write_bytes(content[:middle] + (b"" if cut else b"\0\xff" * 9 + content[middle + 18 :]))
    with pytest.raises(ValueError, match=r"^dataset\.path=.*is not a readable CSV or Parquet file") as refused:
        Csv(path=str(tmp_path / name), label="y").load()
    assert "\n" not in str(refused.value)


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_an_image_is_opened_by_the_fixed_list_of_formats_only(tmp_path):
    folder, own = tmp_path / "g", gallery(tmp_path / "own", 5)
    gallery(folder)
    bad = folder / "cat" / "drawing.png"
    for content in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", b"\x89PNG\r\n\x1a\n" + b"\0" * 60):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"drawing\.png': is not a readable image"):
            ImageFolder(path=own, public_path=str(folder)).load()
    Image.new("1", (20_000, 20_000)).save(bad)
    with pytest.raises(ValueError, match=r"drawing\.png': is not a readable image .*decompression bomb"):
        ImageFolder(path=own, public_path=str(folder)).load()


def test_a_feature_of_an_absurd_number_is_refused_where_it_is_public_and_left_out_where_not(tmp_path):
    x, y = sparse()
    path, public = svm(tmp_path, x, y), tmp_path / "public.svm"
    rows = (tmp_path / "t.svm").read_text()
    public.write_text(rows + "1 2147483647:1\n")
    with pytest.raises(ValueError, match=r"num_features=None: public rows have features up to number 2147483647"):
        Libsvm(path=path, public_path=str(public)).load()
    public.write_text(rows)
    (tmp_path / "private.svm").write_text(rows + "1 2147483647:1\n")
    assert Libsvm(path=str(tmp_path / "private.svm"), public_path=str(public)).load().spec.input_shape[0] < 100
