"""What every strategy needs from the state: the points still open, and a seeded order over them."""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.protocols import QueryState


def open_points(state: QueryState) -> Tensor:
    """Pool indices not asked before, increasing, int64 [R]."""
    unseen_P = torch.ones(len(state.pool_x), dtype=torch.bool)
    unseen_P[state.asked_Q.cpu()] = False
    return unseen_P.nonzero().squeeze(1)


def shuffled(points: Tensor, state: QueryState, strategy: str) -> Tensor:
    """The points in an order that depends on (seed, strategy, how many were asked before) alone."""
    stream = rng.torch_stream(state.seed, "query", strategy, len(state.asked_Q))
    return points[torch.randperm(len(points), generator=stream)]


def share(state: QueryState) -> int:
    """How many to ask this round: an equal share of what remains, at least one while any remains."""
    checks.integer("rounds_left", state.rounds_left, low=1)
    return min(-(-state.remaining // state.rounds_left), len(state.pool_x) - len(state.asked_Q))
