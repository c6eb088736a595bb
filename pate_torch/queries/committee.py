"""Query by committee: ask where small models, each trained on its own draw of the answers, vote most evenly.

Source: Seung, Opper, Sompolinsky 1992; vote entropy as in Dagan and Engelson 1995. The members are ridge regressions
on the features, refitted here in closed form, so the strategy needs no student.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.privacy.records import NO_ANSWER
from pate_torch.queries.base import QueryState, QueryStrategy
from pate_torch.queries.random import compute_round_size, get_features, get_open_points, shuffle


@dataclass(frozen=True, kw_only=True)
class Committee(QueryStrategy):
    """Vote entropy of ridge regressions on bootstrap draws of the answers.

    Attributes:
        members: Number of draws.
        ridge: Weight of the squared norm.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "committee"
    rounds: int = 4
    members: int = 15
    ridge: float = 1.0

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)
        checks.integer("query.members", self.members, low=2)
        checks.positive("query.ridge", self.ridge)

    def select(self, state: QueryState) -> Tensor:
        points = shuffle(get_open_points(state), state, self.name)
        if bool((state.label_Q != NO_ANSWER).any()):
            entropy_R = torch.special.entr(self._count_votes(state)[points] / self.members).sum(1)
            points = points[entropy_R.argsort(descending=True, stable=True)]
        return points[: compute_round_size(state)]

    def _count_votes(self, state: QueryState) -> Tensor:
        """How many members choose each class at each public point, [P, C]."""
        answered_Q = state.label_Q != NO_ANSWER
        x_PD = F.pad(get_features(state).cpu().double(), (0, 1), value=1.0)
        x_ND, label_N = x_PD[state.query_Q[answered_Q].cpu()], state.label_Q[answered_Q].cpu()
        stream = rng.make_torch_generator(state.seed, "query", self.name, "members", len(state.query_Q))
        votes_PC = torch.zeros(len(x_PD), state.spec.num_classes)
        for _ in range(self.members):
            index_M = torch.randint(len(label_N), (len(label_N),), generator=stream)
            x_MD, target_MC = x_ND[index_M], F.one_hot(label_N[index_M], state.spec.num_classes).double()
            gram = x_MD.T @ x_MD + self.ridge * torch.eye(x_MD.shape[1], dtype=torch.float64)
            choice_P = (x_PD @ torch.linalg.solve(gram, x_MD.T @ target_MC)).argmax(1)
            votes_PC[torch.arange(len(x_PD)), choice_P] += 1
        return votes_PC
