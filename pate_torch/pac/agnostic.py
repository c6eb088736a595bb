"""Answering classification queries privately in the agnostic setting: relabel, then sub-sample and aggregate (NB20)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy import stats

from pate_torch.accounting.events import BoundedRangeEvent, DeltaEvent, PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.pac.boosting import split_folds
from pate_torch.pac.classes import HypothesisClass, count_errors, enumerate_representatives, fit_erm
from pate_torch.pac.exponential import ChosenHypothesis
from pate_torch.pac.nets import (
    compute_log_sauer_shelah,
    compute_net_size,
    compute_realizable_size,
    compute_uniform_size,
    find_smallest,
)
from pate_torch.pac.sample import (
    Floats,
    Sample,
    charge_events,
    check_points,
    check_replace_one,
    draw_with_replacement,
    draw_without_replacement,
    warn_below_guarantee,
)
from pate_torch.pac.semi_private import enumerate_sspp_candidates
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes

RELABEL_FACTOR = (1 + math.exp(0.5)) ** 2
"""What relabeling multiplies e^epsilon by; delta stays. NB20 Lemma 3.1 has e^3, and 4e delta; see ``relabel``."""


def relabel(hypotheses: HypothesisClass, sample: Sample, *, noise: NoiseSource) -> Sample:
    """The sample, labeled by a hypothesis drawn with P(h) ~ exp(-errors(h)/2) from its own dichotomies.

    Guarantee: NOT private alone: the points go through. If A is (e, d)-DP, A after relabel is
        (e + 2 ln(1 + e^{1/2}), d)-DP = (e + 1.949, d). Replace-one. Let c run over the dichotomies of the n - 1 common
        points: each extends to the odd point in one or two ways, with relative weights between e^{-1/2} (one way,
        wrong) and 1 + e^{-1/2} (both), so P(c) <= F P'(c) with F = (1 + e^{1/2})^2, numerator and normalizer each
        giving one factor; and given c the two relabeled samples differ in one record. So P(O) = sum_c P(c) P(O|c)
        <= d + e^e sum_c P(c) P'(O|c) <= d + e^e F P'(O). (NB20 Lemma 3.1: (e + 3, 4 e d).)
    Source: NB20 Algorithm 2 (Beimel, Nissim & Stemmer's LabelBoost).
    """
    candidates = enumerate_representatives(hypotheses, sample.x)
    errors = count_errors(hypotheses, candidates, sample.x, sample.y)
    return sample.replace_labels(hypotheses.predict(candidates[draw_gumbel_max(-errors, 0.5, noise)], sample.x))


def compute_shard_votes(hypotheses: HypothesisClass, sample: Sample, num_teachers: int, x_Q: Floats) -> Votes:
    """PRIVATE. Vote counts on x_Q of one ERM per shard, the sample being cut into consecutive equal shards."""
    ones_Q = np.zeros(len(x_Q), dtype=np.int64)
    for fold in split_folds(sample.n, num_teachers):
        ones_Q += hypotheses.predict(fit_erm(hypotheses, sample.x[fold], sample.y[fold]), x_Q)
    counts_QC = torch.from_numpy(np.stack([num_teachers - ones_Q, ones_Q], axis=1))
    return Votes(counts_QC, num_teachers)


def run_sub_samp(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    num_teachers: int,
    mechanism: SparseVector,
    budget: NoiseProvider,
) -> Answers:
    """Sub-sample and aggregate: an ERM per shard, and the sparse vector over the stability of their votes.

    Queries after the T-th unstable one get NO_ANSWER as the unstable ones do.
    Guarantee: that of ``SparseVector``: a record sits in one shard. Replace-one (positions make the shards).
    Source: BTT18 Algorithm 4 / NB20 Algorithm 5, with the distance halved and stopping at T (see ``SparseVector``).
    """
    check_replace_one(sample, "sub-sample and aggregate")
    x_Q = check_points("x_Q", x_Q)
    checks.integer("num_teachers", num_teachers, low=1, high=sample.n, fix="Every teacher needs a record.")
    with charge_events(budget, mechanism.privacy_events(len(x_Q)), "sub-sample and aggregate") as spending:
        answers = _run_sub_samp(hypotheses, sample, x_Q, num_teachers, mechanism, spending.noise)
        spending.record_cost(answers.events)
    return answers


def _run_sub_samp(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    num_teachers: int,
    mechanism: SparseVector,
    noise: NoiseSource,
) -> Answers:
    """``run_sub_samp`` with noise that has been paid for."""
    votes = compute_shard_votes(hypotheses, sample, num_teachers, x_Q)
    answers = mechanism.release(votes, noise, MechanismContext(num_queries=len(x_Q)))
    label_Q = torch.full((len(x_Q),), NO_ANSWER, dtype=torch.int64)
    label_Q[: len(answers.label_Q)] = answers.label_Q
    return replace(answers, label_Q=label_Q)


@dataclass(frozen=True, kw_only=True)
class AgPrivClPlan:
    """Step 1 of AgPrivCl: every number it runs with, all public.

    Attributes:
        subset_size: n' records drawn without replacement.
        inner_price: (epsilon*, delta*) of the part after relabeling, as a function of the relabeled sample.
        resample: Whether step 4 is taken.
        max_draws: No record is resampled more often, except with probability ``tail_probability``.
        tail_probability: That probability.
        record_price: (epsilon_hat, delta_hat), what one resampled record may cost.
        num_teachers: Number K of teachers.
        mechanism: The sparse vector that keeps it.
        total_price: The (epsilon, delta) proved for the whole, at most what was asked.
        minimum_n: Below so many records no accuracy is promised.
        minimum_queries: Nor below so many queries.
        minimum_teachers: Nor below so many teachers.
    """

    subset_size: int
    inner_price: tuple[float, float]
    resample: bool
    max_draws: int
    tail_probability: float
    record_price: tuple[float, float]
    num_teachers: int
    mechanism: SparseVector
    total_price: tuple[float, float]
    minimum_n: int
    minimum_queries: int
    minimum_teachers: int

    @property
    def events(self) -> tuple[PrivacyEvent, ...]:
        """What is charged: ``total_price``, and not what was asked."""
        return PureDPEvent(epsilon=self.total_price[0]), DeltaEvent(delta=self.total_price[1])


def _compute_max_draws(subset_size: int, delta: float) -> tuple[int, float]:
    """The most times one of n' records is drawn in n' draws with replacement, but with probability delta/2 at most.

    NB20 says ln(2/delta), by a Chernoff bound that fails for large delta (delta = 0.1: P(3 or more) = 0.080 > 0.05)
    and is loose for small ones (delta = 1e-5: 12 against 8): the exact binomial quantile instead.
    """
    max_draws = 1
    while (tail_probability := float(stats.binom.sf(max_draws, subset_size, 1 / subset_size))) > delta / 2:
        max_draws += 1
    return max_draws, tail_probability


def plan_ag_priv_cl(
    n: int,
    num_queries: int,
    vc_dimension: int,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    num_teachers: int | None = None,
    constants: str = "paper",
    inner_epsilon: float = 1.0,
    resample: bool = True,
    noise_kind: str = "torch",
) -> AgPrivClPlan:
    """Step 1 of NB20 Algorithm 3.

    Args:
        n: Private records.
        num_queries: Number m of queries.
        vc_dimension: VC dimension of the class.
        epsilon: Asked for all answers together.
        delta: Delta of the same.
        alpha: Excess error.
        beta: Failure probability.
        num_teachers: None: as the constants have it.
        constants: "paper" takes n' = epsilon n / 56 and epsilon* = min(1, alpha max(1, sqrt(m alpha))). "sharp" takes
            epsilon* = ``inner_epsilon``, and the largest n' that ``relabel``'s own factor and exact amplification allow
            (at epsilon = 1 five times larger).
        inner_epsilon: epsilon* of the sharp constants.
        resample: False leaves step 4 out: shards drawn without replacement are nets at least as often (DF20, after
            Lemma 1), and a record then reaches one teacher, so that nothing is lost to group privacy.
        noise_kind: Kind of noise that the mechanism draws.

    Raises:
        ValueError: The sub-sample is empty.
    """
    checks.positive("epsilon", epsilon)
    checks.positive("inner_epsilon", inner_epsilon)
    checks.delta("delta", delta)
    for key, value in (("alpha", alpha), ("beta", beta)):
        checks.between(key, value, 0, 1, exclusive=True)
    m = checks.integer("num_queries", num_queries, low=1)
    is_sharp = checks.one_of("constants", constants, ("paper", "sharp")) == "sharp"
    if is_sharp:
        share = min(1.0, math.expm1(epsilon) / (RELABEL_FACTOR * math.exp(inner_epsilon) - 1))
    else:
        share, inner_epsilon = epsilon / 56, min(1.0, alpha * max(1.0, math.sqrt(m * alpha)))
    subset_size = math.floor(min(1.0, share) * n * (1 + 1e-12))
    if subset_size < 1:
        fix = f"At epsilon={epsilon:g} take n >= {math.ceil(1 / share):,}."
        raise checks.error("n", n, f"the sub-sample of {share:.3g} n records is empty", fix)
    inner_delta = min(0.5, delta / share) if is_sharp else delta
    total_price = (
        math.log1p(subset_size / n * (RELABEL_FACTOR * math.exp(inner_epsilon) - 1)),
        subset_size / n * inner_delta,
    )
    assert total_price[0] <= epsilon * (1 + 1e-9) and total_price[1] <= delta * (1 + 1e-9)
    max_draws, tail_probability = _compute_max_draws(subset_size, inner_delta) if resample else (1, 0.0)
    hat_epsilon = inner_epsilon / max_draws
    group_factor = sum(math.exp(i * hat_epsilon) for i in range(max_draws))
    record_price = hat_epsilon, (inner_delta - tail_probability) / group_factor
    cutoff = math.ceil(_compute_cutoff(m, alpha, beta))
    mechanism = SparseVector(epsilon=record_price[0], delta=record_price[1], max_failures=cutoff, noise=noise_kind)
    min_teachers = compute_two_thirds_teachers(mechanism, m, beta)
    teachers = min(min_teachers, subset_size) if num_teachers is None else num_teachers
    min_subset = _compute_minimum_subset(
        vc_dimension, max(min_teachers, teachers), m, cutoff, alpha=alpha, beta=beta, resample=resample
    )
    return AgPrivClPlan(
        subset_size=subset_size,
        inner_price=(inner_epsilon, inner_delta),
        resample=resample,
        max_draws=max_draws,
        tail_probability=tail_probability,
        record_price=record_price,
        num_teachers=teachers,
        mechanism=mechanism,
        total_price=total_price,
        minimum_n=math.ceil(min_subset / min(1.0, share)),
        minimum_queries=_compute_minimum_queries(alpha, beta),
        minimum_teachers=min_teachers,
    )


def _compute_cutoff(num_queries: int, alpha: float, beta: float) -> float:
    """T of NB20 Algorithm 3, before rounding up."""
    expected_errors = num_queries * alpha
    return max(1.0, expected_errors / 8 + math.sqrt(3 * expected_errors * math.log(num_queries / beta)) / 4)


def compute_two_thirds_teachers(mechanism: SparseVector, num_queries: int, beta: float) -> int:
    """Number of teachers whose two-thirds majority (dist = K/6 - 1) passes every test with probability 1 - beta/4."""
    plan = mechanism.compute_scales(num_queries)
    noise = plan.noise_scale * (math.log(4 * plan.max_blocks / beta) + 2 * math.log(4 * num_queries / beta))
    return math.ceil(6 * (1 + plan.threshold + noise))


@lru_cache(maxsize=64)
def _compute_minimum_subset(
    vc_dimension: int, teachers: int, num_queries: int, cutoff: int, *, alpha: float, beta: float, resample: bool
) -> int:
    """The n' from which the labels' average error exceeds the best of the class by at most alpha.

    With probability 1 - beta, for ``_compute_minimum_queries`` queries or more.

    h, the relabeling hypothesis: excess error alpha/4 on the sub-sample by the exponential mechanism (probability
    beta/4), alpha/8 more on the distribution (alpha/16 twice, beta/8). The labels: at most T are not h's, if no
    teacher disagrees with h on more than T/3 queries (BTT18 Lemma 4.2) and two thirds always pass (beta/4); T <=
    m alpha/4. The average over the queries: 3 alpha/8 (beta/8).

    Source: the proof of NB20 Lemma 3.5, with explicit constants. It asks for teachers within alpha/12 of h, which
    would take T >= m alpha/4 and more where the paper has m alpha/8 and less: here the teachers are within the
    disagreement of which T/3 out of m is exceeded with probability beta/(8 K) (exact binomial).
    """
    relabel_size = find_smallest(
        lambda k: 2 * (compute_log_sauer_shelah(k, vc_dimension) + math.log(4 / beta)) <= k * alpha / 4
    )
    population_size = compute_uniform_size(alpha / 16, beta / 8, vc_dimension)
    max_disagreements, teacher_beta = cutoff // 3, beta / (8 * teachers)
    disagreement_rate = (
        float(stats.beta.ppf(teacher_beta, max_disagreements + 1, num_queries - max_disagreements))
        if max_disagreements < num_queries
        else 0.5
    )
    if not resample:
        # A shard is a sample of the distribution: a net for the differences of h and whatever agrees with it there.
        return max(
            relabel_size, population_size, teachers * compute_net_size(disagreement_rate, teacher_beta, vc_dimension)
        )
    # A shard is a sample of the sub-sample, on which h is given; Claim 3.6 carries disagreement to the distribution.
    transfer_size = compute_uniform_size(disagreement_rate / 2, teacher_beta / 2, vc_dimension, differences=True)
    return max(
        relabel_size,
        population_size,
        transfer_size,
        teachers * compute_realizable_size(disagreement_rate / 2, teacher_beta / 2, vc_dimension),
    )


@lru_cache(maxsize=64)
def _compute_minimum_queries(alpha: float, beta: float) -> int:
    """So many that T <= m alpha/4, and that their average error is within 3 alpha/8 of its mean but with beta/8.

    NB20 Lemma 3.5 asks for 8 ln(1/(alpha beta))/alpha, by a Chernoff bound that needs the best error to be of the
    order of alpha; this is Hoeffding's.
    """
    hoeffding = math.ceil(math.log(8 / beta) / (2 * (3 * alpha / 8) ** 2))
    return find_smallest(lambda m: _compute_cutoff(m, alpha, beta) + 1 <= m * alpha / 4, low=hoeffding)


def run_ag_priv_cl(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    budget: NoiseProvider,
    **options: Any,
) -> Answers:
    """Answers m queries: sub-sample, relabel, resample, sub-sample and aggregate (AgPrivCl).

    Labels 0/1, NO_ANSWER where unstable. Warns (``BelowGuaranteeWarning``) below the n, m and teachers of NB20 Theorem
    3.3.

    Args:
        hypotheses: The class.
        sample: PRIVATE.
        x_Q: [m, D]; the queries may depend on earlier answers, not on the sample.
        epsilon: Epsilon of all answers together.
        delta: Delta of the same.
        alpha: Excess error.
        beta: Failure probability.
        budget: Pays, and gives the noise.
        **options: Those of ``plan_ag_priv_cl``.

    Guarantee: (epsilon, delta)-DP for all answers together; charged: what is proved, the plan's ``total_price``, which
        may be far less. Replace-one, n public. The sparse vector is (e, d)-DP per resampled record; a record is drawn r
        times or fewer but with probability t (exact binomial quantile), so with respect to the relabeled sample the
        rest is (r e, d sum_{i<r} e^{ie} + t)-DP; ``relabel`` adds its factor; sub-sampling without replacement
        amplifies to ln(1 + (n'/n)(e^.-1)) (Balle, Barthe & Gaboardi 2018).
    Source: NB20 Algorithm 3 and Lemma 3.4.
    """
    x_Q, plan = _prepare_plan(hypotheses, sample, x_Q, epsilon, delta, alpha, beta, budget.kind, options)
    with charge_events(budget, plan.events, "AgPrivCl") as spending:
        return replace(_run_plan(hypotheses, sample, x_Q, plan, spending.noise), events=plan.events)


def _prepare_plan(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    noise_kind: str,
    options: dict[str, Any],
) -> tuple[Floats, AgPrivClPlan]:
    """Refuses and warns: all that can go wrong before anything is paid."""
    check_replace_one(sample, "AgPrivCl")
    x_Q = check_points("x_Q", x_Q)
    plan = plan_ag_priv_cl(
        sample.n,
        len(x_Q),
        hypotheses.vc_dimension,
        epsilon=epsilon,
        delta=delta,
        alpha=alpha,
        beta=beta,
        noise_kind=noise_kind,
        **options,
    )
    warn_below_guarantee(
        "AgPrivCl",
        sample.n,
        [(f"average excess error {alpha:g} with probability {1 - beta:g}", plan.minimum_n)],
        [("queries", len(x_Q), plan.minimum_queries), ("teachers", plan.num_teachers, plan.minimum_teachers)],
        stack_depth=1,
    )
    checks.integer("num_teachers", plan.num_teachers, low=1, high=plan.subset_size, fix="Every teacher needs a record.")
    return x_Q, plan


def _run_plan(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, plan: AgPrivClPlan, noise: NoiseSource
) -> Answers:
    """Steps 2 to 5."""
    subset = sample.select(draw_without_replacement(sample.n, plan.subset_size, noise))
    relabeled_sample = relabel(hypotheses, subset, noise=noise)
    if plan.resample:
        relabeled_sample = relabeled_sample.select(draw_with_replacement(plan.subset_size, plan.subset_size, noise))
    return _run_sub_samp(hypotheses, relabeled_sample, x_Q, plan.num_teachers, plan.mechanism, noise)


@dataclass(frozen=True, eq=False)
class UniversalAnswers:
    """UnvPrivCl's result.

    Attributes:
        answers: Answers to every query.
        learner: SSPP's hypothesis; None: the queries ran out before.
    """

    answers: Answers
    learner: ChosenHypothesis | None


def run_unv_priv_cl(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    budget: NoiseProvider,
    share: float = 0.5,
    first: int | None = None,
    **options: Any,
) -> UniversalAnswers:
    """Answers any number of queries: AgPrivCl on the first m0, which are then SSPP's public points for the others.

    Up to m0 queries spend all of epsilon in AgPrivCl; beyond, a ``share`` of it, and SSPP the rest.

    Args:
        hypotheses: The class.
        sample: PRIVATE.
        x_Q: [m, D].
        epsilon: Epsilon of all answers together.
        delta: Delta of the same.
        alpha: Excess error.
        beta: Failure probability.
        budget: Pays, and gives the noise.
        share: Share of epsilon that AgPrivCl spends.
        first: m0; None: ceil(32 (d ln(1/alpha) + ln(1/beta)) / alpha).
        **options: Those of ``plan_ag_priv_cl``.

    Guarantee: (epsilon, delta)-DP for all answers together, the *sum* of both parts (NB20 Algorithm 4 runs both with
        the full epsilon, which is 2 epsilon). Replace-one, n public.
    Source: NB20 Algorithm 4.
    """
    for key, value in (("share", share), ("alpha", alpha), ("beta", beta)):
        checks.between(key, value, 0, 1, exclusive=True)
    checks.positive("epsilon", epsilon)
    queries = check_points("x_Q", x_Q)
    d = hypotheses.vc_dimension
    m0 = math.ceil(32 * (d * math.log(1 / alpha) + math.log(1 / beta)) / alpha)
    m0 = m0 if first is None else checks.integer("first", first, low=1)
    first_epsilon = epsilon if len(queries) <= m0 else epsilon * share
    rest_epsilon = epsilon - first_epsilon
    first_Q, plan = _prepare_plan(
        hypotheses, sample, queries[:m0], first_epsilon, delta, alpha, beta, budget.kind, options
    )
    # Both parts are charged before either draws: a run refused half-way would have spent without answering.
    events = plan.events
    with charge_events(
        budget, events if rest_epsilon == 0 else (*events, BoundedRangeEvent(eta=rest_epsilon)), "UnvPrivCl"
    ) as spending:
        answers = replace(_run_plan(hypotheses, sample, first_Q, plan, spending.noise), events=events)
        if rest_epsilon == 0:
            return UniversalAnswers(answers, None)
        candidates = enumerate_sspp_candidates(
            hypotheses, sample, first_Q, epsilon=rest_epsilon, alpha=alpha, beta=beta
        )
        index, choice_events = 0, tuple[PrivacyEvent, ...]()
        if len(candidates) > 1:
            errors = count_errors(hypotheses, candidates, sample.x, sample.y)
            index, choice_events = (
                draw_gumbel_max(-errors, rest_epsilon / 2, spending.noise),
                (BoundedRangeEvent(eta=rest_epsilon),),
            )
        spending.record_cost((*events, *choice_events))
    learner = ChosenHypothesis(candidates[index], index, choice_events)
    rest_label_Q = torch.from_numpy(hypotheses.predict(learner.hypothesis, queries[m0:]).astype(np.int64))
    label_Q = torch.cat([answers.label_Q, rest_label_Q])
    return UniversalAnswers(replace(answers, label_Q=label_Q, events=(*events, *choice_events)), learner)
