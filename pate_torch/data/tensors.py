"""Data already in memory, for the Python API and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pate_torch import checks
from pate_torch.data import benchmark, locations, roles, units
from pate_torch.types import Dataset, DataSpec, Evaluation, PrivateData, PublicPool


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tensors:
    """x, y: the private side; pool_x: public points; test_x, test_y: for measuring; pool_y: the pool's truth, if known.

    x, pool_x, test_x: uint8 images [*, Ch, H, W] or float rows [*, D] (kept as float32). y: integers in 0..C-1.
    class_names: all classes, declared (never read off y, which is private); an integer C names them 0..C-1.
    unit_id: stable names [N] of the privacy units; None names a record by a hash of its content, and equal records
    are one unit. unit: "record" or "group:<what>". mean, std: constants per channel or feature; None: the pool's.
    """

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

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        if (self.mean is None) != (self.std is None):
            raise checks.fail("std", self.std, "must be given together with mean")

    def __repr__(self) -> str:
        return f"Tensors({self.name!r}, content withheld)"

    def load(self) -> Dataset:
        names = self.class_names
        classes = tuple(map(str, range(names))) if isinstance(names, int) else tuple(map(str, names))
        if len(classes) < 2:
            raise checks.fail("class_names", names, "must list at least two classes")
        x, pool_x, test_x = (_points(key, getattr(self, key)) for key in ("x", "pool_x", "test_x"))
        for key, points in (("pool_x", pool_x), ("test_x", test_x)):
            if points.shape[1:] != x.shape[1:] or points.dtype != x.dtype:
                raise checks.fail(key, tuple(points.shape), f"must have points like x, {tuple(x.shape[1:])} {x.dtype}")
        y = _labels("y", self.y, len(x), len(classes))
        test_y = _labels("test_y", self.test_y, len(test_x), len(classes))
        pool_y = None if self.pool_y is None else _labels("pool_y", self.pool_y, len(pool_x), len(classes))
        mean, std = self._normalisation(pool_x)
        return Dataset(
            spec=DataSpec(
                name=self.name,
                num_classes=len(classes),
                input_shape=tuple(x.shape[1:]),
                class_names=classes,
                mean=mean,
                std=std,
                benchmark=self.benchmark,
                nominal_size=self.nominal_size,
            ),
            private=PrivateData(x, y, self._units(x, y), self.unit),
            pool=PublicPool(pool_x),
            evaluation=Evaluation(test_x, test_y, pool_y),
        )

    def _normalisation(self, pool_x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.mean is not None and self.std is not None:
            return tuple(map(float, self.mean)), tuple(map(float, self.std))
        return benchmark.channel_statistics(pool_x) if pool_x.dim() == 4 else roles.feature_statistics(pool_x)

    def _units(self, x: Tensor, y: Tensor) -> np.ndarray:
        if self.unit_id is None:
            pairs = zip(x.numpy(), y.tolist(), strict=True)
            return np.array([units.content_id((point.tobytes(), str(label).encode())) for point, label in pairs])
        if len(self.unit_id) != len(y):
            raise checks.fail("unit_id", f"{len(self.unit_id)} names", f"must be one for each of the {len(y)} records")
        return np.asarray(self.unit_id).astype(str)


def _points(key: str, value: Tensor) -> Tensor:
    x = torch.as_tensor(value).detach().cpu()
    if x.dim() == 2 and x.dtype.is_floating_point:
        x = x.to(torch.float32)
        if not bool(x.isfinite().all()):
            raise checks.fail(key, tuple(x.shape), "must be finite", "Remove NaN and infinity.")
    elif not (x.dim() == 4 and x.dtype == torch.uint8):
        raise checks.fail(key, f"{tuple(x.shape)} {x.dtype}", "must be uint8 images [*, Ch, H, W] or float rows [*, D]")
    if len(x) == 0:
        raise checks.fail(key, tuple(x.shape), "must have at least one point")
    return x.contiguous()


def _labels(key: str, value: Tensor, count: int, classes: int) -> Tensor:
    y = torch.as_tensor(value).detach().cpu()
    if y.dim() != 1 or len(y) != count or y.dtype.is_floating_point or y.dtype in (torch.bool, torch.complex64):
        raise checks.fail(key, f"{tuple(y.shape)} {y.dtype}", f"must be {count} integers, one for each point")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise checks.fail(key, "labels", f"must lie in 0..{classes - 1}", "class_names must list every class.")
    return y.long()
