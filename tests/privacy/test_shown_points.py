"""labels.csv names public points for who holds them, and says nothing of points that nobody agreed to show."""

import csv
import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from pate_torch import load_student, pipeline
from pate_torch.data.image_folder import ImageFolder, read_image
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.data.libsvm import Libsvm
from pate_torch.data.tabular import Csv
from pate_torch.privacy.records import PointNames, PublicPool
from pate_torch.privacy.unit_ids import compute_content_id
from tests.run_configs import changed
from tests.tiny_runs import tiny
from tests.worlds import blobs

ONLY_PRIVATE = "Xanadu"


def people(count, seed, first):
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"town": draw.choice(["a", "b"], count), "height": draw.normal(170, 9, count).round(2)})
    frame["person"] = [f"person-{number}" for number in range(first, first + count)]
    frame["house"] = [f"house-{number // 2}" for number in range(first, first + count)]
    frame["note"] = [f"note-{number}" for number in range(first, first + count)]
    return frame.assign(label=np.where(frame["height"] > 170, "tall", "short"))


@pytest.fixture
def source(tmp_path):
    """Makes a table's source; the files of the other roles are asked for by name."""
    private = people(400, 0, 0)
    private.loc[3:5, "town"] = ONLY_PRIVATE
    private.to_csv(tmp_path / "private.csv", index=False)
    people(80, 1, 1000).to_csv(tmp_path / "public.csv", index=False)
    people(80, 2, 2000).to_csv(tmp_path / "test.csv", index=False)

    def make(*roles, **changes):
        paths = {f"{role}_path": str(tmp_path / f"{role}.csv") for role in roles}
        path = str(tmp_path / "private.csv")
        return Csv(**{"name": "people", "path": path, "ignore": ["note", "house"], **paths, **changes})

    return make


def released(home, data):
    plan = changed(tiny(home), dataset=data, folder=home / "runs" / "people" / "gaussian" / "first")
    pipeline.run(plan)
    folder = plan.folder / "release"
    table = list(csv.DictReader((folder / "labels.csv").read_text().splitlines()))
    return folder, table, json.loads((folder / "release.json").read_text())


def everything(folder):
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_points_of_a_public_file_are_named_by_its_own_ids(source, tmp_path):
    data = source("public", "test", id="person")
    folder, table, record = released(tmp_path, data)
    assert record["points"] == {"source": "public.csv", "named_by": "id", "column": "person"}
    assert list(table[0]) == ["query", "label", "class", "id"]
    public, student = pd.read_csv(tmp_path / "public.csv").set_index("person"), load_student(folder)
    named = public.loc[[row["id"] for row in table]].reset_index()
    assert torch.equal(student.encode(named), data.load().pool.x[[int(row["query"]) for row in table]])
    assert ONLY_PRIVATE.encode() not in everything(folder)
    plan = changed(tiny(tmp_path), dataset=data, folder=folder.parent.with_name("again"), labels=record["release_id"])
    pipeline.run(plan)  # the release is read again
    assert load_student(plan.folder).spec == student.spec


def test_points_without_names_of_their_own_are_named_by_content(source, tmp_path):
    data = source("public", "test", ignore=["note", "person", "house"])
    folder, table, record = released(tmp_path, data)
    assert record["points"] == {"source": "public.csv", "named_by": "content"}
    student, public = load_student(folder), pd.read_csv(tmp_path / "public.csv")
    names = student.spec.schema.compute_content_ids(public)
    assert names == student.spec.schema.compute_content_ids(public.astype(str))
    named = public.iloc[[names.index(row["content"]) for row in table]]
    pool = data.load().pool
    assert torch.equal(student.encode(named), pool.x[[int(row["query"]) for row in table]])
    by_group = source("public", "test", ignore=["note", "person"], group="house").load().pool  # of several points
    assert by_group.names.describe() == pool.names.describe() and set(by_group.names.names) == set(pool.names.names)


def test_of_points_split_off_the_data_features_alone_are_hashed(source, tmp_path):
    """Neither ids nor groups nor labels nor columns that are not used: nobody agreed to these."""
    data = source(group="person", publish_split=True)
    folder, table, record = released(tmp_path, data)
    assert record["points"] == {"source": "split off the data", "named_by": "content"}
    private = pd.read_csv(tmp_path / "private.csv")
    known = load_student(folder).spec.schema.compute_content_ids(private)
    asked = private.iloc[[known.index(row["content"]) for row in table]]
    assert torch.equal(load_student(folder).encode(asked), data.load().pool.x[[int(row["query"]) for row in table]])
    private.assign(person="p", note="n", label="tall").to_csv(tmp_path / "private.csv", index=False)
    assert set(load_student(folder).spec.schema.compute_content_ids(pd.read_csv(tmp_path / "private.csv"))) == set(
        known
    )
    found = everything(folder)
    for text in ("person-", "house-", "note-", ONLY_PRIVATE):
        assert text.encode() not in found


def test_nothing_but_positions_is_told_where_nobody_agreed(source, tmp_path):
    """Private features that join the pool, points of one's own making, and rows whose columns have no names."""
    assert (
        LabelPrivacyDataset(source=source("public", "test", ignore=["note", "person", "house"])).load().pool.names
        is None
    )
    assert blobs().load().pool.names is None
    rows = "".join(f"{row % 2} 1:{row} 2:1\n" for row in range(200))
    (tmp_path / "all.svm").write_text(rows)
    assert Libsvm(name="rows", path=str(tmp_path / "all.svm"), publish_split=True).load().pool.names is None
    with pytest.raises(ValueError, match="publish_split"):
        source().load()
    with pytest.raises(ValueError, match="must be 'content' for points"):
        PointNames("id", ("a",))
    with pytest.raises(ValueError, match="one for each of the 2 points"):
        PublicPool(torch.zeros(2, 1), names=PointNames("content", ("a",)))


def test_images_are_named_by_their_file_or_split_off_by_their_pixels(tmp_path):
    draw = np.random.default_rng(0)
    for folder, count in (("private", 80), ("public", 20), ("test", 20)):
        for place in range(count):
            file = tmp_path / folder / "ab"[place % 2] / f"patient{place}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (9, 9), dtype=np.uint8)).save(file)
    path, size = str(tmp_path / "private"), {"size": 6, "channels": 1}
    others = {f"{role}_path": str(tmp_path / role) for role in ("public", "test")}
    pool = ImageFolder(name="scans", path=path, **others, **size).load().pool
    assert pool.names.describe() == {"source": "public", "named_by": "file"}
    files = [tmp_path / "public" / name for name in pool.names.names]
    assert torch.equal(torch.stack([read_image("x", file, (1, 6, 6), "bilinear") for file in files]), pool.x)
    split = ImageFolder(name="scans", path=path, publish_split=True, **size).load().pool
    assert split.names.describe() == {"source": "split off the data", "named_by": "content"}
    assert split.names.names == tuple(compute_content_id([x.numpy().tobytes()]) for x in split.x)
