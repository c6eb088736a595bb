"""Public benchmarks: the base class of those with parts of fixed sizes, and the digits that scikit-learn ships."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.data.base import DatasetSource, SourceFacts, assemble_dataset, check_name
from pate_torch.privacy.records import FROM_DATASET_CODE, Dataset, Evaluation, PrivateRecords, PublicPool
from pate_torch.privacy.unit_ids import UnitIds, make_position_ids

LabeledImages = tuple[Tensor, Tensor]
"""Images, uint8 [N, Ch, H, W], and labels, int64 [N]."""

_NUM_DIGITS = 1797
_SPLIT_SEED = 0  # fixed: a record that is public under one run's seed must not be private under another's


@dataclass(frozen=True, kw_only=True)
class Benchmark(DatasetSource):
    """Public data in three parts of fixed sizes.

    Attributes:
        name: Declared name.
        private: Number of private records, or None to take the whole private part.
        public: Number of public points.
        test: Number of test records.
    """

    name: str
    private: int | None = None
    public: int = 9000
    test: int = 1000

    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def __post_init__(self) -> None:
        check_name(self.name)
        for key in ("private", "public", "test"):
            if getattr(self, key) is not None or key != "private":
                checks.integer(f"dataset.{key}", getattr(self, key), low=1)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class."""
        return self.classes

    @property
    def num_private(self) -> int | None:
        """Number of private records, as published."""
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
        """Build the Dataset of the three parts. Unit ids default to the positions in the private part."""
        unit_id = make_position_ids(len(private[1])) if unit_id is None else unit_id
        return assemble_dataset(
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
        order = rng.make_numpy_generator(_SPLIT_SEED, "digits", "split").permutation(_NUM_DIGITS)
        private, public, test, _ = np.split(order, np.cumsum([self.private, self.public, self.test]))
        private = np.sort(private)  # file order, so that unit ids can be the positions in the original file
        unit_id = make_position_ids(private)
        return self.assemble((x[private], y[private]), (x[public], y[public]), (x[test], y[test]), unit_id)
