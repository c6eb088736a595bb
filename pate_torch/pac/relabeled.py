"""A practical AgPrivCl: relabel a sub-sample by its best hypothesis, then GNMax on the votes of its shards."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from pate_torch.accounting import gdp
from pate_torch.accounting.events import DeltaEvent, PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.pac.agnostic import RELABEL_FACTOR, compute_shard_votes, relabel
from pate_torch.pac.classes import HypothesisClass
from pate_torch.pac.nets import compute_realizable_size
from pate_torch.pac.sample import (
    Floats,
    NoisyVotesWarning,
    Sample,
    charge_events,
    check_points,
    check_replace_one,
    draw_without_replacement,
    warn_below_guarantee,
)
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext


@dataclass(frozen=True, kw_only=True)
class RelabeledPlan:
    """Every number that the practical AgPrivCl runs with, all public.

    Attributes:
        subset_size: n' records drawn without replacement.
        inner_price: (epsilon*, delta*) of GNMax with regard to the relabeled sample.
        num_teachers: Number K of teachers.
        sigma: Noise of GNMax, in votes.
        total_price: The (epsilon, delta) proved for the whole, at most what was asked.
    """

    subset_size: int
    inner_price: tuple[float, float]
    num_teachers: int
    sigma: float
    total_price: tuple[float, float]

    @property
    def events(self) -> tuple[PrivacyEvent, ...]:
        """What is charged: ``total_price``."""
        return PureDPEvent(epsilon=self.total_price[0]), DeltaEvent(delta=self.total_price[1])


@functools.lru_cache(maxsize=64)
def plan_relabeled(n: int, num_queries: int, *, epsilon: float, delta: float, shard: int = 30) -> RelabeledPlan:
    """The share of records at which the teachers' lead is largest in units of the noise.

    A share q leaves epsilon* = ln((1 + (e^epsilon - 1)/q)/F), F = (1 + e^{1/2})^2 for the relabeling, and delta/q;
    GNMax takes sigma = sqrt(2 m)/mu*, exactly. K/sigma is made largest over a grid of shares.

    Args:
        n: Private records.
        num_queries: Number m of queries.
        epsilon: Asked for all answers together.
        delta: Delta of the same.
        shard: Records of a teacher.

    Raises:
        ValueError: No share leaves two teachers; says what n would.
    """
    checks.positive("epsilon", epsilon)
    checks.delta("delta", delta)
    m = checks.integer("num_queries", num_queries, low=1)
    checks.integer("shard", shard, low=1)
    max_share = min(1.0, math.expm1(epsilon) / (RELABEL_FACTOR - 1))  # above it nothing is left for the votes
    plans = [
        plan
        for q in max_share * np.geomspace(0.01, 1.0, 60)
        if (plan := _plan_at_share(float(q), n, m, epsilon, delta, shard)) is not None
    ]
    if not plans:
        fix = f"At epsilon={epsilon:g} take n >= {math.ceil(2 * shard / max_share) + 1:,}."
        raise checks.error("n", n, f"leaves less than two teachers of {shard} records in a sub-sample", fix)
    return max(plans, key=lambda plan: plan.num_teachers / plan.sigma)


def _plan_at_share(q: float, n: int, m: int, epsilon: float, delta: float, shard: int) -> RelabeledPlan | None:
    subset_size = math.floor(q * n)
    if subset_size < 2 * shard:
        return None
    share = subset_size / n
    # Less a rounding: what is proved for it must not come out above what was asked.
    inner_price = math.log((1 + math.expm1(epsilon) / share) / RELABEL_FACTOR) - 1e-12, min(0.5, delta / share)
    if inner_price[0] <= 0:
        return None
    sigma = math.sqrt(2 * m) / gdp.compute_mu(*inner_price)
    total_price = math.log1p(share * (RELABEL_FACTOR * math.exp(inner_price[0]) - 1)), share * inner_price[1]
    assert total_price[0] <= epsilon and total_price[1] <= delta * (1 + 1e-12)
    return RelabeledPlan(
        subset_size=subset_size,
        inner_price=inner_price,
        num_teachers=subset_size // shard,
        sigma=sigma,
        total_price=(total_price[0], min(total_price[1], delta)),
    )


def run_relabeled_gnmax(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    budget: NoiseProvider,
    shard: int = 30,
) -> Answers:
    """Answers every query: sub-sample, relabel, and GNMax on the votes of ERMs on the relabeled sub-sample's shards.

    Warns where a teacher's records do not bring it within alpha/3 of the relabeling hypothesis, or where the noise is
    above a lead of a third of the teachers.

    Args:
        hypotheses: The class.
        sample: PRIVATE.
        x_Q: [m, D]; not chosen by earlier answers of the same call.
        epsilon: Epsilon of all answers together.
        delta: Delta of the same.
        alpha: Excess error of the warning.
        budget: Pays, and gives the noise.
        shard: Records of a teacher.

    Guarantee: (epsilon, delta)-DP for all answers together; charged: the plan's ``total_price``. Replace-one, n public.
        A replaced record of the relabeled sample changes one teacher's votes, so GNMax is (e, d(e))-DP for every e with
        regard to it, d the exact Gaussian curve; ``relabel`` makes that (e + ln F, d(e)) with regard to the sub-sample
        (its docstring has the proof, for any algorithm); sub-sampling without replacement amplifies that to
        (ln(1 + (n'/n)(F e^e - 1)), (n'/n) d(e)) (Balle, Barthe & Gaboardi 2018). The plan fixes e beforehand.
    Source: NB20 Algorithm 3, with LZCW21's Algorithm 1 in the place of its Algorithm 5.
    """
    check_replace_one(sample, "AgPrivCl")
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    x_Q = check_points("x_Q", x_Q)
    plan = plan_relabeled(sample.n, len(x_Q), epsilon=epsilon, delta=delta, shard=shard)
    min_shard = compute_realizable_size(alpha / 6, alpha / 6, hypotheses.vc_dimension)
    min_teachers = _compute_min_teachers(plan, len(x_Q), alpha)
    min_n, _ = compute_relabeled_size(len(x_Q), hypotheses.vc_dimension, epsilon=epsilon, delta=delta, alpha=alpha)
    is_small = shard < min_shard or plan.num_teachers < min_teachers
    warn_below_guarantee(
        "practical AgPrivCl",
        sample.n,
        [(f"the relabeling hypothesis but for {2 * alpha:g} of the points", min_n)] if is_small else [],
        [("records of a teacher", shard, min_shard), ("teachers", plan.num_teachers, min_teachers)],
    )
    break_even_lead = math.sqrt(2) * plan.sigma * float(ndtri(0.75))  # the lead at which a label is as near to a guess
    if break_even_lead > plan.num_teachers / 2:
        problem = "Noise outweighs the votes: a label is nearer to a guess than to the truth unless one class leads by"
        fix = "Take more records, a larger epsilon, fewer points or a smaller shard."
        lead_text = f"{break_even_lead:.3g} of {plan.num_teachers} votes"
        warnings.warn(f"{problem} {lead_text}. {fix}", NoisyVotesWarning, stacklevel=2)
    with charge_events(budget, plan.events, "practical AgPrivCl") as spending:
        return replace(_run_plan(hypotheses, sample, x_Q, plan, spending.noise), events=plan.events)


def _run_plan(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, plan: RelabeledPlan, noise: NoiseSource
) -> Answers:
    subset = sample.select(draw_without_replacement(sample.n, plan.subset_size, noise))
    votes = compute_shard_votes(hypotheses, relabel(hypotheses, subset, noise=noise), plan.num_teachers, x_Q)
    return GNMax(sigma=plan.sigma).release(votes, noise, MechanismContext(num_queries=len(x_Q)))


def _compute_min_teachers(plan: RelabeledPlan, num_queries: int, alpha: float) -> float:
    """K from which two thirds outvote a third, but with probability alpha on some query: 3 sqrt(2) sigma z."""
    return 3 * math.sqrt(2) * plan.sigma * math.sqrt(2 * math.log(num_queries / alpha))


def compute_relabeled_size(
    num_queries: int, vc_dimension: int, *, epsilon: float, delta: float, alpha: float
) -> tuple[int, int]:
    """(n, records of a teacher) at which ``run_relabeled_gnmax`` warns no more."""
    shard = compute_realizable_size(alpha / 6, alpha / 6, vc_dimension)
    n = 4 * shard
    while True:
        try:
            plan = plan_relabeled(n, num_queries, epsilon=epsilon, delta=delta, shard=shard)
        except ValueError:
            n *= 2
            continue
        min_teachers = _compute_min_teachers(plan, num_queries, alpha)
        if plan.num_teachers >= min_teachers:
            return n, shard
        n = math.ceil(n * max(1.02, min_teachers / plan.num_teachers))
