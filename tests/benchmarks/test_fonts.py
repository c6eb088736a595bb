"""Data sets drawn from fonts: records independent of the set's size, made from the seed, and told apart."""

import shutil
from pathlib import Path

import matplotlib
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from benchmarks.fonts import glyphs, handwriting
from benchmarks.fonts.glyphs import CHARACTERS, Glyphs
from benchmarks.fonts.handwriting import Handwriting, _atlas


@pytest.fixture
def small_batches(monkeypatch):
    """Pictures are drawn in batches; a few hundred are then several."""
    for module in (glyphs, handwriting):
        monkeypatch.setattr(module, "_BATCH", 100)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """Four fonts, one without digits and one that is none."""
    folder, shipped = tmp_path_factory.mktemp("fonts"), Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name in ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "DejaVuSansMono-Bold", "STIXSizOneSymReg"):
        shutil.copy(shipped / f"{name}.ttf", folder)
    (folder / "broken.otf").write_bytes(b"no font")
    (folder / "licence.txt").write_text("free")
    return folder


def make(kind, fonts, **sizes):
    return Glyphs(num_classes=36, **sizes) if kind == "glyphs" else Handwriting(path=fonts, **sizes)


DIGITS = pytest.param("handwriting", 10, 1000, 1, 28, marks=pytest.mark.slow(reason="statistics of 1,000 drawn digits"))


@pytest.mark.parametrize(("kind", "num_classes", "size", "low", "high"), [("glyphs", 36, 3600, 11, 67), DIGITS])
def test_pictures_are_a_prefix_of_larger_sets_and_made_from_the_seed(
    kind, num_classes, size, low, high, fonts, small_batches
):
    """``low`` and ``high`` are the quantiles of chi-square at 0.1 % of the number of records of each class."""
    a, b, other = (
        make(kind, fonts, private=n, public=50, test=20, seed=seed).load()
        for n, seed in ((250, 0), (size, 0), (250, 1))
    )
    assert torch.equal(a.private.x, b.private.x[:250]) and torch.equal(a.private.y, b.private.y[:250])
    assert torch.equal(a.pool.x, b.pool.x) and a.spec.nominal_size == 250
    assert not torch.equal(a.private.x, other.private.x)
    assert not torch.equal(a.private.x[:20], a.evaluation.x)
    assert a.private.x.shape == (250, 1, 28, 28) and a.private.x.dtype == torch.uint8
    counts = torch.bincount(b.private.y, minlength=num_classes).double()
    assert low < float(((counts - 100) ** 2 / 100).sum()) < high


@pytest.mark.slow(reason="draws 4,000 pictures and searches their neighbors")
@pytest.mark.parametrize(
    ("kind", "size", "least", "most"), [("glyphs", 4000, 0.9, 1), ("handwriting", 1500, 0.85, 0.995)]
)
def test_pictures_can_be_told_apart(kind, size, least, most, fonts, small_batches):
    sizes = {"private": size, "public": 50, "test": 400}
    dataset = Glyphs(**sizes).load() if kind == "glyphs" else Handwriting(path=fonts, **sizes).load()
    (x, y), (test_x, test_y) = (
        (part.x.flatten(1).double().numpy(), part.y.numpy()) for part in (dataset.private, dataset.evaluation)
    )
    assert least < KNeighborsClassifier(3).fit(x, y).score(test_x, test_y) <= most
    assert dataset.spec.class_names == tuple(CHARACTERS[:10])


@pytest.mark.parametrize(
    "wrong", [{"num_classes": 1}, {"num_classes": 37}, {"size": 4}, {"noise": -1}, {"rotate": 999}]
)
def test_glyphs_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Glyphs(**wrong)


@pytest.mark.slow(reason="statistics of 3,500 drawn digits")
def test_some_fonts_are_rare(fonts, small_batches):
    """Of four, ranked as words are: shares 12/25, 6/25, 4/25, 3/25. Fonts all as common fail 99 times of 100."""
    plain = {"rotate": 0, "shear": 0, "scale": 0, "bend": 0}
    assert _atlas(fonts).shape == (4, 10, 80, 80)
    dataset = Handwriting(path=fonts, private=3500, public=1, test=1, **plain).load()
    ones = dataset.private.x[dataset.private.y == 1]
    pictures, counts = torch.unique(ones.flatten(1), dim=0, return_counts=True)
    assert len(pictures) == 12, "four fonts, three widths of stroke"
    expected = len(ones) * torch.tensor([12.0, 6, 4, 3]).repeat_interleave(3) / 75
    found = counts.sort(descending=True).values
    assert float(((found - expected) ** 2 / expected).sum()) < 31  # chi-square(11), 0.1 %


@pytest.mark.parametrize(
    "wrong,key", [({"path": "nowhere"}, "dataset.path"), ({"path": None}, "dataset.path"), ({"bend": -1}, "bend"),
                  ({"rotate": 999}, "rotate"), ({"private": 0}, "dataset.private")],
)  # fmt: skip
def test_handwriting_is_checked(wrong, key):
    with pytest.raises(ValueError, match=key):
        Handwriting(**wrong).load()


def test_a_folder_without_fonts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dataset\.path.*must hold fonts.*it holds 0 such files"):
        Handwriting(path=tmp_path).load()
