"""Data sets in an owner's files: roles, units, neighbors, consent, and nothing learned from private records."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.data import image_folder, libsvm, tabular
from pate_torch.data.file_source import build_class_list
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.privacy.records import UNKNOWN_CLASS
from pate_torch.privacy.unit_ids import PRIVATE, TEST, assign_by_hash
from tests.data.owner_files import (
    CLASSES,
    KINDS,
    Csv,
    ImageFolder,
    Text,
    assert_same_public_side,
    changed_cell,
    index_by_unit,
    table,
    write,
)
from tests.worlds import check_adjacency

SOURCES = {"csv": tabular.Csv, "svm": libsvm.Libsvm, "images": image_folder.ImageFolder}


NEW_ROWS = st.tuples(
    st.sampled_from(["44", "-1", "", "old", "inf", "1e60"]),
    st.sampled_from(["171.5", "", "a long text"]),
    st.sampled_from(["no", "yes", "perhaps", ""]),
    st.sampled_from(["u1", "u39", "new"]),
)


@pytest.mark.parametrize(
    ("source", "options", "changes"),
    [
        (Csv, {"group": "user"}, ["remove"]),
        (Csv, {"ignore": ["user"]}, ["remove"]),
        (Csv, {"group": "user", "public_path": ...}, ["remove", "add"]),
        (Csv, {"ignore": ["user"], "public_path": ...}, ["remove", "add", "replace"]),
        (Csv, {"ignore": ["user"], "roles": "position"}, ["replace"]),
        (Text, {"column": "height", "roles": "position", "classes": CLASSES}, ["replace"]),
    ],
)
@settings(max_examples=8)
@given(draw=st.data())
def test_a_private_row_changes_its_unit_only(source, options, changes, files, tmp_path_factory, draw):
    """The public points, the test records, the facts and all other private records stay the same."""
    if "public_path" in options:
        options = options | {"public_path": files["apart csv"]}
    whole = source(path=files["own csv"], **options).load()
    header, *rows = Path(files["own csv"]).read_text().splitlines()
    is_private_N = [is_private_row(whole, options, i, row) for i, row in enumerate(rows)]
    position = draw.draw(st.sampled_from(np.flatnonzero(is_private_N).tolist()))
    change, new_row = draw.draw(st.sampled_from(changes)), ",".join(draw.draw(NEW_ROWS))
    rows[position : position + (change != "add")] = [new_row] if change != "remove" else []
    path = tmp_path_factory.mktemp("changed") / "t.csv"
    path.write_text("\n".join([header, *rows]))
    other = source(path=str(path), **options).load()
    assert_same_public_side(whole, other)
    before, after = index_by_unit(whole.private), index_by_unit(other.private)
    changed_units = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert len(changed_units) <= (2 if change == "replace" and "roles" not in options else 1)
    assert change == "replace" or len(changed_units) == 1


def is_private_row(data, options, position, row):
    if "group" in options:
        return row.rsplit(",", 1)[1] in data.private.unit_id
    if options.get("roles") == "position":
        return str(position) in data.private.unit_id
    age, height = map(np.float32, row.split(",")[:2])
    return bool(((data.private.x.numpy() == (age, height)).all(1)).any())


@pytest.mark.parametrize("kind", ["csv", "text", "svm"])
@pytest.mark.parametrize(
    ("options", "parts", "adjacencies", "advice"),
    [
        ({}, "path", {"add_remove"}, "Use dataset.roles=position, or put"),
        ({"benchmark": True}, "path", {"add_remove"}, "Use dataset.roles=position, or put"),
        ({}, "path test_path", {"add_remove"}, "(dataset.public_path)"),
        ({}, "path public_path", {"add_remove", "replace_one"}, ""),
        ({"group": ...}, "path public_path", {"add_remove"}, "Use partition=add_remove"),
        ({"roles": "position"}, "path", {"replace_one"}, "Use partition=replace_one, or dataset.roles=hash"),
        ({"roles": "position", "benchmark": True}, "path", {"add_remove", "replace_one"}, ""),
    ],
)
def test_sources_state_the_neighbors_that_they_support(kind, options, parts, adjacencies, advice, files):
    format = "csv" if kind == "text" else kind
    if "group" in options:
        options = {"group": "qid" if kind == "svm" else "user"}
    paths = dict.fromkeys(parts.split(), files[f"apart {format}"]) | {"path": files[f"own {format}"]}
    source = Text(column="age", **paths, **options) if kind == "text" else KINDS[kind](**paths, **options)
    data = source.load()
    assert set(data.adjacencies) == adjacencies
    for adjacency in ("add_remove", "replace_one"):
        if adjacency in adjacencies:
            check_adjacency(data, adjacency)
        else:
            with pytest.raises(ValueError, match=f"partition='{adjacency}'.*{re.escape(advice)}"):
                check_adjacency(data, adjacency)


@pytest.mark.parametrize("options", [{}, {"benchmark": True, "public_path": "apart images"}])
def test_a_replaced_image_may_move_others(options, files):
    options = {key: files.get(value, value) for key, value in options.items()}
    source = ImageFolder(path=files["own images"], **options)
    plain = source.load()
    check_adjacency(plain, "add_remove")
    for data in (plain, LabelPrivacyDataset(source=source).load()):
        with pytest.raises(ValueError, match=r"Use partition=add_remove \(and labels_only=false\)"):
            check_adjacency(data, "replace_one")


def test_equal_records_share_a_role_classes_have_an_order_and_the_pool_is_not_sorted_by_class(files, tmp_path):
    """Image folders come class by class; a strategy that follows the pool's order must not see one class only."""
    assert build_class_list(None, ["10", "9", "-1"]) == ("-1", "9", "10")
    assert build_class_list([1, -1], ["1"]) == ("1", "-1")
    assert build_class_list(["TRUE", "FALSE"], ["1", "0"]) == ("TRUE", "FALSE")
    with pytest.raises(ValueError, match="different classes"):
        build_class_list(["TRUE", "1"], ["1"])
    frame = table()[["age", "height", "label"]]
    data = Csv(path=write(pd.concat([frame, frame]), tmp_path / "t.csv")).load()
    assert set(map(len, index_by_unit(data.private).values())) == {2}
    data = ImageFolder(path=files["own images"], fractions=(0.3, 0.6, 0.1)).load()
    first = data.evaluation.pool_y[: len(data.pool) // 3]
    assert 0.2 < float(first.double().mean()) < 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": (0.5, 0.5, 0.0)}, r"dataset\.fractions=0"),
        ({"fractions": (0.5, 0.5)}, r"dataset\.fractions=\[0\.5, 0\.5\]"),
        ({"fractions": (0.5, 0.2, 0.2)}, r"dataset\.fractions=.*summing to 1"),
        ({"name": "a b"}, r"dataset\.name='a b'"),
        ({"publish_split": "yes"}, r"dataset\.publish_split='yes'"),
        ({"nominal_size": 0}, r"dataset\.nominal_size=0"),
        ({"roles": "hush"}, r"dataset\.roles='hush'.*hash"),
        ({"roles": "position", "public_path": "p"}, r"dataset\.roles='position'.*Use dataset\.roles=hash"),
    ],
)
def test_settings_are_refused_before_anything_is_read(options, message):
    for source in SOURCES.values():
        with pytest.raises(ValueError, match=message):
            source(**options)


@pytest.mark.parametrize("kind", SOURCES)
def test_paths_are_found_below_the_data_root_or_named(kind, files, tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_DATA", str(Path(files["own csv"]).parent))
    assert len(Csv(path="t.csv").load().private) > 80
    with pytest.raises(ValueError, match=r"dataset\.path=None.*Set dataset\.path"):
        SOURCES[kind]().load()
    with pytest.raises(ValueError, match=r"dataset\.path='gone'.*Looked for .*gone and .*gone"):
        SOURCES[kind](path="gone", root=str(tmp_path)).load()


@pytest.mark.parametrize(("role", "fractions"), [("public", (0.998, 0.001, 0.001)), ("test", (0.7, 0.299, 0.001))])
def test_a_split_without_records_of_a_published_role_is_refused(role, fractions, files):
    with pytest.raises(ValueError, match=rf"dataset\.name='csv': has no {role} records.*dataset\.fractions"):
        Csv(path=files["own csv"], group="user", fractions=fractions).load()


@pytest.mark.parametrize("fractions", [(0.7, 0.299, 0.001), (1e-9, 0.5, 0.499999999), (1e-9, 0.999999998, 1e-9)])
def test_no_number_of_private_records_refuses_a_run(fractions, files):
    loaded = Csv(path=files["own csv"], group="user", fractions=fractions, publish_test=False).load()
    is_private, _, is_test = (fraction > 0.1 for fraction in fractions)
    assert (len(loaded.private) > 0, len(loaded.evaluation.y) > 0) == (is_private, is_test)


def test_no_number_of_usable_records_refuses_a_run(tmp_path):
    private = write(table().assign(label="neither"), tmp_path / "private.csv")
    public, test = (write(table(seed=seed), tmp_path / f"{seed}.csv") for seed in (1, 2))
    source = tabular.Csv(
        path=private, public_path=public, test_path=test, classes=list(CLASSES), group="user", ignore=["key"]
    )
    loaded = source.load()
    assert loaded.num_dropped_by_reason == {UNKNOWN_CLASS: 120} and not loaded.private.usable_N.any()


@pytest.mark.parametrize("key", ["public_path", "test_path"])
def test_the_private_file_is_not_the_public_one_too(key, files, tmp_path):
    path = Path(files["own csv"])
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*every private record would be public"):
        Csv(path=str(path), **{key: str(path.parent / "images" / ".." / "t.csv")}).load()
    (tmp_path / "linked.csv").hardlink_to(path)
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*every private record would be public"):
        Csv(path=str(path), **{key: str(tmp_path / "linked.csv")}).load()
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*or a folder that contains it"):
        ImageFolder(path=files["own images"], **{key: str(path.parent)}).load()


@pytest.mark.parametrize("kind", SOURCES)
def test_nothing_private_becomes_public_without_consent(kind, files):
    source, path, apart = SOURCES[kind], files[f"own {kind}"], files[f"apart {kind}"]
    request = r"dataset\.publish_split=False: about 10% of the records.*become public.*dataset\.publish_split=true"
    for options, message in (
        ({}, request),
        ({"publish_test": True}, request),
        ({"test_path": apart}, "about 11% of the records"),  # a test file leaves less to be split
    ):
        with pytest.raises(ValueError, match=message):
            source(path=path, **options).load()
    for options, split, is_public in (
        ({"publish_split": True}, 0.1, False),
        ({"publish_split": True, "publish_test": True}, 0.1, True),
        ({"publish_split": True, "test_path": apart}, 1 / 9, True),
        ({"public_path": apart}, 0, True),
        ({"benchmark": True}, 0, True),
    ):
        data = source(path=path, **options).load()
        assert data.pool.split == pytest.approx(split) and data.evaluation.public is is_public
    if kind == "csv":
        with pytest.raises(ValueError, match=r"about 10% of the units \(dataset\.group=user\), with all records of ea"):
            source(path=path, group="user").load()


@pytest.mark.parametrize("publish_test", [False, True])
def test_private_test_records_are_not_looked_at(publish_test, tmp_path):
    """Neither a class nor a category comes from test records that only the owner sees."""
    frame = table(200).drop(columns=["user"])
    options = {"group": "key", "publish_split": True, "publish_test": publish_test}
    source = tabular.Csv(path=str(tmp_path / "t.csv"), **options)
    role_N = assign_by_hash(frame.key.to_numpy(), np.zeros(200, dtype=int), {PRIVATE}, source.fractions, 0)
    row = int(np.flatnonzero(role_N == TEST)[0])
    write(changed_cell(changed_cell(frame, "label", row, "perhaps"), "color", row, "ultraviolet"), tmp_path / "t.csv")
    data = source.load()
    assert ("perhaps" in data.spec.class_names) is publish_test
    assert data.spec.input_shape == (5 + publish_test,)
    assert data.num_dropped_by_reason == ({} if publish_test else {UNKNOWN_CLASS: 1})
