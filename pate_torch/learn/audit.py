"""Does an algorithm keep the epsilon it is charged? Many runs on neighboring samples of a tiny world, as in ``audit``.

The world is one feature with two values, its records so balanced that one record decides most. An outcome is what the
hypothesis, or the answers' best hypothesis, says of the two values.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pate_torch.accounting import accountant as accounting
from pate_torch.audit.command import AuditResult, audit_outcomes
from pate_torch.core import checks
from pate_torch.learn.algorithms import ALGORITHMS, Algorithm, plan_events, sum_deltas
from pate_torch.learn.problem import LearnOptions, Problem, make_hypothesis_class
from pate_torch.pac.sample import BelowGuaranteeWarning, Sample
from pate_torch.privacy.noise import DryRunNoise

SAMPLE_SIZES = (8, 16, 32, 64, 128, 256, 1024, 4096)
"""Records of the world: the first size at which the algorithm runs at all."""


def make_neighbor_problem(n: int, has_extra_positive: bool, options: LearnOptions, delta: float) -> Problem:
    """A quarter of n records at 0, labeled 0, and half of those at 1 labeled 1; on the left one more is."""
    x = np.full((n, 1), 1.0)
    x[: n // 4] = 0.0
    y = np.zeros(n, dtype=bool)
    y[n // 4 : n // 4 + (n - n // 4) // 2] = True
    if has_extra_positive:
        y[-1] = True
    order = np.random.default_rng(0).permutation(n)
    public_x = np.tile([[0.0], [1.0]], (max(2, options.points or 2) // 2 + 1, 1))
    scaled_x = np.concatenate([x, np.ones((n, 1))], axis=1) / np.sqrt(2)
    return Problem(
        hypotheses=make_hypothesis_class(options.hypotheses, 1),
        sample=Sample(x[order], y[order]),
        public_x=public_x,
        scaled_sample=Sample(scaled_x[order], y[order]),
        options=options,
        delta=delta,
    )


def audit(name: str, options: LearnOptions, *, runs: int, delta: float, confidence: float = 0.95) -> AuditResult:
    """The largest epsilon that the runs prove, beside the one that is charged at ``delta``.

    Raises:
        ValueError: The algorithm runs on no world of these sizes.
    """
    checks.integer("audit", runs, low=100)
    algorithm = ALGORITHMS[name]
    options = replace(options, points=2 if options.points is None else options.points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowGuaranteeWarning)
        sides = _make_sides(algorithm, options, delta)
        events = plan_events(algorithm, sides[0], "torch")
        outcomes = [np.array([_draw_outcome(algorithm, side) for _ in range(runs)]) for side in sides]
    spent_delta = sum_deltas(events)
    claimed_epsilon = accounting.compute_guarantee(events, delta).epsilon if spent_delta < delta else 0.0
    evidence = audit_outcomes(*outcomes, delta=max(delta, spent_delta), confidence=confidence)
    return AuditResult(
        mechanism=name,
        proven=evidence.epsilon,
        claimed=claimed_epsilon,
        delta=max(delta, spent_delta),
        confidence=confidence,
        runs=runs,
        queries=outcomes[0].shape[1],
        evidence=evidence,
    )


def _make_sides(algorithm: Algorithm, options: LearnOptions, delta: float) -> Sequence[Problem]:
    last_error = ValueError()
    for n in SAMPLE_SIZES:
        sides = [
            make_neighbor_problem(n, has_extra_positive, options, delta / 2) for has_extra_positive in (True, False)
        ]
        try:
            plan_events(algorithm, sides[0], "torch")
        except ValueError as error:
            last_error = error
            continue
        return sides
    raise ValueError(f"audit: the algorithm runs on no world of up to {SAMPLE_SIZES[-1]:,} records: {last_error}")


def _draw_outcome(algorithm: Algorithm, side: Problem) -> np.ndarray:
    """What was learnt says of both values; -1 where nothing was."""
    points = np.array([[0.0], [1.0]])
    try:
        hypothesis = algorithm.learn(side, DryRunNoise())
    except ValueError:  # no query was answered
        return np.full(2, -1)
    if algorithm.is_linear:
        return (np.concatenate([points, np.ones((2, 1))], axis=1) @ hypothesis > 0).astype(np.int64)
    return side.hypotheses.predict(hypothesis, points).astype(np.int64)
