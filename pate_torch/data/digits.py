"""8x8 handwritten digits embedded in scikit-learn: 1,797 real records, no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits

from pate_torch.core import checks, rng
from pate_torch.data import benchmark
from pate_torch.privacy.records import Dataset
from pate_torch.privacy.unit_ids import make_position_ids

_NUM_RECORDS = 1797
_SPLIT_SEED = 0  # fixed: a record that is public under one run's seed must not be private under another's


@dataclass(frozen=True, kw_only=True)
class Digits(benchmark.Benchmark):
    """1,100 private, 450 public and 247 test records, drawn once by a fixed permutation of the file's positions.

    Images are uint8 [N, 1, 8, 8], the file's 0..16 scaled to 0..255. Unit ids are positions in the original file.

    Source: UCI Optical Recognition of Handwritten Digits (test part), as shipped by scikit-learn.
    """

    name: str = "digits"
    private: int = 1100
    public: int = 450
    test: int = 247

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private + self.public + self.test > _NUM_RECORDS:
            raise checks.error(
                "dataset.private + public + test",
                self.private + self.public + self.test,
                f"must be at most {_NUM_RECORDS}, the size of the data set",
            )

    def load(self) -> Dataset:
        images, labels = load_digits(return_X_y=True)
        pixels = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        order = rng.make_numpy_generator(_SPLIT_SEED, "digits", "split").permutation(_NUM_RECORDS)
        # The private part first and in file order, so that unit ids can be the positions in the original file.
        private_index = np.sort(order[: self.private])
        other_index = order[self.private :]
        x, y = torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64))
        return benchmark.assemble(
            name=self.name,
            class_names=self.classes,
            private=(x[private_index], y[private_index]),
            public_test=benchmark.split_public_test(x[other_index], y[other_index], self.public, self.test),
            nominal_size=self.private,
            unit_id=make_position_ids(private_index),
        )
