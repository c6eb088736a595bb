"""Public benchmarks: the digits that scikit-learn ships, and MNIST, Fashion-MNIST, SVHN and CIFAR-10.

The training images of the four benchmarks that torchvision reads are private. The first test images, in file order, are
the public pool, and the next ones the test set, as in PATE (Papernot et al. 2017, arXiv 1610.05755, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.data import base
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.privacy.records import FROM_DATASET_CODE, Dataset, Evaluation, PrivateRecords, PublicPool
from pate_torch.privacy.unit_ids import UnitIds, make_position_ids

LabeledImages = tuple[Tensor, Tensor]
"""Images, uint8 [N, Ch, H, W], and labels, int64 [N]."""

_NUM_DIGITS = 1797


@dataclass(frozen=True, kw_only=True)
class Benchmark(DatasetSource):
    """A public benchmark, divided into private, public and test records. ``private`` is None for all in the files."""

    name: str
    private: int | None = None
    public: int = 9000
    test: int = 1000

    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def __post_init__(self) -> None:
        base.check_name(self.name)
        checks.optional(checks.integer, "dataset.private", self.private, low=1)
        for key in ("public", "test"):
            checks.integer(f"dataset.{key}", getattr(self, key), low=1)

    @property
    def num_private(self) -> int | None:
        """Number of private records, which is public. None if it is not known before the files are read."""
        return self.private

    def declared_facts(self) -> SourceFacts:
        return SourceFacts(
            name=self.name,
            num_classes=len(self.class_names),
            num_private=self.num_private,
            num_public=self.public,
            is_benchmark=True,
        )

    def assemble(
        self, private: LabeledImages, public: LabeledImages, test: LabeledImages, unit_id: UnitIds | None = None
    ) -> Dataset:
        """Build the Dataset. If ``unit_id`` is None, unit ids are the positions of the private records."""
        unit_id = make_position_ids(len(private[1])) if unit_id is None else unit_id
        return base.assemble_dataset(
            PrivateRecords.from_rows(*private, unit_id, num_classes=len(self.class_names)),
            PublicPool(public[0]),
            Evaluation(*test, pool_y=public[1]),
            name=self.name,
            class_names=self.class_names,
            nominal_size=self.num_private,
            classes_origin=FROM_DATASET_CODE,
            size_origin=FROM_DATASET_CODE,
            benchmark=True,
        )


@dataclass(frozen=True, kw_only=True)
class Digits(Benchmark):
    """8x8 handwritten digits: 1,797 real records that come with scikit-learn, split by a fixed permutation.

    Images are uint8 [N, 1, 8, 8], with the file's 0..16 scaled to 0..255. Unit ids are positions in the original file.

    Source: UCI Optical Recognition of Handwritten Digits (test part).
    """

    name: str = "digits"
    private: int = 1100
    public: int = 450
    test: int = 247

    def __post_init__(self) -> None:
        super().__post_init__()
        total = checks.integer("dataset.private", self.private) + self.public + self.test
        if total > _NUM_DIGITS:
            message = f"must be at most {_NUM_DIGITS}, the size of the data set"
            raise checks.error("dataset.private + public + test", total, message)

    def load(self) -> Dataset:
        images, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8))
        y = torch.from_numpy(labels.astype(np.int64))
        # The seed is a constant, because a record that is public in one run must not be private in another run.
        order = rng.make_numpy_generator(0, "digits", "split").permutation(_NUM_DIGITS)
        private, public, test, _ = np.split(order, np.cumsum([self.private, self.public, self.test]))
        private = np.sort(private)  # file order, so that unit ids can be the positions in the original file
        unit_id = make_position_ids(private)
        return self.assemble((x[private], y[private]), (x[public], y[public]), (x[test], y[test]), unit_id)


@dataclass(frozen=True, kw_only=True)
class ImageBenchmark(Benchmark):
    """A public image benchmark whose files torchvision reads from the folder ``path``, or from ``root`` if None."""

    path: str | None = None
    root: str | None = None
    download: bool = False

    reader: ClassVar[str]
    """Name of the class in ``torchvision.datasets`` that reads the files."""
    train_size: ClassVar[int]
    """Number of images of the training file, as published."""
    folder: ClassVar[str] = ""
    """Folder of the files below the data root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("dataset.download", self.download)

    @property
    def private_sizes(self) -> Mapping[str, int]:
        """Number of images in each file of private images."""
        return {"train": self.train_size}

    @property
    def num_private(self) -> int:
        return self.private or sum(self.private_sizes.values())

    def declared_facts(self) -> SourceFacts:
        return replace(super().declared_facts(), root=self.root)

    def load(self) -> Dataset:
        parts = [self._load_split(split) for split in self.private_sizes]
        x, y = (torch.cat(tensors)[: self.private] for tensors in zip(*parts, strict=True))
        test_x, test_y = self._load_split("test")
        end = self.public + self.test
        if end > len(test_y):
            message = f"must be at most {len(test_y)}, the number of test images"
            raise checks.error("dataset.public + dataset.test", end, message, "Lower dataset.public or dataset.test.")
        public, test = slice(self.public), slice(self.public, end)
        return self.assemble((x, y), (test_x[public], test_y[public]), (test_x[test], test_y[test]))

    def _read_split(self, root: Path, split: str) -> LabeledImages:
        from torchvision import datasets  # imported here, because the import takes a second

        data = getattr(datasets, self.reader)(str(root), train=split == "train", download=self.download)
        x = torch.as_tensor(data.data)
        return x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous(), torch.as_tensor(data.targets).long()

    def _load_split(self, split: str) -> LabeledImages:
        """Read and check one file. Raise ValueError if the file is missing or damaged, or its download fails."""
        root = base.get_data_root(self.path or self.root)
        try:
            x, y = self._read_split(root, split)
            if len(x) != len(y) or len(y) == 0:
                raise ValueError(f"{len(x)} images, {len(y)} labels")
            if int(y.min()) < 0 or int(y.max()) >= len(self.class_names):
                raise ValueError(f"labels outside 0..{len(self.class_names) - 1}")
        except Exception as error:  # each parser raises other errors for damaged files (zlib, pickle, MATLAB, ...)
            folder = (root / self.folder).absolute()
            if self.download and isinstance(error, RuntimeError | OSError):
                message = f"{self.name} could not be downloaded to {folder} ({error})"
                raise checks.error("dataset.download", True, message, "Check the network.") from error
            fix = "Set data_root (or the environment variable PATE_DATA) to the folder that holds the files, "
            fix += "or remove damaged files and set dataset.download=true."
            message = f"could not be read from {folder} ({error!r})"
            raise checks.error("dataset.name", self.name, message, fix) from error
        return x, y


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageBenchmark):
    """28x28 gray digits (LeCun, Cortes, Burges)."""

    name: str = "mnist"

    reader, folder, train_size = "MNIST", "MNIST/raw", 60_000


@dataclass(frozen=True, kw_only=True)
class FashionMnist(ImageBenchmark):
    """28x28 gray clothes (Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747)."""

    name: str = "fashion_mnist"

    reader, folder, train_size = "FashionMNIST", "FashionMNIST/raw", 60_000
    class_names = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@dataclass(frozen=True, kw_only=True)
class Svhn(ImageBenchmark):
    """32x32 color digits of house numbers (Netzer et al. 2011).

    Attributes:
        extra: Whether the private records are the 73,257 training images and the 531,131 easier images of
            ``extra_32x32.mat``, as in PATE (604,388 in total). If False, only the training images are used.
    """

    name: str = "svhn"
    extra: bool = True
    public: int = 10_000
    test: int = 16_032

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("dataset.extra", self.extra)

    @property
    def private_sizes(self) -> Mapping[str, int]:
        return {"train": 73_257} | ({"extra": 531_131} if self.extra else {})

    def load(self) -> Dataset:
        root = base.get_data_root(self.path or self.root)
        if self.extra and not self.download and not (root / "extra_32x32.mat").is_file():
            problem = f"needs extra_32x32.mat, which could not be read from {root.absolute()}"
            fix = "Set dataset.extra=false to use the 73,257 training images alone, data_root to the folder that holds "
            fix += "the file, or dataset.download=true to download it (1.3 GB)."
            raise checks.error("dataset.extra", True, problem, fix)
        return super().load()

    def _read_split(self, root: Path, split: str) -> LabeledImages:
        from torchvision import datasets

        data = datasets.SVHN(str(root), split, download=self.download)
        return torch.from_numpy(data.data).contiguous(), torch.from_numpy(data.labels)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImageBenchmark):
    """32x32 color photographs (Krizhevsky 2009). The checksum of a pickled file is verified before it is opened."""

    name: str = "cifar10"

    reader, folder, train_size = "CIFAR10", "cifar-10-batches-py", 50_000
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
