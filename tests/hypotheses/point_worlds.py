"""Data sets of a few points, for the tests of problems and students."""

import numpy as np
import torch

from pate_torch.privacy.partition import DatasetFacts, ReplaceOne
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, PrivateRecords, PublicPool


def data_of(x, y, num_classes=2, *, shape=None, units=None, unit="record"):
    """Private records x [n, D] with labels y, and forty public points."""
    shape = shape or (x.shape[1],)
    spec = DataSpec(
        name="points", num_classes=num_classes, input_shape=shape, class_names=tuple(map(str, range(num_classes))),
        mean=(0.5,) * shape[0], std=(0.3,) * shape[0],
    )  # fmt: skip
    pool = torch.rand(40, *shape, generator=torch.Generator().manual_seed(1))
    ids = np.array(units) if units else np.arange(len(y)).astype(str)
    x = torch.as_tensor(x, dtype=torch.float32).reshape(len(y), *shape)
    private = PrivateRecords.from_rows(x, torch.as_tensor(y), ids, unit)
    return Dataset(spec, private, PublicPool(pool), Evaluation(pool, torch.zeros(40, dtype=torch.int64)))


def facts_of(data):
    return DatasetFacts.from_dataset(data, ReplaceOne())
