"""The base class of data set sources, the search for their files, and the assembly of a Dataset."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy import records
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, PrivateRecords, PublicPool
from pate_torch.privacy.schema import TableSchema

Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel or feature."""

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Releasable. The facts that a source declares before any file is read. A fact that is not declared is None.

    Attributes:
        num_private: Approximate number of private records, as published or declared.
        is_benchmark: Whether all records are public data.
        paths: Candidate locations of the owner's main file. Empty if the data are not in files.
        root: Folder of all data sets. None for the default of ``get_data_root``.
    """

    name: str
    num_classes: int | None = None
    num_private: int | None = None
    num_public: int | None = None
    is_benchmark: bool = False
    paths: frozenset[Path] = frozenset()
    root: str | None = None


class DatasetSource(ABC):
    """A source of one data set."""

    if TYPE_CHECKING:  # at run time, the property would become the default value of the field "name" of dataclasses

        @property
        def name(self) -> str:
            """Declared name of the data set."""

    def declared_facts(self) -> SourceFacts:
        """Return the public facts that are known before any file is read."""
        return SourceFacts(name=self.name)

    @abstractmethod
    def load(self) -> Dataset:
        """Load the data set. Raise ValueError, which names the file and the setting, if the data cannot be read."""


def assemble_dataset(
    private: PrivateRecords,
    pool: PublicPool,
    evaluation: Evaluation,
    *,
    class_names: tuple[str, ...],
    standardize: bool | Sequence[bool] = True,
    classes_origin: str = records.FROM_OWNER,
    categories_origin: str | None = None,
    size_origin: str = records.FROM_OWNER,
    **spec_facts: Any,
) -> Dataset:
    """Build a Dataset from its parts and the further fields of ``DataSpec`` in ``spec_facts``.

    ``standardize`` selects features as in ``compute_normalization``. Each origin is one of ``records.PROVENANCES``.
    ``categories_origin`` is None if the data have no categories.
    """
    mean, std = compute_normalization(pool.x, standardize)
    spec_facts |= {"num_classes": len(class_names), "input_shape": tuple(pool.x.shape[1:])}
    spec = DataSpec(class_names=class_names, mean=mean, std=std, **spec_facts)
    origins = {
        records.CLASSES: classes_origin,
        records.NORMALIZATION_CONSTANTS: records.FROM_PUBLIC_POINTS,
        records.NUMBER_OF_RECORDS: None if spec.nominal_size is None else size_origin,
        records.CATEGORIES: categories_origin,
    }
    provenance = {name: origin for name, origin in origins.items() if origin is not None}
    num_dropped_by_reason = private.num_unusable_by_reason
    return Dataset(spec, private, pool, evaluation, num_dropped_by_reason=num_dropped_by_reason, provenance=provenance)


def compute_normalization(public_x: Tensor, standardize: bool | Sequence[bool] = True) -> Constants:
    """Compute the constants by which points are normalized, from public points and never from private records.

    The published constants of image benchmarks are statistics of the training images, which are private here.

    ``standardize``, bool or [D], selects features of rows. Images are always standardized, texts never. A feature that
    is constant in the pool gets standard deviation 1, because a tiny standard deviation would magnify private records
    that differ from the pool.
    """
    if public_x.dim() == 4:  # counts are exact, so the result does not depend on the order of the images
        channels = public_x.transpose(0, 1).flatten(1)
        counts = torch.stack([torch.bincount(channel.long(), minlength=256) for channel in channels]).double()
        level = torch.arange(256, dtype=torch.float64) / 255
        weight = counts / counts.sum(1, keepdim=True).clamp(min=1)
        mean = weight @ level
        std = (weight @ level.square() - mean.square()).clamp(min=0).sqrt()
        return tuple(mean.tolist()), tuple(std.clamp(min=1 / 255).tolist())  # a constant channel has std 0
    if public_x.dtype == torch.uint8:  # texts
        return (0.0,), (1.0,)
    mean, std = _compute_moments(public_x)
    is_standardized = torch.as_tensor(standardize).expand(len(mean))
    mean = torch.where(is_standardized, mean, 0.0)
    return tuple(mean.tolist()), tuple(torch.where(is_standardized & (std > 1e-8), std, 1.0).tolist())


def compute_common_scale(public_x: Tensor) -> Constants:
    """Compute the mean of each feature of public rows [P, D], and one common scale, because it preserves angles."""
    mean_D, std_D = _compute_moments(public_x)
    return tuple(mean_D.tolist()), (float(std_D.square().mean().sqrt()) or 1.0,) * len(mean_D)


def make_encoded_spec(points: DataSpec, card: records.EncoderCard, x_PD: Tensor) -> DataSpec:
    """Make the specification of an encoder's features, given those x_PD of the public points."""
    mean, std = compute_common_scale(x_PD)
    spec = replace(points, input_shape=(x_PD.shape[1],), mean=mean, std=std, encoder=card)
    return replace(spec, low=None, high=None, schema=None, resize=None, text=None)


def _compute_moments(x_PD: Tensor) -> Tensor:
    """Compute means and standard deviations, float64 [2, D], without a float64 copy of all columns."""
    blocks = (x.double() for x in x_PD.split(64, dim=1))
    return torch.cat([torch.stack([x.mean(0), x.std(0, correction=0)]) for x in blocks], 1)


def get_categories_origin(schema: TableSchema, owner_columns: Collection[str]) -> str:
    """Return the provenance of a table's categories, given the columns whose categories the owner declared."""
    is_declared = {column.name in owner_columns for column in schema.columns if column.categories is not None}
    if is_declared == {True}:
        return records.FROM_OWNER
    return records.FROM_OWNER_AND_PUBLIC_POINTS if True in is_declared else records.FROM_PUBLIC_POINTS


def get_data_root(root: PathLike | None) -> Path:
    """Return the folder of all data sets: ``root``, or else the environment variable PATE_DATA, or else ``data``."""
    root = root or os.environ.get("PATE_DATA") or "data"
    if not isinstance(root, str | os.PathLike):
        raise checks.error("data_root", root, "must be the path of a folder")
    return Path(root).expanduser()


def resolve_path(key: str, path: PathLike | None, root: PathLike | None) -> Path:
    """Find a file or folder of the user in the working directory, or else below the data root.

    Raise ValueError, which names the setting ``key``, if the path is not set or does not exist.
    """
    if not path or not isinstance(path, str | os.PathLike):
        raise checks.error(key, path, "must be the path of the data", f"Set {key}=/path/to/the/data.")
    candidates = list_candidate_paths(path, root)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    tried_paths = " and ".join(str(candidate.absolute()) for candidate in candidates)
    raise checks.error(key, str(path), "must exist", f"Looked for {tried_paths}; set {key} or data_root.")


def list_candidate_paths(path: PathLike, root: PathLike | None) -> list[Path]:
    """List the paths at which a path of the user is looked up: in the working directory and below the data root."""
    user_path = Path(path).expanduser()
    return list(dict.fromkeys((user_path, get_data_root(root) / user_path)))  # an absolute path gives one place


def check_name(name: Any) -> str:
    """Check the declared name of a data set, of its ledger account and of its folders."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        message = "must start with a letter or a digit, and hold only letters, digits, '.', '_' and '-'"
        raise checks.error("dataset.name", name, message)
    return name
