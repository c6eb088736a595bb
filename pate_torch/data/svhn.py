"""SVHN: house numbers; the training (and extra) images private, test images 10,000 public and 16,032 for testing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy.io
import torch
from torch import Tensor
from torchvision import datasets

from pate_torch.core import checks
from pate_torch.data.benchmark import ImageBenchmark


@dataclass(frozen=True, kw_only=True)
class Svhn(ImageBenchmark):
    """32x32 color digits from ``train_32x32.mat``, ``test_32x32.mat`` and, with ``extra``, ``extra_32x32.mat``.

    Downloads are checked by torchvision; files already there are read as they are.

    Attributes:
        extra: Whether the 531,131 easier images follow the 73,257 of the training file, as in PATE (604,388).

    Source: Netzer et al. 2011; the split of Papernot et al. 2017 (arXiv 1610.05755, section 4).
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

    def _read_split(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        url, file, md5 = datasets.SVHN.split_list[split]
        if self.download:
            datasets.utils.download_url(url, str(root), file, md5)
        return _read_matlab(root / file)


def _read_matlab(path: Path) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, 32, 32] and int64 [N] from X [32, 32, 3, N] and y [N, 1], where the file calls the digit 0 ten."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name}")  # scipy's own error for it is about file-like objects
    content = scipy.io.loadmat(path, variable_names=["X", "y"])
    x = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
    return torch.from_numpy(x), torch.from_numpy(content["y"].astype(np.int64).ravel() % 10)
