"""A data set of tensors in memory, for tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from pate_torch.data.base import DatasetSource, SourceFacts, assemble_dataset, check_name
from pate_torch.data.tensors import build_private_data, parse_labels, parse_points
from pate_torch.privacy.records import Dataset, Evaluation, PublicPool


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tensors(DatasetSource):
    """Private records, public points and test records, read as ``PATE`` reads them."""

    name: str
    x: Tensor
    y: Tensor
    pool_x: Tensor
    test_x: Tensor
    test_y: Tensor
    class_names: Sequence[str] | int
    pool_y: Tensor | None = None
    unit_id: Sequence[str] | np.ndarray | None = None
    unit: str = "record"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    benchmark: bool = False
    nominal_size: int | None = None

    def __post_init__(self):
        check_name(self.name)

    def declared_facts(self):
        return SourceFacts(
            name=self.name,
            num_classes=len(self._class_names),
            num_private=self.nominal_size,
            num_public=len(self.pool_x),
            is_benchmark=self.benchmark,
        )

    @property
    def _class_names(self):
        names = range(self.class_names) if isinstance(self.class_names, int) else self.class_names
        return tuple(map(str, names))

    def load(self) -> Dataset:
        classes = self._class_names
        private = build_private_data(self.x, self.y, self.unit_id, self.unit, classes, public_x=self.pool_x)
        pool_x, test_x = parse_points("pool_x", self.pool_x), parse_points("test_x", self.test_x)
        test_y = parse_labels("test_y", self.test_y, len(test_x), len(classes))
        pool_y = None if self.pool_y is None else parse_labels("pool_y", self.pool_y, len(pool_x), len(classes))
        data = assemble_dataset(
            private,
            PublicPool(pool_x),
            Evaluation(test_x, test_y, pool_y),
            name=self.name,
            class_names=classes,
            benchmark=self.benchmark,
            nominal_size=self.nominal_size,
        )
        if self.mean is None or self.std is None:
            return data
        return replace(data, spec=replace(data.spec, mean=tuple(self.mean), std=tuple(self.std)))
