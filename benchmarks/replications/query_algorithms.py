"""Algorithms that the table over five papers compares with those of ``pate learn``, none of which they outdo.

``ALGORITHMS`` has each of them as a function from a ``Problem``, a budget and a delta to a hypothesis of its class.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import expit

from benchmarks.theory.agnostic import (
    RELABEL_FACTOR,
    compute_shard_votes,
    draw_ag_priv_cl,
    prepare_plan,
    relabel,
    run_ag_priv_cl,
    split_folds,
)
from pate_torch.accounting import gdp
from pate_torch.accounting.events import BoundedRangeEvent, DeltaEvent, PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.hypotheses.algorithms import Problem
from pate_torch.hypotheses.classes import HypothesisClass, fit_erm
from pate_torch.hypotheses.exponential import ChosenHypothesis
from pate_torch.hypotheses.sample import Bools, Floats, Sample, charge_events, draw_without_replacement
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.noise import NoiseProvider
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext

# ---- WLF16 Theorem 18 ------------------------------------------------------------------------------------------------


def run_high_confidence(
    hypotheses: HypothesisClass,
    candidates: Sequence[Any],
    sample: Sample,
    *,
    epsilon: float,
    failure: float,
    budget: NoiseProvider,
) -> ChosenHypothesis:
    """The exponential mechanism on a = ceil(ln(3/failure)) disjoint folds, then on the last fold among the winners.

    Each fold's winner has excess error at most e times its expectation with probability 1 - 1/e (Markov), so one of
    them does with probability 1 - failure/3; the last fold finds it. The folds are consecutive positions: the order of
    the records must not depend on them.

    Guarantee: the cost of BoundedRange(epsilon), not a sum. A record sits in one fold. In a candidate's fold, all
        that follows is post-processing. In the last, the winners do not depend on it, and given them the draw is of
        bounded range; averaged over them it need not be (its log ratios may span 2 epsilon), but epsilon-DP, the Renyi
        and every other divergence that composes are no larger than given the winners (quasi-convexity). Replace-one.
    Source: WLF16 Theorem 18, whose statement prints log(3/n) where its proof has log(3/delta).
    """
    rounds = math.ceil(math.log(3 / failure))
    if sample.n <= rounds:
        fix = f"failure={failure:g} takes {rounds + 1} folds."
        raise checks.error("sample.n", sample.n, f"must exceed {rounds}", fix)
    *training_folds, last_fold = (sample.select(block) for block in split_folds(sample.n, rounds + 1))
    events: tuple[PrivacyEvent, ...] = (BoundedRangeEvent(eta=epsilon),)
    with charge_events(budget, events, "high-confidence boosting") as spending:

        def draw_fewest_errors(options: Sequence[Any], fold: Sample) -> int:
            return draw_gumbel_max(-hypotheses.count_errors(options, fold.x, fold.y), epsilon / 2, spending.noise)

        winners = [draw_fewest_errors(candidates, fold) for fold in training_folds]
        best_index = winners[draw_fewest_errors([candidates[i] for i in winners], last_fold)]
    return ChosenHypothesis(candidates[best_index], best_index, events)


# ---- AgPrivCl with the Gaussian noisy maximum in the place of the sparse vector --------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelabeledPlan:
    """Every number that AgPrivCl by GNMax runs with, all public.

    Attributes:
        subset_size: Number n' of records drawn without replacement.
        inner_cost: (epsilon*, delta*) of GNMax with regard to the relabeled sample.
        num_teachers: Number K of teachers.
        sigma: Noise of GNMax, in votes.
        total_cost: The (epsilon, delta) proved for the whole, at most what was asked.
    """

    subset_size: int
    inner_cost: tuple[float, float]
    num_teachers: int
    sigma: float
    total_cost: tuple[float, float]

    @property
    def events(self) -> tuple[PrivacyEvent, ...]:
        """What is charged: ``total_cost``."""
        return PureDPEvent(epsilon=self.total_cost[0]), DeltaEvent(delta=self.total_cost[1])


@functools.lru_cache(maxsize=64)
def plan_relabeled(n: int, num_queries: int, *, epsilon: float, delta: float, shard: int = 30) -> RelabeledPlan:
    """The share of records at which the teachers' lead is largest in units of the noise.

    A share q leaves epsilon* = ln((1 + (e^epsilon - 1)/q)/F), F = (1 + e^{1/2})^2 for the relabeling, and delta/q;
    GNMax takes sigma = sqrt(2 m)/mu*, exactly. K/sigma is made largest over a grid of shares.

    Raises:
        ValueError: No share leaves two teachers of ``shard`` records.
    """
    max_share = min(1.0, math.expm1(epsilon) / (RELABEL_FACTOR - 1))  # above it nothing is left for the votes
    plans = [
        plan
        for q in max_share * np.geomspace(0.01, 1.0, 60)
        if (plan := _plan_at_share(float(q), n, num_queries, epsilon, delta, shard)) is not None
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
    inner_cost = math.log((1 + math.expm1(epsilon) / share) / RELABEL_FACTOR) - 1e-12, min(0.5, delta / share)
    if inner_cost[0] <= 0:
        return None
    sigma = math.sqrt(2 * m) / gdp.compute_mu(*inner_cost)
    total_cost = math.log1p(share * (RELABEL_FACTOR * math.exp(inner_cost[0]) - 1)), share * inner_cost[1]
    assert total_cost[0] <= epsilon and total_cost[1] <= delta * (1 + 1e-12)
    return RelabeledPlan(
        subset_size=subset_size,
        inner_cost=inner_cost,
        num_teachers=subset_size // shard,
        sigma=sigma,
        total_cost=(total_cost[0], min(total_cost[1], delta)),
    )


def run_relabeled_gnmax(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, *, epsilon: float, delta: float, budget: NoiseProvider
) -> Answers:
    """Answers every query: sub-sample, relabel, and GNMax on the votes of ERMs on the relabeled sub-sample's shards.

    Guarantee: the plan's ``total_cost`` for all answers together, which is what is charged. Replace-one, n public.
        A replaced record of the relabeled sample changes one teacher's votes, so GNMax is (e, d(e))-DP for every e with
        regard to it, d the exact Gaussian curve; ``relabel`` makes that (e + ln F, d(e)) with regard to the sub-sample
        (its docstring has the proof, for any algorithm); sub-sampling without replacement amplifies that to
        (ln(1 + (n'/n)(F e^e - 1)), (n'/n) d(e)) (Balle, Barthe & Gaboardi 2018). The plan fixes e beforehand.
    Source: NB20 Algorithm 3, with LZCW21's Algorithm 1 in the place of its Algorithm 5.
    """
    plan = plan_relabeled(sample.n, len(x_Q), epsilon=epsilon, delta=delta)
    with charge_events(budget, plan.events, "AgPrivCl by GNMax") as spending:
        subset = sample.select(draw_without_replacement(sample.n, plan.subset_size, spending.noise))
        relabeled = relabel(hypotheses, subset, noise=spending.noise)
        votes = compute_shard_votes(hypotheses, relabeled, plan.num_teachers, x_Q)
        answers = GNMax(sigma=plan.sigma).release(votes, spending.noise, MechanismContext(num_queries=len(x_Q)))
    return replace(answers, events=plan.events)


# ---- NB20 Algorithm 4; Dwork and Feldman 2018 ------------------------------------------------------------------------


FIRST_SHARES = (0.5, 0.75, 0.9)
"""Shares of epsilon that UnvPrivCl tries for its first stage."""


def run_unv_priv_cl(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, *, epsilon: float, budget: NoiseProvider, **options: Any
) -> tuple[Answers, ChosenHypothesis]:
    """AgPrivCl answers the queries at a share of epsilon; they are the public points of SSPP, which gets the rest.

    The share is the first of ``FIRST_SHARES`` at which the teachers can pass the threshold, which depends on public
    numbers alone. If there is no such share, the run is refused before a charge.

    Guarantee: the *sum* of both parts (NB20 Algorithm 4 runs both with the full epsilon, which is 2 epsilon).
        Both parts are charged before either draws. Replace-one, n public.
    Source: NB20 Algorithm 4 (``PrivateLabeler.publish_hypothesis`` has it for any teachers).
    """
    for share in FIRST_SHARES:
        try:
            plan = prepare_plan(hypotheses, sample, x_Q, budget.kind, epsilon=share * epsilon, **options)
            break
        except ValueError:
            if share == FIRST_SHARES[-1]:
                raise
    rest_epsilon = epsilon - plan.epsilon
    candidates = hypotheses.enumerate_representatives(x_Q)
    events = (*plan.events, BoundedRangeEvent(eta=rest_epsilon))
    with charge_events(budget, events, "UnvPrivCl") as spending:
        answers = draw_ag_priv_cl(hypotheses, sample, x_Q, plan, spending.noise)
        errors = hypotheses.count_errors(candidates, sample.x, sample.y)
        index = draw_gumbel_max(-errors, rest_epsilon / 2, spending.noise)
    return answers, ChosenHypothesis(candidates[index], index, events)


def run_df18_vote(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, *, epsilon: float, alpha: float, budget: NoiseProvider
) -> Bools:
    """Predicts by an exponential vote P(c) ~ exp(epsilon n_c/2) of ERMs on ceil((6/epsilon) ln(1/alpha)) shards.

    Guarantee: epsilon-DP per prediction, pure: one vote moves, so the log-odds move by epsilon. Replace-one.
    Source: Dwork & Feldman 2018 Theorem 4.1, as DF20 Lemma 6 has it.
    """
    teachers = math.ceil(6 * math.log(1 / alpha) / epsilon)
    checks.integer("num_teachers", teachers, low=1, high=sample.n, fix="Every teacher needs a record.")
    with charge_events(budget, (PureDPEvent(epsilon=epsilon, count=len(x_Q)),), "DF18's vote") as spending:
        counts_QC = compute_shard_votes(hypotheses, sample, teachers, x_Q).counts_QC.numpy()
        probability_Q = expit(epsilon / 2 * (counts_QC[:, 1] - counts_QC[:, 0]))
        return spending.noise.draw_uniform((len(x_Q),), torch.device("cpu")).numpy() < probability_Q


# ---- From a problem to a hypothesis ----------------------------------------------------------------------------------


def fit_answers(p: Problem, x_Q: Floats, label_Q: Any) -> Any:
    """The class's empirical risk minimizer on the answers; a ValueError if no query was answered."""
    label_Q = np.asarray(label_Q).astype(np.int64)
    is_answered_Q = label_Q != NO_ANSWER
    if not is_answered_Q.any():
        raise ValueError(f"points: none of the {len(x_Q)} queries was answered. Take fewer points or more records.")
    return fit_erm(p.hypotheses, x_Q[is_answered_Q], label_Q[is_answered_Q] == 1)


def _learn_boosted(p: Problem, budget: NoiseProvider, delta: float) -> Any:
    options: dict[str, Any] = {"epsilon": p.options.epsilon, "failure": p.options.beta, "budget": budget}
    return run_high_confidence(p.hypotheses, p.make_quantile_hypotheses(), p.sample, **options).hypothesis


def _learn_ag_priv_cl(p: Problem, budget: NoiseProvider, delta: float) -> Any:
    c, x_Q = p.options, p.select_points(50)
    options: dict[str, Any] = {"epsilon": c.epsilon, "delta": delta, "alpha": c.alpha, "beta": c.beta}
    answers = run_ag_priv_cl(p.hypotheses, p.sample, x_Q, **options, constants=c.constants, budget=budget)
    return fit_answers(p, x_Q, answers.label_Q.numpy())


def _learn_relabeled(p: Problem, budget: NoiseProvider, delta: float) -> Any:
    x_Q = p.select_points(50)
    answers = run_relabeled_gnmax(p.hypotheses, p.sample, x_Q, epsilon=p.options.epsilon, delta=delta, budget=budget)
    return fit_answers(p, x_Q, answers.label_Q.numpy())


def _learn_unv_priv_cl(p: Problem, budget: NoiseProvider, delta: float) -> Any:
    c, x_Q = p.options, p.select_points(20)
    options: dict[str, Any] = {"epsilon": c.epsilon, "delta": delta, "alpha": c.alpha, "beta": c.beta}
    return run_unv_priv_cl(p.hypotheses, p.sample, x_Q, **options, constants=c.constants, budget=budget)[1].hypothesis


def _learn_df18(p: Problem, budget: NoiseProvider, delta: float) -> Any:
    c, x_Q = p.options, p.select_points(20)
    options: dict[str, Any] = {"epsilon": p.compute_answer_epsilon(len(x_Q)), "alpha": c.alpha, "budget": budget}
    return fit_answers(p, x_Q, run_df18_vote(p.hypotheses, p.sample, x_Q, **options))


ALGORITHMS: dict[str, Callable[[Problem, NoiseProvider, float], Any]] = {
    "boosted": _learn_boosted,
    "ag-priv-cl": _learn_ag_priv_cl,
    "relabeled": _learn_relabeled,
    "unv-priv-cl": _learn_unv_priv_cl,
    "df18": _learn_df18,
}
