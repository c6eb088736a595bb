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
from pate_torch.learn.algorithms import ALGORITHMS, Algorithm, quote, total_delta
from pate_torch.learn.problem import Choices, Problem, hypothesis_class
from pate_torch.noise.source import DryRunNoise
from pate_torch.pac.sample import BelowGuarantee, Sample

SIZES = (8, 16, 32, 64, 128, 256, 1024, 4096)
"""Records of the world: the first size at which the algorithm runs at all."""


def world(n: int, left: bool, choices: Choices, delta: float) -> Problem:
    """A quarter of n records at 0, labeled 0, and half of those at 1 labeled 1; on the left one more is."""
    x = np.full((n, 1), 1.0)
    x[: n // 4] = 0.0
    y = np.zeros(n, dtype=bool)
    y[n // 4 : n // 4 + (n - n // 4) // 2] = True
    if left:
        y[-1] = True
    order = np.random.default_rng(0).permutation(n)
    public_x = np.tile([[0.0], [1.0]], (max(2, choices.points or 2) // 2 + 1, 1))
    scaled = np.concatenate([x, np.ones((n, 1))], axis=1) / np.sqrt(2)
    return Problem(
        hypotheses=hypothesis_class(choices.hypotheses, 1),
        sample=Sample(x[order], y[order]),
        public_x=public_x,
        scaled=Sample(scaled[order], y[order]),
        choices=choices,
        delta=delta,
    )


def audit(name: str, choices: Choices, *, runs: int, delta: float, confidence: float = 0.95) -> AuditResult:
    """The largest epsilon that the runs prove, beside the one that is charged at ``delta``.

    Raises:
        ValueError: The algorithm runs on no world of these sizes.
    """
    checks.integer("audit", runs, low=100)
    algorithm = ALGORITHMS[name]
    choices = replace(choices, points=2 if choices.points is None else choices.points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowGuarantee)
        sides = _sides(algorithm, choices, delta)
        events = quote(algorithm, sides[0], "torch")
        told = [np.array([_outcome(algorithm, side) for _ in range(runs)]) for side in sides]
    spent = total_delta(events)
    claimed = accounting.compute_guarantee(events, delta).epsilon if spent < delta else 0.0
    evidence = audit_outcomes(*told, delta=max(delta, spent), confidence=confidence)
    return AuditResult(
        mechanism=name,
        proven=evidence.epsilon,
        claimed=claimed,
        delta=max(delta, spent),
        confidence=confidence,
        runs=runs,
        queries=told[0].shape[1],
        evidence=evidence,
    )


def _sides(algorithm: Algorithm, choices: Choices, delta: float) -> Sequence[Problem]:
    refused = ValueError()
    for n in SIZES:
        sides = [world(n, left, choices, delta / 2) for left in (True, False)]
        try:
            quote(algorithm, sides[0], "torch")
        except ValueError as error:
            refused = error
            continue
        return sides
    raise ValueError(f"audit: the algorithm runs on no world of up to {SIZES[-1]:,} records: {refused}")


def _outcome(algorithm: Algorithm, side: Problem) -> np.ndarray:
    """What was learnt says of both values; -1 where nothing was."""
    points = np.array([[0.0], [1.0]])
    try:
        found = algorithm.learn(side, DryRunNoise())
    except ValueError:  # no query was answered
        return np.full(2, -1)
    if algorithm.linear:
        return (np.concatenate([points, np.ones((2, 1))], axis=1) @ found > 0).astype(np.int64)
    return side.hypotheses.predict(found, points).astype(np.int64)
