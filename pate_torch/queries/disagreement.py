"""Disagreement-based active learning (LZCW21 Algorithm 4, for Algorithm 5's PATE-ASQ), with linear hypotheses.

Public points come as a stream. A point is asked about only if two hypotheses in the version space, the hypotheses that
fit the earlier answers, disagree on the label of the point. One hypothesis is the best linear fit. The other hypothesis
is the best fit whose boundary contains the point, and is in the version space if it makes few additional errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.privacy.records import NO_ANSWER
from pate_torch.queries.base import QueryState, QueryStrategy, get_features

MAX_FEATURES = 128  # principal components
_MIN_LOSS_DECREASE = 1e-6  # in nats; Newton's method stops after a smaller decrease of the loss
_MAX_NEWTON_STEPS = 30
_CHUNK_CANDIDATES = 64  # number of candidates fitted at once: 64 Hessians of 129 x 129 doubles are 9 MB


@dataclass(frozen=True, kw_only=True)
class Disagreement(QueryStrategy):
    """Disagreement-based active learning over a stream of public points.

    The point x at stream time j is asked about if the criterion of the best fit with its boundary through x exceeds
    that of the best fit by at most U(j) j = slack (L + sqrt(E L)), where L = ln(log2(2j)^2 / confidence) and E is the
    number of training errors of the best fit. This is line 12 of Algorithm 4 without the term d log(theta), with which
    a pool of a few hundred points would exclude no hypothesis.

    The version space is fitted again when j is a power of two, and each round asks about one such stretch of the
    stream. All points are asked about until two classes occur among the answers. With more than two classes, each class
    is compared with the rest. If fewer queries are asked than allowed, less is spent. Queries depend on earlier
    released answers, so data-dependent costs do not add up over rounds.

    Attributes:
        rounds: Number of rounds, at least log2 of the pool's size (20 for a million points), to use the whole stream.
        criterion: Criterion of a fit: "error" for training errors, as in Algorithm 4, or "loss" for the penalized
            logistic loss in nats. With fewer answers than features, "error" leads to queries about all points.
        slack: Factor of U(j). Slack and ridge were chosen on public problems (docs/experiments/questions.md).
        confidence: Failure probability in L.
        ridge: Weight of half the squared norm, which is added to the summed logistic loss.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "disagreement"
    rounds: int = 20
    criterion: str = "loss"
    slack: float = 0.01
    confidence: float = 0.05
    ridge: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("query.criterion", self.criterion, ("loss", "error"))
        checks.non_negative("query.slack", self.slack)
        checks.between("query.confidence", self.confidence, 0, 1, exclusive=True)
        checks.positive("query.ridge", self.ridge)

    def select(self, state: QueryState) -> Tensor:
        count = len(state.pool_x)
        stream_P = torch.randperm(count, generator=rng.make_torch_generator(state.seed, "query", self.name))
        # The next stretch begins at the first power of two above the stream index of the last query.
        start = 0
        if len(state.query_Q):
            start = 1 << int(torch.isin(stream_P, state.query_Q.cpu()).nonzero().max()).bit_length()
        has_two_classes = len(state.label_Q[state.label_Q != NO_ANSWER].unique()) > 1
        x_PD = append_ones(get_features(state, MAX_FEATURES).cpu()) if has_two_classes and start < count else None
        while start < count:
            stretch = stream_P[start : max(1, 2 * start)]
            if x_PD is not None:
                stretch = stretch[self._find_disputed(x_PD, state, stretch, max(1, start))]
            if len(stretch):
                return stretch[: state.num_remaining]
            start = max(1, 2 * start)
        return torch.zeros(0, dtype=torch.int64)

    def compute_allowed_excess(self, time: int, errors: int) -> float:
        complexity = math.log(math.log2(2 * time) ** 2 / self.confidence)
        return self.slack * (complexity + math.sqrt(errors * complexity))

    def _find_disputed(self, x_PD: Tensor, state: QueryState, stretch: Tensor, time: int) -> Tensor:
        """Return for each point of the stretch whether the two hypotheses disagree, bool [len(stretch)]."""
        answered_Q = state.label_Q != NO_ANSWER
        x_ND, label_N = x_PD[state.query_Q[answered_Q].cpu()], state.label_Q[answered_Q].cpu()
        is_disputed = torch.zeros(len(stretch), dtype=torch.bool)
        # Two classes need one fit. A class that has never been answered has no fit yet.
        for c in [1] if state.spec.num_classes == 2 else label_N.unique().tolist():
            sign_N = torch.where(label_N == c, 1.0, -1.0).double()
            best_D = fit_logistic(x_ND, sign_N, self.ridge)[0]
            errors = int((x_ND @ best_D * sign_N <= 0).sum())  # a score of zero counts as an error
            best_loss = compute_penalized_loss(x_ND, sign_N, best_D[None], self.ridge)
            max_excess = self.compute_allowed_excess(time, errors)
            for part in torch.arange(len(stretch)).split(_CHUNK_CANDIDATES):
                through_BD = x_PD[stretch[part]]
                boundary_BD = fit_logistic(x_ND, sign_N, self.ridge, through_BD=through_BD, start_D=best_D)
                if self.criterion == "error":
                    excess_B = (boundary_BD @ x_ND.T * sign_N <= 0).sum(1) - errors
                else:
                    excess_B = compute_penalized_loss(x_ND, sign_N, boundary_BD, self.ridge) - best_loss
                is_disputed[part] |= excess_B <= max_excess
        return is_disputed


def append_ones(x_PD: Tensor) -> Tensor:
    """Append a coordinate 1 to the points and convert them to float64, so that one vector describes a hyperplane."""
    return F.pad(x_PD.double(), (0, 1), value=1.0)


def fit_logistic(
    x_ND: Tensor, sign_N: Tensor, ridge: float, *, through_BD: Tensor | None = None, start_D: Tensor | None = None
) -> Tensor:
    """Minimize ``compute_penalized_loss`` over w by damped Newton steps, [B, D].

    With ``through_BD`` there is one fit for each of these points, under the constraint that the boundary contains the
    point (w.point = 0). Because the loss is convex, this fit is the limit of the best fits that give the point the
    label that the unconstrained fit does not give. All fits start from ``start_D``, or from 0 if ``start_D`` is None.
    """
    w_BD = torch.zeros(1, x_ND.shape[1], dtype=torch.float64) if start_D is None else start_D[None]
    if through_BD is not None:
        w_BD = w_BD - (through_BD @ w_BD[0] / through_BD.square().sum(1))[:, None] * through_BD
    penalty_D = _make_penalty(x_ND, ridge)
    products_NE = (x_ND[:, :, None] * x_ND[:, None, :]).flatten(1)
    loss_B = compute_penalized_loss(x_ND, sign_N, w_BD, ridge)
    for _ in range(_MAX_NEWTON_STEPS):
        p_BN = torch.sigmoid(-(w_BD @ x_ND.T) * sign_N)
        gradient_BD = -(p_BN * sign_N) @ x_ND + penalty_D * w_BD
        hessian_BDD = ((p_BN * (1 - p_BN)) @ products_NE).unflatten(1, (x_ND.shape[1], -1)) + penalty_D.diag()
        factor = torch.linalg.cholesky(hessian_BDD)
        step_BD = torch.cholesky_solve(gradient_BD[:, :, None], factor).squeeze(2)
        if through_BD is not None:
            # Project the step onto the constraint w.point = 0, in the metric of the Hessian.
            normal_BD = torch.cholesky_solve(through_BD[:, :, None], factor).squeeze(2)
            offset_B = (through_BD * step_BD).sum(1) / (through_BD * normal_BD).sum(1)
            step_BD = step_BD - offset_B[:, None] * normal_BD
        for _ in range(20):  # halve the steps that raise the loss
            trial_BD = w_BD - step_BD
            trial_B = compute_penalized_loss(x_ND, sign_N, trial_BD, ridge)
            is_lower_B = trial_B <= loss_B  # also False for NaN
            if bool(is_lower_B.all()):
                break
            step_BD = torch.where(is_lower_B[:, None], step_BD, step_BD / 2)
        loss_decrease = float(torch.where(is_lower_B, loss_B - trial_B, 0.0).max())
        w_BD = torch.where(is_lower_B[:, None], trial_BD, w_BD)
        loss_B = torch.where(is_lower_B, trial_B, loss_B)
        if loss_decrease < _MIN_LOSS_DECREASE:
            break
    return w_BD


def compute_penalized_loss(x_ND: Tensor, sign_N: Tensor, w_BD: Tensor, ridge: float) -> Tensor:
    """Compute the loss sum ln(1 + exp(-y x.w)) + ridge/2 |w|^2 in nats, [B]."""
    penalty = 0.5 * (_make_penalty(x_ND, ridge) * w_BD.square()).sum(1)
    return F.softplus(-(w_BD @ x_ND.T) * sign_N).sum(1) + penalty


def _make_penalty(x_ND: Tensor, ridge: float) -> Tensor:
    """Return the ridge of each coordinate, which is small for the intercept but keeps the minimum unique."""
    return F.pad(torch.full((x_ND.shape[1] - 1,), ridge, dtype=torch.float64), (0, 1), value=1e-3 * ridge)
