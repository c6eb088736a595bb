"""Folders of images: read by a fixed list of formats, resized, and labeled by folder; other folders are refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pate_torch.data import image_folder
from pate_torch.privacy.partition import drop_unusable
from pate_torch.privacy.records import UNREADABLE_POINT
from tests.data.owner_files import ImageFolder, assert_same_public_side, index_by_unit, write_gallery, write_image

NOT_AN_IMAGE = b"\x89PNG\r\n\x1a\n not an image"


def write_deep_image(path):
    """An image of sixteen bits a channel."""
    Image.fromarray(np.full((9, 9), 60_000, dtype=np.uint16)).save(path)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_read_resized_and_labeled_by_folder(channels, files):
    data = ImageFolder(path=files["own images"], channels=channels).load()
    assert data.spec.input_shape == (channels, 8, 8) and data.spec.class_names == ("cat", "dog")
    assert len(data.private) + len(data.pool) + len(data.evaluation.y) == 60
    for name, x, y in list(zip(data.private.unit_id, data.private.x, data.private.y, strict=True))[:5]:
        assert ("cat", "dog")[y] == name.split("/")[0]
        image = Image.open(Path(files["own images"]) / name).convert("L" if channels == 1 else "RGB").resize((8, 8), 2)
        np.testing.assert_array_equal(x.numpy(), np.atleast_3d(np.array(image)).transpose(2, 0, 1))


def test_public_and_test_folders(tmp_path, files):
    shutil.copytree(Path(files["own images"]) / "cat", tmp_path / "pool")
    private = write_gallery(tmp_path / "own", 10, classes=("cat", "dog", "eel"))
    data = ImageFolder(path=private, public_path=str(tmp_path / "pool"), test_path=files["apart images"]).load()
    data = drop_unusable(data, "add_remove")
    assert (len(data.private), len(data.pool), len(data.evaluation.y)) == (20, 30, 60)  # no test image shows an eel
    assert data.evaluation.pool_y is None and data.spec.class_names == ("cat", "dog")
    for mode in ("1", "L", "P", "RGBA", "LA"):
        write_image(tmp_path / "odd.png", 0, mode=mode)
        assert image_folder.read_image("dataset.path", tmp_path / "odd.png", (3, 8, 8), "bilinear").shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (write_deep_image, r"image mode='I;16'.*odd\.png.*eight bits"),
        (NOT_AN_IMAGE, "not a readable image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "not a readable image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 60, "not a readable image"),
        (b"P4 20000 20000\n", "not a readable image .*decompression bomb"),
    ],
)
def test_unreadable_public_images_are_refused(content, message, tmp_path, files):
    """An image is opened by the fixed list of formats only: others would start a program."""
    public = Path(write_gallery(tmp_path / "public", 2))
    content(public / "cat" / "odd.png") if callable(content) else (public / "cat" / "odd.png").write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        ImageFolder(path=files["own images"], public_path=str(public)).load()
    assert "odd.png" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "^(q)"}, r"dataset\.group='\^\(q\)'.*must match"),
        ({"group": "("}, r"dataset\.group='\('.*regular expression"),
        ({"channels": 2}, r"dataset\.channels=2"),
        ({"size": 3}, r"dataset\.size=3"),
        ({"roles": "position"}, r"dataset\.roles='position'.*Use dataset\.roles=hash"),
        ({"path": "cat"}, "no images in class folders"),
        ({"path": "cat/p0_0.png"}, "must be a folder"),
        ({"classes": ["cat", "eel"]}, r"dataset\.classes=\['cat', 'eel'\].*lacks.*dog"),
    ],
)
def test_image_folders_are_refused_clearly(options, message, files):
    path = Path(files["own images"]) / options.get("path", "")
    with pytest.raises(ValueError, match=message):
        ImageFolder(**(options | {"path": str(path)})).load()


def test_a_private_image_that_cannot_be_read_contributes_nothing_and_stops_nobodys_run(tmp_path, files):
    own = write_gallery(tmp_path / "own", 5)
    source = ImageFolder(path=own, public_path=files["apart images"])
    whole = source.load()
    write_deep_image(tmp_path / "own" / "cat" / "p0_0.png")
    (tmp_path / "own" / "dog" / "p1_1.png").write_bytes(NOT_AN_IMAGE)
    damaged = source.load()
    assert_same_public_side(whole, damaged)
    assert damaged.num_dropped_by_reason == {UNREADABLE_POINT: 2}
    filled = drop_unusable(damaged, "replace_one").private
    assert len(filled) == 10 and not filled.x[0].any() and filled.unit_id.tolist() == whole.private.unit_id.tolist()
    records = index_by_unit(drop_unusable(damaged, "add_remove").private)
    gone = {"cat/p0_0.png", "dog/p1_1.png"}
    assert records == {name: record for name, record in index_by_unit(whole.private).items() if name not in gone}
