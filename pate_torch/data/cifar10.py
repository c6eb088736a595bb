"""CIFAR-10: 50,000 training images private; test images in file order 9,000 public and 1,000 for testing."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets

from pate_torch.data.benchmark import ImageBenchmark


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and plain containers, nothing that could run code: the files come from anywhere."""

    allowed_globals: ClassVar[set[tuple[str, str]]] = {
        *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed_globals:
            raise pickle.UnpicklingError(f"refuses to load {module}.{name}")
        return super().find_class(module, name)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImageBenchmark):
    """32x32 color photographs in the pickled batches of ``cifar-10-batches-py``.

    Downloads are checked by torchvision; files already there are read as they are.

    Source: Krizhevsky 2009.
    """

    name: str = "cifar10"

    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    sizes: ClassVar[Mapping[str, int]] = {"train": 50_000}

    def _get_folder(self, root: Path) -> Path:
        return root / datasets.CIFAR10.base_folder

    def _read_split(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        if self.download:
            datasets.CIFAR10(str(root), download=True)
        files = datasets.CIFAR10.train_list if split == "train" else datasets.CIFAR10.test_list
        return _read_batches([self._get_folder(root) / name for name, _ in files])


def _read_batches(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, 32, 32] and int64 [N], the batches one after another."""
    entries = [_ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load() for path in paths]
    x = np.concatenate([entry[b"data"] for entry in entries]).reshape(-1, 3, 32, 32)
    y = np.concatenate([np.asarray(entry[b"labels"], dtype=np.int64) for entry in entries])
    return torch.from_numpy(x), torch.from_numpy(y)
