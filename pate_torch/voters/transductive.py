"""Transductive votes: a teacher answers for all public points together, not for each by itself.

A teacher of fifteen records has never seen some classes, and errs here and there between near points. Public facts mend
both: each class has its share of the public points, and near points mostly share one. So a teacher's class
probabilities on the pool are scaled until every class has its share (Sinkhorn), and then carried along the neighbour
graph of the public points (Zhou et al. 2004, with a teacher's opinion in place of labels).

Costs no privacy: a teacher's votes are still a function of its own parameters and of public points, so one record
moves one teacher, and a teacher has one vote on each question.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.features.neighbors import Graph, balanced, neighbour_graph, spread
from pate_torch.protocols import Progress, silent
from pate_torch.teachers import voting
from pate_torch.teachers.ensemble import Ensemble

_LEFT = 1e-3
"""What is left, at most, of the weight of longer paths when carrying stops."""


@dataclass(frozen=True, kw_only=True)
class Transduction:
    """neighbours: of the graph. reach: the share of an opinion that comes along its edges; 0: none.

    balance: scale until all classes are equally common among the public points. Wrong where they are known not to be.
    """

    neighbours: int = 6
    reach: float = 0.8
    balance: bool = True

    def __post_init__(self) -> None:
        checks.integer("voting.neighbours", self.neighbours, low=1)
        checks.between("voting.reach", self.reach, 0, 0.999)
        checks.boolean("voting.balance", self.balance)

    def among(self, feature_PD: Tensor) -> Jointly:
        """Votes on the public points that have these features, float32 [P, D]."""
        return Jointly(self, neighbour_graph(feature_PD, self.neighbours))


@dataclass(frozen=True, eq=False)
class Jointly:
    """How teachers vote on one pool. ``graph``: of its points, public."""

    recipe: Transduction
    graph: Graph

    def predictions(
        self, ensemble: Ensemble, pool_x: Tensor, device: torch.device | str = "cpu", progress: Progress = silent
    ) -> Tensor:
        """PRIVATE. Each teacher's class, [K, P], of the raw public points [P, ...]; ties go to the lowest class.

        Every teacher is worked out alone, in the same shapes whoever stands beside it, so that another teacher's
        record has no say even in the rounding.
        """
        if len(pool_x) != len(self.graph):
            raise ValueError(f"votes: the graph has {len(self.graph)} points, the pool {len(pool_x)}")
        num_classes = ensemble.network["num_classes"]
        out = torch.zeros(len(ensemble), len(pool_x), dtype=voting.label_dtype(num_classes))

        def hear(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            logits_kPC = torch.cat([logits for _, logits in parts], 1).float().cpu()
            for row, logits_PC in zip(out[rows], logits_kPC, strict=True):
                row[:] = self._joint(logits_PC.softmax(1)).argmax(1)

        ensemble.opinions(pool_x, hear, device=device, progress=progress)
        out[~ensemble.trained_K] = 0
        return out

    def tally(
        self, ensemble: Ensemble, pool_x: Tensor, device: torch.device | str = "cpu", progress: Progress = silent
    ) -> Tensor:
        """PRIVATE. Counts, int32 [P, C]."""
        return voting.tally(self.predictions(ensemble, pool_x, device, progress), ensemble.network["num_classes"])

    def _joint(self, probability_PC: Tensor) -> Tensor:
        num_classes = probability_PC.shape[1]
        if self.recipe.balance:
            probability_PC = balanced(probability_PC, torch.full((num_classes,), 1 / num_classes))
        if self.recipe.reach == 0:
            return probability_PC
        steps = math.ceil(math.log(_LEFT) / math.log(self.recipe.reach))
        return spread(self.graph, probability_PC, self.recipe.reach, steps)
