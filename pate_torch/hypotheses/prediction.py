"""Private prediction of one query at a time by a stable predictor with random flips (DF20)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pate_torch.accounting.events import PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.hypotheses import sample as samples
from pate_torch.hypotheses.classes import HypothesisClass
from pate_torch.hypotheses.sample import Bools, Floats, Sample
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.privacy.noise import NoiseProvider, NoiseSource


@dataclass(frozen=True, eq=False)
class Predictions:
    """Private predictions, bool [Q], which are drawn independently, and the events of all predictions together."""

    label_Q: Bools
    events: tuple[PrivacyEvent, ...]


def compute_stability(gamma: float, share: float, constants: str = "paper") -> float:
    """Compute the uniform stability, which bounds the change of P(answer = 1) when one record is replaced.

    "paper": 3 gamma (DF20 Lemma 7). "sharp": share + (1 - share) tanh(gamma/4). A record is in the subset with
    probability ``share``. Otherwise the candidates stay, and the exponential mechanism, of bounded range gamma, changes
    the log-odds of any event by at most gamma, hence its probability by at most sigma(gamma/2) - sigma(-gamma/2).
    (gamma-DP alone gives tanh(gamma/2).) For share = gamma, the stability is below 1.25 gamma.
    """
    checks.one_of("constants", constants, ("paper", "sharp"))
    return 3 * gamma if constants == "paper" else share + (1 - share) * math.tanh(gamma / 4)


def compute_stable_predictor_size(vc_dimension: int, *, gamma: float, alpha: float) -> int:
    """Compute the smallest n for an empirical excess error of 3 alpha of the stable predictor.

    The conditions are n' >= N_net(alpha, alpha), n >= n'/gamma and n >= 2 ln tau(n')/(gamma alpha).

    Source: DF20 Lemma 7 (with the net of ``compute_net_size``).
    """
    subset_size = samples.compute_net_size(alpha, alpha, vc_dimension)
    mechanism_size = 2 * samples.compute_log_sauer_shelah(subset_size, vc_dimension) / (gamma * alpha)
    return math.ceil(max(subset_size / gamma, mechanism_size))


def compute_flipping_gamma(epsilon: float, alpha: float, constants: str = "paper") -> float:
    """Compute the gamma at which flips with probability alpha give epsilon-private prediction.

    A flip makes the probability of each answer (1 - 2 alpha) p + alpha >= alpha, so a stability s gives a ratio of
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
    """Predict each query by a random hypothesis, and flip each answer with probability alpha.

    For each query, a hypothesis for the dichotomies of a new random subset is drawn by its errors on the whole sample
    (the stable predictor at ``compute_flipping_gamma``). The function warns if n is below
    ``compute_stable_predictor_size`` or the size for uniform convergence, or if the subset is too small for a net.

    ``epsilon`` is that of one prediction of the queries x_Q [Q, D]. ``alpha`` is the excess error, too. A subset has
    ``subset_size`` = n' <= gamma n records, by default the smaller of gamma n and the size of a net.

    Guarantee: pure epsilon-DP for each prediction; len(x_Q) predictions are charged. Replace-one. The stable predictor
        is ``compute_stability``-uniformly stable (DF20 Theorem 1 and Lemma 7, where gamma is the internal parameter).
    Source: DF20 Corollary 1, which needs an *achieved* stability of epsilon alpha / 2; hence gamma = epsilon alpha / 6.
    """
    checks.positive("epsilon", epsilon)
    checks.between("alpha", alpha, 0, 0.5, exclusive=True, fix="At alpha = 1/2, every answer is random.")
    x_Q = samples.check_points("x_Q", x_Q)
    gamma = compute_flipping_gamma(epsilon, alpha, constants)
    checks.between("gamma", gamma, 0, 1, exclusive=True, fix="Take a smaller epsilon or alpha.")
    max_size, d = math.floor(gamma * sample.n * (1 + 1e-12)), hypotheses.vc_dimension
    if max_size < 1:
        fix = f"At gamma={gamma:.3g} take n >= {math.ceil(1 / gamma):,}."
        raise checks.error("sample.n", sample.n, "makes the subset of at most gamma n records empty", fix)
    net_size = samples.compute_net_size(alpha, alpha, d)
    subset_size = min(max_size, net_size) if subset_size is None else subset_size
    checks.integer("subset_size", subset_size, low=1, high=max_size, fix="Stability needs subset_size <= gamma n.")
    min_n = compute_stable_predictor_size(d, gamma=gamma, alpha=alpha)
    promises = [(f"empirical excess error {4 * alpha:g}", min_n)]
    promises += [(f"excess error {6 * alpha:g} with probability 0.9", samples.compute_uniform_size(alpha, 0.1, d))]
    samples.warn_below_guarantee("private prediction", sample.n, promises, [("subset", subset_size, net_size)])
    events: tuple[PrivacyEvent, ...] = (PureDPEvent(epsilon=epsilon, count=len(x_Q)),)
    with samples.charge_events(budget, events, "private prediction") as spending:
        label_Q = _draw_stable_labels(hypotheses, sample, x_Q, gamma, subset_size, spending.noise)
        label_Q ^= spending.noise.draw_uniform((len(x_Q),), torch.device("cpu")).numpy() < alpha
    return Predictions(label_Q, events)


def _draw_stable_labels(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, gamma: float, subset_size: int, noise: NoiseSource
) -> Bools:
    label_Q = np.empty(len(x_Q), dtype=bool)
    for q, x in enumerate(x_Q):
        index = samples.draw_without_replacement(sample.n, subset_size, noise)
        candidates = hypotheses.enumerate_representatives(sample.x[index])
        errors = hypotheses.count_errors(candidates, *sample.usable)
        label_Q[q] = hypotheses.predict(candidates[draw_gumbel_max(-errors, gamma / 2, noise)], x[None])[0]
    return label_Q
