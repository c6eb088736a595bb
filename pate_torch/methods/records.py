"""Records that answer for themselves: what reverse k-NN labeling and per-record gradients share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features.batch_invariant import map_batch_invariant
from pate_torch.features.contrastive import append_mean_shift, embed, encode, learn_encoder
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.labeling import LabelingMethod, PreparedLabeling
from pate_torch.networks import make_feature_extractor
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.partition import assign_shards, select
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import SensitiveRecords


@dataclass(frozen=True, kw_only=True)
class RecordMethod(LabelingMethod):
    """Records that answer for themselves, each by a function of itself and of public values.

    A subclass defines how records are asked (``build_sensitive``).

    Attributes:
        mechanism_type: The type of the mechanism that prices their answers.
    """

    mechanism_type: ClassVar[type[RecordMechanism]]
    mechanism: RecordMechanism

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mechanism, self.mechanism_type):
            problem, fix = f"cannot be combined with mechanism={self.mechanism.name}", self.mechanism_type.name
            raise checks.error("method", self.name, problem, f"Use mechanism={fix}.")

    @property
    def refits_records(self) -> bool:
        return True

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError where one record's answer would not be its own."""
        super().validate(facts)
        capacity, adjacency = facts.partition.max_shard_size, facts.adjacency
        if capacity is not None:
            problem = f"cannot be combined with method={self.name}: a record more would displace another's answer"
            raise checks.error("partition.capacity", capacity, problem, "Leave out partition.capacity.")
        if self.mechanism.adjacency != adjacency:
            raise checks.error("mechanism.adjacency", self.mechanism.adjacency, f"must be the partition's, {adjacency}")
        facts.partition.check(facts.unit, facts.num_units, 1)

    @abstractmethod
    def build_sensitive(
        self,
        records: PrivateRecords,
        shards: Shards,
        facts: DatasetFacts,
        *,
        encoder: nn.Module | None,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> SensitiveRecords:
        """PRIVATE. The records of all shards, ready to answer under the shards' adjacency.

        Args:
            records: PRIVATE. The run's records.
            shards: Which hold the records.
            facts: Public facts, with the public points.
            encoder: Normalized points -> features, learnt from the public points or a released student's; None: the
                normalized points themselves.
            device: Device of the encoding.
            progress: Called with (done, total) records.
        """

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. The records in features of the public points; in later rounds, in those of the student."""
        facts = inputs.facts

        def encode_records(encoder: nn.Module | None) -> SensitiveRecords:
            shards = assign_shards(facts.partition, inputs.records, 1, inputs.seed)
            progress = inputs.stages("Encoding every record")
            return self.build_sensitive(
                inputs.records, shards, facts, encoder=encoder, device=inputs.device, progress=progress
            )

        with inputs.clock("records"):
            encoder = learn_encoder(self.features, facts.pool, facts.spec, inputs.seed, inputs.device, inputs.stages)
            records = encode_records(encoder)
        return PreparedLabeling.from_method(
            self,
            inputs,
            records,
            id=inputs.store.create_alias(inputs.store.compute_fingerprint(inputs.records)),
            refit=lambda guide: encode_records(make_feature_extractor(guide.module)),
        )


def encode_public(
    records: PrivateRecords,
    shards: Shards,
    facts: DatasetFacts,
    encoder: nn.Module | None,
    device: torch.device | str,
    neighbors: int = 0,
) -> tuple[PrivateRecords, nn.Module, Tensor]:
    """PRIVATE. The records of all shards, the encoder, and the features of the public points.

    Args:
        records: PRIVATE. The run's records.
        shards: Which hold the records.
        facts: Public facts, with the public points.
        encoder: Normalized points -> features; None: the normalized points themselves.
        device: Device of the encoding.
        neighbors: Number of public neighbors in a mean-shift step of every feature; 0: none.

    Returns:
        PRIVATE records; the encoder, with the mean-shift step; unit-length features of the public points.
    """
    encoder = (nn.Flatten() if encoder is None else encoder).to(device)
    encoder = encoder.to(memory_format=torch.channels_last)  # few images take less time
    encoder = append_mean_shift(encoder, facts.pool.x, facts.spec, neighbors)
    private = select(records, shards.index_KS[shards.mask_KS].numpy())
    return private, encoder, encode(encoder, facts.pool.x, facts.spec)


def map_records_batch_invariant(
    fn: Callable[[Tensor], Tensor], encoder: nn.Module, private: PrivateRecords, spec: DataSpec, progress: Progress
) -> Tensor:
    """PRIVATE. Apply ``fn`` to the features of each record, [N, ...]; it gets those of a batch, [8, D].

    Each as if it were alone: see ``map_batch_invariant``.
    """

    def apply_fn(batches: Iterator[Tensor]) -> Tensor:
        place_RBD = torch.stack([embed(encoder, x_B, spec) for x_B in batches]).cpu()  # a GPU is waited for once
        return torch.stack([fn(place_BD.clone()) for place_BD in place_RBD])

    return map_batch_invariant(apply_fn, private.x, progress)
