"""Teachers from a public start: heads over features that were learnt from the public points, at no cost in privacy.

The trunk is a function of public points, its recipe and the seed, the same for all teachers, and frozen. A teacher
learns a small head from its shard, so that a shard of some sixty records goes far and a thousand teachers train fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pate_torch import checks, networks
from pate_torch.augment import Affine
from pate_torch.protocols import Progress, silent
from pate_torch.representation import Representation, encode, headless
from pate_torch.rng import torch_stream
from pate_torch.types import DataSpec, PrivateData, Shards
from pate_torch.views import View

_BLOCK = 4096  # records distorted at once


@dataclass(frozen=True, kw_only=True)
class PublicStart:
    """representation: how the features are learnt. copies: distorted copies of each private record, encoded beside it.

    Copies are drawn by the recipe's ``augment``, from the teacher's own stream, and stay in the record's shard: with a
    frozen trunk this is what augmentation is.
    """

    representation: Representation
    copies: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.representation, Representation):
            raise checks.fail(
                "start.representation", self.representation, "must be a recipe", "See conf/representation."
            )
        checks.integer("start.copies", self.copies, low=0)

    def learn(
        self,
        pool_x: Tensor,
        spec: DataSpec,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
    ) -> Trunk:
        """The trunk, learnt from raw public points [P, ...]."""
        recipe = self.representation
        network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.network_options)
        module = recipe.learn(pool_x, spec, seed=seed, device=device, progress=progress)
        return Trunk.of(network, module, pool_x, spec)


@dataclass(frozen=True, eq=False)
class Trunk:
    """Releasable. ``module``: ``network`` without its last layer; ``points``, ``spec``: facts of its input and output.

    Features are standardised by their mean and deviation over the public points, which are constants of ``spec``.
    """

    network: dict[str, Any]
    module: nn.Module
    points: DataSpec
    spec: DataSpec

    @classmethod
    def of(cls, network: dict[str, Any], module: nn.Module, pool_x: Tensor, points: DataSpec) -> Trunk:
        feature_PD = encode(module, pool_x, points).double()
        std = feature_PD.std(0, correction=0)
        spec = dataclasses.replace(
            points,
            input_shape=(feature_PD.shape[1],),
            mean=tuple(feature_PD.mean(0).tolist()),
            std=tuple(torch.where(std > 1e-6, std, 1.0).tolist()),
        )
        return cls(network, module.eval().requires_grad_(False), points, spec)

    @classmethod
    def rebuild(cls, network: dict[str, Any], state: Mapping[str, Tensor], points: DataSpec, spec: DataSpec) -> Trunk:
        """From what a store kept. Raises RuntimeError where the state does not fit."""
        module = headless(networks.rebuild(network))
        module.load_state_dict(dict(state))
        return cls(network, module.eval().requires_grad_(False), points, spec)

    def facts(self) -> dict[str, Any]:
        """Plain data beside the state from which ``rebuild`` makes the same trunk."""
        return {"network": self.network, "spec": dataclasses.asdict(self.spec)}

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().contiguous() for name, value in self.module.state_dict().items()}

    def features(self, x: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Unit-length features of raw points [Q, ...], float32 [Q, D] on the CPU."""
        return encode(self.module.to(device), x, self.points)

    def shards(
        self,
        private: PrivateData,
        shards: Shards,
        *,
        start: PublicStart,
        augment: Affine | None,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
    ) -> tuple[PrivateData, Shards]:
        """PRIVATE. Features of every shard's records and of their copies, and the shards that hold them.

        Each shard is encoded by itself, from its teacher's own stream: a record has no say in the arithmetic of
        another shard, not even in the shape of a batch.
        """
        self.module.to(device)
        view = View(affine=augment)
        copies = start.copies if augment is not None else 0
        features, labels, units, sizes = [], [], [], []
        for teacher in range(shards.num_teachers):
            draws, rows = torch_stream(seed, "teacher", teacher, "copies"), 0
            for own in shards.of(teacher).split(_BLOCK):
                x = private.x[own]
                parts = [self.features(x, device)]
                parts += [encode(self.module, view(x, self.points, draws), self._normalised) for _ in range(copies)]
                features += parts
                labels += [private.y[own]] * len(parts)
                units += [private.unit_id[own.numpy()]] * len(parts)
                rows += len(own) * len(parts)
            sizes.append(rows)
            progress(teacher + 1, shards.num_teachers)
        index_KS = torch.full((shards.num_teachers, max(sizes)), -1, dtype=torch.int64)
        first = 0
        for teacher, size in enumerate(sizes):
            index_KS[teacher, :size] = torch.arange(first, first + size)
            first += size
        encoded = PrivateData(torch.cat(features), torch.cat(labels), np.concatenate(units), private.unit)
        return encoded, Shards(index_KS, index_KS >= 0, shards.adjacency, shards.unit)

    @property
    def _normalised(self) -> DataSpec:
        """The points' facts with constants that leave them as they are: views are normalised already."""
        width = len(self.points.mean)
        return dataclasses.replace(self.points, mean=(0.0,) * width, std=(1.0,) * width)
