"""Public facts about the data of a run, on which alone prices, refusals and plans depend."""

from __future__ import annotations

from dataclasses import dataclass

from pate_torch.core import checks
from pate_torch.privacy.partition import Partition
from pate_torch.privacy.records import ADJACENCIES, Dataset, DataSpec, PublicPool


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetFacts:
    """Releasable. Public facts of a data set, under the partition of the run.

    Attributes:
        spec: Shape, classes and declared size of the data.
        pool: The public points.
        unit: Kind of the privacy unit.
        partition: Rule that assigns units to shards. It fixes the adjacency.
        num_units: Number of private records under ``replace_one``, where this number is public. None under
            ``add_remove``.
        has_records: Whether private records are present. False for votes that were made elsewhere.
        supported_adjacencies: Relations under which a change of one unit leaves every other record unchanged.
        advice: Advice for a run with another neighboring relation.
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
        """Raise ValueError if a change of one unit could affect other records of these data."""
        if self.adjacency not in self.supported_adjacencies:
            problem = f"is not supported by {self.spec.name}, because a change of one unit could affect other records"
            raise checks.error("partition", self.adjacency, problem, self.advice)
