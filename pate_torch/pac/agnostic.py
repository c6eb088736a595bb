"""Answering classification queries privately in the agnostic setting: relabel, then sub-sample and aggregate (NB20)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from pate_torch import checks
from pate_torch.accounting.events import BoundedRange, Delta, Event, PureDP
from pate_torch.mechanisms.stability import Stability
from pate_torch.noise import NoiseSource
from pate_torch.pac.boosting import folds
from pate_torch.pac.classes import erm, error_counts, representatives
from pate_torch.pac.exponential import Chosen, gumbel_max
from pate_torch.pac.nets import realizable_size
from pate_torch.pac.sample import (
    Charge,
    Floats,
    Sample,
    pay,
    points,
    require_replace_one,
    warn_below,
    with_replacement,
    without_replacement,
)
from pate_torch.pac.semi_private import sspp
from pate_torch.protocols import HypothesisClass
from pate_torch.types import NO_ANSWER, Answers, Context, Votes

RELABEL_FACTOR = (1 + math.exp(0.5)) ** 2
"""What relabelling multiplies e^epsilon and delta by. NB20 Lemma 3.1 has e^3 and 4e; see ``relabel``."""


def relabel(hypotheses: HypothesisClass, sample: Sample, *, noise: NoiseSource) -> Sample:
    """The sample, labelled by a hypothesis drawn with P(h) ~ exp(-errors(h)/2) from its own dichotomies.

    Guarantee: NOT private alone: the points go through. If A is (e, d)-DP, A after relabel is (e + 2 ln(1 + e^{1/2}),
        (1 + e^{1/2})^2 d)-DP = (e + 1.949, 7.02 d). Replace-one. Let c run over the dichotomies of the n - 1 common
        points: each extends to the odd point in one or two ways, with relative weights between e^{-1/2} (one way,
        wrong) and 1 + e^{-1/2} (both), so P(c)/P'(c) <= (1 + e^{1/2})^2, numerator and normaliser each giving one
        factor; and given c the two relabelled samples differ in one record. (NB20 Lemma 3.1: (e + 3, 4 e d).)
    Source: NB20 Algorithm 2 (Beimel, Nissim & Stemmer's LabelBoost).
    """
    candidates = representatives(hypotheses, sample.x)
    wrong = error_counts(hypotheses, candidates, sample.x, sample.y)
    return sample.relabelled(hypotheses.predict(candidates[gumbel_max(-wrong, 0.5, noise)], sample.x))


def votes_of_shards(hypotheses: HypothesisClass, sample: Sample, num_teachers: int, x_Q: Floats) -> Votes:
    """PRIVATE. Splits the sample into consecutive equal shards and counts their ERMs' labels on x_Q."""
    ones_Q = np.zeros(len(x_Q), dtype=np.int64)
    for block in folds(sample.n, num_teachers):
        ones_Q += hypotheses.predict(erm(hypotheses, sample.x[block], sample.y[block]), x_Q)
    counts_QC = torch.from_numpy(np.stack([num_teachers - ones_Q, ones_Q], axis=1))
    return Votes(counts_QC, num_teachers)


def sub_samp(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    num_teachers: int,
    mechanism: Stability,
    noise: NoiseSource,
    charge: Charge | None = None,
) -> Answers:
    """Sub-sample and aggregate: an ERM per shard, and the sparse vector over the stability of their votes.

    Queries after the T-th unstable one get NO_ANSWER as the unstable ones do.
    Guarantee: that of ``Stability``: a record sits in one shard. Replace-one (positions make the shards).
    Source: BTT18 Algorithm 4 / NB20 Algorithm 5, with the distance halved and stopping at T (see ``Stability``).
    """
    require_replace_one(sample, "sub-sample and aggregate")
    x_Q = points("x_Q", x_Q)
    checks.integer("num_teachers", num_teachers, low=1, high=sample.n, fix="Every teacher needs a record.")
    pay(charge, mechanism.worst_case(len(x_Q)))
    votes = votes_of_shards(hypotheses, sample, num_teachers, x_Q)
    answers = mechanism.release(votes, noise, Context(num_queries=len(x_Q)))
    label_Q = torch.full((len(x_Q),), NO_ANSWER, dtype=torch.int64)
    label_Q[: len(answers.label_Q)] = answers.label_Q
    return Answers(label_Q, answers.events)


@dataclass(frozen=True, kw_only=True)
class AgPrivClPlan:
    """Step 1 of AgPrivCl: every number it runs with, all public.

    subset: n' records drawn without replacement; inner: (epsilon*, delta*) of the part after relabelling, as a
    function of the relabelled sample; draws: no record is resampled more often, but with probability ``draws_tail``;
    mechanism: the sparse vector with (epsilon_hat, delta_hat) per resampled record; total: the (epsilon, delta)
    proved for the whole, at most what was asked; minimum_n: below it NB20 Theorem 3.3's proof promises no accuracy.
    """

    subset: int
    inner: tuple[float, float]
    draws: int
    draws_tail: float
    num_teachers: int
    mechanism: Stability
    total: tuple[float, float]
    minimum_n: int


def _draws(subset: int, delta: float) -> tuple[int, float]:
    """The most times one of n' records is drawn in n' draws with replacement, but with probability delta/2 at most.

    NB20 says ln(2/delta), by a Chernoff bound that fails for large delta (delta = 0.1: P(3 or more) = 0.080 > 0.05)
    and is loose for small ones (delta = 1e-5: 12 against 8): the exact binomial quantile instead.
    """
    often = 1
    while (tail := float(binom.sf(often, subset, 1 / subset))) > delta / 2:
        often += 1
    return often, tail


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
    resample: bool = True,
    noise_kind: str = "torch",
) -> AgPrivClPlan:
    """Step 1 of NB20 Algorithm 3.

    constants: "paper" takes n' = epsilon n / 56 and epsilon* = min(1, alpha max(1, sqrt(m alpha))). "sharp" takes
    epsilon* = 1 and the largest n' that ``relabel``'s own factor and exact amplification allow (5 times larger at
    epsilon = 1). resample=False leaves step 4 out: shards drawn without replacement are nets at least as often
    (DF20, after Lemma 1), and a record then reaches one teacher, so that nothing is lost to group privacy.
    Raises ValueError where the sub-sample is empty or the proof does not give (epsilon, delta).
    """
    checks.positive("epsilon", epsilon)
    checks.delta("delta", delta)
    for key, value in (("alpha", alpha), ("beta", beta)):
        checks.between(key, value, 0, 1, open_=True)
    checks.integer("num_queries", num_queries, low=1)
    checks.one_of("constants", constants, ("paper", "sharp"))
    m_alpha = num_queries * alpha
    failures = math.ceil(max(1.0, m_alpha / 8 + math.sqrt(3 * m_alpha * math.log(num_queries / beta)) / 4))
    if constants == "paper":
        share, inner_epsilon = epsilon / 56, min(1.0, alpha * max(1.0, math.sqrt(m_alpha)))
    else:
        share, inner_epsilon = min(1.0, math.expm1(epsilon) / (RELABEL_FACTOR * math.e - 1)), 1.0
    subset = math.floor(min(1.0, share) * n)
    if subset < 1:
        fix = f"At epsilon={epsilon:g} take n >= {math.ceil(1 / share):,}."
        raise checks.fail("n", n, f"the sub-sample of {share:.3g} n records is empty", fix)
    inner_delta = delta if constants == "paper" else min(0.5, delta / (share * RELABEL_FACTOR))
    total = (
        math.log1p(subset / n * (RELABEL_FACTOR * math.exp(inner_epsilon) - 1)),
        subset / n * RELABEL_FACTOR * inner_delta,
    )
    if total[0] > epsilon * (1 + 1e-12) or total[1] > delta * (1 + 1e-12):
        raise checks.fail(
            "epsilon", epsilon, f"the proof gives {total} at most", 'Take epsilon <= 1, or constants="sharp".'
        )
    draws, tail = _draws(subset, inner_delta) if resample else (1, 0.0)
    hat_epsilon = inner_epsilon / draws
    group = sum(math.exp(i * hat_epsilon) for i in range(draws))
    mechanism = Stability(
        epsilon=hat_epsilon, delta=(inner_delta - tail) / group, max_failures=failures, noise=noise_kind
    )
    wanted = _teachers(mechanism, num_queries, beta)
    minimum = _minimum_subset(vc_dimension, wanted, alpha=alpha, beta=beta)
    return AgPrivClPlan(
        subset=subset,
        inner=(inner_epsilon, inner_delta),
        draws=draws,
        draws_tail=tail,
        num_teachers=min(wanted, subset) if num_teachers is None else num_teachers,
        mechanism=mechanism,
        total=total,
        minimum_n=math.ceil(minimum / min(1.0, share)),
    )


def _teachers(mechanism: Stability, num_queries: int, beta: float) -> int:
    """So many that a two-thirds majority (dist = K/6 - 1) passes every test with probability 1 - beta/4."""
    plan = mechanism.calibration(num_queries)
    noise = plan.scale * (math.log(4 * plan.blocks / beta) + 2 * math.log(4 * num_queries / beta))
    return math.ceil(6 * (1 + plan.threshold + noise))


def _minimum_subset(vc_dimension: int, num_teachers: int, *, alpha: float, beta: float) -> float:
    """The n' that NB20's proof of Lemma 3.5 uses: relabelling (Lemma 3.2), disagreements (Claim 3.6), the teachers."""
    relabelling = 256 * (vc_dimension + math.log(12 / beta)) / (alpha / 4) ** 2
    resolution = vc_dimension * math.log(24 / alpha) + math.log(16 * num_teachers / beta)
    shard = realizable_size(alpha / 24, beta / (16 * num_teachers), vc_dimension)
    return max(relabelling, 50 * resolution / (alpha / 24) ** 2, float(shard * num_teachers))


def ag_priv_cl(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    noise: NoiseSource,
    charge: Charge | None = None,
    **options: Any,
) -> Answers:
    """Answers m queries: sub-sample, relabel, resample, sub-sample and aggregate (AgPrivCl).

    x_Q: [m, D]; they may depend on earlier answers, not on the sample. ``options``: those of ``plan_ag_priv_cl``.
    Labels 0/1, NO_ANSWER where unstable. Warns (BelowGuarantee) below NB20 Theorem 3.3's n.

    Guarantee: (epsilon, delta)-DP for all answers together. Replace-one, n public. The sparse vector is (e, d)-DP per
        resampled record; a record is drawn r times or fewer but with probability t (exact binomial quantile), so with
        respect to the relabelled sample the rest is (r e, d sum_{i<r} e^{ie} + t)-DP; ``relabel`` adds its factor;
        sub-sampling without replacement amplifies to ln(1 + (n'/n)(e^.-1)) (Balle, Barthe & Gaboardi 2018).
    Source: NB20 Algorithm 3 and Lemma 3.4.
    """
    require_replace_one(sample, "AgPrivCl")
    x_Q = points("x_Q", x_Q)
    plan = plan_ag_priv_cl(
        sample.n,
        len(x_Q),
        hypotheses.vc_dimension,
        epsilon=epsilon,
        delta=delta,
        alpha=alpha,
        beta=beta,
        noise_kind=noise.kind,
        **options,
    )
    warn_below("AgPrivCl", sample.n, [(f"average excess error {alpha:g}", plan.minimum_n)])
    checks.integer("num_teachers", plan.num_teachers, low=1, high=plan.subset, fix="Every teacher needs a record.")
    events: tuple[Event, ...] = pay(charge, (PureDP(epsilon=epsilon), Delta(delta=delta)))
    chosen = sample.take(without_replacement(sample.n, plan.subset, noise))
    relabelled = relabel(hypotheses, chosen, noise=noise)
    if options.get("resample", True):
        relabelled = relabelled.take(with_replacement(plan.subset, plan.subset, noise))
    answers = sub_samp(
        hypotheses, relabelled, x_Q, num_teachers=plan.num_teachers, mechanism=plan.mechanism, noise=noise
    )
    return Answers(answers.label_Q, events)


@dataclass(frozen=True, eq=False)
class Universal:
    """UnvPrivCl's answers to every query; ``learner``: SSPP's hypothesis, None if the queries ran out before."""

    answers: Answers
    learner: Chosen | None


def unv_priv_cl(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    epsilon: float,
    delta: float,
    alpha: float,
    beta: float,
    noise: NoiseSource,
    charge: Charge | None = None,
    share: float = 0.5,
    first: int | None = None,
    **options: Any,
) -> Universal:
    """Answers any number of queries: AgPrivCl on the first m0, which are then SSPP's public points for the others.

    first: m0 = ceil(32 (d ln(1/alpha) + ln(1/beta)) / alpha) unless given. Up to m0 queries spend all of epsilon in
    AgPrivCl; beyond, a ``share`` of it, and SSPP the rest.
    Guarantee: (epsilon, delta)-DP for all answers together, the *sum* of both parts (NB20 Algorithm 4 runs both with
        the full epsilon, which is 2 epsilon). Replace-one, n public.
    Source: NB20 Algorithm 4.
    """
    require_replace_one(sample, "UnvPrivCl")
    checks.between("share", share, 0, 1, open_=True)
    checks.positive("epsilon", epsilon)
    x_Q = points("x_Q", x_Q)
    d = hypotheses.vc_dimension
    m0 = first or math.ceil(32 * (d * math.log(1 / alpha) + math.log(1 / beta)) / alpha)
    early = epsilon if len(x_Q) <= m0 else epsilon * share
    late = epsilon - early
    # Both parts are charged before either draws: a run refused half-way would have spent without answering.
    first_part: tuple[Event, ...] = (PureDP(epsilon=early), Delta(delta=delta))
    pay(charge, first_part if late == 0 else (*first_part, BoundedRange(eta=late)))
    answers = ag_priv_cl(
        hypotheses, sample, x_Q[:m0], epsilon=early, delta=delta, alpha=alpha, beta=beta, noise=noise, **options
    )
    if late == 0:
        return Universal(answers, None)
    learner = sspp(hypotheses, sample, x_Q[:m0], epsilon=late, noise=noise, alpha=alpha, beta=beta)
    rest_Q = torch.from_numpy(hypotheses.predict(learner.hypothesis, x_Q[m0:]).astype(np.int64))
    return Universal(Answers(torch.cat([answers.label_Q, rest_Q]), answers.events + learner.events), learner)
