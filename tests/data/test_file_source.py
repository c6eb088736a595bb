"""Data sets in an owner's files: roles, units, neighbors, consent, and nothing learned from private records."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pate_torch.data import image_folder, libsvm, tabular
from pate_torch.data.base import DatasetSource
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


def test_build_class_list_sorts_numbers_by_value_and_keeps_declared_order():
    assert build_class_list(None, ["10", "9", "-1"]) == ("-1", "9", "10")
    assert build_class_list([1, -1], ["1"]) == ("1", "-1")


# ---- neighbors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["44,171.5,yes,u1", "18,,no,u3", "18,long text,perhaps,new"])
def test_a_replaced_text_moves_no_other_where_positions_decide(other, files, tmp_path):
    """Rows of the other forms are replaced by ``test_neighbors_differ_by_one_unit_of_the_private_side``."""
    options = {"roles": "position", "column": "height", "classes": CLASSES}
    before = Text(path=files["own csv"], **options).load()
    position = int(before.private.unit_id[7])
    lines = Path(files["own csv"]).read_text().splitlines()
    lines[1 + position] = other
    (tmp_path / "t.csv").write_text("\n".join(lines))
    after = Text(path=str(tmp_path / "t.csv"), **options).load()
    assert_same_public_side(before, after)
    records, other_records = index_by_unit(before.private), index_by_unit(after.private)
    assert len(records) == 96 and {name for name in records if records[name] != other_records[name]} == {str(position)}


def test_a_replaced_row_may_move_others_where_ids_decide(files, tmp_path):
    """This is why replace_one is refused then."""
    lines, sizes = Path(files["own csv"]).read_text().splitlines(), set()
    for age in range(8):
        (tmp_path / "t.csv").write_text("\n".join([lines[0], f"{age},171.5,yes,u1", *lines[2:]]))
        sizes.add(len(Csv(path=str(tmp_path / "t.csv"), ignore=["user"]).load().private))
    assert len(sizes) > 1


@pytest.mark.parametrize("options", [{"group": "user"}, {"ignore": ["user"]}])
def test_removing_a_private_unit_changes_nothing_else(options, files, tmp_path):
    """The other forms of data are removed from by ``test_neighbors_differ_by_one_unit_of_the_private_side``."""
    header, *rows = Path(files["own csv"]).read_text().splitlines()
    options = options | {"fractions": (0.5, 0.3, 0.2)}
    whole = Csv(path=files["own csv"], **options).load()
    records, num_tried = index_by_unit(whole.private), 0
    for row in rows[:6]:
        unit = row.rsplit(",", 1)[1] if "group" in options else row
        (tmp_path / "t.csv").write_text("\n".join([header, *(other for other in rows if not other.endswith(unit))]))
        fewer = Csv(path=str(tmp_path / "t.csv"), **options).load()
        gone = set(records) - set(fewer.private.unit_id.tolist())
        if gone:
            assert_same_public_side(whole, fewer)
            assert index_by_unit(fewer.private) == {name: records[name] for name in records if name not in gone}
        num_tried += len(gone)
    assert 1 < num_tried <= 6


@pytest.mark.parametrize("kind", ["csv", "text", "svm"])
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


@pytest.mark.parametrize("parts", ["", "public_path", "public_path test_path benchmark"])
def test_a_replaced_image_may_move_others(parts, files):
    options = {part: True if part == "benchmark" else files["apart images"] for part in parts.split()}
    source = ImageFolder(path=files["own images"], **options)
    check_adjacency(source.load(), "add_remove")
    for data in (source.load(), LabelPrivacyDataset(source=source).load()):
        with pytest.raises(ValueError, match=r"Use partition=add_remove \(and labels_only=false\)"):
            check_adjacency(data, "replace_one")


def test_equal_records_share_a_unit_and_a_role(tmp_path):
    frame = table()[["age", "height", "label"]]
    data = Csv(path=write(pd.concat([frame, frame]), tmp_path / "t.csv")).load()
    assert set(map(len, index_by_unit(data.private).values())) == {2}


def test_the_pool_is_not_sorted_by_class(files):
    """Image folders come class by class; a strategy that asks in order must not see one class only."""
    data = ImageFolder(path=files["own images"], fractions=(0.3, 0.6, 0.1)).load()
    first = data.evaluation.pool_y[: len(data.pool) // 3]
    assert 0.2 < float(first.double().mean()) < 0.8


# ---- settings and paths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": (0.5, 0.5, 0.0)}, r"dataset\.fractions=0"),
        ({"fractions": (0.5, 0.5)}, r"dataset\.fractions=\[0\.5, 0\.5\]"),
        ({"fractions": (0.5, 0.2, 0.2)}, r"dataset\.fractions=.*summing to 1"),
        ({"fractions": (1.2, -0.1, -0.1)}, r"dataset\.fractions=-0\.1"),
        ({"name": "a b"}, r"dataset\.name='a b'"),
        ({"publish_split": "yes"}, r"dataset\.publish_split='yes': must be true or false"),
        ({"nominal_size": 0}, r"dataset\.nominal_size=0"),
        ({"roles": "hush"}, r"dataset\.roles='hush'.*hash"),
        ({"roles": "position", "public_path": "p"}, r"dataset\.roles='position'.*Use dataset\.roles=hash"),
    ],
)
def test_settings_are_refused_before_anything_is_read(kind, options, message):
    assert isinstance(SOURCES[kind](), DatasetSource)
    with pytest.raises(ValueError, match=message):
        SOURCES[kind](**options)


@pytest.mark.parametrize("kind", SOURCES)
def test_missing_paths_are_named(kind, tmp_path):
    with pytest.raises(ValueError, match=r"dataset\.path=None.*Set dataset\.path"):
        SOURCES[kind]().load()
    with pytest.raises(ValueError, match=r"dataset\.path='gone'.*Looked for .*gone and .*gone"):
        SOURCES[kind](path="gone", root=str(tmp_path)).load()


def test_paths_are_found_below_the_data_root(files, monkeypatch):
    monkeypatch.setenv("PATE_DATA", str(Path(files["own csv"]).parent))
    assert len(Csv(path="t.csv").load().private) > 80


# ---- what becomes public ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["public_path", "test_path"])
def test_the_private_file_is_not_the_public_one_too(key, files):
    path = Path(files["own csv"])
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*every private record would be public"):
        Csv(path=str(path), **{key: str(path.parent / "images" / ".." / "t.csv")}).load()
    with pytest.raises(ValueError, match=rf"dataset\.{key}=.*or a folder around it"):
        ImageFolder(path=files["own images"], **{key: str(path.parent)}).load()


@pytest.mark.parametrize("kind", SOURCES)
def test_nothing_private_becomes_public_without_consent(kind, files):
    source, path, apart = SOURCES[kind], files[f"own {kind}"], files[f"apart {kind}"]
    request = r"dataset\.publish_split=False: about 10% of its records.*become public.*dataset\.publish_split=true"
    for options, message in (
        ({}, request),
        ({"publish_test": True}, request),
        ({"test_path": apart}, "about 11% of its records"),  # a test file leaves less to be split
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


def test_the_request_for_consent_speaks_of_units(files):
    with pytest.raises(ValueError, match=r"about 10% of its units \(dataset\.group=user\), with all their records"):
        tabular.Csv(path=files["own csv"], group="user").load()


@pytest.mark.parametrize("publish_test", [False, True])
def test_private_test_records_are_not_looked_at(publish_test, tmp_path):
    """Neither a class nor a category comes from test records that are the owner's alone."""
    frame = table(200).drop(columns=["user"])
    options = {"id": "key", "publish_split": True, "publish_test": publish_test}
    source = tabular.Csv(path=str(tmp_path / "t.csv"), **options)
    role_N = assign_by_hash(frame.key.to_numpy(), np.zeros(200, dtype=int), {PRIVATE}, source.fractions, 0)
    row = int(np.flatnonzero(role_N == TEST)[0])
    write(changed_cell(changed_cell(frame, "label", row, "perhaps"), "color", row, "ultraviolet"), tmp_path / "t.csv")
    data = source.load()
    assert ("perhaps" in data.spec.class_names) is publish_test
    assert data.spec.input_shape == (5 + publish_test,)
    assert data.num_dropped_by_reason == ({} if publish_test else {UNKNOWN_CLASS: 1})
