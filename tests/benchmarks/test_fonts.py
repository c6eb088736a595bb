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


def test_glyphs_are_a_prefix_of_larger_sets_and_made_from_the_seed(small_batches):
    small, large = (Glyphs(private=n, public=50, test=20, num_classes=36) for n in (250, 3600))
    a, b = small.load(), large.load()
    assert torch.equal(a.private.x, b.private.x[:250]) and torch.equal(a.private.y, b.private.y[:250])
    assert torch.equal(a.pool.x, b.pool.x) and a.spec.nominal_size == 250
    other = Glyphs(private=250, public=50, test=20, num_classes=36, seed=1).load()
    assert not torch.equal(a.private.x, other.private.x)
    assert not torch.equal(a.private.x[:20], a.evaluation.x)
    assert a.private.x.shape == (250, 1, 28, 28) and a.private.x.dtype == torch.uint8
    counts = torch.bincount(b.private.y, minlength=36).double()
    assert 11 < float(((counts - 100) ** 2 / 100).sum()) < 67  # chi-square(35), 0.1 % on either side


@pytest.mark.slow(reason="draws 4,000 characters and searches their neighbors")
def test_glyphs_can_be_told_apart():
    dataset = Glyphs(private=4000, public=50, test=400).load()
    rows = dataset.private.x.flatten(1).float().numpy()
    model = KNeighborsClassifier(3).fit(rows, dataset.private.y.numpy())
    accuracy = model.score(dataset.evaluation.x.flatten(1).float().numpy(), dataset.evaluation.y.numpy())
    assert accuracy > 0.9
    assert dataset.spec.class_names == tuple(CHARACTERS[:10])


@pytest.mark.parametrize(
    "wrong", [{"num_classes": 1}, {"num_classes": 37}, {"size": 4}, {"noise": -1}, {"rotate": 999}]
)
def test_glyphs_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Glyphs(**wrong)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """Four fonts, one without digits and one that is none."""
    folder, shipped = tmp_path_factory.mktemp("fonts"), Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name in ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "DejaVuSansMono-Bold", "STIXSizOneSymReg"):
        shutil.copy(shipped / f"{name}.ttf", folder)
    (folder / "broken.otf").write_bytes(b"no font")
    (folder / "licence.txt").write_text("free")
    return folder


@pytest.mark.slow(reason="statistics of 1,000 drawn digits")
def test_handwriting_is_a_prefix_of_larger_sets_and_made_from_the_seed(fonts, small_batches):
    assert _atlas(fonts).shape == (4, 10, 80, 80)
    small, large = (Handwriting(path=fonts, private=n, public=50, test=20) for n in (250, 1000))
    a, b = small.load(), large.load()
    assert torch.equal(a.private.x, b.private.x[:250]) and torch.equal(a.private.y, b.private.y[:250])
    assert torch.equal(a.pool.x, b.pool.x) and a.spec.nominal_size == 250
    assert a.private.x.shape == (250, 1, 28, 28) and a.private.x.dtype == torch.uint8
    other = Handwriting(path=fonts, private=250, public=50, test=20, seed=1).load()
    assert not torch.equal(a.private.x, other.private.x)
    assert not torch.equal(a.private.x[:20], a.evaluation.x)
    counts = torch.bincount(b.private.y, minlength=10).double()
    assert 1 < float(((counts - 100) ** 2 / 100).sum()) < 28  # chi-square(9), 0.1 % on either side; the seed is fixed


@pytest.mark.slow(reason="draws 1,500 digits and searches their neighbors")
def test_handwriting_lies_in_the_middle_and_can_be_told_apart(fonts, small_batches):
    dataset = Handwriting(path=fonts, private=1500, public=50, test=400).load()
    x = dataset.private.x[:, 0].double()
    at = torch.arange(28, dtype=torch.float64) - 13.5
    for total in (x.sum(1), x.sum(2)):
        off = ((total @ at) / x.sum((1, 2))).abs()  # pixels; a few are bent over the edge. (Else 1.5.)
        assert float(off.quantile(0.99)) < 0.3 and float(off.max()) < 2
    model = KNeighborsClassifier(3).fit(x.flatten(1).numpy(), dataset.private.y.numpy())
    accuracy = model.score(dataset.evaluation.x.flatten(1).double().numpy(), dataset.evaluation.y.numpy())
    assert 0.85 < accuracy < 0.995


@pytest.mark.slow(reason="statistics of 3,500 drawn digits")
def test_some_fonts_are_rare(fonts, small_batches):
    """Of four, ranked as words are: shares 12/25, 6/25, 4/25, 3/25. Fonts all as common fail 99 times of 100."""
    plain = {"rotate": 0, "shear": 0, "scale": 0, "bend": 0}
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
