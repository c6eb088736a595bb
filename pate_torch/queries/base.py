"""The base class of query strategies and the state that they may use; random queries and margin sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.features.neighbors import NeighborSearch, compute_coordinates
from pate_torch.privacy.records import DataSpec


@dataclass(frozen=True, eq=False)
class QueryState:
    """Releasable. All inputs of a query strategy.

    Attributes:
        spec: Public description of the data.
        pool_x: Public points as loaded, [P, ...].
        query_Q: Pool indices of the queries of earlier rounds, in order.
        label_Q: Released labels of these queries, NO_ANSWER (-1) for a query without an answer.
        num_remaining: Number of queries still allowed.
        num_rounds_left: Number of rounds left, including this round.
        seed: Seed of the strategy's random choices.
        student_PC: Class probabilities of the guide student on all public points. None in the first round.
        feature_PD: Features learned from public points without labels, on the run's device. None without an encoder.
        search: Search for neighbors of the run, which keeps results about public points alone.
    """

    spec: DataSpec
    pool_x: Tensor
    query_Q: Tensor
    label_Q: Tensor
    num_remaining: int
    num_rounds_left: int
    seed: int
    student_PC: Tensor | None = None
    feature_PD: Tensor | None = None
    search: NeighborSearch = field(default_factory=NeighborSearch)


@dataclass(frozen=True, kw_only=True)
class QueryStrategy(ABC):
    """A rule that chooses the public points to ask about next. The release records the fields of the strategy.

    Attributes:
        uses_guide: Whether ``select`` reads ``state.student_PC``. If False, no guide student is fitted between rounds.
        name: Name of the strategy in settings and reports.
        rounds: Number of rounds in which queries are asked.
    """

    uses_guide: ClassVar[bool] = True
    name: str
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    @abstractmethod
    def select(self, state: QueryState) -> Tensor:
        """Select at most ``state.num_remaining`` distinct pool indices that were not asked before, int64 [Q]."""


def get_open_points(state: QueryState) -> Tensor:
    """Return the indices of the pool points that were not asked about before, in increasing order, int64 [R]."""
    is_open_P = torch.ones(len(state.pool_x), dtype=torch.bool)
    is_open_P[state.query_Q.cpu()] = False
    return is_open_P.nonzero().squeeze(1)


def shuffle(points: Tensor, state: QueryState, strategy: str) -> Tensor:
    """Shuffle the points with a seed made of the run's seed, the strategy and the number of earlier queries."""
    stream = rng.make_torch_generator(state.seed, "query", strategy, len(state.query_Q))
    return points[torch.randperm(len(points), generator=stream)]


def compute_round_size(state: QueryState) -> int:
    """Compute the number of queries of this round: an equal share of the remaining queries, at most all points."""
    return min(-(-state.num_remaining // state.num_rounds_left), len(state.pool_x) - len(state.query_Q))


def get_features(state: QueryState, width: int = 64) -> Tensor:
    """Return the learned features, or without an encoder at most ``width`` principal components, float32 [P, D]."""
    if state.feature_PD is not None:
        return state.feature_PD.float()
    return compute_coordinates(state.pool_x, state.spec, width)


@dataclass(frozen=True, kw_only=True)
class Random(QueryStrategy):
    """A uniform sample of the open points.

    Attributes:
        shuffle: Whether points are drawn at random. If False, the first open points of the pool are asked in order.

    Source: LZCW21 Algorithm 3 (PSQ), which does not shuffle, because its pool is in random order.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "random"
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("query.shuffle", self.shuffle)

    def select(self, state: QueryState) -> Tensor:
        points = get_open_points(state)
        return (shuffle(points, state, self.name) if self.shuffle else points)[: compute_round_size(state)]


@dataclass(frozen=True, kw_only=True)
class Margin(QueryStrategy):
    """Margin sampling after a random first round (Scheffer et al. 2001).

    The queries are the open points whose two largest class probabilities, by the student, differ least.
    """

    name: str = "margin"
    rounds: int = 4

    def select(self, state: QueryState) -> Tensor:
        points = shuffle(get_open_points(state), state, self.name)
        if state.student_PC is not None:
            best = state.student_PC.cpu()[points].topk(2, dim=1).values
            points = points[(best[:, 1] - best[:, 0]).argsort(descending=True, stable=True)]
        return points[: compute_round_size(state)]
