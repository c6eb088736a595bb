"""The exponential mechanism over listed hypotheses, over the dichotomies of public points, and over a ball."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import expit

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.hypotheses import sample as samples
from pate_torch.hypotheses.classes import HypothesisClass
from pate_torch.hypotheses.sample import Floats, Ints, Sample
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.privacy.noise import NoiseProvider, NoiseSource

MIN_ACCEPTANCE_RATE = 1e-4
"""Smallest acceptance rate of proposals that ``run_logistic_exponential`` allows."""

VACUOUS_ALPHA = 0.5
"""Default excess error. Its promise is so weak that only very small samples cause a warning."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ChosenHypothesis:
    """A privately chosen hypothesis, or parameters of a logistic regression, float64 [D], and the events of the choice.

    ``index`` is the place in the list of candidates, or -1 if there is no list.
    """

    hypothesis: Any
    index: int
    events: tuple[PrivacyEvent, ...]


# ---- Accuracy at a given number of records ---------------------------------------------------------------------------


def compute_excess_risk(n: int, num_candidates: int, epsilon: float, failures: tuple[float, float, float]) -> float:
    """Bound the risk of the drawn h, P(h) ~ exp(-epsilon errors(h)/2), above that of the best candidate h*.

    Let R be the risk on a new record, and r the share of errors on n independent records. Except with probability b, b1
    and b2 (``failures``), r(h) <= min r + 2 ln(M/b)/(epsilon n), R(h) <= r(h) + sqrt(ln(M/b1)/(2n)) for all M
    candidates, and r(h*) <= R(h*) + sqrt(ln(1/b2)/(2n)) (Hoeffding). Their sum bounds R(h) - R(h*).
    """
    log_draw, log_all = (math.log(num_candidates / failure) for failure in failures[:2])
    deviations = math.sqrt(log_all / (2 * n)) + math.sqrt(-math.log(failures[2]) / (2 * n))
    return min(1.0, 2 * log_draw / (epsilon * n) + deviations) if num_candidates > 1 else 0.0


def certify(
    n: int, num_candidates: int, epsilon: float, failure: float, num_problems: int, theorem: tuple[float, str]
) -> dict[str, Any]:
    """Make the certificate of the hypotheses of all problems, in words and numbers that may be published.

    The candidates must not depend on the records. ``epsilon`` is that of one problem. Each problem has an equal share
    of the failure probability, of which each term of ``compute_excess_risk`` has a third. ``theorem`` is the number of
    records that the theorem of the algorithm needs, and its promise.
    """
    excess = compute_excess_risk(n, num_candidates, epsilon, (failure / num_problems / 3,) * 3)
    subject, size = "the released rule" if num_problems == 1 else "each rule for one class against the rest", theorem[0]
    words = (
        f"With probability {1 - failure:g}, the error of {subject} on new records is at most "
        f"{math.ceil(1000 * excess) / 10:g} percentage points above that of the best candidate. The best candidate has "
        f"the smallest error on new records among {num_candidates:,} rules, which public points determine. This holds "
        f"if all n = {n:,} private records can be used and are independent draws from the population of the new ones. "
        f"The theorem needs n >= {math.ceil(size):,} for its own promise ({theorem[1]})."
    )
    facts = {"certificate": words, "excess_risk": excess, "probability": 1 - failure, "num_records": n}
    return facts | {"num_candidates": num_candidates, "theorem_num_records": math.ceil(size)}


# ---- Listed hypotheses -----------------------------------------------------------------------------------------------


def compute_finite_size(num_hypotheses: int, *, epsilon: float, alpha: float) -> float:
    """Compute the smallest n with E[empirical error] <= min + alpha, 2 ln M/(epsilon alpha) (DF20 Lemma 4)."""
    return 2 * math.log(num_hypotheses) / (epsilon * alpha)


def run_exponential_mechanism(
    hypotheses: HypothesisClass,
    candidates: Sequence[Any],
    sample: Sample,
    *,
    epsilon: float,
    budget: NoiseProvider,
    alpha: float = VACUOUS_ALPHA,
) -> ChosenHypothesis:
    """Choose among public ``candidates`` by their errors on the private sample: P(h) ~ exp(-epsilon errors(h)/2).

    The function warns (``BelowGuaranteeWarning``) if n is below ``compute_finite_size`` for the excess empirical error
    ``alpha``. A single candidate is free of charge.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one, n public; error counts have sensitivity 1.
        (WLF16 prints the sensitivity 2/n for mean losses in [0, 1], which would use only half of the budget.)
    Source: DF20 section 2; WLF16 Algorithm 1 with the 0-1 loss; bounded range: Cesar & Rogers 2021.
    """
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    checks.positive("epsilon", epsilon)
    if len(candidates) == 0:
        raise checks.error("candidates", [], "must hold at least one hypothesis")
    min_n = compute_finite_size(len(candidates), epsilon=epsilon, alpha=alpha)
    samples.warn_below_guarantee("exponential mechanism", sample.n, [(f"excess empirical error {alpha:g}", min_n)])
    return _choose(hypotheses, candidates, sample, epsilon, budget)


def count_errors(hypotheses: HypothesisClass, candidates: Sequence[Any], sample: Sample) -> Ints:
    """PRIVATE. Count the errors of each candidate. One replaced record changes each count by at most 1."""
    return hypotheses.count_errors(candidates, *sample.usable)


def _choose(
    hypotheses: HypothesisClass, candidates: Sequence[Any], sample: Sample, epsilon: float, budget: NoiseProvider
) -> ChosenHypothesis:
    errors = count_errors(hypotheses, candidates, sample)
    if len(candidates) == 1:
        return ChosenHypothesis(candidates[0], 0, ())
    events: tuple[PrivacyEvent, ...] = (BoundedRangeEvent(eta=epsilon),)
    with samples.charge_events(budget, events, "exponential mechanism") as spending:
        index = draw_gumbel_max(-(errors / sample.n), epsilon * sample.n / 2, spending.noise)
    return ChosenHypothesis(candidates[index], index, events)


# ---- Dichotomies of public points (SSPP) -----------------------------------------------------------------------------


def compute_sspp_public_size(vc_dimension: int, *, alpha: float, beta: float) -> int:
    """Compute how many public points give a cover within alpha/4 with probability 1 - beta/3."""
    return samples.compute_net_size(alpha / 4, beta / 3, vc_dimension)


def compute_sspp_private_size(
    vc_dimension: int, *, epsilon: float, alpha: float, beta: float, num_public: int = 0
) -> int:
    """Compute the smallest n for excess error alpha with probability 1 - beta.

    The cover by the public points adds alpha/4 to the error, the exponential mechanism alpha/4
    (2 (ln M + ln(3/beta))/(epsilon n) with M <= sum_{i<=d} C(m, i)), and uniform convergence 2 alpha/4. The number m of
    public points is ``num_public`` if it exceeds ``compute_sspp_public_size``, because more points make a larger cover.

    Source: NB20 appendix B.2 (after Alon, Bassily & Moran 2019), with explicit constants.
    """
    num_points = max(num_public, compute_sspp_public_size(vc_dimension, alpha=alpha, beta=beta))
    log_cover = samples.compute_log_sauer_shelah(num_points, vc_dimension)
    mechanism_size = 8 * (log_cover + math.log(3 / beta)) / (epsilon * alpha)
    return max(math.ceil(mechanism_size), samples.compute_uniform_size(alpha / 4, beta / 3, vc_dimension))


def run_sspp(
    hypotheses: HypothesisClass,
    sample: Sample,
    public_x: Floats,
    *,
    epsilon: float,
    budget: NoiseProvider,
    alpha: float = VACUOUS_ALPHA,
    beta: float = 0.5,
) -> ChosenHypothesis:
    """Choose among one hypothesis for each dichotomy of the *public* points by the errors on the sample.

    The public points [m, D] must be independent of the sample. If the class has a single dichotomy of the points, its
    hypothesis is free of charge. The function warns if there are fewer records than ``compute_sspp_private_size`` or
    fewer public points than ``compute_sspp_public_size`` for excess error alpha with probability 1 - beta.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one; error counts have sensitivity 1.
    Source: NB20 Algorithm 7.
    """
    checks.positive("epsilon", epsilon)
    public_x = samples.check_points("public_x", public_x)
    if len(public_x) == 0:
        raise checks.error("public_x", [], "must hold at least one point")
    d, m = hypotheses.vc_dimension, len(public_x)
    min_n = compute_sspp_private_size(d, epsilon=epsilon, alpha=alpha, beta=beta, num_public=m)
    promises = [(f"excess error {alpha:g} with probability {1 - beta:g}", min_n)]
    public_size = ("public points", m, compute_sspp_public_size(d, alpha=alpha, beta=beta))
    samples.warn_below_guarantee("SSPP", sample.n, promises, [public_size])
    return _choose(hypotheses, hypotheses.enumerate_representatives(public_x), sample, epsilon, budget)


# ---- Logistic regression over a ball ---------------------------------------------------------------------------------


def compute_convex_size(dimension: int, *, epsilon: float, alpha: float, loss_range: float) -> float:
    """Compute the smallest n with E[mean loss + g] <= min + alpha under the target law: 2 D range/(epsilon alpha).

    For F >= 0 convex with F(0) = 0 over a convex body, let Z(r) be the integral of exp(-r F) in D dimensions. Shrinking
    the body by s >= 1 gives Z(r) >= s^-D Z(r/s), so r^D Z(r) does not decrease, and E[F] = -d ln Z/dr <= D/r; here
    r = epsilon n/(2 range). (WLF16 Theorem 17, by sublevel sets, has at least 9 (D + 2) ln n instead of 2 D.)
    """
    return 2 * dimension * loss_range / (epsilon * alpha)


def compute_min_acceptance(radius: float, ridge: float) -> float:
    """Compute a lower bound on the acceptance rate of proposals inside the ball, exp(-(1/4 - k)/(2 ridge)).

    Here k = s'(R), s the logistic function. Over the ball, the Hessian of the loss lies between k S and S/4, S = X'X/n,
    whose eigenvalues s_i have a sum of 1 at most. Proposals have the precision of the lower bound, so the rate is at
    least prod_i sqrt((ridge + k s_i)/(ridge + s_i/4)).
    """
    return math.exp(-(0.25 - _compute_min_curvature(radius)) / (2 * ridge))


def _compute_min_curvature(radius: float) -> float:
    return float(expit(radius) * expit(-radius))


def run_logistic_exponential(
    sample: Sample, *, radius: float, ridge: float, epsilon: float, budget: NoiseProvider, alpha: float = VACUOUS_ALPHA
) -> ChosenHypothesis:
    """Draw theta in the ball with density ~ exp(-epsilon n J(theta)/(2 R)), J = mean log-loss + ridge |theta|^2/2.

    The ball has the radius R, so the loss of a record has a range of R over it. The features include the intercept.
    Records with a norm above 1 are scaled to norm 1. The function warns below ``compute_convex_size`` for ``alpha``.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one, n public. The draw is exact (in real numbers).
        Let P be a lower bound on the Hessian of J over the ball, g the gradient at some t0 in the ball, s = t - t0,
        and l >= 0. For t in the ball, -t0 s >= |s|^2/2 - (R^2 - |t0|^2)/2, so J(t) >= J(t0) - l (R^2 - |t0|^2)/2 +
        (g + l t0) s + s'(P + l) s/2. A normal draw of precision P + l that is accepted with the ratio of both sides has
        the density. t0 and l (the minimum and its multiplier) change only the acceptance rate, which is not released.
    Source: WLF16 Algorithm 1 and Proposition 19, without its Markov chain.
    """
    for key, value in (("epsilon", epsilon), ("radius", radius), ("ridge", ridge), ("alpha", alpha)):
        checks.positive(key, value)
    if (acceptance_rate := compute_min_acceptance(radius, ridge)) < MIN_ACCEPTANCE_RATE:
        fix = f"Take ridge >= {0.25 / (2 * math.log(1 / MIN_ACCEPTANCE_RATE)):.2g}."
        problem = f"is so small that {1 / acceptance_rate:,.0f} proposals may be rejected before one is accepted"
        raise checks.error("ridge", ridge, problem, fix)
    dimension = sample.x.shape[1]
    if sample.n < (law_min_n := 2 * dimension / (epsilon * ridge * radius)):
        fix = f"Take n >= {math.ceil(law_min_n):,}, fewer features, or a larger ridge."
        raise checks.error("sample.n", sample.n, "is so small that most proposals lie outside the ball", fix)
    min_n = compute_convex_size(dimension, epsilon=epsilon, alpha=alpha, loss_range=radius)
    samples.warn_below_guarantee("convex exponential mechanism", sample.n, [(f"excess mean loss {alpha:g}", min_n)])
    events: tuple[PrivacyEvent, ...] = (BoundedRangeEvent(eta=epsilon),)
    with samples.charge_events(budget, events, "convex exponential mechanism") as spending:
        theta = _draw_parameters(sample, radius, ridge, epsilon * sample.n / (2 * radius), spending.noise)
    return ChosenHypothesis(theta, -1, events)


def _draw_parameters(sample: Sample, radius: float, ridge: float, rate: float, noise: NoiseSource) -> Floats:
    clipped_x = sample.x / np.maximum(np.linalg.norm(sample.x, axis=1, keepdims=True), 1.0)
    signed_x = np.where(sample.y, 1.0, -1.0)[:, None] * clipped_x
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
    def minimize_objective(extra_ridge: float) -> Floats:
        return minimize(objective, np.zeros(dimension), (extra_ridge,), jac=True, method="L-BFGS-B").x

    low, high = 0.0, 1 / radius  # the gradient of the loss has norm 1 at most, so the minimum's is below 1/extra_ridge
    interior = minimize_objective(low)
    if np.linalg.norm(interior) <= radius:
        return interior, 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if np.linalg.norm(minimize_objective(middle)) > radius else (low, middle)
    start = minimize_objective(high)
    return start * min(1.0, radius / float(np.linalg.norm(start))), high
