"""Points of datasets, folders and arrays: the same tensors by every way, each record alone, and clear refusals."""

import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from pate_torch.data import streams
from pate_torch.data.image_folder import ImageFolderDataset
from pate_torch.data.streams import PointForm, PointStream

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (9, 3, 8, 6), dtype=np.uint8)


class Items(Dataset):
    """A list as a dataset; a function among the items is called."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        item = self.items[row]
        return item() if callable(item) else item


def pil(pixels):
    return Image.fromarray(pixels.transpose(1, 2, 0))


def write_folder(folder):
    for row, pixels in enumerate(PIXELS):
        file = folder / ("cat", "dog", "eel")[row // 3] / f"{row}.png"
        file.parent.mkdir(exist_ok=True, parents=True)
        pil(pixels).save(file)
    return folder


def private(points, form=None, **options):
    form = PointStream("public", points).form if form is None else form
    return PointStream("X", points, form, adjacency="add_remove", **options)


def test_every_way_gives_the_same_pixels(tmp_path):
    fractions = torch.from_numpy(PIXELS) / 255
    folder = write_folder(tmp_path / "images")
    ways = {
        "array": PIXELS,
        "tensor": torch.from_numpy(PIXELS),
        "64-bit integers": PIXELS.astype(np.int64),
        "fractions": fractions,
        "folder": folder,
        "its path as a string": str(folder),
        "folder dataset": ImageFolderDataset(folder, (3, 8, 6)),
        "dataset of tensors": TensorDataset(fractions, torch.arange(9)),
        "dataset of arrays": Items(list(PIXELS)),
        "dataset of PIL images": Items([(pil(pixels), row) for row, pixels in enumerate(PIXELS)]),
        "torchvision's folder": ImageFolder(folder),
        "subset": Subset(ImageFolder(folder, v2.ToImage()), range(9)),
    }
    for name, points in ways.items():
        for stream in (PointStream("public", points), private(points)):
            assert torch.equal(stream.load(), torch.from_numpy(PIXELS)), name
            assert torch.equal(torch.cat(list(stream.iterate_blocks())), torch.from_numpy(PIXELS)), name
            assert stream.is_readable_N.all()


def test_labels_are_those_of_the_items(tmp_path):
    folder = write_folder(tmp_path / "images")
    names = ["cat"] * 3 + ["dog"] * 3 + ["eel"] * 3
    for points, labels in [
        (folder, names),
        (ImageFolder(folder), [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (TensorDataset(torch.rand(4, 1, 8, 8), torch.tensor([3, 1, 0, 2])), [3, 1, 0, 2]),
        (Items([(PIXELS[0], np.int8(1)), (PIXELS[1], None), (PIXELS[2], "x")]), [1, None, "x"]),
        (Items(list(PIXELS)), [None] * 9),
    ]:
        stream = private(points)
        stream.load()
        assert stream.labels == labels


def test_colors_of_private_images_follow_the_public_ones_and_rows_are_floats(tmp_path):
    x = torch.randn(20, 4, dtype=torch.float64)
    assert torch.equal(private(TensorDataset(x)).load(), x.float())
    assert torch.equal(PointStream("x", Items(list(x.numpy()))).load(), x.float())
    images = [Image.fromarray(pixels[0]) for pixels in PIXELS]
    gray = Items(images)
    assert torch.equal(PointStream("public", gray).load(), torch.from_numpy(PIXELS[:, :1]))
    form = PointStream("public", Items([pil(PIXELS[0])])).form
    assert torch.equal(private(gray, form).load(), torch.from_numpy(PIXELS[:, :1]).expand(-1, 3, -1, -1))
    (tmp_path / "cat").mkdir()
    for row, image in enumerate(images):
        image.save(tmp_path / "cat" / f"{row}.png")
    pil(PIXELS[0]).save(tmp_path / "cat" / "in color.png")
    stream = private(ImageFolderDataset(tmp_path, (1, 8, 6)), PointForm((1, 8, 6), False))
    assert torch.equal(stream.load()[:9], torch.from_numpy(PIXELS[:, :1])) and stream.is_readable_N.all()


class Noisy(Dataset):
    """Random transforms that draw from all three global generators."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        x = torch.full((1, 8, 8), 0.1 + self.rows[row] / 100)
        return x + torch.rand(1, 8, 8) / 5 + random.random() / 5 + np.random.random() / 5


def test_a_record_of_a_random_transform_does_not_depend_on_the_others():
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    whole = private(Noisy([1, 5, 9, 20, 2])).load()
    fewer = private(Noisy([9, 1, 2]), PointForm((1, 8, 8), True)).load()
    assert torch.equal(fewer, whole[[2, 0, 4]])
    assert len(whole[0].unique()) > 20, "nothing was drawn"
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


class Dimmed(ImageFolderDataset):
    def __getitem__(self, row):
        pixels, label = super().__getitem__(row)
        return pixels - (pixels * torch.rand(())).to(torch.uint8), label


def test_a_random_transform_of_a_folder_depends_on_no_other_record(tmp_path):
    folder = write_folder(tmp_path / "images")
    state = torch.get_rng_state()
    whole = private(Dimmed(folder, (3, 8, 6))).load()
    (folder / "cat" / "0.png").unlink()
    assert torch.equal(private(Dimmed(folder, (3, 8, 6))).load(), whole[1:])
    assert not torch.equal(whole, torch.from_numpy(PIXELS)), "nothing was drawn"
    assert torch.equal(state, torch.get_rng_state())


def test_a_dataset_with_a_state_is_refused_and_one_private_record_stops_nobodys_run():
    draw = torch.Generator().manual_seed(0)
    items = [torch.zeros(1, 8, 8)] * 8
    items[4] = lambda: torch.rand(1, 8, 8, generator=draw)
    assert not private(Items(items)).load()[[0, 1, 2, 3, 5, 6, 7]].any()
    with pytest.raises(ValueError, match="returns other values"):
        PointStream("public", Items(items)).load()
    for odd in (np.nan, np.inf, 1e300):
        rows = list(np.ones((9, 3)))
        rows[0] = np.array([odd, 1, 1])
        assert private(Items(rows), PointForm((3,))).load().isfinite().all(1).tolist() == [False] + [True] * 8
    noisy = Items([lambda: torch.rand(1, 8, 8, generator=draw)] * 20)
    for stream in (PointStream("public", noisy), private(noisy)):
        with pytest.raises(ValueError, match=rf"^{stream.key}='Items': returns other values when .* a second time"):
            stream.load()


UNREADABLE = {
    "an error": lambda: 1 / 0,
    "another shape": PIXELS[0][:, :4],
    "another type": PIXELS[0] / 255,
    "a row": np.zeros(4),
    "no image": "a text",
    "nothing": None,
}


@pytest.mark.parametrize("odd", UNREADABLE)
def test_a_private_point_that_cannot_be_read_contributes_nothing_and_stops_nobodys_run(odd):
    items = [(pixels, row) for row, pixels in enumerate(PIXELS)]
    items[4] = UNREADABLE[odd] if odd in ("an error", "nothing") else (UNREADABLE[odd], 4)
    stream = private(Items(items), PointForm((3, 8, 6), False))
    x = stream.load()
    assert stream.is_readable_N.tolist() == [row != 4 for row in range(9)]
    assert torch.equal(x[stream.is_readable_N], torch.from_numpy(np.delete(PIXELS, 4, axis=0))) and not x[4].any()
    with pytest.raises(ValueError, match=r"^public='point 4': has a point that cannot be read"):
        PointStream("public", Items(items)).load()


def test_private_fractions_that_are_not_finite_are_not_readable_and_others_are_clipped():
    x = torch.from_numpy(PIXELS) / 255
    x[3, 0, 0, 0], x[5, 0, 0, 0] = torch.nan, 7.0
    for points in (x, TensorDataset(x)):
        stream = private(points, PointForm((3, 8, 6), True))
        pixels = stream.load()
        assert stream.is_readable_N.tolist() == [row != 3 for row in range(9)]
        assert not pixels[3].any() and pixels[5, 0, 0, 0] == 255
        assert torch.equal(pixels[5, 1:], torch.from_numpy(PIXELS[5, 1:]))


@pytest.mark.parametrize("has_fractions", [False, True])
def test_no_private_image_decides_by_its_type_how_the_others_are_read(has_fractions):
    """One more record makes an array of another type of the same values, which each image is read by."""
    whole = (PIXELS > 99).astype(np.uint8) if has_fractions else PIXELS.astype(np.int64)
    fractions = np.random.default_rng(1).random(PIXELS.shape, dtype=np.float32)
    ties = (np.arange(3 * 8 * 6, dtype=np.float32).reshape(3, 8, 6) + np.float32(0.5)) / np.float32(255)
    odd = [np.full((3, 8, 6), np.nan), PIXELS[0] + np.float64(0.5), PIXELS[0].astype(np.uint16)]
    for images in (whole, np.concatenate([fractions, ties[None]])) if has_fractions else (whole, PIXELS):
        form = PointForm((3, 8, 6), has_fractions)
        expected = private(images, form).load()
        for other in odd:
            for wrap in (np.asarray, lambda x: TensorDataset(torch.from_numpy(x))):
                stream = private(wrap(np.concatenate([images, other[None]])), form)
                assert torch.equal(stream.load()[:-1], expected) and stream.is_readable_N[:-1].all()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def test_other_objects_are_refused_by_name(tmp_path):
    write_folder(tmp_path / "images")
    (tmp_path / "empty").mkdir()
    pil(PIXELS[0]).resize((4, 4)).save(tmp_path / "images" / "cat" / "small.png")
    for points, message in [
        (DataLoader(TensorDataset(torch.zeros(3, 2))), r"^X='DataLoader'.*map-style Dataset.*Pass loader\.dataset"),
        (Endless(), "^X='Endless'.*map-style Dataset"),
        (Items([]), "^X='Items': must have at least one point"),
        (tmp_path / "nowhere", "^X='.*nowhere': must be a folder with images"),
        (tmp_path / "empty", "^X='.*empty': must be a folder with images"),
        (tmp_path / "images", "^X='.*images': has images of 2 sizes.*ImageFolderDataset"),
    ]:
        with pytest.raises(ValueError, match=message):
            PointStream("X", points)
    for array in (PIXELS[:, :, :3], PIXELS[:, :1]):
        with pytest.raises(ValueError, match=r"^X=.*must be images of shape .*3, 8, 6"):
            private(array, PointForm((3, 8, 6), False))
    for array, has_fractions in [(PIXELS / 255, False), (PIXELS, True)]:  # no number of readable records stops a run
        (stream := private(array, PointForm((3, 8, 6), has_fractions))).load()
        assert not stream.is_readable_N.any()
    # Private images of other sizes are resized to the public form.
    x = private(tmp_path / "images", PointForm((3, 8, 6), False)).load()
    assert torch.equal(x[:3], torch.from_numpy(PIXELS[:3])) and x.shape == (10, 3, 8, 6)
    assert PointStream("public", tmp_path / "images", size=5).form.shape == (3, 5, 5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda folder: folder,
        ImageFolder,
        lambda folder: Subset(ImageFolder(folder), [0, 1]),
        lambda folder: ConcatDataset([TensorDataset(torch.zeros(2, 3, 8, 6)), Subset(ImageFolder(folder), [0])]),
    ],
)
def test_positions_in_a_folder_depend_on_other_records(wrap, tmp_path):
    points, form = wrap(write_folder(tmp_path / "images")), PointForm((3, 8, 6), False)
    with pytest.raises(ValueError, match=r"adjacency='replace_one'.*position of an image depends on its name"):
        PointStream("X", points, form, adjacency="replace_one")
    PointStream("X", FakeData(3, (3, 8, 6)), form, adjacency="replace_one")


@pytest.mark.slow(reason="imports torch in a new process")
def test_torchvision_is_imported_only_where_positions_count():
    """The import takes longer than all modules of the package together."""
    code = (
        "import sys, torch, pate_torch, pate_torch.students.store\n"
        "from pate_torch.data.streams import PointStream\n"
        "pate_torch.PATEClassifier\n"
        "points = torch.utils.data.TensorDataset(torch.zeros(3, 1, 8, 8))\n"
        "form = PointStream('X', points).form\n"
        "PointStream('X', points, form, adjacency='add_remove').load()\n"
        "assert 'torchvision' not in sys.modules\n"
        "PointStream('X', points, form, adjacency='replace_one')\n"
        "assert 'torchvision' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_items_are_not_in_memory_together(monkeypatch):
    """80 points of 16 kB; as 64-bit items, all together, they would take 10 MB."""
    monkeypatch.setattr(streams, "_BLOCK_POINTS", 32)
    points = Items([lambda: np.full((1, 128, 128), 7, dtype=np.int64)] * 80)
    tracemalloc.start()
    stream = private(points, PointForm((1, 128, 128), False))
    sizes = [len(block) for block in stream.iterate_blocks()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sizes == [32, 32, 16] and peak < 5e6
