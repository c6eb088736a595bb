"""MNIST: 60,000 training images private; 9,000 test images public and 1,000 for testing, as in PATE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torchvision import datasets

from pate_torch.core import checks
from pate_torch.data import benchmark, locations
from pate_torch.types import Dataset


@dataclass(frozen=True, kw_only=True)
class Mnist:
    """28x28 grey digits: the training file is private, the first ``public`` test images the pool, the next the test.

    Attributes:
        name: Declared name.
        path: The folder that holds ``MNIST/raw``.
        root: The same, where ``path`` is None.
        download: Whether to fetch missing files.
        private: The first so many training images; None: all.
        public: The first so many test images.
        test: The test images after these.

    Raises:
        ValueError: The files are not there; it names the folder and ``dataset.download=true``.

    Source: LeCun, Cortes, Burges; the split of Papernot et al. 2017 (arXiv 1610.05755, section 4).
    """

    name: str = "mnist"
    path: str | None = None
    root: str | None = None
    download: bool = False
    private: int | None = None
    public: int = 9000
    test: int = 1000

    reader: ClassVar[type[datasets.MNIST]] = datasets.MNIST
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    size: ClassVar[int] = 60_000

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        checks.boolean("dataset.download", self.download)
        benchmark.check_counts(self.public, self.test, self.private)

    def load(self) -> Dataset:
        x, y = self._part(train=True)
        held = benchmark.held_out(*self._part(train=False), self.public, self.test)
        return benchmark.assemble(
            name=self.name,
            class_names=self.classes,
            private=(x[: self.private], y[: self.private]),
            held=held,
            nominal_size=self.private or self.size,
        )

    def _part(self, *, train: bool) -> tuple[Tensor, Tensor]:
        where = locations.folder(self.path, self.root)
        raw = where / self.reader.__name__ / "raw"

        def open_() -> tuple[Tensor, Tensor]:
            data = self.reader(str(where), train=train, download=self.download)
            return data.data[:, None], data.targets.long()

        return benchmark.read(self.name, raw, self.download, len(self.classes), open_)
