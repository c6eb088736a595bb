"""Measurements of teachers and their votes on public data, by the size of a shard. No private record is read.

The theory of PATE depends on three measurements: the margins of the vote (LZCW21 Definition 17), the on-average
stability of a teacher (BTT18 Definition 5.7), and the gain of the vote over one teacher (LZCW21 Examples 1 and 2).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.planning.pilot import Pilot
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.voting import count_votes

XI = np.arange(50) / 100  # margins at which a diagnosis holds the share of points
LEGEND = (
    "K, shard: teachers, and private records of each. tried: teachers trained here.",
    "one: % of the points on which one teacher is right.",
    "vote: % points by which the vote of those tried is right more often than one.",
    "alpha: on-average stability, the root mean square change of a teacher's",
    "  probabilities if one of its records is replaced.",
    "nu.1: % of the points on which half of the winner's lead is at most .1 K votes.",
)


@dataclass(frozen=True, kw_only=True)
class ShardDiagnosis:
    """Measurements for one size of a shard. An estimate comes with half the width of its 95 % confidence interval.

    Attributes:
        num_teachers: Number K of teachers that the planned records give at this size.
        num_tried: Number of teachers that were trained on public records.
        teacher_accuracy: Accuracy of one teacher.
        vote_gain: Accuracy of the vote minus ``teacher_accuracy``, given the teachers that were trained.
        voting: "helps", "harms", or "same" if the interval of the gain contains 0.
        nu: Share nu(xi) of points whose margin is at most xi, for each xi of ``XI``.
        instability: Mean squared change alpha^2 of a teacher's probabilities if a record is replaced.
    """

    num_teachers: int
    shard_size: int
    num_tried: int
    teacher_accuracy: tuple[float, float]
    vote_gain: tuple[float, float]
    voting: str
    nu: tuple[float, ...]
    instability: tuple[float, float]


def diagnose_shards(pilot: Pilot, method: TeacherVotes) -> ShardDiagnosis:
    """Measure the method's teachers on public data. Raise ValueError if there are too few data."""
    proba_KQC, changed_KQC = pilot.predict(method), pilot.predict(method, replaces_one=True)
    label_KQ, truth_Q = proba_KQC.argmax(-1), pilot.test_points[1]
    votes, right_KQ = count_votes(label_KQ, proba_KQC.shape[2]), (label_KQ == truth_Q).double()
    gain, half_width = _estimate((votes.compute_plurality() == truth_Q).double() - right_KQ.mean(0))
    # For two classes, half of the sum over classes is the squared change of the probability of one class.
    square_KQ = (proba_KQC.double() - changed_KQC.double()).square().sum(-1) / 2
    return ShardDiagnosis(
        num_teachers=method.num_teachers,
        shard_size=pilot.num_records // method.num_teachers,
        num_tried=len(label_KQ),
        teacher_accuracy=_estimate(right_KQ.mean(1), right_KQ.mean(0)),
        vote_gain=(gain, half_width),
        voting="same" if abs(gain) <= half_width else "helps" if gain > 0 else "harms",
        nu=tuple(compute_margin_curve(votes, XI).tolist()),
        instability=_estimate(square_KQ.mean(1), square_KQ.mean(0)),
    )


def _estimate(*samples: Tensor) -> tuple[float, float]:
    """Estimate a mean. Each sample holds the means over the teachers, or over the points."""
    variance = sum(float(sample.var()) / len(sample) for sample in samples)
    return float(samples[0].mean()), 1.96 * math.sqrt(variance)


def compute_margin_curve(votes: Votes, xi_X: np.ndarray) -> np.ndarray:
    """Compute the share nu(xi) of points with a margin of at most xi, float64 [X] (LZCW21 Definition 17, corrected).

    The margin, half the winner's lead as a share of the votes, exceeds the expected margin by at most 1/(2 sqrt K).
    """
    margin_Q = votes.compute_gaps().cpu().double().numpy() / (2 * votes.num_teachers)
    return np.searchsorted(np.sort(margin_Q), xi_X, side="right") / len(margin_Q)


def compute_proposition_18(
    m: int, *, nu: float, xi: float, epsilon: float, delta: float, gamma: float
) -> tuple[int, int]:
    """Compute (T, K) with which the sparse vector answers all m queries but T as infinitely many teachers would.

    T = nu m + sqrt(2 nu m ln(3/gamma)) + (2/3) ln(3/gamma), for a (nu, xi)-high-margin problem. K: the smallest with
    K xi - sqrt(K L/2) - 1 >= w + lambda ln(3T/gamma) + 2 lambda L, L = ln(3m/gamma): half the smallest gap, less one,
    above the threshold and all noise, with probability 1 - gamma. (LZCW21 prints 3 lambda (ln(4m/delta) + L)/xi, which
    compares the whole gap, and leaves nothing for sqrt(K L/2).)
    """
    T, L = _bound_failures(m, nu, gamma), math.log(3 * m / gamma)
    scales = _make_cost(T, m, epsilon, delta)
    needed = 1 + scales.threshold + scales.noise_scale * (math.log(3 * T / gamma) + 2 * L)
    root = (math.sqrt(L / 2) + math.sqrt(L / 2 + 4 * xi * needed)) / (2 * xi)
    return T, math.ceil(root**2)


def _bound_failures(m: int, nu: float, gamma: float) -> int:
    slack = math.log(3 / gamma)
    return max(1, math.ceil(nu * m + math.sqrt(2 * nu * m * slack) + 2 * slack / 3))


@functools.lru_cache(maxsize=64)  # many margins have the same bound
def _make_cost(max_failures: int, m: int, epsilon: float, delta: float) -> Any:
    mechanism = SparseVector(epsilon=epsilon, delta=delta, failure_delta=delta / 2, max_failures=max_failures)
    return mechanism.make_cost(m)


def format_shards(shards: tuple[ShardDiagnosis, ...]) -> list[str]:
    """Format a line for each size of a shard, and the meaning of every column, in 80 columns."""
    rows = [["K", "shard", "tried", "one", "vote", "voting", "alpha", "nu.1", "nu.2", "nu.4"]]
    for s in shards:
        (one, half), (gain, gain_half) = s.teacher_accuracy, s.vote_gain
        row = f"{s.num_teachers} {s.shard_size} {s.num_tried} {100 * one:.1f}±{100 * half:.1f} {100 * gain:+.1f}"
        row += f"±{100 * gain_half:.1f} {s.voting} {s.instability[0] ** 0.5:.3f}"
        rows.append([*row.split(), *(f"{100 * s.nu[i]:.0f}" for i in (10, 20, 40))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    scope = "On public records that train no teacher, and for data like them (± 95 %):"
    return [scope, "", *("  ".join(map(str.rjust, row, widths)) for row in rows), "", *LEGEND, ""]


def explain_theory(shard: ShardDiagnosis, lead: float | None, m: int, epsilon: float, delta: float) -> list[str]:
    """Explain what m queries ask of the votes. ``lead`` is the lead that a useful label needs, in votes."""
    K, notes = shard.num_teachers, list[str]()
    if shard.voting == "harms":
        notes.append("Voting harms here: try larger shards, another teacher, or method=gradients, which has no vote.")
    if lead is not None and lead < K:
        percent = 100 * shard.nu[int(lead / K * 50)]
        notes.append(f"On {percent:.0f} % of the points, the lead is below the {lead:.3g} votes of a useful label.")
    terms = {"epsilon": epsilon, "delta": delta, "gamma": 0.05}
    curve = [(nu, xi) for nu, xi in zip(shard.nu, XI.tolist(), strict=True) if xi and _bound_failures(m, nu, 0.05) < m]
    proofs = [compute_proposition_18(m, nu=nu, xi=xi, **terms) for nu, xi in curve]
    T, needed = min(proofs, key=lambda proof: proof[1], default=(m, 0))
    promise = f"that the sparse vector answers {m - T} of {m} queries with {needed:,} such teachers; there are {K}"
    return [*notes, f"LZCW21 Proposition 18 promises {promise if needed else 'no answer to the sparse vector'}."]
