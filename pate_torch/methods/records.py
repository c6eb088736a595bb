"""Records that answer for themselves: what reverse k-NN labeling and per-record gradients share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features.batch_invariant import map_batch_invariant
from pate_torch.features.contrastive import append_mean_shift, embed, encode
from pate_torch.features.neighbors import to_graph_device
from pate_torch.methods.base import PreparedMethod, PrivateMethodBase
from pate_torch.networks import make_feature_extractor
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.records import Dataset, DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import SensitiveRecords
from pate_torch.privacy.units import select
from pate_torch.students.base import Student

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext


@dataclass(frozen=True, kw_only=True)
class RecordMethod(PrivateMethodBase):
    """Records that answer for themselves, each by a function of itself and of public values.

    A subclass defines how they are asked (``build_sensitive``).

    Attributes:
        mechanism_name: The mechanism that prices their answers.
    """

    mechanism_name: ClassVar[str]

    @property
    def num_teachers(self) -> int:
        return 0

    @property
    def uses_guide(self) -> bool:
        """Whether a later round lies in features of the student: always."""
        return True

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for options of teachers, and where one record's answer is not its own."""
        if config.private_epsilon is not None:
            fix = "Leave out private_epsilon: every record answers for itself."
            raise checks.error("method", self.name, "cannot be combined with private_epsilon", fix)
        value = config.mechanism.name
        if value != self.mechanism_name:
            problem, fix = f"cannot be combined with mechanism={value}", f"Use mechanism={self.mechanism_name}."
            raise checks.error("method", self.name, problem, fix)
        capacity = getattr(config.partition, "capacity", None)
        if capacity is not None:
            problem = f"cannot be combined with method={self.name}: a record more would displace another's answer"
            raise checks.error("partition.capacity", capacity, problem, "Leave out partition.capacity.")
        adjacency = config.partition.adjacency
        value = getattr(config.mechanism, "adjacency", adjacency)
        if value != adjacency:
            raise checks.error("mechanism.adjacency", value, f"must be the partition's, {adjacency}")

    def check_data(self, data: Dataset, config: RunConfig) -> None:
        """Raise ValueError where the partition's adjacency does not hold for these units."""
        assign_shards(config.partition, data.private, 1, config.seed)

    def build_sensitive(
        self,
        data: Dataset,
        shards: Shards,
        *,
        encoder: nn.Module | None,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> SensitiveRecords:
        """PRIVATE. The records of all shards, ready to answer under the shards' adjacency.

        Args:
            data: The run's data.
            shards: Which hold the records.
            encoder: Normalized points -> features, learnt from the public points or a released student's; None: the
                normalized points themselves.
            device: Device of the encoding.
            progress: Called with (done, total) records.
        """
        raise NotImplementedError(f"{type(self).__name__}: must say how its records answer, in build_sensitive")

    def prepare(self, run: RunContext) -> PreparedMethod:
        """PRIVATE. The records in features of the public points; in later rounds, in those of the student."""

        def encode_records(encoder: nn.Module | None) -> SensitiveRecords:
            shards = assign_shards(run.config.partition, run.data.private, 1, run.config.seed)
            progress = run.stages("Encoding every record")
            return self.build_sensitive(run.data, shards, encoder=encoder, device=run.config.device, progress=progress)

        def refit(guide: Student) -> PreparedMethod:
            records = encode_records(make_feature_extractor(guide.module))
            return replace(
                first_round, sensitive=records, feature_PD=to_graph_device(records.feature_PD, run.config.device)
            )

        with run.clock("records"):
            records = encode_records(run.learn_encoder())
        alias = run.store.create_alias(run.store.compute_fingerprint(run.data.private))
        first_round = PreparedMethod(id=alias, sensitive=records, refit=refit)
        return first_round


def encode_public(
    data: Dataset, shards: Shards, encoder: nn.Module | None, device: torch.device | str, neighbors: int = 0
) -> tuple[PrivateRecords, nn.Module, Tensor]:
    """PRIVATE. The records of all shards, the encoder, and the features of the public points.

    Args:
        data: The run's data.
        shards: Which hold the records.
        encoder: Normalized points -> features; None: the normalized points themselves.
        device: Device of the encoding.
        neighbors: Number of public neighbors in a mean-shift step of every feature; 0: none.

    Returns:
        PRIVATE records; the encoder, with the mean-shift step; unit-length features of the public points.
    """
    encoder = (nn.Flatten() if encoder is None else encoder).to(device)
    encoder = encoder.to(memory_format=torch.channels_last)  # few images take less time
    encoder = append_mean_shift(encoder, data.pool.x, data.spec, neighbors)
    private = select(data.private, shards.index_KS[shards.mask_KS].numpy())
    return private, encoder, encode(encoder, data.pool.x, data.spec)


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
