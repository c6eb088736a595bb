"""Private prediction, one at a time: uniformly stable, then private, with the sample complexity of learning (DF20)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import expit

from pate_torch.accounting.events import DeltaEvent, PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.pac.agnostic import compute_shard_votes
from pate_torch.pac.classes import HypothesisClass, count_errors, enumerate_representatives
from pate_torch.pac.nets import (
    compute_log_sauer_shelah,
    compute_net_size,
    compute_realizable_size,
    compute_uniform_size,
    find_smallest,
)
from pate_torch.pac.sample import (
    Bools,
    Floats,
    Ints,
    Sample,
    charge_events,
    check_points,
    check_replace_one,
    draw_without_replacement,
    warn_below_guarantee,
)
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.noise import NoiseSource

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Private predictions and their price.

    Attributes:
        label_Q: bool [Q], each drawn afresh.
        events: What all of them cost, composed.
        price: (Name, per prediction).
    """

    label_Q: Bools
    events: tuple[PrivacyEvent, ...]
    price: tuple[str, float]


# --- Theorem 1: the stable predictor -------------------------------------------------------------------------------


def compute_stability(gamma: float, share: float, constants: str = "paper") -> float:
    """Uniform stability: how much one replaced record can move P(answer = 1) of the stable predictor.

    "paper": 3 gamma (DF20 Lemma 7). "sharp": share + (1 - share) tanh(gamma/4). A record is in the subset with
    probability ``share``; else the candidates stay, and the exponential mechanism, of bounded range gamma, moves the
    log-odds of any event by at most gamma, hence its probability by at most sigma(gamma/2) - sigma(-gamma/2). (From
    gamma-DP alone one gets tanh(gamma/2).) For share = gamma: below 1.25 gamma.

    Args:
        gamma: The predictor's parameter.
        share: n'/n, at most gamma.
        constants: "paper" or "sharp".
    """
    checks.one_of("constants", constants, ("paper", "sharp"))
    return 3 * gamma if constants == "paper" else share + (1 - share) * math.tanh(gamma / 4)


def compute_stable_predictor_size(vc_dimension: int, *, gamma: float, alpha: float) -> int:
    """Smallest n for empirical excess error 3 alpha.

    n' >= N_net(alpha, alpha), n >= n'/gamma, n >= 2 ln tau(n')/(gamma alpha).

    Source: DF20 Lemma 7 (with the net of ``compute_net_size``).
    """
    subset_size = compute_net_size(alpha, alpha, vc_dimension)
    mechanism_size = 2 * compute_log_sauer_shelah(subset_size, vc_dimension) / (gamma * alpha)
    return math.ceil(max(subset_size / gamma, mechanism_size))


def _warn_stable(
    algorithm: str,
    hypotheses: HypothesisClass,
    sample: Sample,
    gamma: float,
    alpha: float,
    subset_size: int,
    flip_rate: float,
) -> None:
    """Lemma 7's conditions, and Theorem 1's uniform convergence; ``flip_rate``: what flipping adds to the error."""
    d = hypotheses.vc_dimension
    warn_below_guarantee(
        algorithm,
        sample.n,
        [
            (
                f"empirical excess error {3 * alpha + flip_rate:g}",
                compute_stable_predictor_size(d, gamma=gamma, alpha=alpha),
            ),
            (f"excess error {5 * alpha + flip_rate:g} with probability 0.9", compute_uniform_size(alpha, 0.1, d)),
        ],
        [("subset", subset_size, compute_net_size(alpha, alpha, d))],
        stack_depth=1,
    )


def select_alpha_cover(hypotheses: HypothesisClass, candidates: Sequence[Any], x: Floats, alpha: float) -> list[Any]:
    """Candidates of which one is within alpha n of each candidate's labels on x [n, D]: taken greedily, in their order.

    It looks at points, not at labels. Any two that are taken lie more than alpha n apart, so there are at most
    e (d + 1) (2 e/alpha)^d of them (Haussler 1995), however many points there are.

    Source: DF20 Remark 1.
    """
    checks.between("alpha", alpha, 0, 1)
    labels_Mn = np.array([hypotheses.predict(h, x) for h in candidates], dtype=bool)
    cover_indices: list[int] = []
    uncovered_M = np.ones(len(candidates), dtype=bool)
    for index in range(len(candidates)):
        if uncovered_M[index]:
            cover_indices.append(index)
            uncovered_M &= np.count_nonzero(labels_Mn != labels_Mn[index], axis=1) > alpha * len(x)
    return [candidates[index] for index in cover_indices]


def _enumerate_candidates(
    hypotheses: HypothesisClass, sample: Sample, index: Ints, cover_alpha: float = 0.0
) -> tuple[Sequence[Any], Ints]:
    """One hypothesis per dichotomy of the subset, or a cover of them, and minus their errors on the whole sample."""
    candidates = enumerate_representatives(hypotheses, sample.x[index])
    if cover_alpha:
        candidates = select_alpha_cover(hypotheses, candidates, sample.x[index], cover_alpha)
    return candidates, -count_errors(hypotheses, candidates, sample.x, sample.y)


def _check_subset_size(
    sample: Sample, hypotheses: HypothesisClass, gamma: float, alpha: float, subset_size: int | None
) -> int:
    max_size = math.floor(gamma * sample.n * (1 + 1e-12))
    if max_size < 1:
        fix = f"At gamma={gamma:.3g} take n >= {math.ceil(1 / gamma):,}."
        raise checks.error("sample.n", sample.n, "the subset of at most gamma n records is empty", fix)
    if subset_size is None:
        return min(max_size, compute_net_size(alpha, alpha, hypotheses.vc_dimension))
    return checks.integer("subset", subset_size, low=1, high=max_size, fix="Stability needs subset <= gamma n.")


def _draw_stable_labels(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    gamma: float,
    subset_size: int,
    noise: NoiseSource,
    cover_alpha: float = 0.0,
) -> Bools:
    label_Q = np.empty(len(x_Q), dtype=bool)
    for q, x in enumerate(x_Q):
        index = draw_without_replacement(sample.n, subset_size, noise)
        candidates, utility = _enumerate_candidates(hypotheses, sample, index, cover_alpha)
        label_Q[q] = hypotheses.predict(candidates[draw_gumbel_max(utility, gamma / 2, noise)], x[None])[0]
    return label_Q


def _flip_labels(label_Q: Bools, alpha: float, noise: NoiseSource) -> Bools:
    return label_Q ^ (noise.draw_uniform((len(label_Q),), _CPU).numpy() < alpha)


def run_stable_predictor(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    gamma: float,
    alpha: float,
    budget: NoiseProvider,
    subset_size: int | None = None,
    constants: str = "paper",
    cover: bool = False,
) -> Predictions:
    """Predicts h(x), h drawn from a random subset's dichotomies by its errors on all of S.

    Each point gets a fresh subset and draw. Warns below ``compute_stable_predictor_size``, the net, and the n of
    uniform convergence.

    Args:
        hypotheses: The class.
        sample: S, PRIVATE.
        x_Q: Points to label, [Q, D].
        gamma: Internal parameter of DF20.
        alpha: Excess error.
        budget: Pays, and gives the noise.
        subset_size: n' <= gamma n; None: the smaller of that and ``compute_net_size(alpha, alpha, d)``.
        constants: "paper" or "sharp".
        cover: Draw among a cover of the dichotomies within alpha (``select_alpha_cover``, DF20 Remark 1): fewer, and as
            good but for alpha. It looks at no label, so the price stays.

    Guarantee: ``compute_stability``-uniformly stable, i.e. (0, stability)-DP, per prediction; charged as Delta.
        Replace-one.
    Source: DF20 Theorem 1 and Lemma 7, gamma being the internal parameter there.
    """
    check_replace_one(sample, "the stable predictor")
    checks.between("gamma", gamma, 0, 1, exclusive=True)
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    x_Q = check_points("x_Q", x_Q)
    size = _check_subset_size(sample, hypotheses, gamma, alpha, subset_size)
    stability = compute_stability(gamma, size / sample.n, constants)
    if stability >= 1:
        raise checks.error("gamma", gamma, f"promises a stability of {stability:g} only", "Take gamma below 1/3.")
    _warn_stable("stable predictor", hypotheses, sample, gamma, alpha, size, 0.0)
    events: tuple[PrivacyEvent, ...] = (DeltaEvent(delta=stability, count=len(x_Q)),)
    with charge_events(budget, events, "stable predictor") as spending:
        label_Q = _draw_stable_labels(hypotheses, sample, x_Q, gamma, size, spending.noise, alpha if cover else 0.0)
    return Predictions(label_Q, events, ("stability", stability))


# --- Corollary 1: private prediction by flipping -------------------------------------------------------------------


def compute_flipping_gamma(epsilon: float, alpha: float, constants: str = "paper") -> float:
    """The gamma at which flipping with probability alpha gives epsilon-private prediction.

    Flipping makes each answer's probability (1 - 2 alpha) p + alpha >= alpha, so a stability s gives the ratio
    1 + (1 - 2 alpha) s / alpha at most. "paper": s <= epsilon alpha / 2 with s = 3 gamma, so gamma = epsilon alpha / 6.
    "sharp": s <= alpha (e^epsilon - 1)/(1 - 2 alpha) with the sharp ``compute_stability`` at share = gamma.
    """
    checks.one_of("constants", constants, ("paper", "sharp"))
    if constants == "paper":
        return epsilon * alpha / 6
    max_stability = alpha * math.expm1(epsilon) / (1 - 2 * alpha)
    low, high = 0.0, min(1.0, max_stability)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_stability(middle, middle, "sharp") <= max_stability else (low, middle)
    return low


def run_private_prediction(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    epsilon: float,
    alpha: float,
    budget: NoiseProvider,
    subset_size: int | None = None,
    constants: str = "paper",
) -> Predictions:
    """The stable predictor at ``compute_flipping_gamma``, each answer flipped with probability alpha.

    Guarantee: epsilon-DP per prediction, pure; len(x_Q) of them are charged. Replace-one.
    Source: DF20 Corollary 1, which needs an *achieved* stability of epsilon alpha / 2; hence gamma = epsilon alpha / 6.
    """
    check_replace_one(sample, "private prediction")
    checks.positive("epsilon", epsilon)
    checks.between("alpha", alpha, 0, 0.5, exclusive=True, fix="At 1/2 the answer is a coin.")
    x_Q = check_points("x_Q", x_Q)
    gamma = compute_flipping_gamma(epsilon, alpha, constants)
    checks.between("gamma", gamma, 0, 1, exclusive=True, fix="Take a smaller epsilon or alpha.")
    size = _check_subset_size(sample, hypotheses, gamma, alpha, subset_size)
    _warn_stable("private prediction", hypotheses, sample, gamma, alpha, size, alpha)
    events: tuple[PrivacyEvent, ...] = (PureDPEvent(epsilon=epsilon, count=len(x_Q)),)
    with charge_events(budget, events, "private prediction") as spending:
        label_Q = _draw_stable_labels(hypotheses, sample, x_Q, gamma, size, spending.noise)
        label_Q = _flip_labels(label_Q, alpha, spending.noise)
    return Predictions(label_Q, events, ("epsilon", epsilon))


# --- Theorem 2: the private predictor ------------------------------------------------------------------------------


def compute_predictor_epsilon(n: int, subset_size: int, eta: float, constants: str = "paper") -> float:
    """Epsilon of one prediction of the private predictor; requires N_net(eta, alpha) < n' = ``subset_size`` < n.

        ln[ (1 + F n'/(n - n')) e^{3/(eta n)} + n'/n ],   "paper": F = 4 e^6 (needs eta n >= 1)
                                                          "sharp": F = 4 e^{3c}, c = (eta (n - 1) + 1)/(eta n)

    DF20 Lemma 10 bounds eta (n - 1) + 1, the records on which two matched hypotheses differ, by 2 eta n; each of the
    three factors e^2 it makes of that is e^c. As eta n grows F falls from 1614 to 80. n'/n covers subsets that are no
    net: they add alpha n'/n to a probability that the final flip keeps at alpha or above.

    Source: DF20 Lemmas 8, 10 and 11, whose O(epsilon) hides these constants.
    """
    checks.one_of("constants", constants, ("paper", "sharp"))
    checks.integer("subset", subset_size, low=1, high=n - 1)
    if constants == "paper" and eta * n < 1:
        raise checks.error("eta", eta, f"must be at least 1/n = {1 / n:.3g}")
    exponent = 2.0 if constants == "paper" else (eta * (n - 1) + 1) / (eta * n)
    amplification = 4 * math.exp(3 * exponent) * subset_size / (n - subset_size)
    return math.log((1 + amplification) * math.exp(3 / (eta * n)) + subset_size / n)


@dataclass(frozen=True, kw_only=True)
class PrivatePredictorPlan:
    """Public parameters of the private predictor.

    Attributes:
        subset_size: n'.
        eta: Net resolution.
        num_teachers: Teachers of the realizable learner.
        epsilon: Per prediction, computed.
    """

    subset_size: int
    eta: float
    num_teachers: int
    epsilon: float


def compute_default_resolution(vc_dimension: int, alpha: float) -> float:
    """The eta whose 2 eta n ln(1/alpha) teachers get one record more each than ``compute_realizable_size`` asks for.

    One more than for (alpha, alpha, d), because their number is rounded up.
    """
    return 1 / (2 * math.log(1 / alpha) * (compute_realizable_size(alpha, alpha, vc_dimension) + 1))


def plan_private_predictor(
    n: int, vc_dimension: int, *, alpha: float, eta: float | None = None, constants: str = "paper"
) -> PrivatePredictorPlan:
    """The smallest admissible subset, the teachers, and what a prediction then costs (compute it before running).

    A subset of ``compute_net_size(eta, alpha, d)`` + 1 is what privacy needs, one of ``compute_net_size(alpha, alpha,
    d)`` accuracy.
    """
    checks.between("alpha", alpha, 0, 0.5, exclusive=True)
    eta = (
        compute_default_resolution(vc_dimension, alpha)
        if eta is None
        else checks.between("eta", eta, 0, 1, exclusive=True)
    )
    subset_size = compute_net_size(min(eta, alpha), alpha, vc_dimension) + 1
    if n <= subset_size:
        min_n = compute_private_predictor_size(vc_dimension, epsilon=1.0, alpha=alpha, constants=constants)
        fix = f"By default at alpha={alpha:g} a prediction of epsilon 1 takes n >= {min_n:,}."
        raise checks.error("sample.n", n, f"must exceed the net of n' = {subset_size:,} records", fix)
    teachers = min(n, math.ceil(2 * eta * n * math.log(1 / alpha)))
    epsilon = compute_predictor_epsilon(n, subset_size, eta, constants)
    return PrivatePredictorPlan(subset_size=subset_size, eta=eta, num_teachers=teachers, epsilon=epsilon)


def compute_private_predictor_size(
    vc_dimension: int,
    *,
    epsilon: float,
    alpha: float,
    beta: float = 0.1,
    eta: float | None = None,
    constants: str = "paper",
) -> int:
    """Smallest n for Theorem 2: epsilon-private predictions, excess error O(alpha) with probability 1 - beta.

    The conditions of DF20 Lemma 8 with explicit constants.

    Args:
        vc_dimension: VC dimension of the class.
        epsilon: Per prediction.
        alpha: Excess error.
        beta: Failure probability.
        eta: At most ``compute_max_eta``, or no n is enough for the error; None: ``compute_default_resolution``.
        constants: "paper" or "sharp".
    """
    eta = compute_default_resolution(vc_dimension, alpha) if eta is None else eta
    subset_size = compute_net_size(min(eta, alpha), alpha, vc_dimension) + 1
    min_n = max(subset_size + 1, math.ceil(1 / eta), compute_uniform_size(alpha, beta, vc_dimension))
    return find_smallest(lambda n: compute_predictor_epsilon(n, subset_size, eta, constants) <= epsilon, low=min_n)


def compute_max_eta(vc_dimension: int, alpha: float, subset_size: int) -> float:
    """Largest eta for which Lemma 8 promises O(alpha), whatever n: its two conditions in which n cancels.

    The teachers need their examples (``compute_default_resolution``), and n >= 2 ln tau(n')/((2/(eta n)) alpha) says
    eta <= alpha/ln tau(n').
    """
    return min(
        compute_default_resolution(vc_dimension, alpha), alpha / compute_log_sauer_shelah(subset_size, vc_dimension)
    )


def _compute_vote_probability(
    hypotheses: HypothesisClass, sample: Sample, hypothesis: Any, x_Q: Floats, eta: float, num_teachers: int
) -> Floats:
    """The exponential vote P(c) ~ exp(n_c/(2 eta n)) of ERMs on shards of S relabeled: 1/(eta n)-private."""
    relabeled_sample = sample.replace_labels(hypotheses.predict(hypothesis, sample.x))
    counts_QC = compute_shard_votes(hypotheses, relabeled_sample, num_teachers, x_Q).counts_QC.numpy()
    return expit((counts_QC[:, 1] - counts_QC[:, 0]) / (2 * eta * sample.n))


def run_private_predictor(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    alpha: float,
    budget: NoiseProvider,
    epsilon: float | None = None,
    eta: float | None = None,
    constants: str = "paper",
) -> Predictions:
    """Relabels S by a hypothesis drawn from a random subset's dichotomies, then votes; flips with probability alpha.

    Per prediction: h ~ exp(-err(h)/eta) over the dichotomies of n' random records, S relabeled by h, the exponential
    vote of ERMs on its shards at 1/(eta n).

    Args:
        hypotheses: The class.
        sample: S, PRIVATE.
        x_Q: Points to label, [Q, D].
        alpha: Excess error, and the probability of the flip.
        budget: Pays, and gives the noise.
        epsilon: A cap on the *computed* price of one prediction; above it the run is refused and told the n it would
            take. None: the computed price is charged, whatever it is.
        eta: Net resolution; None: ``compute_default_resolution``.
        constants: "paper" or "sharp".

    Guarantee: ``compute_predictor_epsilon``-DP per prediction, pure; len(x_Q) of them are charged. Replace-one.
    Source: DF20 Theorem 2, Lemma 8.
    """
    check_replace_one(sample, "the private predictor")
    x_Q = check_points("x_Q", x_Q)
    d = hypotheses.vc_dimension
    plan = plan_private_predictor(sample.n, d, alpha=alpha, eta=eta, constants=constants)
    if epsilon is not None and plan.epsilon > checks.positive("epsilon", epsilon):
        min_n = compute_private_predictor_size(d, epsilon=epsilon, alpha=alpha, constants=constants)
        fix = f"By default at alpha={alpha:g} it takes n >= {min_n:,}."
        raise checks.error("epsilon", epsilon, f"one prediction costs {plan.epsilon:.4g} at n = {sample.n:,}", fix)
    min_n = compute_private_predictor_size(d, epsilon=epsilon or 1.0, alpha=alpha, eta=plan.eta, constants=constants)
    warn_below_guarantee(
        "private predictor",
        sample.n,
        [(f"epsilon {epsilon or 1.0:g} and error O({alpha:g}) with probability 0.9", min_n)],
        [("1/eta", math.floor(1 / plan.eta), 1 / compute_max_eta(d, alpha, plan.subset_size))],
    )
    events: tuple[PrivacyEvent, ...] = (PureDPEvent(epsilon=plan.epsilon, count=len(x_Q)),)
    label_Q = np.empty(len(x_Q), dtype=bool)
    with charge_events(budget, events, "private predictor") as spending:
        noise = spending.noise
        for q, x in enumerate(x_Q):
            index = draw_without_replacement(sample.n, plan.subset_size, noise)
            candidates, utility = _enumerate_candidates(hypotheses, sample, index)
            hypothesis = candidates[draw_gumbel_max(utility, 1 / (plan.eta * sample.n), noise)]
            probability = _compute_vote_probability(
                hypotheses, sample, hypothesis, x[None], plan.eta, plan.num_teachers
            )
            label_Q[q] = float(noise.draw_uniform((1,), _CPU)[0]) < probability[0]
        label_Q = _flip_labels(label_Q, alpha, noise)
    return Predictions(label_Q, events, ("epsilon", plan.epsilon))
