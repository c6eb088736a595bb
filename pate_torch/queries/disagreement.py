"""Disagreement-based active learning (LZCW21 Algorithm 4, for Algorithm 5's PATE-ASQ), with linear hypotheses.

Public points come as a stream. A point is asked about only if two hypotheses that both fit the answers so far give it
different labels. The version space is never written down: the best linear fit is one of the two, the best fit that puts
its boundary through the point the other, and the second one fits if it makes few more training errors.
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
from pate_torch.queries.base import QueryState, QueryStrategy
from pate_torch.queries.random import get_features

_MIN_GAIN = 1e-6  # of the loss in nats, by a step of Newton's method that is followed by another
_CHUNK_CANDIDATES = 64  # candidates refitted at once: 64 Hessians of 129 x 129 doubles are 9 MB


@dataclass(frozen=True, kw_only=True)
class Disagreement(QueryStrategy):
    """Asks x at stream time j if the best fit with its boundary through x is within U(j) j of the best fit of all.

    U(j) j = slack (L + sqrt(E L)) with L = ln(log2(2j)^2 / confidence) and E the training errors of the best fit: line
    12 of Algorithm 4 without its d log(theta) term, which at a few hundred points would let every hypothesis stay.

    The version space is refitted when j is a power of two; each round of questions is one such stretch of the stream.
    Until two classes have been answered everything is disputed. Fewer questions than allowed may be asked: then less is
    spent. Several classes: one against the rest, asked if any of them disagrees. Questions depend on earlier released
    answers, so data-dependent prices do not compose over them.

    Attributes:
        rounds: At least log2 of the pool (20 serves a million points).
        criterion: What is compared: training ``error`` counts, as Algorithm 4 has it, or the ridge-penalized logistic
            ``loss`` in nats. With fewer answers than features some boundary runs through any point without one error,
            and ``error`` asks about everything; the loss still tells likely from unlikely.
        slack: See above. It and ridge were chosen on scikit-learn's embedded and made problems
            (docs/experiments/questions.md).
        confidence: See above.
        ridge: Weight of the squared norm against the summed logistic loss.
        width: Principal axes kept of wider data.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "disagreement"
    rounds: int = 20
    criterion: str = "loss"
    slack: float = 0.01
    confidence: float = 0.05
    ridge: float = 1.0
    width: int = 128

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)
        checks.one_of("query.criterion", self.criterion, ("loss", "error"))
        checks.non_negative("query.slack", self.slack)
        checks.between("query.confidence", self.confidence, 0, 1, exclusive=True)
        checks.positive("query.ridge", self.ridge)
        checks.integer("query.width", self.width, low=1)

    def select(self, state: QueryState) -> Tensor:
        count = len(state.pool_x)
        stream_P = torch.randperm(count, generator=rng.make_torch_generator(state.seed, "query", self.name))
        # The next stretch begins at the power of two at or after the last point asked.
        last_place = int(torch.isin(stream_P, state.query_Q.cpu()).nonzero().max()) if len(state.query_Q) else 0
        start = 1 << last_place.bit_length() if len(state.query_Q) else 0
        x_PD = None
        while start < count:
            stop = max(1, 2 * start)
            stretch = stream_P[start:stop]
            if len(state.label_Q[state.label_Q != NO_ANSWER].unique()) > 1:
                x_PD = append_ones(get_features(state, self.width).cpu()) if x_PD is None else x_PD
                stretch = stretch[self._find_disputed(x_PD, state, stretch, max(1, start))]
            if len(stretch):
                return stretch[: state.num_remaining]
            start = stop
        return torch.zeros(0, dtype=torch.int64)

    def compute_allowed_excess(self, time: int, errors: int) -> float:
        """The excess U(j) j at stream time j."""
        complexity = math.log(math.log2(2 * time) ** 2 / self.confidence)
        return self.slack * (complexity + math.sqrt(errors * complexity))

    def _find_disputed(self, x_PD: Tensor, state: QueryState, stretch: Tensor, time: int) -> Tensor:
        """Bool, one for each point of the stretch."""
        answered_Q = state.label_Q != NO_ANSWER
        x_ND = x_PD[state.query_Q[answered_Q].cpu()]
        label_N = state.label_Q[answered_Q].cpu()
        is_disputed = torch.zeros(len(stretch), dtype=torch.bool)
        # With two classes one problem says it all; a class never answered has no hypothesis of its own yet.
        classes = [1] if state.spec.num_classes == 2 else label_N.unique().tolist()
        for c in classes:
            sign_N = torch.where(label_N == c, 1.0, -1.0).double()
            best_D = fit_logistic(x_ND, sign_N, self.ridge)
            errors = int(count_mistakes(x_ND @ best_D, sign_N))
            max_excess = self.compute_allowed_excess(time, errors)
            best_loss = float(compute_penalized_loss(x_ND, sign_N, best_D[None], self.ridge))
            for part in torch.arange(len(stretch)).split(_CHUNK_CANDIDATES):
                boundary_BD = fit_through_point(x_ND, sign_N, x_PD[stretch[part]], best_D, self.ridge)
                if self.criterion == "error":
                    extra_B = count_mistakes(boundary_BD @ x_ND.T, sign_N).double() - errors
                else:
                    extra_B = compute_penalized_loss(x_ND, sign_N, boundary_BD, self.ridge) - best_loss
                is_disputed[part] |= extra_B <= max_excess
        return is_disputed


def append_ones(x_PD: Tensor) -> Tensor:
    """Float64 points with a last coordinate 1, so that a hyperplane is one vector."""
    return F.pad(x_PD.double(), (0, 1), value=1.0)


def count_mistakes(score: Tensor, sign_N: Tensor) -> Tensor:
    """How many of the N signs each row of scores [..., N] gets wrong; a zero score is a mistake."""
    return (score * sign_N <= 0).sum(-1)


def fit_logistic(x_ND: Tensor, sign_N: Tensor, ridge: float, steps: int = 30) -> Tensor:
    """The ridge-penalized logistic fit argmin_w sum ln(1 + exp(-y x.w)) + ridge/2 |w|^2, [D], by damped Newton.

    The last coordinate, the intercept, is hardly penalized.
    """
    start_1D = torch.zeros(1, x_ND.shape[1], dtype=torch.float64)
    return _minimize_newton(x_ND, sign_N, None, start_1D, ridge, steps)[0]


def fit_through_point(x_ND: Tensor, sign_N: Tensor, point_BD: Tensor, start_D: Tensor, ridge: float) -> Tensor:
    """The same minimum over the w with point.w = 0, [B, D], one for each point.

    The best fit that gives a point the *other* label lies on this hyperplane, the loss being convex; that the boundary
    belongs to either side is the limit taken.
    """
    coefficient_B = (point_BD @ start_D) / point_BD.square().sum(1)
    return _minimize_newton(x_ND, sign_N, point_BD, start_D - coefficient_B[:, None] * point_BD, ridge, steps=12)


def _minimize_newton(
    x_ND: Tensor, sign_N: Tensor, point_BD: Tensor | None, w_BD: Tensor, ridge: float, steps: int
) -> Tensor:
    penalty_D = _make_penalty(x_ND, ridge)
    products_NE = (x_ND[:, :, None] * x_ND[:, None, :]).flatten(1)
    cost_B = compute_penalized_loss(x_ND, sign_N, w_BD, ridge)
    for _ in range(steps):
        p_BN = torch.sigmoid(-(w_BD @ x_ND.T) * sign_N)
        slope_BD = -(p_BN * sign_N) @ x_ND + penalty_D * w_BD
        curve_BDD = ((p_BN * (1 - p_BN)) @ products_NE).view(len(w_BD), *[x_ND.shape[1]] * 2) + penalty_D.diag()
        factor = torch.linalg.cholesky(curve_BDD)
        move_BD = torch.cholesky_solve(slope_BD[:, :, None], factor).squeeze(2)
        if point_BD is not None:
            # Stay on the hyperplane: subtract the part of the step that leaves it, in the metric of the curvature.
            normal_BD = torch.cholesky_solve(point_BD[:, :, None], factor).squeeze(2)
            offset_B = (point_BD * move_BD).sum(1) / (point_BD * normal_BD).sum(1)
            move_BD = move_BD - offset_B[:, None] * normal_BD
        size_B = torch.ones(len(w_BD), dtype=torch.float64)
        for _ in range(20):
            trial_BD = w_BD - size_B[:, None] * move_BD
            trial_B = compute_penalized_loss(x_ND, sign_N, trial_BD, ridge)
            worse_B = trial_B > cost_B
            if not bool(worse_B.any()):
                break
            size_B = torch.where(worse_B, size_B / 2, size_B)
        improved_B = trial_B <= cost_B
        gain = float(torch.where(improved_B, cost_B - trial_B, 0.0).max())
        w_BD = torch.where(improved_B[:, None], trial_BD, w_BD)
        cost_B = torch.where(improved_B, trial_B, cost_B)
        if gain < _MIN_GAIN:
            break
    return w_BD


def compute_penalized_loss(x_ND: Tensor, sign_N: Tensor, w_BD: Tensor, ridge: float) -> Tensor:
    """The loss sum ln(1 + exp(-y x.w)) + ridge/2 |w|^2 in nats, [B]."""
    penalty = 0.5 * (_make_penalty(x_ND, ridge) * w_BD.square()).sum(1)
    return F.softplus(-(w_BD @ x_ND.T) * sign_N).sum(1) + penalty


def _make_penalty(x_ND: Tensor, ridge: float) -> Tensor:
    """The border's weight, which only shifts, is held just enough to keep the minimum unique."""
    penalty_D = torch.full((x_ND.shape[1],), ridge, dtype=torch.float64)
    penalty_D[-1] = 1e-3 * ridge
    return penalty_D
