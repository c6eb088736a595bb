"""Teachers from a public start: heads over features that were learnt from the public points, at no cost in privacy.

The trunk is a function of public points, its recipe and the seed, the same for all teachers, and frozen. A teacher
learns a small head from its shard, so that a shard of some sixty records goes far and a thousand teachers train fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
            raise checks.error("start.features", self.features, "must be a recipe", "Use teacher=public_start.")
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
        spec: Facts of its output, centered over the public points.
    """

    network: dict[str, Any]
    encoder: nn.Module
    input_spec: DataSpec
    spec: DataSpec

    def __post_init__(self) -> None:
        self.encoder.eval().requires_grad_(False)

    @classmethod
    def from_encoder(cls, network: dict[str, Any], encoder: nn.Module, pool_x: Tensor, input_spec: DataSpec) -> Trunk:
        """The trunk of an encoder, its output centered over the raw public points ``pool_x`` and scaled by one number.

        To standardize each feature would blow up the unimportant ones.
        """
        feature_PD = cls(network, encoder, input_spec, input_spec).compute_features(pool_x).double()
        mean_D = feature_PD.mean(0)
        scale = float((feature_PD - mean_D).square().mean().sqrt().clamp(min=1e-6))
        width, mean, std = len(mean_D), tuple(mean_D.tolist()), (scale,) * len(mean_D)
        spec = dataclasses.replace(input_spec, input_shape=(width,), mean=mean, std=std, schema=None, resize=None)
        return cls(network, encoder, input_spec, spec)

    @classmethod
    def rebuild(cls, facts: Mapping[str, Any], state: Mapping[str, Tensor], input_spec: DataSpec) -> Trunk:
        """The trunk of stored ``to_facts`` and ``get_state``.

        Raises:
            KeyError: Something is missing.
            RuntimeError: They do not fit.
        """
        encoder = remove_head(networks.rebuild(facts["network"]))
        encoder.load_state_dict({name.removeprefix(_ENCODER_PREFIX): value for name, value in state.items()})
        return cls(facts["network"], encoder, input_spec, DataSpec.from_dict(facts["spec"]))

    def to_facts(self) -> dict[str, Any]:
        """Plain data beside the state from which ``rebuild`` makes the same trunk."""
        return {"network": self.network, "spec": self.spec.to_dict()}

    def get_state(self) -> dict[str, Tensor]:
        """The trunk's tensors by name."""
        state = self.encoder.state_dict()
        return {_ENCODER_PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}

    def compute_features(self, x: Tensor, device: torch.device | str = "cpu", *, normalized: bool = False) -> Tensor:
        """Unit-length features of points [Q, ...] (raw, or normalized before), float32 [Q, D] on the CPU."""
        spec, width = self.input_spec, len(self.input_spec.mean)
        if normalized:
            spec = dataclasses.replace(spec, mean=(0.0,) * width, std=(1.0,) * width)
        return encode(self.encoder.to(device), x, spec)

    def encode_shards(
        self,
        private: PrivateRecords,
        shards: Shards,
        *,
        start: PublicStart,
        augment: Affine | None,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> tuple[PrivateRecords, Shards]:
        """PRIVATE. Features of every shard's records and of their copies, and the shards that hold them.

        Each shard is encoded by itself, from its teacher's own stream: a record has no influence on the arithmetic of
        another shard, not even on the shape of a batch.

        Args:
            private: The private records.
            shards: Which records each teacher learns from.
            start: Gives the number of copies.
            augment: How they are distorted; None if there are no copies.
            seed: Seed of the teachers' streams.
            device: Device of the encoding.
        """
        view, copies = View(affine=augment), start.copies if augment is not None else 0
        features, sources, sizes = [], [], []
        for teacher in range(shards.num_teachers):
            record_index = shards.get_indices(teacher)
            generator = make_torch_generator(seed, "teacher", teacher, "copies")
            for block_index in record_index.split(_BLOCK_RECORDS):
                x = private.x[block_index]
                features.append(self.compute_features(x, device))
                for _ in range(copies):
                    distorted = view(x, self.input_spec, generator)
                    features.append(self.compute_features(distorted, device, normalized=True))
                sources += [block_index] * (1 + copies)
            sizes.append(len(record_index) * (1 + copies))
        index_KS = torch.full((shards.num_teachers, max(sizes)), -1, dtype=torch.int64)
        for index_S, row_index in zip(index_KS, torch.arange(sum(sizes)).split(sizes), strict=True):
            index_S[: len(row_index)] = row_index
        source_index = torch.cat(sources)
        encoded_records = PrivateRecords(
            torch.cat(features), private.y[source_index], private.unit_id[source_index.numpy()], private.unit
        )
        return encoded_records, Shards(index_KS, index_KS >= 0, shards.adjacency, shards.unit)
