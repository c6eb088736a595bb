"""Public benchmarks: each loader on small files of the real format, made here."""

import gzip
import pickle
import shutil
import struct
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import scipy.io
import torch
from sklearn.datasets import load_digits

from benchmarks.fonts import glyphs, handwriting
from benchmarks.fonts.glyphs import CHARACTERS, Glyphs
from benchmarks.fonts.handwriting import Handwriting, _atlas
from pate_torch.data.base import DatasetSource
from pate_torch.data.cifar10 import Cifar10
from pate_torch.data.digits import Digits
from pate_torch.data.mnist import FashionMnist, Mnist
from pate_torch.data.svhn import Svhn

random = np.random.default_rng(0)


def write_idx(folder, train, test):
    folder.mkdir(parents=True)
    for prefix, (x, y) in (("train", train), ("t10k", test)):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *x.shape) + x.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(y)) + y.tobytes())


def images(count, *shape):
    return random.integers(0, 256, (count, *shape), dtype=np.uint8), random.integers(0, 10, count, dtype=np.uint8)


def check_parts(dataset, train, test, public, evaluated):
    x, y = train
    assert torch.equal(dataset.private.x, torch.from_numpy(x)) and dataset.private.x.dtype == torch.uint8
    assert dataset.private.y.tolist() == y.tolist()
    assert dataset.private.unit_id.tolist() == [str(i) for i in range(len(y))] and dataset.private.unit == "record"
    x, y = test
    assert torch.equal(dataset.pool.x, torch.from_numpy(x[:public]))
    assert torch.equal(dataset.evaluation.x, torch.from_numpy(x[public : public + evaluated]))
    assert dataset.evaluation.pool_y.tolist() == y[:public].tolist()
    assert dataset.evaluation.y.tolist() == y[public : public + evaluated].tolist()
    # Normalization by the public pool: it comes out standardized, channel by channel.
    z = dataset.spec.normalize(dataset.pool.x, torch.float64).transpose(0, 1).flatten(1)
    torch.testing.assert_close(z.mean(1), torch.zeros(len(z), dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(z.std(1, correction=0), torch.ones(len(z), dtype=torch.float64), atol=1e-9, rtol=0)
    assert dataset.spec.benchmark and dataset.spec.input_shape == tuple(dataset.private.x.shape[1:])


@pytest.mark.parametrize(("source", "folder"), [(Mnist, "MNIST"), (FashionMnist, "FashionMNIST")])
def test_idx_files(source, folder, tmp_path, monkeypatch):
    train, test = images(30, 28, 28), images(20, 28, 28)
    write_idx(tmp_path / folder / "raw", train, test)
    dataset = source(root=str(tmp_path), public=12, test=5).load()
    check_parts(dataset, (train[0][:, None], train[1]), (test[0][:, None], test[1]), 12, 5)
    assert dataset.spec.nominal_size == 60_000 and dataset.spec.num_classes == 10
    few = source(path=str(tmp_path), root="/nowhere", public=12, test=5, private=7).load()
    assert len(few.private) == few.spec.nominal_size == 7
    monkeypatch.setenv("PATE_DATA", str(tmp_path))
    assert len(source(public=12, test=5).load().private) == 30


def test_normalization_ignores_private_images(tmp_path):
    train, test = images(30, 28, 28), images(20, 28, 28)
    specs = []
    for name, x in (("a", train[0]), ("b", np.zeros_like(train[0]))):
        write_idx(tmp_path / name / "MNIST" / "raw", (x, train[1]), test)
        specs.append(Mnist(root=str(tmp_path / name), public=12, test=5).load().spec)
    assert specs[0] == specs[1]


def write_svhn(folder, split, x, y):
    labels = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
    scipy.io.savemat(folder / f"{split}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": labels})


def test_svhn_files(tmp_path):
    train, extra, test = (images(count, 3, 32, 32) for count in (12, 8, 9))
    for split, (x, y) in (("train", train), ("extra", extra), ("test", test)):
        write_svhn(tmp_path, split, x, y)
    small = Svhn(root=str(tmp_path), public=5, test=4).load()
    check_parts(small, train, test, 5, 4)
    assert small.spec.nominal_size == 73_257
    large = Svhn(root=str(tmp_path), public=5, test=4, extra=True).load()
    check_parts(large, tuple(np.concatenate(pair) for pair in zip(train, extra, strict=True)), test, 5, 4)
    assert large.spec.nominal_size == 604_388


def write_cifar(folder, train, test):
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    parts = zip(np.array_split(train[0], 5), np.array_split(train[1], 5), strict=True)
    files = {f"data_batch_{i}": part for i, part in enumerate(parts, 1)} | {"test_batch": test}
    for name, (x, y) in files.items():
        content = {b"data": x.reshape(len(x), -1), b"labels": [int(label) for label in y], b"batch_label": b"x"}
        (batches / name).write_bytes(pickle.dumps(content, protocol=2))


def test_cifar_batches(tmp_path):
    train, test = images(25, 3, 32, 32), images(9, 3, 32, 32)
    write_cifar(tmp_path, train, test)
    dataset = Cifar10(root=str(tmp_path), public=5, test=4).load()
    check_parts(dataset, train, test, 5, 4)
    assert dataset.spec.class_names[3] == "cat" and dataset.spec.nominal_size == 50_000


class Bomb:
    def __reduce__(self):
        return (print, ("code ran",))


def test_cifar_pickles_run_no_code(tmp_path, capsys):
    write_cifar(tmp_path, images(25, 3, 32, 32), images(9, 3, 32, 32))
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"could not be read.*refuses to load"):
        Cifar10(root=str(tmp_path), public=5, test=4).load()
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("source", [Mnist, FashionMnist, Svhn, Cifar10])
def test_missing_data_name_folder_and_switch(source, tmp_path):
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=rf"was not found in {folder}.*dataset\.download=true"):
            source(root=str(folder)).load()


@pytest.mark.parametrize("source", [Mnist, Svhn, Cifar10])
def test_a_failed_download_is_one_clear_error(source, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no route")

    for target in ("mnist.MNIST.download", "utils.download_url", "cifar.CIFAR10.download"):
        monkeypatch.setattr(f"torchvision.datasets.{target}", refuse)
    with pytest.raises(ValueError, match=r"dataset\.download=True: .* could not be fetched into .*no route"):
        source(root=str(tmp_path), download=True).load()


def test_damaged_files_are_named(tmp_path):
    train, test = images(30, 28, 28), images(20, 28, 28)
    write_idx(tmp_path / "MNIST" / "raw", train, test)
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    whole = file.read_bytes()
    damaged = (whole[:-100], b"nonsense", gzip.compress(whole), struct.pack(">IIII", 2051, 29, 28, 28) + whole[800:])
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"MNIST/raw could not be read"):
            Mnist(root=str(tmp_path), public=12, test=5).load()
    write_svhn(tmp_path, "train", *images(5, 3, 32, 32))
    (tmp_path / "train_32x32.mat").write_bytes(b"no matlab file")
    with pytest.raises(ValueError, match="could not be read"):
        Svhn(root=str(tmp_path)).load()


def test_labels_outside_the_classes_are_refused(tmp_path):
    train, test = images(30, 28, 28), images(20, 28, 28)
    train[1][3] = 10
    write_idx(tmp_path / "MNIST" / "raw", train, test)
    with pytest.raises(ValueError, match=r"labels outside 0\.\.9"):
        Mnist(root=str(tmp_path), public=12, test=5).load()


def test_sizes_are_checked(tmp_path):
    write_idx(tmp_path / "MNIST" / "raw", images(30, 28, 28), images(20, 28, 28))
    with pytest.raises(ValueError, match=r"public \+ dataset\.test=21.*at most 20"):
        Mnist(root=str(tmp_path), public=15, test=6).load()
    with pytest.raises(ValueError, match=r"dataset\.public=0"):
        Mnist(public=0)
    with pytest.raises(ValueError, match=r"dataset\.name='\.\./x'"):
        Mnist(name="../x")
    with pytest.raises(ValueError, match=r"at most 1797"):
        Digits(private=1700)


def test_digits_split_is_fixed_and_complete():
    dataset, again = Digits().load(), Digits().load()
    assert (len(dataset.private), len(dataset.pool), len(dataset.evaluation.y)) == (1100, 450, 247)
    assert torch.equal(dataset.private.x, again.private.x)
    assert dataset.private.x.dtype == torch.uint8 and dataset.private.x.shape[1:] == (1, 8, 8)
    original, labels = load_digits(return_X_y=True)
    positions = dataset.private.unit_id.astype(int)
    assert len(set(positions)) == 1100
    rescaled = dataset.private.x.flatten(1).double().numpy() * 16 / 255
    np.testing.assert_allclose(rescaled, original[positions], atol=0.04)
    assert int(dataset.private.x.max()) == 255 and int(dataset.private.x.min()) == 0
    assert dataset.private.y.tolist() == labels[positions].tolist()
    assert set(dataset.evaluation.y.tolist()) == set(range(10))
    # The three parts together are the data set, each record once.
    everything = torch.cat([dataset.private.x, dataset.pool.x, dataset.evaluation.x]).flatten(1).long().sum(0)
    np.testing.assert_array_equal(everything.numpy(), np.rint(original * 255 / 16).astype(int).sum(0))


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


def test_glyphs_can_be_told_apart():
    from sklearn.neighbors import KNeighborsClassifier

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


@pytest.mark.slow
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


def test_handwriting_lies_in_the_middle_and_can_be_told_apart(fonts, small_batches):
    from sklearn.neighbors import KNeighborsClassifier

    dataset = Handwriting(path=fonts, private=1500, public=50, test=400).load()
    x = dataset.private.x[:, 0].double()
    at = torch.arange(28, dtype=torch.float64) - 13.5
    for total in (x.sum(1), x.sum(2)):
        off = ((total @ at) / x.sum((1, 2))).abs()  # pixels; a few are bent over the edge. (Else 1.5.)
        assert float(off.quantile(0.99)) < 0.3 and float(off.max()) < 2
    model = KNeighborsClassifier(3).fit(x.flatten(1).numpy(), dataset.private.y.numpy())
    accuracy = model.score(dataset.evaluation.x.flatten(1).double().numpy(), dataset.evaluation.y.numpy())
    assert 0.85 < accuracy < 0.995


@pytest.mark.slow
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


def test_every_source_is_one_and_withholds_content():
    for source in (Digits(), Mnist(), FashionMnist(), Svhn(), Cifar10(), Glyphs(), Handwriting()):
        assert isinstance(source, DatasetSource)
    assert "withheld" in repr(Digits().load()) and "withheld" in repr(Digits().load().private)
