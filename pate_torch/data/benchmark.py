"""Common parts of the public image benchmarks: one fixed split, public normalization, one error if missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.data import locations
from pate_torch.data.base import DatasetSource, SourceFacts, assemble_dataset
from pate_torch.privacy.records import FROM_DATASET_CODE, Dataset, Evaluation, PrivateRecords, PublicPool
from pate_torch.privacy.unit_ids import UnitIds, make_position_ids


def check_counts(public: int, test: int, private: int | None = None) -> None:
    """Refuse sizes of the three parts that are not positive."""
    checks.integer("dataset.public", public, low=1)
    checks.integer("dataset.test", test, low=1)
    if private is not None:
        checks.integer("dataset.private", private, low=1)


def split_public_test(x: Tensor, y: Tensor, public: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first ``public`` records and the ``test`` after them, in file order: pool x, pool y, test x, test y."""
    if public + test > len(y):
        raise checks.error(
            "dataset.public + dataset.test",
            public + test,
            f"must be at most {len(y)}, the size of the held-out part",
            "Lower dataset.public or dataset.test.",
        )
    return x[:public], y[:public], x[public : public + test], y[public : public + test]


def assemble(
    *,
    name: str,
    class_names: tuple[str, ...],
    private: tuple[Tensor, Tensor],
    public_test: tuple[Tensor, Tensor, Tensor, Tensor],
    nominal_size: int,
    unit_id: UnitIds | None = None,
) -> Dataset:
    """A benchmark's Dataset from uint8 images and int64 labels; unit ids are positions in the original file."""
    x, y = private
    pool_x, pool_y, test_x, test_y = public_test
    unit_id = make_position_ids(len(y)) if unit_id is None else unit_id
    return assemble_dataset(
        PrivateRecords.from_rows(x, y, unit_id, num_classes=len(class_names)),
        PublicPool(pool_x),
        Evaluation(test_x, test_y, pool_y),
        name=name,
        class_names=class_names,
        nominal_size=nominal_size,
        origin=FROM_DATASET_CODE,
        benchmark=True,
    )


@dataclass(frozen=True, kw_only=True)
class Benchmark(DatasetSource):
    """Public data in three parts of fixed sizes.

    Attributes:
        name: Declared name.
        private: Number of private records; None: all that the private part holds.
        public: Number of public points.
        test: Number of test records.
    """

    name: str
    private: int | None = None
    public: int = 9000
    test: int = 1000

    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        check_counts(self.public, self.test, self.private)

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name for each class."""
        return self.classes

    @property
    def size(self) -> int:
        """Number of records of the private part, as published."""
        raise NotImplementedError

    def declared_facts(self) -> SourceFacts:
        return SourceFacts(
            name=self.name,
            num_classes=len(self.class_names),
            num_private=self.private or self.size,
            num_public=self.public,
            is_benchmark=True,
        )


@dataclass(frozen=True, kw_only=True)
class ImageBenchmark(Benchmark):
    """Files of a public benchmark: the training files are private, the first test images the pool, the next the test.

    Attributes:
        path: The folder that holds the files.
        root: The same, where ``path`` is None.
        download: Whether to fetch missing files.

    Raises:
        ValueError: The files are not there; it names the folder and ``dataset.download=true``.
    """

    path: str | None = None
    root: str | None = None
    download: bool = False

    sizes: ClassVar[Mapping[str, int]]
    """Number of images of each training file, as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("dataset.download", self.download)

    @property
    def splits(self) -> tuple[str, ...]:
        """The files of the private side."""
        return ("train",)

    @property
    def size(self) -> int:
        """Number of images of the training files, as published."""
        return sum(self.sizes[split] for split in self.splits)

    def declared_facts(self) -> SourceFacts:
        return replace(super().declared_facts(), root=self.root)

    def _get_folder(self, root: Path) -> Path:
        """The folder of the files, for messages."""
        return root

    def _read_split(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Images and labels of one file, fetched where ``download`` says so."""
        raise NotImplementedError

    def load(self) -> Dataset:
        parts = [self._load_split(split) for split in self.splits]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
        return assemble(
            name=self.name,
            class_names=self.classes,
            private=(x[: self.private], y[: self.private]),
            public_test=split_public_test(*self._load_split("test"), self.public, self.test),
            nominal_size=self.private or self.size,
        )

    def _load_split(self, split: str) -> tuple[Tensor, Tensor]:
        """Images and labels of one file.

        Raises:
            ValueError: Files that are missing (it names the switch), unreadable or could not be fetched.
        """
        root = locations.get_benchmark_folder(self.path, self.root)
        folder = self._get_folder(root)
        try:
            x, y = self._read_split(root, split)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise locations.missing_data_error(self.name, folder, str(error)) from error
        except (RuntimeError, OSError) as error:
            if self.download:
                raise checks.error(
                    "dataset.download",
                    True,
                    f"{self.name} could not be fetched into {folder.absolute()} ({error})",
                    "Check the network, or put the files there by hand.",
                ) from error
            if "not found" in str(error):
                raise locations.missing_data_error(self.name, folder) from error
            raise self._unreadable_error(folder, repr(error)) from error
        except Exception as error:  # each parser has errors of its own for damaged files (zlib, pickle, MATLAB, ...)
            raise self._unreadable_error(folder, repr(error)) from error
        if len(x) != len(y) or len(y) == 0:
            raise self._unreadable_error(folder, f"{len(x)} images, {len(y)} labels")
        if int(y.min()) < 0 or int(y.max()) >= len(self.classes):
            raise self._unreadable_error(folder, f"labels outside 0..{len(self.classes) - 1}")
        return x, y

    def _unreadable_error(self, folder: Path, reason: str) -> ValueError:
        """The error of files that are there but are not what they should be."""
        return checks.error(
            "dataset.name",
            self.name,
            f"its files in {folder.absolute()} could not be read ({reason})",
            "Remove them and fetch them anew with dataset.download=true.",
        )
