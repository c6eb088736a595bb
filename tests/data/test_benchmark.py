"""Benchmarks: the split of the digits, and each reader on small files of the real format."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from sklearn.datasets import load_digits

from pate_torch.data.benchmark import Cifar10, Digits, FashionMnist, Mnist, Svhn

random = np.random.default_rng(0)
SOURCES = (Mnist, FashionMnist, Svhn, Cifar10)
SIZES = {"public": 5, "test": 4}


def test_digits_are_split_by_a_fixed_permutation():
    data, again = Digits().load(), Digits().load()
    assert "tensor" not in repr(data) + repr(data.private) + repr(data.evaluation)
    assert (len(data.private), len(data.pool), len(data.evaluation.y)) == (1100, 450, 247)
    assert torch.equal(data.private.x, again.private.x)
    assert data.private.x.dtype == torch.uint8 and data.private.x.shape[1:] == (1, 8, 8)
    original, labels = load_digits(return_X_y=True)
    positions = data.private.unit_id.astype(int)
    assert len(set(positions)) == 1100
    rescaled = data.private.x.flatten(1).double().numpy() * 16 / 255
    np.testing.assert_allclose(rescaled, original[positions], atol=0.04)
    assert int(data.private.x.max()) == 255 and data.private.y.tolist() == labels[positions].tolist()
    # The three parts together are the data set, each record once.
    pixel_sum = torch.cat([data.private.x, data.pool.x, data.evaluation.x]).flatten(1).long().sum(0)
    np.testing.assert_array_equal(pixel_sum.numpy(), np.rint(original * 255 / 16).astype(int).sum(0))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"private": 1700}, "private.*1797"),
        ({"private": None}, "private"),
        ({"public": 0}, "public"),
        ({"test": 0}, "test"),
        ({"name": "../x"}, "name"),
    ],
)
def test_impossible_sizes_and_names_are_refused(options, key):
    with pytest.raises(ValueError, match=rf"^dataset\.{key}"):
        Digits(**options)


@pytest.fixture
def any_checksum(monkeypatch):
    """torchvision accepts files of any checksum."""
    check = torchvision.datasets.utils.check_integrity
    for module in (torchvision.datasets.svhn, torchvision.datasets.cifar):
        monkeypatch.setattr(module, "check_integrity", lambda path, md5: check(path))


def images(count, *shape):
    return random.integers(0, 256, (count, *shape), dtype=np.uint8), random.integers(0, 10, count, dtype=np.uint8)


def write_mnist(folder, train, test):
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, (x, y) in (("train", train), ("t10k", test)):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *x.shape) + x.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(y)) + y.tobytes())


def write_svhn(folder, split, x, y):
    labels = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
    scipy.io.savemat(folder / f"{split}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": labels})


def write_cifar(folder, train, test):
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    parts = zip(np.array_split(train[0], 5), np.array_split(train[1], 5), strict=True)
    files = {f"data_batch_{i}": part for i, part in enumerate(parts, 1)} | {"test_batch": test}
    for name, (x, y) in files.items():
        content = {"data": x.reshape(len(x), -1), "labels": y.tolist()}
        (batches / name).write_bytes(pickle.dumps(content, protocol=2))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": []}))


def check_parts(data, train, test, nominal_size):
    (x, y), (test_x, test_y) = train, test
    assert torch.equal(data.private.x, torch.from_numpy(x)) and data.private.y.tolist() == y.tolist()
    assert data.private.unit_id.tolist() == [str(i) for i in range(len(y))] and data.private.unit == "record"
    assert torch.equal(data.pool.x, torch.from_numpy(test_x[:5]))
    assert torch.equal(data.evaluation.x, torch.from_numpy(test_x[5:9]))
    assert data.evaluation.pool_y.tolist() == test_y[:5].tolist() and data.evaluation.y.tolist() == test_y[5:9].tolist()
    # The public points are standardized, channel by channel.
    z = data.spec.normalize(data.pool.x, torch.float64).transpose(0, 1).flatten(1)
    torch.testing.assert_close(z.mean(1), torch.zeros(len(z), dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(z.std(1, correction=0), torch.ones(len(z), dtype=torch.float64), atol=1e-9, rtol=0)
    assert data.spec.benchmark and data.spec.nominal_size == nominal_size and data.spec.num_classes == 10


@pytest.mark.parametrize(("source", "folder"), [(Mnist, "MNIST"), (FashionMnist, "FashionMNIST")])
def test_mnist_files(source, folder, tmp_path, monkeypatch):
    train, test = images(30, 28, 28), images(9, 28, 28)
    write_mnist(tmp_path / folder / "raw", train, test)
    data = source(root=str(tmp_path), **SIZES).load()
    check_parts(data, (train[0][:, None], train[1]), (test[0][:, None], test[1]), 60_000)
    few = source(path=str(tmp_path), root="/nowhere", private=7, **SIZES).load()
    assert len(few.private) == few.spec.nominal_size == 7
    monkeypatch.setenv("PATE_DATA", str(tmp_path))
    write_mnist(tmp_path / folder / "raw", (np.zeros_like(train[0]), train[1]), test)
    assert source(**SIZES).load().spec == data.spec  # normalization ignores private images
    with pytest.raises(ValueError, match=r"public \+ dataset\.test=10.*at most 9"):
        source(public=5, test=5).load()


def test_svhn_files(tmp_path, any_checksum):
    train, extra, test = (images(count, 3, 32, 32) for count in (12, 8, 9))
    for split, (x, y) in (("train", train), ("extra", extra), ("test", test)):
        write_svhn(tmp_path, split, x, y)
    check_parts(Svhn(root=str(tmp_path), extra=False, **SIZES).load(), train, test, 73_257)
    both = tuple(np.concatenate(pair) for pair in zip(train, extra, strict=True))
    check_parts(Svhn(root=str(tmp_path), **SIZES).load(), both, test, 604_388)
    (tmp_path / "extra_32x32.mat").unlink()
    (tmp_path / "train_32x32.mat").write_bytes(b"nonsense")  # the other files are not read
    with pytest.raises(ValueError, match=r"^dataset\.extra=True: .*extra_32x32\.mat.*extra=false.*download=true"):
        Svhn(root=str(tmp_path), **SIZES).load()


def test_cifar_batches(tmp_path, any_checksum):
    train, test = images(25, 3, 32, 32), images(9, 3, 32, 32)
    write_cifar(tmp_path, train, test)
    data = Cifar10(root=str(tmp_path), **SIZES).load()
    check_parts(data, train, test, 50_000)
    assert data.spec.class_names[3] == "cat"


class Bomb:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_of_another_checksum_runs_no_code(tmp_path, capsys):
    write_cifar(tmp_path, images(25, 3, 32, 32), images(9, 3, 32, 32))
    for file in (tmp_path / "cifar-10-batches-py").iterdir():
        file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not found or corrupted"):
        Cifar10(root=str(tmp_path)).load()
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("source", SOURCES)
def test_a_missing_folder_and_a_failed_download_are_refused(source, tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=rf"from {folder}.*data_root.*dataset\.download=true"):
            source(root=str(folder)).load()

    def refuse(*_, **__):
        raise RuntimeError("no route")

    for target in ("mnist.MNIST.download", "svhn.SVHN.download", "cifar.CIFAR10.download"):
        monkeypatch.setattr(f"torchvision.datasets.{target}", refuse)
    with pytest.raises(ValueError, match=r"dataset\.download=True: .* downloaded to .*no route"):
        source(root=str(tmp_path), download=True).load()


def test_damaged_files_and_labels_outside_the_classes_are_named(tmp_path):
    train = images(30, 28, 28)
    train[1][3] = 10
    write_mnist(tmp_path / "MNIST" / "raw", train, images(9, 28, 28))
    with pytest.raises(ValueError, match=r"labels outside 0\.\.9"):
        Mnist(root=str(tmp_path), **SIZES).load()
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    one_fewer = struct.pack(">IIII", 2051, 29, 28, 28) + content[800:]
    for damaged in (content[:-100], b"nonsense", gzip.compress(content), one_fewer):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"could not be read from .*MNIST/raw"):
            Mnist(root=str(tmp_path), **SIZES).load()
