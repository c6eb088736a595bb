"""Transductive votes: a teacher labels all public points together, instead of each point independently.

A teacher of fifteen records has never seen some classes, and gives different labels to points that are close together.
Two public facts correct such errors: every class has its share of the public points, and points that are close together
mostly have the same class. Therefore a teacher's class probabilities on the pool are scaled until every class has its
share (Sinkhorn), and then propagated over the k-NN graph of the public points (Zhou et al. 2004, with probabilities in
place of labels).

This costs no privacy, because the votes of a teacher are still a function of its own parameters and of public points:
one record changes one teacher, and a teacher has one vote on each query. The graph may be approximate, because it is
a function of public points alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pate_torch.core import checks, ranks
from pate_torch.features import neighbors as graphs
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.privacy.partition import DatasetFacts

_MAX_TAIL_WEIGHT = 1e-3
"""Total weight of the longer paths in the graph below which propagation stops."""


@dataclass(frozen=True, kw_only=True)
class TransductiveTeacherVotes(TeacherVotes):
    """PATE with teachers that label all public points together, over a graph of their features or principal axes.

    Attributes:
        neighbors: Number of neighbors in the graph.
        alpha: Share of a point's probabilities that comes from its neighbors. 0 for no propagation.
        balance: Whether to scale the probabilities until all classes are equally common among the public points. Use
            False if the classes are known not to be equally common.
    """

    name: str = "teachers_transductive"
    neighbors: int = 6
    alpha: float = 0.8
    balance: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("method.neighbors", self.neighbors, low=1)
        checks.between("method.alpha", self.alpha, 0, 0.999)
        checks.boolean("method.balance", self.balance)

    @property
    def is_soft(self) -> bool:
        """False, because the propagated values are not probabilities. These teachers give votes only."""
        return False

    def validate(self, facts: DatasetFacts) -> None:
        if len(facts.pool) < 2:
            raise checks.error("method", self.name, "needs at least two public points", "Use method=teachers.")
        super().validate(facts)

    def build_vote(self, feature_PD: Tensor, search: graphs.NeighborSearch | None = None) -> Callable[[Tensor], Tensor]:
        """Build the graph of public points with these features, float32 [P, D], on which ``vote`` labels the points."""
        return functools.partial(self.vote, graphs.build_neighbor_graph(feature_PD, self.neighbors, search))

    def vote(self, graph: graphs.Graph, logits_PC: Tensor) -> Tensor:
        """PRIVATE. Return the class of each public point by one teacher, [P], given its logits on all of them, [P, C].

        Every teacher is evaluated alone and in the same shapes, so that the records of other teachers do not influence
        even the rounding.
        """
        probability_PC, num_classes = logits_PC.softmax(1), logits_PC.shape[1]
        if self.balance:
            probability_PC = graphs.balance_classes(probability_PC, torch.full((num_classes,), 1 / num_classes))
        if self.alpha > 0:
            steps = math.ceil(math.log(_MAX_TAIL_WEIGHT) / math.log(self.alpha))
            probability_PC = graphs.propagate_labels(graph, probability_PC, self.alpha, steps)
        return probability_PC.argmax(1)

    def _make_vote(self, inputs: MethodInputs, *, all_ranks: bool) -> Callable[[Tensor], Tensor]:
        feature_PD, facts = None, inputs.facts  # rank 0 computes the features for all ranks
        if ranks.is_main():
            own_PD = self.learn_features(inputs)
            feature_PD = graphs.compute_coordinates(facts.pool.x, facts.spec) if own_PD is None else own_PD.cpu()
        if all_ranks or feature_PD is None:
            feature_PD = ranks.broadcast_object(feature_PD)
        return self.build_vote(graphs.to_graph_device(feature_PD, inputs.device), inputs.search)

    def _get_vote_variant(self, inputs: MethodInputs) -> str:
        feature_options = {} if self.features is None else asdict(cast(Any, self.features)) | {"seed": inputs.seed}
        options = {"neighbors": self.neighbors, "alpha": self.alpha, "balance": self.balance}
        facts = {"transduction": options, "representation": feature_options}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
