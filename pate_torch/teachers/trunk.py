"""Teachers from a public start: heads over features that were learnt from the public points, at no cost in privacy.

The trunk is a function of public points, its recipe and the seed, the same for all teachers, and frozen. A teacher
learns a small head from its shard, so that a shard of some sixty records goes far and a thousand teachers train fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.augmentation import Affine, View
from pate_torch.features.contrastive import ContrastiveFeatures, encode
from pate_torch.networks import remove_head
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.unit_ids import concatenate_unit_ids

_BLOCK_RECORDS = 4096  # records distorted at once
_ENCODER_PREFIX = "encoder."


@dataclass(frozen=True, kw_only=True)
class PublicStart:
    """A recipe for a trunk.

    Attributes:
        features: How the features are learnt.
        copies: Distorted copies of each private record, encoded beside it. They are drawn by the recipe's ``augment``,
            from the teacher's own stream, and stay in the record's shard: with a frozen trunk this is what augmentation
            is.
    """

    features: ContrastiveFeatures
    copies: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.features, ContrastiveFeatures):
            raise checks.error("start.features", self.features, "must be a recipe", "See conf/features.")
        if self.features.encoders > 1:
            fix = "A teacher starts from one encoder."
            raise checks.error("start.features.encoders", self.features.encoders, "must be 1", fix)
        checks.integer("start.copies", self.copies, low=0)

    def learn(
        self,
        pool_x: Tensor,
        spec: DataSpec,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> Trunk:
        """Learn the trunk from raw public points [P, ...]."""
        recipe = self.features
        network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.network_options)
        encoder = recipe.learn(pool_x, spec, seed=seed, device=device, progress=progress)
        return Trunk.from_encoder(network, encoder, pool_x, spec)


@dataclass(frozen=True, eq=False)
class Trunk:
    """Releasable. An encoder learnt from public points, frozen.

    Attributes:
        network: Description of the encoder's network.
        encoder: That network without its last layer.
        input_spec: Facts of its input.
        spec: Facts of its output, ``make_centered_spec`` over the public points.
    """

    network: dict[str, Any]
    encoder: nn.Module
    input_spec: DataSpec
    spec: DataSpec

    def __post_init__(self) -> None:
        self.encoder.eval().requires_grad_(False)

    @classmethod
    def from_encoder(cls, network: dict[str, Any], encoder: nn.Module, pool_x: Tensor, input_spec: DataSpec) -> Trunk:
        """The trunk of an encoder, its output centered over the raw public points ``pool_x``."""
        uncentered_trunk = cls(network, encoder, input_spec, input_spec)
        return dataclasses.replace(
            uncentered_trunk, spec=make_centered_spec(input_spec, uncentered_trunk.compute_features(pool_x))
        )

    @classmethod
    def rebuild(
        cls, facts: Mapping[str, Any], state: Mapping[str, Tensor], input_spec: DataSpec, spec: DataSpec
    ) -> Trunk:
        """The trunk of stored ``to_facts`` and ``get_state``.

        Raises:
            KeyError: Something is missing.
            RuntimeError: They do not fit.
        """
        encoder = remove_head(networks.rebuild(facts["network"]))
        encoder.load_state_dict(
            {k.removeprefix(_ENCODER_PREFIX): v for k, v in state.items() if k.startswith(_ENCODER_PREFIX)}
        )
        return cls(facts["network"], encoder, input_spec, spec)

    def to_facts(self) -> dict[str, Any]:
        """Plain data beside the state from which ``rebuild`` makes the same trunk."""
        return {"network": self.network, "spec": self.spec.to_dict()}

    def get_state(self) -> dict[str, Tensor]:
        """The trunk's tensors by name."""
        state = {_ENCODER_PREFIX + name: value for name, value in self.encoder.state_dict().items()}
        return {name: value.detach().cpu().contiguous() for name, value in state.items()}

    def compute_features(self, x: Tensor, device: torch.device | str = "cpu", *, normalized: bool = False) -> Tensor:
        """Unit-length features of points [Q, ...] (raw, or normalized before), float32 [Q, D] on the CPU."""
        return encode(self.encoder.to(device), x, self._identity_spec if normalized else self.input_spec)

    def encode_shards(
        self,
        private: PrivateRecords,
        shards: Shards,
        *,
        start: PublicStart,
        augment: Affine | None,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> tuple[PrivateRecords, Shards]:
        """PRIVATE. Features of every shard's records and of their copies, and the shards that hold them.

        Each shard is encoded by itself, from its teacher's own stream: a record has no influence on the arithmetic of
        another shard, not even on the shape of a batch.

        Args:
            private: The private records.
            shards: Which records each teacher learns from.
            start: Gives the number of copies.
            augment: How they are distorted.
            seed: Seed of the teachers' streams.
            device: Device of the encoding.
            progress: Called with (done, total) shards.
        """
        view = View(affine=augment)
        copies = start.copies if augment is not None else 0

        def make_encoder(teacher: int) -> Callable[[Tensor], list[Tensor]]:
            generator = make_torch_generator(seed, "teacher", teacher, "copies")

            def encode_parts(x: Tensor) -> list[Tensor]:
                copy_features = [
                    self.compute_features(view(x, self.input_spec, generator), device, normalized=True)
                    for _ in range(copies)
                ]
                return [self.compute_features(x, device), *copy_features]

            return encode_parts

        return encode_shards(private, shards, make_encoder, progress)

    @property
    def _identity_spec(self) -> DataSpec:
        """The points' facts with constants that change nothing: views are normalized already."""
        width = len(self.input_spec.mean)
        return dataclasses.replace(self.input_spec, mean=(0.0,) * width, std=(1.0,) * width)


def encode_shards(
    private: PrivateRecords,
    shards: Shards,
    make_encoder: Callable[[int], Callable[[Tensor], list[Tensor]]],
    progress: Progress = do_nothing,
) -> tuple[PrivateRecords, Shards]:
    """PRIVATE. Features of every shard's records, and the shards that hold them.

    Args:
        private: The private records.
        shards: Which records each teacher learns from.
        make_encoder: Teacher -> a map from raw records [B, ...] to one or several features of each, [B, D] a part. Each
            shard is encoded by itself: see ``Trunk.encode_shards``.
        progress: Called with (done, total) shards.
    """
    features, labels, units, sizes = [], [], [], []
    for teacher in range(shards.num_teachers):
        encode_part, rows = make_encoder(teacher), 0
        for record_index in shards.get_indices(teacher).split(_BLOCK_RECORDS):
            parts = encode_part(private.x[record_index])
            features += parts
            labels += [private.y[record_index]] * len(parts)
            units += [private.unit_id[record_index.numpy()]] * len(parts)
            rows += len(record_index) * len(parts)
        sizes.append(rows)
        progress(teacher + 1, shards.num_teachers)
    index_KS = torch.full((shards.num_teachers, max(sizes)), -1, dtype=torch.int64)
    first = 0
    for teacher, size in enumerate(sizes):
        index_KS[teacher, :size] = torch.arange(first, first + size)
        first += size
    encoded_records = PrivateRecords(torch.cat(features), torch.cat(labels), concatenate_unit_ids(units), private.unit)
    return encoded_records, Shards(index_KS, index_KS >= 0, shards.adjacency, shards.unit)


def make_centered_spec(input_spec: DataSpec, feature_PD: Tensor) -> DataSpec:
    """The spec of rows like these: ``input_spec``, centered by the rows' mean and scaled by one number.

    To standardize each feature would blow up the unimportant ones.
    """
    feature_PD = feature_PD.double()
    mean_D = feature_PD.mean(0)
    scale = float((feature_PD - mean_D).square().mean().sqrt().clamp(min=1e-6))
    mean = tuple(mean_D.tolist())
    return dataclasses.replace(
        input_spec, input_shape=(len(mean),), mean=mean, std=(scale,) * len(mean), schema=None, resize=None
    )
