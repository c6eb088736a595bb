"""Data already in memory, for the Python API and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.data import benchmark, locations, roles
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.privacy import units
from pate_torch.privacy.records import (
    CLASSES,
    FROM_OWNER,
    FROM_PUBLIC_POINTS,
    NORMALIZATION_CONSTANTS,
    Dataset,
    DataSpec,
    Evaluation,
    PrivateRecords,
    PublicPool,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tensors(DatasetSource):
    """A data set of tensors: the private side (x, y), public points, and labels for measuring.

    Images are uint8 [*, Ch, H, W], feature rows float [*, D] (kept as float32).

    Attributes:
        name: Declared name.
        x: Private records.
        y: Their labels, integers in 0..C-1.
        pool_x: Public points.
        test_x: Test records.
        test_y: Their labels.
        class_names: All classes, declared (never read off y, which is private); an integer C names them 0..C-1.
        pool_y: The pool's truth, if known.
        unit_id: Stable names [N] of the privacy units; None names a record by a hash of its content, and equal records
            are one unit.
        unit: "record" or "group:<what>".
        mean: Constants per channel or feature; None: the pool's.
        std: Likewise.
        benchmark: Whether the records are public data: accuracies on the private side are then shown.
        nominal_size: Publicly declared approximate number of private records.
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
            raise checks.error("std", self.std, "must be given together with mean")

    def __repr__(self) -> str:
        return f"Tensors({self.name!r}, content withheld)"

    def declared_facts(self) -> SourceFacts:
        return SourceFacts(
            name=self.name,
            num_classes=self.class_names if isinstance(self.class_names, int) else len(self.class_names),
            num_private=self.nominal_size,
            num_public=len(self.pool_x),
            is_benchmark=self.benchmark,
        )

    def load(self) -> Dataset:
        names = self.class_names
        classes = tuple(map(str, range(names))) if isinstance(names, int) else tuple(map(str, names))
        if len(classes) < 2:
            raise checks.error("class_names", names, "must list at least two classes")
        private, drop_counts = build_private_data(self.x, self.y, self.unit_id, self.unit, len(classes))
        x, pool_x, test_x = private.x, parse_points("pool_x", self.pool_x), parse_points("test_x", self.test_x)
        for key, part_x in (("pool_x", pool_x), ("test_x", test_x)):
            if part_x.shape[1:] != x.shape[1:] or part_x.dtype != x.dtype:
                raise checks.error(key, tuple(part_x.shape), f"must have points like x, {tuple(x.shape[1:])} {x.dtype}")
        test_y = parse_labels("test_y", self.test_y, len(test_x), len(classes))
        pool_y = None if self.pool_y is None else parse_labels("pool_y", self.pool_y, len(pool_x), len(classes))
        declared_constants = None if self.mean is None or self.std is None else (self.mean, self.std)
        mean, std = (
            compute_statistics(pool_x)
            if declared_constants is None
            else (tuple(map(float, constants)) for constants in declared_constants)
        )
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
            private=private,
            pool=PublicPool(pool_x),
            evaluation=Evaluation(test_x, test_y, pool_y),
            num_dropped_by_reason=drop_counts,
            provenance={
                CLASSES: FROM_OWNER,
                NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS if self.mean is None else FROM_OWNER,
            },
        )


def compute_statistics(public_x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of public points, per channel or feature."""
    return (
        benchmark.compute_channel_statistics(public_x)
        if public_x.dim() == 4
        else roles.compute_feature_statistics(public_x)
    )


def build_private_data(
    x: Tensor | np.ndarray, y: Tensor | np.ndarray, unit_id: Any, unit: str, num_classes: int
) -> tuple[PrivateRecords, dict[str, int]]:
    """PRIVATE. Records as data sets hold them, and how many cannot be used, by the reason; these are marked and filled.

    Args:
        x: Images or rows; a row that is not finite cannot be used.
        y: Labels; one that is no integer in 0..classes-1 cannot be used, and stops nobody's run.
        unit_id: Ids of their units; None names a record by a hash of its content.
        unit: "record" or "group:<what>".
        num_classes: How many there are.

    Raises:
        ValueError: Another shape or type; no record can be used; groups without ids, each record would be one.
    """
    x, y = parse_points("x", x, require_finite=False), torch.as_tensor(y).detach().cpu()
    if y.dim() != 1 or len(y) != len(x) or y.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise checks.error("y", y.dtype, "must be integers, one for each point")
    finite_N = x.flatten(1).isfinite().all(1)
    valid_label_N = (
        (y >= 0) & (y < num_classes) & (y == y.to(torch.int64))
    )  # one NaN makes all of them floating-point numbers
    usable_N = finite_N & valid_label_N
    if not bool(usable_N.any()):
        raise checks.error(
            "y", y.dtype, f"has no integer in 0..{num_classes - 1} beside a finite point", "List all classes."
        )
    # A fixed public filler in the record's own place: a valid record, as far from the old one as any other.
    x = torch.where(finite_N.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x[:1]))
    y = torch.where(usable_N, y, torch.zeros_like(y)).to(torch.int64)
    if unit_id is not None:
        names = units.parse_unit_ids("unit_id", unit_id, len(y))
    elif unit == "record":
        pairs = zip(x.numpy(), y.tolist(), strict=True)
        names = np.array([units.compute_content_id((point.tobytes(), str(label).encode())) for point, label in pairs])
    else:
        raise checks.error("unit_id", None, f"must name the unit of every record where it is {unit}")
    count_by_reason = {
        "of no known class": int((~valid_label_N).sum()),
        "with numbers that are not finite": int((~finite_N).sum()),
    }
    return PrivateRecords(x, y, names, unit, usable_N=usable_N), {
        reason: count for reason, count in count_by_reason.items() if count
    }


def parse_points(key: str, value: Tensor | np.ndarray, *, require_finite: bool = True) -> Tensor:
    """Images or rows in the form that data sets hold them.

    Raises:
        ValueError: Another shape or type, none, or not finite where they must be.
    """
    if hasattr(value, "columns"):
        fix = "PATEClassifier takes DataFrames; or give numbers, df.to_numpy()."
        raise checks.error(key, type(value).__name__, "must be an array or a tensor", fix)
    x = torch.as_tensor(value).detach().cpu()
    if x.dim() == 2 and x.dtype.is_floating_point:
        x = x.to(torch.float32)
        if require_finite and not bool(x.isfinite().all()):
            raise checks.error(key, tuple(x.shape), "must be finite", "Remove NaN and infinity.")
    elif not (x.dim() == 4 and x.dtype == torch.uint8):
        found_type = f"{('*', *x.shape[1:])} {x.dtype}"
        raise checks.error(key, found_type, "must be uint8 images [*, Ch, H, W] or float rows [*, D]")
    if len(x) == 0:
        raise checks.error(key, tuple(x.shape), "must have at least one point")
    return x.contiguous()


def parse_labels(key: str, value: Tensor, count: int, num_classes: int) -> Tensor:
    """Labels as int64 [count].

    Raises:
        ValueError: Another number of them, not integers, or outside 0..classes-1.
    """
    y = torch.as_tensor(value).detach().cpu()
    if y.dim() != 1 or len(y) != count or y.dtype.is_floating_point or y.dtype in (torch.bool, torch.complex64):
        raise checks.error(key, f"{tuple(y.shape)} {y.dtype}", f"must be {count} integers, one for each point")
    if int(y.min()) < 0 or int(y.max()) >= num_classes:
        raise checks.error(key, "labels", f"must lie in 0..{num_classes - 1}", "class_names must list every class.")
    return y.long()
