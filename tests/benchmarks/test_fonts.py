"""Data sets drawn from fonts: records independent of the set's size, made from the seed, and told apart."""

import shutil
from pathlib import Path

import matplotlib
import pytest
import torch

from benchmarks.fonts import glyphs, handwriting
from benchmarks.fonts.glyphs import Glyphs
from benchmarks.fonts.handwriting import Handwriting


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


@pytest.mark.parametrize(
    "make,key",
    [
        (lambda: Glyphs(num_classes=37), "num_classes"),
        (lambda: Glyphs(noise=-1), "noise"),
        (lambda: Handwriting(bend=-1), "bend"),
        (lambda: Handwriting(path="nowhere").load(), "dataset.path"),
        (lambda: Handwriting(path=Path(__file__).parent).load(), "holds 0 such files"),
    ],
)
def test_bad_choices_are_named(make, key):
    with pytest.raises(ValueError, match=key):
        make()
