"""Base of the methods in which every record contributes independently: reverse k-NN labeling, per-record gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features.batch_invariant import BATCH_SIZE, ROW_BATCH_SIZE, map_batch_invariant
from pate_torch.features.contrastive import embed
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.labeling import LabelingMethod, PreparedLabeling
from pate_torch.networks import make_feature_extractor
from pate_torch.privacy.partition import DatasetFacts, assign_shards, select
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import SensitiveRecords


@dataclass(frozen=True, kw_only=True)
class RecordMethod(LabelingMethod):
    """Base of the methods in which the contribution of a record depends on this record and on public values alone.

    A subclass computes the contributions in ``make_sensitive``.
    """

    refits_records: ClassVar[bool] = True
    mechanism: RecordMechanism

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError if one unit could change the contribution of another."""
        super().validate(facts)
        capacity, adjacency = facts.partition.max_shard_size, facts.adjacency
        if capacity is not None:
            problem = f"cannot be combined with method={self.name}: an added unit could displace records of another"
            raise checks.error("partition.capacity", capacity, problem, "Leave out partition.capacity.")
        if self.mechanism.adjacency != adjacency:
            problem = f"must be the adjacency of the partition, {adjacency}"
            raise checks.error("mechanism.adjacency", self.mechanism.adjacency, problem)
        facts.partition.check(facts.unit, facts.num_units, 1)

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
        """PRIVATE. Build the sensitive value of the records in all shards, under the adjacency of the shards.

        ``encoder`` maps normalized points to features. It was learned from public points, or belongs to a released
        student. None to use the normalized points.
        """
        encoder = (nn.Flatten() if encoder is None else encoder).to(device)
        encoder = encoder.to(memory_format=torch.channels_last)  # faster for few images
        private = select(records, shards.index_KS[shards.mask_KS].numpy())
        return self.make_sensitive(private, shards, facts, encoder, progress)

    @abstractmethod
    def make_sensitive(
        self, private: PrivateRecords, shards: Shards, facts: DatasetFacts, encoder: nn.Module, progress: Progress
    ) -> SensitiveRecords:
        """PRIVATE. Make the sensitive value of ``private``, the records of these shards, in features of ``encoder``."""

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        facts, private, device = inputs.facts, inputs.records, inputs.device

        def encode_records(encoder: nn.Module | None) -> SensitiveRecords:
            shards = assign_shards(facts.partition, private, 1, inputs.seed)
            progress = inputs.stages("Encoding every record")
            return self.build_sensitive(private, shards, facts, encoder=encoder, device=device, progress=progress)

        with inputs.clock("records"):
            encoder = self.learn_encoder(inputs)
            records = encode_records(encoder)
        return PreparedLabeling.from_method(
            self,
            inputs,
            records,
            id=inputs.store.create_alias(inputs.store.compute_fingerprint(private)),
            refit=lambda guide: encode_records(make_feature_extractor(guide.module)),
        )


def map_records_batch_invariant(
    fn: Callable[[Tensor], Tensor], encoder: nn.Module, private: PrivateRecords, spec: DataSpec, progress: Progress
) -> Tensor:
    """PRIVATE. Apply ``fn`` to the features of each record, independently of all other records, [N, ...].

    ``fn`` receives the features of one batch, [B, D]. The shape of the points and the type of the encoder, both public,
    fix B. All batches have one shape, and the place of a record in its batch depends on this record alone, for any B
    (``map_batch_invariant``).
    """
    batch_size = ROW_BATCH_SIZE if private.x.dim() == 2 or isinstance(encoder, nn.Flatten) else BATCH_SIZE

    def apply_fn(batches: Iterator[Tensor]) -> Tensor:
        place_RBD = torch.stack([embed(encoder, x_B, spec) for x_B in batches]).cpu()  # one synchronization with a GPU
        return torch.stack([fn(place_BD.clone()) for place_BD in place_RBD])

    return map_batch_invariant(apply_fn, private.x, progress, batch_size)
