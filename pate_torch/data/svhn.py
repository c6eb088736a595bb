"""SVHN: house numbers; the training (and extra) images private, test images 10,000 public and 16,032 for testing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy.io
import torch
from torch import Tensor
from torchvision import datasets

from pate_torch.core import checks
from pate_torch.data import benchmark, locations
from pate_torch.types import Dataset

_SIZES = {"train": 73_257, "extra": 531_131}


@dataclass(frozen=True, kw_only=True)
class Svhn:
    """32x32 color digits from ``train_32x32.mat``, ``test_32x32.mat`` and, with ``extra``, ``extra_32x32.mat``.

    Downloads are checked by torchvision; files already there are read as they are.

    Attributes:
        name: Declared name.
        path: The folder that holds the files.
        root: The same, where ``path`` is None.
        download: Whether to fetch missing files.
        extra: Whether the 531,131 easier images follow the 73,257 of the training file, as in PATE (604,388).
        private: The first so many private images; None: all.
        public: The first so many test images.
        test: The test images after these.

    Source: Netzer et al. 2011; the split of Papernot et al. 2017 (arXiv 1610.05755, section 4).
    """

    name: str = "svhn"
    path: str | None = None
    root: str | None = None
    download: bool = False
    extra: bool = False
    private: int | None = None
    public: int = 10_000
    test: int = 16_032

    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        checks.boolean("dataset.download", self.download)
        checks.boolean("dataset.extra", self.extra)
        benchmark.check_counts(self.public, self.test, self.private)

    @property
    def splits(self) -> tuple[str, ...]:
        """The files of the private side."""
        return ("train", "extra") if self.extra else ("train",)

    @property
    def size(self) -> int:
        """Number of images these hold, as published."""
        return sum(_SIZES[split] for split in self.splits)

    def load(self) -> Dataset:
        parts = [self._part(split) for split in self.splits]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True)) if self.extra else parts[0]
        held = benchmark.held_out(*self._part("test"), self.public, self.test)
        return benchmark.assemble(
            name=self.name,
            class_names=self.classes,
            private=(x[: self.private], y[: self.private]),
            held=held,
            nominal_size=self.private or self.size,
        )

    def _part(self, split: str) -> tuple[Tensor, Tensor]:
        where = locations.folder(self.path, self.root)
        url, file, md5 = datasets.SVHN.split_list[split]

        def open_() -> tuple[Tensor, Tensor]:
            if self.download:
                datasets.utils.download_url(url, str(where), file, md5)
            return _matlab(where / file)

        return benchmark.read(self.name, where, self.download, 10, open_)


def _matlab(path: Path) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, 32, 32] and int64 [N] from X [32, 32, 3, N] and y [N, 1], where the file calls the digit 0 ten."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name}")  # scipy's own error for it is about file-like objects
    content = scipy.io.loadmat(path, variable_names=["X", "y"])
    x = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
    return torch.from_numpy(x), torch.from_numpy(content["y"].astype(np.int64).ravel() % 10)
