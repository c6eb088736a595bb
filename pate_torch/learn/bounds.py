"""What the theorems ask for, in numbers: records for each algorithm. Reads no record."""

from __future__ import annotations

import math
from typing import Any

from pate_torch.pac import baselines, stable
from pate_torch.pac.agnostic import plan_ag_priv_cl
from pate_torch.pac.boosting import compute_high_confidence_size
from pate_torch.pac.exponential import df20_lemma_4
from pate_torch.pac.logistic import compute_convex_size
from pate_torch.pac.relabeled import compute_relabeled_size
from pate_torch.pac.semi_private import compute_sspp_private_size, compute_sspp_public_size

_MANY_RECORDS = 10**18


def tabulate_sample_sizes(
    d: int,
    m: int,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    gamma: float,
    num_hypotheses: int,
    radius: float,
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
        num_hypotheses: Hypotheses of a finite class.
        radius: Of the ball of parameters.
    """
    query_epsilon, promise = epsilon / m, f"excess error {alpha:g} with probability {1 - beta:g}"
    options: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "alpha": alpha, "beta": beta}
    flipping_gamma = stable.compute_flipping_gamma(query_epsilon, alpha)
    paper_plan, sharp_plan = (
        plan_ag_priv_cl(_MANY_RECORDS, m, d, **options, constants=constants, resample=constants == "paper")
        for constants in ("paper", "sharp")
    )
    relabeled_size, shard = compute_relabeled_size(m, d, epsilon=epsilon, delta=delta, alpha=alpha)
    return {
        "exponential": (
            df20_lemma_4(num_hypotheses, epsilon, alpha),
            f"excess empirical error {alpha:g}, {num_hypotheses} hypotheses",
        ),
        "boosted": (compute_high_confidence_size(num_hypotheses, epsilon=epsilon, alpha=alpha, failure=beta), promise),
        "convex": (
            compute_convex_size(d, epsilon=epsilon, alpha=alpha, loss_range=radius),
            f"excess mean loss {alpha:g}",
        ),
        "sspp": (
            compute_sspp_private_size(d, epsilon=epsilon, alpha=alpha, beta=beta),
            f"{promise}, from {compute_sspp_public_size(d, alpha=alpha, beta=beta):,} public points on",
        ),
        "representation": (baselines.compute_representation_size(d, epsilon=epsilon, alpha=alpha, beta=beta), promise),
        "ag-priv-cl": (paper_plan.minimum_n, f"average {promise}, from {paper_plan.minimum_queries:,} queries on"),
        "ag-priv-cl --constants sharp": (
            sharp_plan.minimum_n,
            f"the same, from {sharp_plan.minimum_queries:,} queries on",
        ),
        "relabeled": (relabeled_size, f"the relabeling hypothesis on most points, {shard:,} records a teacher"),
        "stable": (
            stable.compute_stable_predictor_size(d, gamma=gamma, alpha=alpha),
            f"empirical excess error {3 * alpha:g}",
        ),
        "private-prediction": (
            stable.compute_stable_predictor_size(d, gamma=flipping_gamma, alpha=alpha),
            f"empirical excess error {4 * alpha:g}, {m:,} predictions",
        ),
        "private-predictor": (
            stable.compute_private_predictor_size(d, epsilon=query_epsilon, alpha=alpha, beta=beta),
            f"error O({alpha:g}), {m:,} predictions",
        ),
        "df18": (
            baselines.compute_df18_size(d, epsilon=query_epsilon, alpha=alpha),
            f"error {2 * alpha:g} where some hypothesis makes none, {m:,} predictions",
        ),
        "averaging": (
            baselines.compute_averaging_size(d, gamma=gamma, alpha=alpha, beta=beta),
            f"excess error {2 * alpha:g}",
        ),
        "(lower bound, DF20 Theorem 4)": (
            (d - 1) / (8 * gamma * min(alpha, 0.25)),
            f"any {gamma:g}-stable learner of expected error {min(alpha, 0.25):g}",
        ),
    }


def format_records(value: float) -> str:
    """A number of records: with its thousands, or by its power of ten."""
    return f"{math.ceil(value):,}" if value < 1e9 else f"{value:.2g}"
