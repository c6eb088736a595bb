"""Logistic regression by the exponential mechanism over a ball, drawn exactly: by rejection, and by no Markov chain."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import expit

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.pac.exponential import ChosenHypothesis
from pate_torch.pac.sample import Floats, Sample, charge_events, check_replace_one, warn_below_guarantee
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.noise import NoiseSource

MIN_ACCEPTANCE_RATE = 1e-4
"""A sampler that may accept more seldom is refused beforehand."""

_CPU = torch.device("cpu")


def compute_convex_size(dimension: int, *, epsilon: float, alpha: float, loss_range: float) -> float:
    """Smallest n with E[mean loss + g] <= min + alpha under the target law: n = 2 D range/(epsilon alpha).

    For F >= 0 convex with F(0) = 0 over a convex body, Z(r) = integral of exp(-r F) in D dimensions: shrinking the body
    by s >= 1 gives Z(r) >= s^-D Z(r/s), so r^D Z(r) does not fall, and E[F] = -d ln Z/dr <= D/r; here r = epsilon n /
    (2 range). (WLF16 Theorem 17 by its sublevel sets: 9 (D + 2) ln n and more in the place of 2 D.)
    """
    return 2 * dimension * loss_range / (epsilon * alpha)


def compute_min_acceptance(radius: float, ridge: float) -> float:
    """The share of proposals that is accepted at least, but for those outside of the ball: exp(-(1/4 - k)/(2 ridge)).

    k = s'(R), s the logistic function: over the ball the loss has a Hessian between k S and S/4, S = X'X/n, whose
    eigenvalues s_i add up to 1 at most. Proposals have the precision of the lower one, so the share is at least
    prod_i sqrt((ridge + k s_i)/(ridge + s_i/4)).
    """
    return math.exp(-(0.25 - _compute_min_curvature(radius)) / (2 * ridge))


def _compute_min_curvature(radius: float) -> float:
    return float(expit(radius) * expit(-radius))


def run_logistic_exponential(
    sample: Sample, *, radius: float, ridge: float, epsilon: float, budget: NoiseProvider, alpha: float = 0.5
) -> ChosenHypothesis:
    """Draw theta in the ball with density ~ exp(-epsilon n J(theta)/(2 R)), J = mean log-loss + ridge |theta|^2/2.

    Records are scaled to length 1 if they are longer. Warns below ``compute_convex_size``.

    Args:
        sample: PRIVATE. [n, D]; an intercept is a feature of its own.
        radius: R, of the ball of parameters; the loss lies within an interval of that length over it.
        ridge: Of the penalty; public.
        epsilon: Price of the draw (bounded range).
        budget: Pays, and gives the noise.
        alpha: Excess mean loss for which ``compute_convex_size`` warns.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one, n public. The draw is exact (in real numbers).
        Let P be the least Hessian of J over the ball, g its gradient at some t0 in it, s = t - t0, and l >= 0. For t in
        the ball -t0 s >= |s|^2/2 - (R^2 - |t0|^2)/2, so J(t) >= J(t0) - l (R^2 - |t0|^2)/2 + (g + l t0) s +
        s'(P + l) s/2. A normal draw of that precision, kept with the ratio of both sides, has the density. t0 and l
        (the minimum and its multiplier) only set how often it is kept, and how often is not released.
    Source: WLF16 Algorithm 1 and Proposition 19, without its Markov chain.
    """
    check_replace_one(sample, "the exponential mechanism")
    checks.positive("epsilon", epsilon)
    checks.positive("radius", radius)
    checks.positive("ridge", ridge)
    checks.positive("alpha", alpha)
    if (acceptance_rate := compute_min_acceptance(radius, ridge)) < MIN_ACCEPTANCE_RATE:
        fix = f"Take ridge >= {0.25 / (2 * math.log(1 / MIN_ACCEPTANCE_RATE)):.2g}."
        raise checks.error("ridge", ridge, f"may accept one proposal in {1 / acceptance_rate:,.0f} only", fix)
    dimension = sample.x.shape[1]
    if sample.n < (law_min_n := 2 * dimension / (epsilon * ridge * radius)):
        fix = f"Take n >= {math.ceil(law_min_n):,}, fewer features, or a larger ridge."
        raise checks.error("sample.n", sample.n, "makes a law so wide that the ball holds almost nothing of it", fix)
    min_n = compute_convex_size(dimension, epsilon=epsilon, alpha=alpha, loss_range=radius)
    warn_below_guarantee("convex exponential mechanism", sample.n, [(f"excess mean loss {alpha:g}", min_n)])
    events: tuple[PrivacyEvent, ...] = (BoundedRangeEvent(eta=epsilon),)
    with charge_events(budget, events, "convex exponential mechanism") as spending:
        theta = _draw(sample, radius, ridge, epsilon * sample.n / (2 * radius), spending.noise)
    return ChosenHypothesis(theta, -1, events)


def clip_rows(x: Floats) -> Floats:
    """Rows scaled to length 1 where they are longer, each by itself."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0)


def _draw(sample: Sample, radius: float, ridge: float, rate: float, noise: NoiseSource) -> Floats:
    signed_x = np.where(sample.y, 1.0, -1.0)[:, None] * clip_rows(sample.x)
    n, dimension = signed_x.shape

    def compute_objective(theta: Floats, extra_ridge: float = 0.0) -> tuple[float, Floats]:
        margin = signed_x @ theta
        value = float(np.logaddexp(0, -margin).mean()) + (ridge + extra_ridge) / 2 * float(theta @ theta)
        return value, (ridge + extra_ridge) * theta - signed_x.T @ expit(-margin) / n

    start, multiplier = _minimize_in_ball(compute_objective, dimension, radius)
    level, gradient = compute_objective(start)
    level -= multiplier / 2 * (radius**2 - float(start @ start))
    gradient = gradient + multiplier * start
    precision = (ridge + multiplier) * np.eye(dimension) + _compute_min_curvature(radius) * (signed_x.T @ signed_x) / n
    lower = np.linalg.cholesky(precision)
    center = start - cho_solve((lower, True), gradient)
    while True:
        standard_D = noise.draw_gaussian((dimension,), 1.0, _CPU).numpy()
        theta = center + solve_triangular(lower, standard_D, trans="T", lower=True) / math.sqrt(rate)
        log_u = math.log(float(noise.draw_uniform((1,), _CPU)[0]))
        step = theta - start
        bound = level + float(gradient @ step) + float(step @ precision @ step) / 2
        if np.linalg.norm(theta) <= radius and log_u <= -rate * (compute_objective(theta)[0] - bound):
            return theta


def _minimize_in_ball(
    objective: Callable[[Floats, float], tuple[float, Floats]], dimension: int, radius: float
) -> tuple[Floats, float]:
    """A point of the ball near the least J there, and the multiplier at which it is the minimum without the ball."""

    def minimize_objective(extra_ridge: float) -> Floats:
        return minimize(objective, np.zeros(dimension), (extra_ridge,), jac=True, method="L-BFGS-B").x

    low, high = 0.0, 1 / radius  # at |gradient| <= 1 of the loss, the minimum's length is below 1/extra
    interior = minimize_objective(low)
    if np.linalg.norm(interior) <= radius:
        return interior, 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if np.linalg.norm(minimize_objective(middle)) > radius else (low, middle)
    start = minimize_objective(high)
    return start * min(1.0, radius / float(np.linalg.norm(start))), high
