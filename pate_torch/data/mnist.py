"""MNIST: 60,000 training images private; 9,000 test images public and 1,000 for testing, as in PATE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor
from torchvision import datasets

from pate_torch.data.benchmark import ImageBenchmark


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageBenchmark):
    """28x28 gray digits from ``MNIST/raw``.

    Source: LeCun, Cortes, Burges; the split of Papernot et al. 2017 (arXiv 1610.05755, section 4).
    """

    name: str = "mnist"

    reader: ClassVar[type[datasets.MNIST]] = datasets.MNIST
    sizes: ClassVar[Mapping[str, int]] = {"train": 60_000}

    def _get_folder(self, root: Path) -> Path:
        return root / self.reader.__name__ / "raw"

    def _read_split(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        data = self.reader(str(root), train=split == "train", download=self.download)
        return data.data[:, None], data.targets.long()
