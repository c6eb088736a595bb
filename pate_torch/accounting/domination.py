"""The Gaussian mechanism that dominates a run of DP-SGD up to a failure probability d.

Let delta_M(e) be the larger hockey-stick divergence of the two directions (add, remove) of a mechanism M. If

    delta_M(e) <= d + (1 - d) delta_mu(e)   for all e >= 0,                                                         (1)

then M can be charged as Gaussian(mu) plus a failure of probability d in any adaptive composition.

Proof. The right side is the curve of a mechanism G that reveals the data set with probability d and otherwise answers
by Gaussian(mu). Both directions at e >= 0 determine a curve at all e, because H(P, Q; e) = 1 - exp(e) + exp(e)
H(Q, P; -e). By (1), G dominates M for any neighbors, so M is a post-processing of G (Blackwell 1953; Dong, Roth & Su
2022, Theorem 2), also if it was chosen after earlier answers. Unless a G fails, all answers are those of Gaussian
mechanisms, whose mu^2 a filter adds up. The probability that any G fails is at most the sum of all d.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr

from pate_torch.accounting import pld
from pate_torch.accounting.events import DeltaEvent, GaussianEvent, PrivacyEvent, SampledGaussianEvent
from pate_torch.accounting.rdp import Array
from pate_torch.core import checks

_NUM_INTERVALS = 600
_LOG_MU_STEP = 1e-4  # mu is a power of exp(1e-4), and so the same on machines with other rounding errors
_MIN_STEP, _MAX_STEP = -200_000, 40_000
_ROUNDING_DELTA = 1e-13  # bounds the rounding error of a difference of two terms of at most 1


def replace_sampled_gaussians(events: Iterable[PrivacyEvent]) -> tuple[PrivacyEvent, ...]:
    """Replace every sampled Gaussian that has a failure probability by a Gaussian event and a Delta event."""
    replaced: list[PrivacyEvent] = []
    for event in events:
        if not isinstance(event, SampledGaussianEvent) or not event.failure_delta:
            replaced.append(event)
            continue
        mu = compute_dominating_gaussian(event, event.failure_delta)
        replaced += [GaussianEvent(mu=mu, count=event.count), DeltaEvent(delta=event.failure_delta, count=event.count)]
    return tuple(replaced)


def compute_dominating_gaussian(event: SampledGaussianEvent, failure_delta: float) -> float:
    """Compute the smallest mu, rounded up by at most 1e-4, for which one run of the event satisfies (1).

    Raises:
        ValueError: Domination cannot be shown: mu would be large, or ``failure_delta`` is close to rounding errors.
    """
    return _compute_mu(replace(event, count=1, failure_delta=0.0), checks.delta("failure_delta", failure_delta))


@lru_cache(maxsize=256)
def _compute_mu(run: SampledGaussianEvent, failure_delta: float) -> float:
    low, high, epsilons, deltas = _MIN_STEP, _MAX_STEP, np.zeros(0), np.zeros(0)
    last_epsilon = pld.compute_epsilon([run], failure_delta, 0.5) if pld.can_compose([run]) else math.inf
    if math.isfinite(last_epsilon):
        epsilons = np.linspace(0.0, last_epsilon, _NUM_INTERVALS + 1)
        deltas = np.array([pld.compute_delta([run], epsilon) for epsilon in epsilons])
    if not len(deltas) or not is_dominated(epsilons, deltas, math.exp(high * _LOG_MU_STEP), failure_delta):
        fix = "Use more noise or fewer steps, or another account, opened with privacy.filter=rdp."
        problem = f"no Gaussian mechanism is known to dominate it up to a failure probability of {failure_delta:g}"
        raise checks.error("event", run, problem, fix)
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = is_dominated(epsilons, deltas, math.exp(middle * _LOG_MU_STEP), failure_delta)
        low, high = (low, middle) if is_enough else (middle, high)
    return math.exp(high * _LOG_MU_STEP)


def is_dominated(epsilons: Array, deltas: Array, mu: float, failure_delta: float) -> bool:
    """Show (1) for a curve of at most ``deltas`` at ``epsilons``, from 0 to where delta is at most ``failure_delta``.

    Beyond the last point, (1) holds because the curve does not increase. Between two points the curve is convex in x =
    exp(e), so it lies below its chord. Moreover, delta_mu(e) >= Phi(-l/mu + mu/2) - x Phi(-l/mu - mu/2) for any l, by
    the test that is best at l; here l is the left point. Both sides are linear in x, so both ends suffice.
    """
    left, right = epsilons[:-1], epsilons[1:]
    power, log_error = ndtr(-left / mu + mu / 2), log_ndtr(-left / mu - mu / 2)
    for ends, end_deltas in ((left, deltas[:-1]), (right, deltas[1:])):
        bounds = failure_delta + (1 - failure_delta) * (power - np.exp(ends + log_error) - _ROUNDING_DELTA)
        if not (end_deltas <= bounds).all():
            return False
    return True
