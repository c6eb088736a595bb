"""Image benchmarks: each loader on small files of the real format, made here."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import scipy.io
import torch
import torchvision

from pate_torch.data.base import DatasetSource
from pate_torch.data.image_benchmarks import Cifar10, FashionMnist, Mnist, Svhn

random = np.random.default_rng(0)
SOURCES = (Mnist, FashionMnist, Svhn, Cifar10)


@pytest.fixture
def any_checksum(monkeypatch):
    """torchvision takes files for the real ones whatever their checksum is, if they are there."""
    for module in (torchvision.datasets.svhn, torchvision.datasets.cifar):
        monkeypatch.setattr(
            module, "check_integrity", lambda path, md5: torchvision.datasets.utils.check_integrity(path)
        )


def images(count, *shape):
    return random.integers(0, 256, (count, *shape), dtype=np.uint8), random.integers(0, 10, count, dtype=np.uint8)


def write_idx(folder, train, test):
    folder.mkdir(parents=True)
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


def check_parts(data, train, test, public, evaluated):
    x, y = train
    assert torch.equal(data.private.x, torch.from_numpy(x)) and data.private.x.dtype == torch.uint8
    assert data.private.y.tolist() == y.tolist()
    assert data.private.unit_id.tolist() == [str(i) for i in range(len(y))] and data.private.unit == "record"
    x, y = test
    assert torch.equal(data.pool.x, torch.from_numpy(x[:public]))
    assert torch.equal(data.evaluation.x, torch.from_numpy(x[public : public + evaluated]))
    assert data.evaluation.pool_y.tolist() == y[:public].tolist()
    assert data.evaluation.y.tolist() == y[public : public + evaluated].tolist()
    # Normalization by the public pool: it comes out standardized, channel by channel.
    z = data.spec.normalize(data.pool.x, torch.float64).transpose(0, 1).flatten(1)
    torch.testing.assert_close(z.mean(1), torch.zeros(len(z), dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(z.std(1, correction=0), torch.ones(len(z), dtype=torch.float64), atol=1e-9, rtol=0)
    assert data.spec.benchmark and data.spec.input_shape == tuple(data.private.x.shape[1:])


@pytest.mark.parametrize(("source", "folder"), [(Mnist, "MNIST"), (FashionMnist, "FashionMNIST")])
def test_idx_files(source, folder, tmp_path, monkeypatch):
    train, test = images(30, 28, 28), images(20, 28, 28)
    write_idx(tmp_path / folder / "raw", train, test)
    data = source(root=str(tmp_path), public=12, test=5).load()
    check_parts(data, (train[0][:, None], train[1]), (test[0][:, None], test[1]), 12, 5)
    assert data.spec.nominal_size == 60_000 and data.spec.num_classes == 10
    write_idx(tmp_path / "black" / folder / "raw", (np.zeros_like(train[0]), train[1]), test)
    black = source(root=str(tmp_path / "black"), public=12, test=5).load()
    assert black.spec == data.spec  # normalization ignores private images
    few = source(path=str(tmp_path), root="/nowhere", public=12, test=5, private=7).load()
    assert len(few.private) == few.spec.nominal_size == 7
    monkeypatch.setenv("PATE_DATA", str(tmp_path))
    assert len(source(public=12, test=5).load().private) == 30
    with pytest.raises(ValueError, match=r"public \+ dataset\.test=21.*at most 20"):
        source(public=15, test=6).load()


def test_svhn_files(tmp_path, any_checksum):
    train, extra, test = (images(count, 3, 32, 32) for count in (12, 8, 9))
    for split, (x, y) in (("train", train), ("extra", extra), ("test", test)):
        write_svhn(tmp_path, split, x, y)
    small = Svhn(root=str(tmp_path), public=5, test=4).load()
    check_parts(small, train, test, 5, 4)
    assert small.spec.nominal_size == 73_257
    large = Svhn(root=str(tmp_path), public=5, test=4, extra=True).load()
    check_parts(large, tuple(np.concatenate(pair) for pair in zip(train, extra, strict=True)), test, 5, 4)
    assert large.spec.nominal_size == 604_388


def test_cifar_batches(tmp_path, any_checksum):
    train, test = images(25, 3, 32, 32), images(9, 3, 32, 32)
    write_cifar(tmp_path, train, test)
    data = Cifar10(root=str(tmp_path), public=5, test=4).load()
    check_parts(data, train, test, 5, 4)
    assert data.spec.class_names[3] == "cat" and data.spec.nominal_size == 50_000


class Bomb:
    def __reduce__(self):
        return (print, ("code ran",))


def test_pickles_of_another_checksum_run_no_code(tmp_path, capsys):
    write_cifar(tmp_path, images(25, 3, 32, 32), images(9, 3, 32, 32))
    for file in (tmp_path / "cifar-10-batches-py").iterdir():
        file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not found or corrupted"):
        Cifar10(root=str(tmp_path), public=5, test=4).load()
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("source", SOURCES)
def test_missing_data_name_folder_and_switch(source, tmp_path):
    assert isinstance(source(), DatasetSource)
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=rf"was not found in {folder}.*dataset\.download=true"):
            source(root=str(folder)).load()


@pytest.mark.parametrize("source", SOURCES)
def test_a_failed_download_is_one_clear_error(source, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no route")

    for target in ("mnist.MNIST.download", "svhn.SVHN.download", "cifar.CIFAR10.download"):
        monkeypatch.setattr(f"torchvision.datasets.{target}", refuse)
    with pytest.raises(ValueError, match=r"dataset\.download=True: .* could not be fetched into .*no route"):
        source(root=str(tmp_path), download=True).load()


def cut(content):
    return content[:-100]


def forget_an_image(content):
    return struct.pack(">IIII", 2051, 29, 28, 28) + content[800:]


@pytest.mark.parametrize("damage", [cut, lambda content: b"nonsense", gzip.compress, forget_an_image])
def test_damaged_files_are_named(damage, tmp_path):
    write_idx(tmp_path / "MNIST" / "raw", images(30, 28, 28), images(20, 28, 28))
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"MNIST/raw could not be read"):
        Mnist(root=str(tmp_path), public=12, test=5).load()


def test_labels_outside_the_classes_are_refused(tmp_path):
    train = images(30, 28, 28)
    train[1][3] = 10
    write_idx(tmp_path / "MNIST" / "raw", train, images(20, 28, 28))
    with pytest.raises(ValueError, match=r"labels outside 0\.\.9"):
        Mnist(root=str(tmp_path), public=12, test=5).load()
