"""Image benchmarks that torchvision reads or fetches: MNIST, Fashion-MNIST, SVHN and CIFAR-10.

The training images are private. The first test images, in file order, are the public pool, and the next ones the test
set, as in PATE (Papernot et al. 2017, arXiv 1610.05755, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torchvision import datasets

from pate_torch.core import checks
from pate_torch.data.base import DATA_ROOT_VARIABLE, SourceFacts, get_data_root
from pate_torch.data.benchmark import Benchmark, LabeledImages
from pate_torch.privacy.records import Dataset


@dataclass(frozen=True, kw_only=True)
class ImageBenchmark(Benchmark):
    """Files of a public image benchmark, as torchvision reads them.

    Attributes:
        path: Folder that holds the files, or None for ``root``.
        root: Data root.
        download: Whether to fetch missing files.
    """

    path: str | None = None
    root: str | None = None
    download: bool = False

    sizes: ClassVar[Mapping[str, int]]
    """Number of images of each training file, as published."""
    folder: ClassVar[str] = ""
    """Folder of the files below the data root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("dataset.download", self.download)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the files whose images are private."""
        return ("train",)

    @property
    def num_private(self) -> int:
        return self.private or sum(self.sizes[split] for split in self.splits)

    def declared_facts(self) -> SourceFacts:
        return replace(super().declared_facts(), root=self.root)

    def load(self) -> Dataset:
        parts = [self._load_split(split) for split in self.splits]
        x, y = (torch.cat(tensors)[: self.private] for tensors in zip(*parts, strict=True))
        test_x, test_y = self._load_split("test")
        end = self.public + self.test
        if end > len(test_y):
            message = f"must be at most {len(test_y)}, the size of the held-out part"
            fix = "Lower dataset.public or dataset.test."
            raise checks.error("dataset.public + dataset.test", end, message, fix)
        public, test = slice(self.public), slice(self.public, end)
        return self.assemble((x, y), (test_x[public], test_y[public]), (test_x[test], test_y[test]))

    def _read_split(self, root: Path, split: str) -> LabeledImages:
        """Read the images and labels of one file, after fetching it if ``download`` is set."""
        raise NotImplementedError

    def _load_split(self, split: str) -> LabeledImages:
        """Read one file. Raise ValueError if it is missing or damaged, or could not be fetched."""
        root = get_data_root(self.path or self.root)
        try:
            x, y = self._read_split(root, split)
            if len(x) != len(y) or len(y) == 0:
                raise ValueError(f"{len(x)} images, {len(y)} labels")
            if int(y.min()) < 0 or int(y.max()) >= len(self.classes):
                raise ValueError(f"labels outside 0..{len(self.classes) - 1}")
        except Exception as error:  # each parser has errors of its own for damaged files (zlib, pickle, MATLAB, ...)
            raise self._make_read_error(error, (root / self.folder).absolute()) from error
        return x, y

    def _make_read_error(self, error: Exception, folder: Path) -> ValueError:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if self.download and isinstance(error, RuntimeError | OSError) and not is_missing:
            message = f"{self.name} could not be fetched into {folder} ({error})"
            return checks.error("dataset.download", True, message, "Check the network, or put the files there by hand.")
        if is_missing or (isinstance(error, RuntimeError) and "not found" in str(error)):
            variable = f"data_root (or the environment variable {DATA_ROOT_VARIABLE})"
            fix = f"Fetch it with dataset.download=true, or set {variable} to the folder that holds it."
            return checks.error("dataset.name", self.name, f"was not found in {folder} ({error})", fix)
        fix = "Remove them and fetch them anew with dataset.download=true."
        return checks.error("dataset.name", self.name, f"its files in {folder} could not be read ({error!r})", fix)


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageBenchmark):
    """28x28 gray digits (LeCun, Cortes, Burges)."""

    name: str = "mnist"

    reader: ClassVar[type[datasets.MNIST]] = datasets.MNIST
    sizes: ClassVar[Mapping[str, int]] = {"train": 60_000}
    folder = "MNIST/raw"

    def _read_split(self, root: Path, split: str) -> LabeledImages:
        data = self.reader(str(root), train=split == "train", download=self.download)
        return data.data[:, None], data.targets.long()


@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """28x28 gray clothes (Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747)."""

    name: str = "fashion_mnist"

    reader: ClassVar[type[datasets.MNIST]] = datasets.FashionMNIST
    folder = "FashionMNIST/raw"
    classes = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@dataclass(frozen=True, kw_only=True)
class Svhn(ImageBenchmark):
    """32x32 color digits of house numbers (Netzer et al. 2011).

    Attributes:
        extra: Whether the 531,131 easier images of ``extra_32x32.mat`` follow the 73,257 of the training file, as in
            PATE (604,388).
    """

    name: str = "svhn"
    extra: bool = False
    public: int = 10_000
    test: int = 16_032

    sizes: ClassVar[Mapping[str, int]] = {"train": 73_257, "extra": 531_131}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("dataset.extra", self.extra)

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "extra") if self.extra else ("train",)

    def _read_split(self, root: Path, split: str) -> LabeledImages:
        data = datasets.SVHN(str(root), split, download=self.download)
        return torch.from_numpy(data.data).contiguous(), torch.from_numpy(data.labels)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImageBenchmark):
    """32x32 color photographs (Krizhevsky 2009). The pickled files are opened only if their checksums are right."""

    name: str = "cifar10"

    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    sizes: ClassVar[Mapping[str, int]] = {"train": 50_000}
    folder = datasets.CIFAR10.base_folder

    def _read_split(self, root: Path, split: str) -> LabeledImages:
        data = datasets.CIFAR10(str(root), train=split == "train", download=self.download)
        return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)
