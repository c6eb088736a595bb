"""Answering queries by the votes of shards (BTT18, NB20): sub-sample and aggregate, and AgPrivCl, which relabels first.

The product answers queries by ``mechanism=sparse_vector``; a benchmark compares both here on enumerated classes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from scipy import stats

from pate_torch.accounting.events import DeltaEvent, PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.hypotheses.classes import HypothesisClass, fit_erm
from pate_torch.hypotheses.sample import (
    Floats,
    Ints,
    Sample,
    charge_events,
    check_points,
    compute_log_sauer_shelah,
    compute_net_size,
    compute_uniform_size,
    draw_without_replacement,
    find_smallest,
    warn_below_guarantee,
)
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.noise import NoiseProvider, NoiseSource
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes

RELABEL_FACTOR = (1 + math.exp(0.5)) ** 2
"""The factor by which relabeling multiplies e^epsilon; delta stays. NB20 Lemma 3.1 has e^3 and 4e delta."""


def compute_realizable_size(alpha: float, beta: float, vc_dimension: int) -> int:
    """Compute how many examples make every consistent hypothesis alpha-accurate with probability 1 - beta.

    As the target is fixed, the growth function of the class counts once.
    """
    return compute_net_size(alpha, beta, vc_dimension, 1)


def split_folds(n: int, count: int) -> list[slice]:
    """Cut n positions into ``count`` consecutive blocks, as equal as n allows; the longer blocks come first."""
    size, remainder = divmod(n, count)
    bounds = [size * i + min(i, remainder) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def draw_with_replacement(n: int, size: int, noise: NoiseSource) -> Ints:
    """Draw ``size`` independent uniform positions from 0..n-1 from the noise source."""
    return np.floor(noise.draw_uniform((size,), torch.device("cpu")).numpy() * n).astype(np.int64)


def compute_shard_votes(hypotheses: HypothesisClass, sample: Sample, num_teachers: int, x_Q: Floats) -> Votes:
    """PRIVATE. Count the votes on x_Q of one ERM per shard, where the shards are consecutive, equal parts."""
    ones_Q = np.zeros(len(x_Q), dtype=np.int64)
    for fold in split_folds(sample.n, num_teachers):
        ones_Q += hypotheses.predict(fit_erm(hypotheses, sample.x[fold], sample.y[fold]), x_Q)
    return Votes(torch.from_numpy(np.stack([num_teachers - ones_Q, ones_Q], axis=1)), num_teachers)


def compute_two_thirds_teachers(mechanism: SparseVector, num_queries: int, beta: float) -> int:
    """Compute how many teachers make every two-thirds majority pass its test with probability 1 - beta/4.

    A two-thirds majority of K teachers has the distance K/6 - 1.
    """
    plan = mechanism.make_cost(num_queries)
    noise = plan.noise_scale * (math.log(4 * plan.max_failures / beta) + 2 * math.log(4 * num_queries / beta))
    return math.ceil(6 * (1 + plan.threshold + noise))


def check_teachers(mechanism: SparseVector, num_queries: int, num_teachers: int) -> None:
    """Raise ValueError, before anything is charged, if even unanimous teachers fail the test of the sparse vector."""
    if num_teachers < (minimum := mechanism.make_cost(num_queries).min_teachers):
        problem = f"must be at least {minimum:,}, because no vote of fewer teachers passes the threshold"
        raise checks.error("num_teachers", num_teachers, problem, "Take more records, or a larger epsilon.")


def draw_answers(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    num_teachers: int,
    mechanism: SparseVector,
    noise: NoiseSource,
) -> Answers:
    """Answer queries as ``run_sub_samp`` does, with noise that is paid for."""
    votes = compute_shard_votes(hypotheses, sample, num_teachers, x_Q)
    answers = mechanism.release(votes, noise, MechanismContext(num_queries=len(x_Q)))
    label_Q = torch.full((len(x_Q),), NO_ANSWER, dtype=torch.int64)
    label_Q[: len(answers.label_Q)] = answers.label_Q
    return replace(answers, label_Q=label_Q)


def run_sub_samp(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    num_teachers: int,
    mechanism: SparseVector,
    budget: NoiseProvider,
) -> Answers:
    """Answer queries by an ERM per shard and the sparse vector over the stability of their votes.

    An unstable query, and every query after the T-th unstable one, gets NO_ANSWER.

    Guarantee: that of ``SparseVector``: a record lies in one shard. Replace-one (positions make the shards).
    Source: BTT18 Algorithm 4 / NB20 Algorithm 5, with the distance halved and stopping at T (see ``SparseVector``).
    """
    x_Q = check_points("x_Q", x_Q)
    checks.integer("num_teachers", num_teachers, low=1, high=sample.n, fix="Every teacher needs a record.")
    check_teachers(mechanism, len(x_Q), num_teachers)
    with charge_events(budget, mechanism.privacy_events(len(x_Q)), "sub-sample and aggregate") as spending:
        answers = draw_answers(hypotheses, sample, x_Q, num_teachers, mechanism, spending.noise)
        spending.record_cost(answers.events)
    return answers


def relabel(hypotheses: HypothesisClass, sample: Sample, *, noise: NoiseSource) -> Sample:
    """Label the sample by a hypothesis drawn with P(h) ~ exp(-errors(h)/2) from the sample's own dichotomies.

    Guarantee: NOT private alone: the points go through. If A is (e, d)-DP, A after relabel is
        (e + 2 ln(1 + e^{1/2}), d)-DP = (e + 1.949, d). Replace-one. Let c run over the dichotomies of the n - 1 common
        points: each extends to the odd point in one or two ways, with relative weights between e^{-1/2} (one way,
        wrong) and 1 + e^{-1/2} (both), so P(c) <= F P'(c) with F = (1 + e^{1/2})^2, numerator and normalizer each
        giving one factor; and given c the two relabeled samples differ in one record. So P(O) = sum_c P(c) P(O|c)
        <= d + e^e sum_c P(c) P'(O|c) <= d + e^e F P'(O). (NB20 Lemma 3.1: (e + 3, 4 e d).)
    Source: NB20 Algorithm 2 (Beimel, Nissim & Stemmer's LabelBoost).
    """
    candidates = hypotheses.enumerate_representatives(sample.x)
    errors = hypotheses.count_errors(candidates, sample.x, sample.y)
    return Sample(sample.x, hypotheses.predict(candidates[draw_gumbel_max(-errors, 0.5, noise)], sample.x))


@dataclass(frozen=True, kw_only=True)
class AgPrivClPlan:
    """The numbers that AgPrivCl runs with (NB20 Algorithm 3, step 1), all public.

    Attributes:
        n: Number of private records.
        num_queries: Number m of queries.
        vc_dimension: VC dimension of the class.
        epsilon: Upper bound on the epsilon of all answers together.
        delta: Upper bound on the delta of all answers together.
        alpha: Excess error.
        beta: Failure probability.
        asked_teachers: Number of teachers; None if it follows from the constants.
        constants: "paper" takes n' = epsilon n/56 and epsilon* = min(1, alpha max(1, sqrt(m alpha))). "sharp" takes
            epsilon* = ``inner_epsilon`` and the largest n' that ``relabel``'s own factor and exact amplification allow
            (at epsilon = 1 five times larger).
        inner_epsilon: epsilon* of the sharp constants.
        resample: Whether step 4 is taken; None if only the paper's constants take it. Shards drawn without replacement
            are nets at least as often (DF20, after Lemma 1), and a record then reaches one teacher, so that nothing is
            lost to group privacy.
        noise_kind: Kind of noise that the mechanism draws.
        share: Share n'/n of the records in the sub-sample, before it is rounded down.
        subset_size: Number n' of records drawn without replacement.
        inner_cost: (epsilon*, delta*) of the part after relabeling, as a function of the relabeled sample.
        total_cost: The (epsilon, delta) proved for the whole, which may be far less than what was asked for.
        max_draws: Number of draws that no record exceeds in step 4, except with probability ``tail_probability``.
        tail_probability: Probability of more draws.
        record_cost: (epsilon_hat, delta_hat) that one resampled record may cost.
        mechanism: The sparse vector with that cost.
        num_teachers: Number K of teachers.
        events: The events that are charged: ``total_cost``.
        min_n: Number of records below which no accuracy is promised.
        min_queries: Number of queries below which no accuracy is promised.
        min_teachers: Number of teachers below which no accuracy is promised.

    Raises:
        ValueError: The sub-sample is empty.
    """

    n: int
    num_queries: int
    vc_dimension: int
    epsilon: float
    delta: float
    alpha: float
    beta: float
    asked_teachers: int | None = None
    constants: str = "paper"
    inner_epsilon: float = 1.0
    resample: bool | None = None
    noise_kind: str = "torch"

    def __post_init__(self) -> None:
        for key in ("epsilon", "inner_epsilon"):
            checks.positive(key, getattr(self, key))
        checks.delta("delta", self.delta)
        for key in ("alpha", "beta"):
            checks.between(key, getattr(self, key), 0, 1, exclusive=True)
        checks.integer("num_queries", self.num_queries, low=1)
        checks.one_of("constants", self.constants, ("paper", "sharp"))
        if self.resample is None:
            object.__setattr__(self, "resample", self.constants == "paper")
        if self.subset_size < 1:
            fix = f"At epsilon={self.epsilon:g} take n >= {math.ceil(1 / self.share):,}."
            raise checks.error("n", self.n, f"the sub-sample of {self.share:.3g} n records is empty", fix)
        assert self.total_cost[0] <= self.epsilon * (1 + 1e-9) and self.total_cost[1] <= self.delta * (1 + 1e-9)

    @cached_property
    def share(self) -> float:
        if self.constants == "paper":
            return self.epsilon / 56
        return min(1.0, math.expm1(self.epsilon) / (RELABEL_FACTOR * math.exp(self.inner_epsilon) - 1))

    @cached_property
    def subset_size(self) -> int:
        return math.floor(min(1.0, self.share) * self.n * (1 + 1e-12))

    @cached_property
    def inner_cost(self) -> tuple[float, float]:
        if self.constants == "paper":
            return min(1.0, self.alpha * max(1.0, math.sqrt(self.num_queries * self.alpha))), self.delta
        return self.inner_epsilon, min(0.5, self.delta / self.share)

    @cached_property
    def total_cost(self) -> tuple[float, float]:
        (epsilon, delta), share = self.inner_cost, self.subset_size / self.n
        return math.log1p(share * (RELABEL_FACTOR * math.exp(epsilon) - 1)), share * delta

    @property
    def events(self) -> tuple[PrivacyEvent, ...]:
        return PureDPEvent(epsilon=self.total_cost[0]), DeltaEvent(delta=self.total_cost[1])

    @cached_property
    def max_draws(self) -> int:
        # NB20 says ln(2/delta), by a Chernoff bound that fails for large delta (delta = 0.1: P(3 or more) = 0.080 >
        # 0.05) and is loose for small ones (delta = 1e-5: 12 against 8): the exact binomial quantile instead.
        draws = 1
        while self.resample and stats.binom.sf(draws, self.subset_size, 1 / self.subset_size) > self.inner_cost[1] / 2:
            draws += 1
        return draws

    @property
    def tail_probability(self) -> float:
        return float(stats.binom.sf(self.max_draws, self.subset_size, 1 / self.subset_size)) if self.resample else 0.0

    @cached_property
    def record_cost(self) -> tuple[float, float]:
        epsilon = self.inner_cost[0] / self.max_draws
        group_factor = sum(math.exp(i * epsilon) for i in range(self.max_draws))
        return epsilon, (self.inner_cost[1] - self.tail_probability) / group_factor

    @cached_property
    def mechanism(self) -> SparseVector:
        epsilon, delta = self.record_cost
        cutoff = math.ceil(_compute_cutoff(self.num_queries, self.alpha, self.beta))
        # The papers give half of delta to the failure.
        shares = {"delta": delta, "failure_delta": delta / 2}
        return SparseVector(epsilon=epsilon, **shares, max_failures=cutoff, noise=self.noise_kind)

    @cached_property
    def min_teachers(self) -> int:
        return compute_two_thirds_teachers(self.mechanism, self.num_queries, self.beta)

    @property
    def num_teachers(self) -> int:
        return min(self.min_teachers, self.subset_size) if self.asked_teachers is None else self.asked_teachers

    @property
    def min_queries(self) -> int:
        return _compute_minimum_queries(self.alpha, self.beta)

    @cached_property
    def min_n(self) -> int:
        """The n at which the labels' average error exceeds the best of the class by at most alpha.

        This holds with probability 1 - beta, for ``min_queries`` queries or more. The relabeling hypothesis h has
        excess error alpha/4 on the sub-sample by the exponential mechanism (probability beta/4), and alpha/8 more on
        the distribution (alpha/16 twice, beta/8). At most T labels are not h's, if no teacher disagrees with h on more
        than T/3 queries (BTT18 Lemma 4.2) and two thirds always pass (beta/4), and T <= m alpha/4. The average over the
        queries adds 3 alpha/8 (beta/8).

        Source: the proof of NB20 Lemma 3.5, with explicit constants. It asks for teachers within alpha/12 of h, which
        would take T >= m alpha/4 and more where the paper has m alpha/8 and less: here the teachers are within the
        disagreement of which T/3 out of m is exceeded with probability beta/(8 K) (exact binomial).
        """
        alpha, beta, d = self.alpha, self.beta, self.vc_dimension
        teachers = max(self.min_teachers, self.num_teachers)
        max_disagreements, teacher_beta = self.mechanism.max_failures // 3, beta / (8 * teachers)
        rate = 0.5
        if max_disagreements < self.num_queries:
            rate = float(stats.beta.ppf(teacher_beta, max_disagreements + 1, self.num_queries - max_disagreements))
        sizes = [
            find_smallest(lambda k: 2 * (compute_log_sauer_shelah(k, d) + math.log(4 / beta)) <= k * alpha / 4),
            compute_uniform_size(alpha / 16, beta / 8, d),
        ]
        if self.resample:
            # A shard is a sample of the sub-sample, on which h is fixed; Claim 3.6 carries disagreement over to the
            # distribution.
            sizes.append(teachers * compute_realizable_size(rate / 2, teacher_beta / 2, d))
            sizes.append(compute_uniform_size(rate / 2, teacher_beta / 2, d, growth_power=2))
        else:
            # A shard is a sample of the distribution: a net for the differences of h and whatever agrees with it there.
            sizes.append(teachers * compute_net_size(rate, teacher_beta, d))
        return math.ceil(max(sizes) / min(1.0, self.share))


_make_plan = lru_cache(maxsize=64)(AgPrivClPlan)  # an audit runs one plan thousands of times


def _compute_cutoff(num_queries: int, alpha: float, beta: float) -> float:
    """Compute T of NB20 Algorithm 3, before it is rounded up."""
    expected_errors = num_queries * alpha
    return max(1.0, expected_errors / 8 + math.sqrt(3 * expected_errors * math.log(num_queries / beta)) / 4)


@lru_cache(maxsize=64)
def _compute_minimum_queries(alpha: float, beta: float) -> int:
    """Compute how many queries give T <= m alpha/4 and an average error within 3 alpha/8 of its mean but with beta/8.

    NB20 Lemma 3.5 asks for 8 ln(1/(alpha beta))/alpha, by a Chernoff bound that needs the best error to be of the
    order of alpha; this bound is Hoeffding's.
    """
    hoeffding = math.ceil(math.log(8 / beta) / (2 * (3 * alpha / 8) ** 2))
    return find_smallest(lambda m: _compute_cutoff(m, alpha, beta) + 1 <= m * alpha / 4, low=hoeffding)


def prepare_plan(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, noise_kind: str, **options: Any
) -> AgPrivClPlan:
    """Make the plan for these queries; refuse and warn of everything before anything is paid."""
    sizes: dict[str, int] = {"n": sample.n, "num_queries": len(x_Q), "vc_dimension": hypotheses.vc_dimension}
    plan = _make_plan(**sizes, noise_kind=noise_kind, **options)
    warn_below_guarantee(
        "AgPrivCl",
        sample.n,
        [(f"average excess error {plan.alpha:g} with probability {1 - plan.beta:g}", plan.min_n)],
        [("queries", len(x_Q), plan.min_queries), ("teachers", plan.num_teachers, plan.min_teachers)],
    )
    checks.integer("num_teachers", plan.num_teachers, low=1, high=plan.subset_size, fix="Every teacher needs a record.")
    check_teachers(plan.mechanism, len(x_Q), plan.num_teachers)
    return plan


def run_ag_priv_cl(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, *, budget: NoiseProvider, **options: Any
) -> Answers:
    """Answer m queries: sub-sample, relabel, resample, sub-sample and aggregate (AgPrivCl).

    Labels are 0 or 1, or NO_ANSWER for an unstable query. The function warns (``BelowGuaranteeWarning``) below the n, m
    and teachers of NB20 Theorem 3.3.

    Args:
        hypotheses: The class.
        sample: PRIVATE.
        x_Q: Queries, float64 [m, D]; they may depend on earlier answers, not on the sample.
        budget: The account that pays and gives the noise.
        **options: ``epsilon``, ``delta``, ``alpha``, ``beta`` and the options of ``AgPrivClPlan``.

    Guarantee: the plan's ``total_cost`` for all answers together, which is what is charged. Replace-one, n public. The
        sparse vector is (e, d)-DP per resampled record; a record is drawn r times or fewer but with probability t
        (exact binomial quantile), so with respect to the relabeled sample the rest is (r e, d sum_{i<r} e^{ie} + t)-DP;
        ``relabel`` adds its factor; sub-sampling without replacement amplifies to ln(1 + (n'/n)(e^.-1)) (Balle, Barthe
        & Gaboardi 2018).
    Source: NB20 Algorithm 3 and Lemma 3.4.
    """
    x_Q = check_points("x_Q", x_Q)
    plan = prepare_plan(hypotheses, sample, x_Q, budget.kind, **options)
    with charge_events(budget, plan.events, "AgPrivCl") as spending:
        return draw_ag_priv_cl(hypotheses, sample, x_Q, plan, spending.noise)


def draw_ag_priv_cl(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, plan: AgPrivClPlan, noise: NoiseSource
) -> Answers:
    """Take steps 2 to 5 of AgPrivCl with noise that is paid for."""
    subset = sample.select(draw_without_replacement(sample.n, plan.subset_size, noise))
    relabeled = relabel(hypotheses, subset, noise=noise)
    if plan.resample:
        relabeled = relabeled.select(draw_with_replacement(plan.subset_size, plan.subset_size, noise))
    answers = draw_answers(hypotheses, relabeled, x_Q, plan.num_teachers, plan.mechanism, noise)
    return replace(answers, events=plan.events)
