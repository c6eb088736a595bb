"""Where data come from: what every source declares before it reads anything, and the data set that it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pate_torch.privacy.records import (
    CLASSES,
    FROM_OWNER,
    FROM_PUBLIC_POINTS,
    NORMALIZATION_CONSTANTS,
    NUMBER_OF_RECORDS,
    Dataset,
    DataSpec,
    Evaluation,
    PrivateRecords,
    PublicPool,
)

Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation, per channel or feature."""


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Releasable. What a source declares before it reads anything; None where it declares nothing.

    Attributes:
        name: Declared name of the data set.
        num_classes: Number C of classes.
        num_private: About how many private records there are, as published or declared.
        num_public: Number P of public points.
        is_benchmark: Whether all records are public data.
        paths: Where the main file of an owner may lie; empty for data that are no files of an owner.
        root: The data root, where the source names one.
    """

    name: str
    num_classes: int | None = None
    num_private: int | None = None
    num_public: int | None = None
    is_benchmark: bool = False
    paths: frozenset[Path] = frozenset()
    root: str | None = None


class DatasetSource(ABC):
    """Loads one data set."""

    if TYPE_CHECKING:  # a field of most sources, which a property here would give itself as its default value

        @property
        def name(self) -> str:
            """Declared name."""

    def declared_facts(self) -> SourceFacts:
        """The public facts that are known before anything is read."""
        return SourceFacts(name=self.name)

    @abstractmethod
    def load(self) -> Dataset:
        """The private, public and evaluation sides.

        Raises:
            ValueError: The data cannot be found; names the folder and the switch.
        """


def assemble_dataset(
    private: PrivateRecords,
    pool: PublicPool,
    evaluation: Evaluation,
    *,
    class_names: tuple[str, ...],
    standardize: bool | Sequence[bool] = True,
    constants: Constants | None = None,
    origin: str = FROM_OWNER,
    dataset_facts: Mapping[str, Any] | None = None,
    **spec_facts: Any,
) -> Dataset:
    """The data set of parts that a source has read, normalized by constants of its public points.

    Args:
        private: The private side.
        pool: The public pool.
        evaluation: The evaluation side.
        class_names: One name for each class.
        standardize: Which features of rows are centered and scaled by the pool's statistics; images always are.
        constants: Declared constants; None: the pool's.
        origin: Where classes and the number of records come from: one of ``PROVENANCES``.
        dataset_facts: Further fields of ``Dataset``; its provenance goes before ``origin``.
        spec_facts: Further fields of ``DataSpec``.
    """
    mean, std = compute_normalization(pool.x, standardize) if constants is None else constants
    spec = DataSpec(
        num_classes=len(class_names),
        input_shape=tuple(pool.x.shape[1:]),
        class_names=class_names,
        mean=mean,
        std=std,
        **spec_facts,
    )
    provenance = {
        CLASSES: origin,
        NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS if constants is None else FROM_OWNER,
        **({} if spec.nominal_size is None else {NUMBER_OF_RECORDS: origin}),
    }
    options = {"num_dropped_by_reason": private.num_unusable_by_reason, **(dataset_facts or {})}
    options["provenance"] = provenance | options.get("provenance", {})
    return Dataset(spec, private, pool, evaluation, **options)


def compute_channel_statistics(x: Tensor) -> Constants:
    """Mean and deviation per channel of public uint8 images [Q, Ch, H, W], as fractions of 255.

    Of the public pool, never of private records. The usual published constants of these benchmarks are statistics of
    their training images, which are the private side here.
    """
    channels = x.transpose(0, 1).flatten(1)
    counts = torch.stack([torch.bincount(channel.long(), minlength=256) for channel in channels]).double()
    level = torch.arange(256, dtype=torch.float64) / 255
    weight = counts / counts.sum(1, keepdim=True).clamp(min=1)
    mean = weight @ level
    variance = weight @ level.square() - mean.square()
    std = variance.clamp(min=0).sqrt().clamp(min=1 / 255)  # a constant channel must not divide by zero
    return tuple(mean.tolist()), tuple(std.tolist())


def compute_normalization(public_x: Tensor, standardize: bool | Sequence[bool] = True) -> Constants:
    """Constants of public points; of rows [Q, D], ``standardize`` says which features are centered and scaled.

    The deviation is 1 where the pool is constant: a small one would blow up private records that differ from the pool.
    """
    if public_x.dim() == 4:
        return compute_channel_statistics(public_x)
    if public_x.dtype == torch.uint8:  # texts
        return (0.0,), (1.0,)
    x_PD = public_x.double()
    is_standardized = torch.as_tensor(standardize).expand(x_PD.shape[1])
    std = x_PD.std(0, correction=0)
    mean = torch.where(is_standardized, x_PD.mean(0), 0.0)
    return tuple(mean.tolist()), tuple(torch.where(is_standardized & (std > 1e-8), std, 1.0).tolist())


def compute_common_scale(public_x: Tensor) -> Constants:
    """The mean of each feature of public rows [Q, D], and one deviation for all, so that angles stay about the same."""
    x_PD = public_x.double()
    std = float(x_PD.std(0, correction=0).square().mean().sqrt()) or 1.0
    return tuple(x_PD.mean(0).tolist()), (std,) * x_PD.shape[1]
