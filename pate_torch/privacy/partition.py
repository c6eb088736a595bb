"""Partitions of the private records into disjoint shards, other selections by privacy unit, and public facts.

Each privacy unit reaches one teacher. Under both neighboring relations a unit therefore controls one teacher's vote in
each query, so the L2 sensitivity of the votes is sqrt(2). Cutting a shuffled set into chunks would be wrong for
add/remove, because removing one record moves all later records to other shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from pate_torch.core import checks, rng
from pate_torch.privacy.accounts import check_unit
from pate_torch.privacy.records import ADJACENCIES, LABEL_UNIT, Dataset, DataSpec, PrivateRecords, PublicPool, Shards
from pate_torch.privacy.unit_ids import UnitIds, compute_keyed_hash, make_content_ids, make_position_ids


class Partition(ABC):
    """A rule that assigns privacy units to shards.

    Attributes:
        adjacency: Neighboring relation that the shards justify: "add_remove" or "replace_one".
    """

    name: str
    adjacency: ClassVar[str]

    @property
    def max_shard_size(self) -> int | None:
        """Largest number of records in a shard, beyond which records are dropped. None if there is no limit."""
        return None

    def check(self, unit: str, num_units: int | None, num_teachers: int) -> None:  # noqa: B027
        """Raise ValueError if public facts show that the units cannot be assigned to so many teachers."""

    @abstractmethod
    def make_shards(self, private: PrivateRecords, num_teachers: int, seed: int) -> Shards:
        """Make disjoint shards, one for each teacher, as indices into ``private``."""


@dataclass(frozen=True, kw_only=True)
class AddRemove(Partition):
    """A partition in which a keyed BLAKE2b hash of a unit's id chooses its shard, independently of all other records.

    Neighboring data sets differ in all records of one unit. A second hash word orders the records of a shard, so
    removing a unit does not reorder the others. Shard sizes vary (about binomially), and a shard may be empty. The
    number of units is private, so it does not limit the number of teachers.

    Attributes:
        capacity: Largest number of records in a shard. Records beyond it are dropped in hash order, so a unit can
            displace records of its shard only. With a capacity the shape of the shards, [K, capacity], does not depend
            on the records. None if there is no limit.

    Guarantee:
        Adding or removing one unit changes one row of ``Shards``, apart from the width of the padding if capacity is
        None.
    """

    name: str = "add_remove"
    capacity: int | None = None

    adjacency: ClassVar[str] = "add_remove"

    def __post_init__(self) -> None:
        checks.optional(checks.integer, "partition.capacity", self.capacity, low=1)

    @property
    def max_shard_size(self) -> int | None:
        return self.capacity

    def check(self, unit: str, num_units: int | None, num_teachers: int) -> None:
        if unit == LABEL_UNIT:
            problem = f"cannot be combined with the privacy unit {unit}, because labels are replaced, not removed"
            raise checks.error("partition", self.name, problem, "Use partition=replace_one.")
        checks.integer("num_teachers", num_teachers, low=1)

    def make_shards(self, private: PrivateRecords, num_teachers: int, seed: int) -> Shards:
        self.check(private.unit, None, num_teachers)
        word_N2 = compute_keyed_hash(private.unit_id.tolist(), seed, "partition", "add_remove")
        shard_N = (word_N2[:, 0] % np.uint64(num_teachers)).astype(np.int64)
        # Because lexsort is stable, the records of one unit, which share both words, keep their order in the file.
        order_N = np.lexsort((word_N2[:, 1], shard_N))
        return _build_shards(order_N, shard_N[order_N], num_teachers, self.capacity, self.adjacency, private.unit)


@dataclass(frozen=True, kw_only=True)
class ReplaceOne(Partition):
    """A fixed permutation of the positions 0..n-1, cut into K chunks whose sizes depend on (n, K) alone.

    Neighboring data sets differ in one record and its id, and both versions of the record are valid. The number n is
    public, and the unit is the position. If labels alone are private, neighbors differ in one label. The assignment
    reads no record, so replacing a record does not change the assignment.
    """

    name: str = "replace_one"

    adjacency: ClassVar[str] = "replace_one"

    def check(self, unit: str, num_units: int | None, num_teachers: int) -> None:
        check_unit("partition", self.adjacency, unit)
        if num_units is not None:
            fix = f"There are {num_units} private records, which is public here, and every teacher needs at least one."
            checks.integer("num_teachers", num_teachers, low=1, high=max(num_units, 1), fix=fix)

    def make_shards(self, private: PrivateRecords, num_teachers: int, seed: int) -> Shards:
        count = len(private)
        self.check(private.unit, count, num_teachers)
        order_N = rng.make_numpy_generator(seed, "partition", "replace_one").permutation(count)
        shard_N = np.arange(count) * num_teachers // count
        return _build_shards(order_N, shard_N, num_teachers, None, self.adjacency, private.unit)


PARTITIONS: dict[str, Partition] = {partition.adjacency: partition for partition in (AddRemove(), ReplaceOne())}
"""Adjacency -> partition with default settings."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetFacts:
    """Releasable. Public facts of a data set, on which alone costs, refusals and plans depend.

    Attributes:
        spec: Shape, classes and declared size of the data.
        partition: Rule that assigns units to shards. It fixes the adjacency.
        num_units: Number of private records under ``replace_one``, where this number is public. None under
            ``add_remove``.
        has_records: Whether private records are present. False for votes that were made elsewhere.
        supported_adjacencies: Relations under which a change of one unit leaves every other record unchanged.
        advice: Advice for a run whose neighboring relation is not supported.
    """

    spec: DataSpec
    pool: PublicPool
    unit: str
    partition: Partition
    num_units: int | None
    has_records: bool = True
    supported_adjacencies: tuple[str, ...] = ADJACENCIES
    advice: str = ""

    @classmethod
    def from_dataset(cls, data: Dataset, partition: Partition) -> DatasetFacts:
        """Collect the public facts of a loaded data set."""
        return cls(
            spec=data.spec,
            pool=data.pool,
            unit=data.private.unit,
            partition=partition,
            num_units=len(data.private) if partition.adjacency == "replace_one" else None,
            has_records=len(data.private) > 0,
            supported_adjacencies=data.adjacencies,
            advice=data.advice,
        )

    @property
    def adjacency(self) -> str:
        return self.partition.adjacency

    def check_adjacency(self) -> None:
        """Raise ValueError if a change of one unit could affect other records, or is not one change of the relation."""
        check_unit("partition", self.adjacency, self.unit)
        if self.adjacency not in self.supported_adjacencies:
            problem = f"is not supported by {self.spec.name}, because a change of one unit could affect other records"
            raise checks.error("partition", self.adjacency, problem, self.advice)


def assign_shards(partition: Partition, private: PrivateRecords, num_teachers: int, seed: int) -> Shards:
    """Make the shards of a partition, which a user may have written, and check these shards.

    Raises:
        ValueError: The shards state another adjacency or unit than the partition, or a unit is in two shards.
    """
    shards = partition.make_shards(private, num_teachers, seed)
    name, adjacency, unit = type(partition).__name__, partition.adjacency, private.unit
    if (shards.adjacency, shards.unit) != (adjacency, unit):
        raise checks.error("partition", name, f"its shards are not of {adjacency}, unit {unit}")
    if shards.adjacency == "add_remove":
        shard_N = torch.arange(shards.num_teachers)[:, None].expand_as(shards.index_KS)[shards.mask_KS].numpy()
        _, unit_N = np.unique(private.unit_id[shards.index_KS[shards.mask_KS].numpy()], return_inverse=True)
        pairs = np.unique(np.stack([unit_N, shard_N]), axis=1)
        if pairs.shape[1] > len(np.unique(unit_N)):
            raise checks.error("partition", name, f"assigns one {unit} to two shards")
    return shards


def _build_shards(
    order_N: np.ndarray, shard_N: np.ndarray, num_teachers: int, capacity: int | None, adjacency: str, unit: str
) -> Shards:
    """Make padded rows from record indices that are sorted by shard (``shard_N`` is non-decreasing)."""
    sizes_K = np.bincount(shard_N, minlength=num_teachers)
    start_K = np.concatenate([[0], np.cumsum(sizes_K)[:-1]])
    rank_N = np.arange(len(order_N)) - start_K[shard_N]
    width = capacity or max(1, int(sizes_K.max()))  # all units may be held out, and a refusal would reveal it
    fits_N = rank_N < width
    index_KS = np.full((num_teachers, width), -1, dtype=np.int64)
    index_KS[shard_N[fits_N], rank_N[fits_N]] = order_N[fits_N]
    index = torch.from_numpy(index_KS)
    return Shards(index, index >= 0, adjacency, unit, has_capacity=capacity is not None)


def get_unit_ids(private: PrivateRecords, adjacency: str) -> UnitIds:
    """PRIVATE. Return the name of each record's privacy unit, str [N]: the unit id, or the position under replace_one.

    Under replace_one each record is one unit. Two records with equal ids are two units, because an id may be a hash of
    the record that is replaced.
    """
    return private.unit_id if adjacency == "add_remove" else make_position_ids(len(private))


def number_units(private: PrivateRecords, adjacency: str) -> np.ndarray:
    """PRIVATE. Return the number of each record's privacy unit, int64 [N]. ``get_unit_ids`` gives the order of units.

    Single records of one name are one unit only if they are equal, so that no added record displaces another record.
    """
    _, unit_N, size_U = np.unique(get_unit_ids(private, adjacency), return_inverse=True, return_counts=True)
    if private.unit == "record" and len(size_U) < len(unit_N):
        rows = np.flatnonzero(size_U[unit_N] > 1)
        contents = make_content_ids((private.x[i].numpy().tobytes(), str(int(private.y[i])).encode()) for i in rows)
        copy_N = np.zeros_like(unit_N)
        copy_N[rows] = np.unique(contents, return_inverse=True)[1]
        unit_N = np.unique(unit_N * len(unit_N) + copy_N, return_inverse=True)[1]
    return unit_N


def hold_out(
    private: PrivateRecords, share: float, adjacency: str, seed: int, purpose: str
) -> tuple[PrivateRecords, PrivateRecords]:
    """PRIVATE. Split off about ``share`` of the units; return (remaining records, held-out records).

    A keyed hash of the unit's name (``get_unit_ids``) decides for each unit, regardless of other units.
    """
    is_held_out_N = compute_keyed_hash(get_unit_ids(private, adjacency).tolist(), seed, purpose)[:, 0] / 2.0**64 < share
    return select(private, np.flatnonzero(~is_held_out_N)), select(private, np.flatnonzero(is_held_out_N))


def select(private: PrivateRecords, index: np.ndarray) -> PrivateRecords:
    """PRIVATE. Select records by integer indices."""
    rows = torch.from_numpy(index)
    usable_N = None if private.usable_N is None else private.usable_N[rows]
    return PrivateRecords(private.x[rows], private.y[rows], private.unit_id[index], private.unit, usable_N=usable_N)


def drop_unusable(data: Dataset, adjacency: str) -> Dataset:
    """PRIVATE. Drop the records that are marked as unusable. Under replace_one keep these records and their marks.

    The fillers are valid records. Without them, the other records of a neighbor could have other positions.
    """
    private = data.private
    if private.usable_N is None or adjacency == "replace_one":
        return data
    usable_N = private.usable_N
    origin = None if private.origin is None else private.origin[usable_N]
    usable_records = select(private, np.flatnonzero(usable_N.numpy()))
    return replace(data, private=replace(usable_records, origin=origin, usable_N=None))


def select_one_per_unit(private: PrivateRecords, adjacency: str, hash_N: np.ndarray | None = None) -> PrivateRecords:
    """PRIVATE. Select the first record of each unit, or with ``hash_N`` the one with the smallest hash.

    Under replace_one this selects every record.
    """
    order_N = np.arange(len(private)) if hash_N is None else np.argsort(hash_N, kind="stable")
    return select(private, order_N[np.unique(number_units(private, adjacency)[order_N], return_index=True)[1]])
