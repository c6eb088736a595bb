"""Diffusion maps: coordinates from a long random walk over the public points' neighbor graph.

Points of one class lie on one dense piece of a manifold, and a walk mixes within a piece long before it leaves it. So
the slow coordinates of the walk separate the classes, without any label, and few labels then suffice to name the
pieces.

Source: Coifman and Lafon 2006 (diffusion maps); the extension to new points by their neighbors is Nystroem's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.features.neighbors import diffused, neighbor_graph


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """A recipe for a diffusion map.

    Attributes:
        neighbors: Number of neighbors in the graph, and of a new point.
        width: Number of coordinates kept.
        time: Number of steps of the lazy walk.
    """

    neighbors: int = 10
    width: int = 64
    time: int = 400

    def __post_init__(self) -> None:
        checks.integer("diffusion.neighbors", self.neighbors, low=1)
        checks.integer("diffusion.width", self.width, low=1)
        checks.integer("diffusion.time", self.time, low=0)

    def learn(self, feature_PD: Tensor, generator: torch.Generator) -> Places:
        """Learn the map of these public points, float32 [P, D]."""
        graph = neighbor_graph(feature_PD, self.neighbors)
        return Places(feature_PD, diffused(graph, self.width, self.time, generator), self.neighbors)


class Places(nn.Module):
    """Nystroem extension: features [B, D] -> the weighted mean [B, M] of their nearest public points' coordinates."""

    def __init__(self, feature_PD: Tensor, place_PM: Tensor, neighbors: int) -> None:
        super().__init__()
        self.neighbors = min(neighbors, len(feature_PD))
        self.register_buffer("feature_PD", feature_PD.float())
        self.register_buffer("place_PM", place_PM.float())
        self.feature_PD: Tensor
        self.place_PM: Tensor

    def forward(self, x_BD: Tensor) -> Tensor:
        squared_BP = x_BD.square().sum(1, keepdim=True) + self.feature_PD.square().sum(1) - 2 * x_BD @ self.feature_PD.T
        near = squared_BP.clamp(min=0).topk(self.neighbors, dim=1, largest=False)
        # The reach of a point is the distance to the last of its neighbors, as in the graph.
        weight_BK = torch.exp(-near.values / near.values[:, -1:].clamp(min=1e-12))
        weight_BK = weight_BK / weight_BK.sum(1, keepdim=True)
        return (weight_BK[:, :, None] * self.place_PM[near.indices]).sum(1)
