"""The exponential mechanism over finitely many hypotheses (McSherry & Talwar 2007; WLF16 Alg. 1; DF20 section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.pac.classes import HypothesisClass, count_errors
from pate_torch.pac.sample import Floats, Ints, Sample, charge_events, check_replace_one, warn_below_guarantee
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.noise import NoiseSource

VACUOUS_ALPHA = 0.5
"""An excess error that any guess attains: a theorem that promises no less says nothing."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ChosenHypothesis:
    """A privately chosen hypothesis.

    Attributes:
        hypothesis: The chosen one.
        index: Its place among the candidates.
        events: What choosing it cost.
    """

    hypothesis: Any
    index: int
    events: tuple[PrivacyEvent, ...]


def compute_log_probabilities(utility_M: Floats | Ints, rate: float) -> Floats:
    """Log-probabilities ln P(i), P(i) proportional to exp(rate utility_i), float64 [M].

    Raises:
        ValueError: A NaN or infinite utility.
    """
    utility = np.asarray(utility_M, dtype=np.float64)
    if utility.ndim != 1 or len(utility) == 0 or not np.isfinite(utility).all():
        raise ValueError("utility: must be a non-empty vector of finite numbers")
    score = rate * (utility - utility.max())
    return score - math.log(np.exp(score).sum())


def draw_gumbel_max(utility_M: Floats | Ints, rate: float, noise: NoiseSource) -> int:
    """An index drawn from ``compute_log_probabilities`` in log space: argmax of score plus standard Gumbel noise."""
    gumbel = noise.draw_gumbel((len(utility_M),), _CPU).numpy()
    return int(np.argmax(compute_log_probabilities(utility_M, rate) + gumbel))


def df20_lemma_4(num_hypotheses: int, epsilon: float, alpha: float) -> float:
    """Smallest n with E[empirical error] <= min + alpha: n = 2 ln M / (epsilon alpha) (DF20 Lemma 4)."""
    return 2 * math.log(num_hypotheses) / (epsilon * alpha)


def run_exponential_mechanism(
    hypotheses: HypothesisClass,
    candidates: Sequence[Any],
    sample: Sample,
    *,
    epsilon: float,
    budget: NoiseProvider,
    alpha: float = VACUOUS_ALPHA,
) -> ChosenHypothesis:
    """Choose among public ``candidates`` by their errors on the private sample: P(h) ~ exp(-epsilon errors(h)/2).

    Warns (``BelowGuaranteeWarning``) when n is below DF20 Lemma 4's for the excess empirical error ``alpha``.

    A single candidate is returned free of charge.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one, n public; error counts have sensitivity 1.
        (WLF16 prints 2/n for mean losses in [0, 1], which would only spend half the budget.)
    Source: DF20 section 2; WLF16 Algorithm 1 with the 0-1 loss; bounded range: Cesar & Rogers 2021.
    """
    check_replace_one(sample, "the exponential mechanism")
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    checks.positive("epsilon", epsilon)
    if len(candidates) == 0:
        raise checks.error("candidates", [], "must hold at least one hypothesis")
    min_n = df20_lemma_4(len(candidates), epsilon, alpha)
    warn_below_guarantee("exponential mechanism", sample.n, [(f"excess empirical error {alpha:g}", min_n)])
    errors = count_errors(hypotheses, candidates, sample.x, sample.y)
    if len(candidates) == 1:
        return ChosenHypothesis(candidates[0], 0, ())
    events: tuple[PrivacyEvent, ...] = (BoundedRangeEvent(eta=epsilon),)
    with charge_events(budget, events, "exponential mechanism") as spending:
        index = draw_gumbel_max(-(errors / sample.n), epsilon * sample.n / 2, spending.noise)
    return ChosenHypothesis(candidates[index], index, events)


def draw_model_index(
    errors_M: Ints, epsilon: float, noise: NoiseSource, *, adjacency: str, sensitivity: int = 1
) -> int:
    """The index of a model with few errors, drawn with noise that has been paid for.

    Args:
        errors_M: Error *counts* on a private validation split no model was trained on, int [M]; not rates, whose
            denominator is private under add/remove.
        epsilon: Price of the choice (bounded range).
        noise: Paid for.
        adjacency: "replace_one" or "add_remove".
        sensitivity: The most validation records one privacy unit may own.

    Guarantee: BoundedRange(epsilon), so epsilon-DP and rho = epsilon^2/8 (never looser than PureDP(epsilon)), under
        either adjacency. Let u_i = -errors_i and P(i) ~ exp(r u_i). Between neighbors ln P(i)/P'(i) =
        r (u_i - u'_i) + constant. Replace-one: each u_i - u'_i lies in [-s, s], so the log-ratios span 2 r s and
        r = epsilon/(2s). Add/remove: all u_i move the same way, u_i - u'_i lies in [0, s] or in [-s, 0], so they
        span r s only and r = epsilon/s: the same price buys twice the rate.
    Source: McSherry & Talwar 2007; bounded range: Durfee & Rogers 2019, Cesar & Rogers 2021.
    """
    checks.positive("epsilon", epsilon)
    checks.integer("sensitivity", sensitivity, low=1)
    checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
    errors = np.asarray(errors_M)
    if errors.ndim != 1 or len(errors) == 0:
        raise checks.error("errors_M.shape", errors.shape, "must be one count per model, at least one")
    if not np.issubdtype(errors.dtype, np.integer) or (errors < 0).any():
        raise ValueError("errors_M: must be counts of errors (integers, at least 0), not rates")
    rate = epsilon / sensitivity if adjacency == "add_remove" else epsilon / (2 * sensitivity)
    return draw_gumbel_max(-errors.astype(np.int64), rate, noise)
