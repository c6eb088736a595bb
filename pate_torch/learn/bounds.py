"""What the theorems ask for, in numbers: records for each algorithm. Reads no record."""

from __future__ import annotations

import math
from typing import Any

from pate_torch.pac import baselines, stable
from pate_torch.pac.agnostic import plan_ag_priv_cl
from pate_torch.pac.boosting import high_confidence_size
from pate_torch.pac.exponential import df20_lemma_4
from pate_torch.pac.logistic import convex_size
from pate_torch.pac.relabeled import needed_records
from pate_torch.pac.semi_private import sspp_private_size, sspp_public_size

_MANY = 10**18


def records_needed(
    d: int, m: int, *, epsilon: float, delta: float, alpha: float, beta: float, gamma: float, finite: int, radius: float
) -> dict[str, tuple[float, str]]:
    """Algorithm -> (records n, what they buy), by explicit constants.

    Args:
        d: VC dimension (parameters, for ``convex``).
        m: Queries, or public points.
        epsilon: Of the whole release; of each prediction where m are released, an equal share.
        delta: Of the whole release.
        alpha: Excess error.
        beta: Probability that it is larger.
        gamma: Of the stable predictor and of averaging.
        finite: Hypotheses of a finite class.
        radius: Of the ball of parameters.
    """
    each, excess = epsilon / m, f"excess error {alpha:g} with probability {1 - beta:g}"
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "alpha": alpha, "beta": beta}
    flipped = stable.flipping_gamma(each, alpha)
    printed, sharp = (
        plan_ag_priv_cl(_MANY, m, d, **asked, constants=constants, resample=constants == "paper")
        for constants in ("paper", "sharp")
    )
    practical, shard = needed_records(m, d, epsilon=epsilon, delta=delta, alpha=alpha)
    return {
        "exponential": (df20_lemma_4(finite, epsilon, alpha), f"excess empirical error {alpha:g}, {finite} hypotheses"),
        "boosted": (high_confidence_size(finite, epsilon=epsilon, alpha=alpha, failure=beta), excess),
        "convex": (convex_size(d, epsilon=epsilon, alpha=alpha, loss_range=radius), f"excess mean loss {alpha:g}"),
        "sspp": (
            sspp_private_size(d, epsilon=epsilon, alpha=alpha, beta=beta),
            f"{excess}, from {sspp_public_size(d, alpha=alpha, beta=beta):,} public points on",
        ),
        "representation": (baselines.representation_size(d, epsilon=epsilon, alpha=alpha, beta=beta), excess),
        "ag-priv-cl": (printed.minimum_n, f"average {excess}, from {printed.minimum_queries:,} queries on"),
        "ag-priv-cl --constants sharp": (sharp.minimum_n, f"the same, from {sharp.minimum_queries:,} queries on"),
        "relabeled": (practical, f"the relabeling hypothesis on most points, {shard:,} records a teacher"),
        "stable": (stable.stable_predictor_size(d, gamma=gamma, alpha=alpha), f"empirical excess error {3 * alpha:g}"),
        "private-prediction": (
            stable.stable_predictor_size(d, gamma=flipped, alpha=alpha),
            f"empirical excess error {4 * alpha:g}, {m:,} predictions",
        ),
        "private-predictor": (
            stable.private_predictor_size(d, epsilon=each, alpha=alpha, beta=beta),
            f"error O({alpha:g}), {m:,} predictions",
        ),
        "df18": (
            baselines.df18_size(d, epsilon=each, alpha=alpha),
            f"error {2 * alpha:g} where some hypothesis makes none, {m:,} predictions",
        ),
        "averaging": (baselines.averaging_size(d, gamma=gamma, alpha=alpha, beta=beta), f"excess error {2 * alpha:g}"),
        "(lower bound, DF20 Theorem 4)": (
            (d - 1) / (8 * gamma * min(alpha, 0.25)),
            f"any {gamma:g}-stable learner of expected error {min(alpha, 0.25):g}",
        ),
    }


def shown(value: float) -> str:
    """A number of records: with its thousands, or by its power of ten."""
    return f"{math.ceil(value):,}" if value < 1e9 else f"{value:.2g}"
