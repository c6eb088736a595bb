"""CIFAR-10: 50,000 training images private; test images in file order 9,000 public and 1,000 for testing."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets

from pate_torch.core import checks
from pate_torch.data import benchmark, locations
from pate_torch.types import Dataset


class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays and plain containers, nothing that could run code: the files come from anywhere."""

    allowed: ClassVar[set[tuple[str, str]]] = {
        *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"refuses to load {module}.{name}")
        return super().find_class(module, name)


@dataclass(frozen=True, kw_only=True)
class Cifar10:
    """32x32 color photographs in the pickled batches of ``cifar-10-batches-py``.

    Downloads are checked by torchvision; files already there are read as they are.

    Attributes:
        name: Declared name.
        path: The folder that holds ``cifar-10-batches-py``.
        root: The same, where ``path`` is None.
        download: Whether to fetch missing files.
        private: The first so many training images; None: all.
        public: The first so many test images.
        test: The test images after these.

    Source: Krizhevsky 2009.
    """

    name: str = "cifar10"
    path: str | None = None
    root: str | None = None
    download: bool = False
    private: int | None = None
    public: int = 9000
    test: int = 1000

    classes: ClassVar[tuple[str, ...]] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    size: ClassVar[int] = 50_000

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        checks.boolean("dataset.download", self.download)
        benchmark.check_counts(self.public, self.test, self.private)

    def load(self) -> Dataset:
        x, y = self._part(datasets.CIFAR10.train_list)
        held = benchmark.held_out(*self._part(datasets.CIFAR10.test_list), self.public, self.test)
        return benchmark.assemble(
            name=self.name,
            class_names=self.classes,
            private=(x[: self.private], y[: self.private]),
            held=held,
            nominal_size=self.private or self.size,
        )

    def _part(self, files: list[list[str]]) -> tuple[Tensor, Tensor]:
        where = locations.folder(self.path, self.root)
        batches = where / datasets.CIFAR10.base_folder

        def open_() -> tuple[Tensor, Tensor]:
            if self.download:
                datasets.CIFAR10(str(where), download=True)
            return _batches([batches / name for name, _ in files])

        return benchmark.read(self.name, batches, self.download, len(self.classes), open_)


def _batches(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, 32, 32] and int64 [N], the batches one after another."""
    entries = [_ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load() for path in paths]
    x = np.concatenate([entry[b"data"] for entry in entries]).reshape(-1, 3, 32, 32)
    y = np.concatenate([np.asarray(entry[b"labels"], dtype=np.int64) for entry in entries])
    return torch.from_numpy(x), torch.from_numpy(y)
