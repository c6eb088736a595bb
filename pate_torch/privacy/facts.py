"""What is public about the data of a run: all that a price, a refusal or a plan may depend on."""

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
        unit: What the privacy unit is.
        partition: How units are dealt to shards; it fixes the adjacency.
        num_units: Number of private records under ``replace_one``, where it is public; None under ``add_remove``.
        has_records: Whether there are private records here; of votes that were made elsewhere there are none.
        supported_adjacencies: The relations under which one unit's change leaves every other record as it was.
        advice: What to do where a run needs another relation.
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
        """Read the public facts off a data set that was loaded."""
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
        """The neighboring relation of the run."""
        return self.partition.adjacency

    def check_adjacency(self) -> None:
        """Raise ValueError where one unit's change could move other records of these data."""
        if self.adjacency not in self.supported_adjacencies:
            problem = f"cannot be promised for {self.spec.name}: one unit's change could move other records"
            raise checks.error("partition", self.adjacency, problem, self.advice)
