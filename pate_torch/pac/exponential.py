"""The exponential mechanism over finitely many hypotheses (McSherry & Talwar 2007; WLF16 Alg. 1; DF20 section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.budget import NoiseProvider
from pate_torch.core import checks
from pate_torch.noise.source import NoiseSource
from pate_torch.pac.classes import count_errors
from pate_torch.pac.sample import Floats, Ints, Sample, check_replace_one, pay, warn_below_guarantee
from pate_torch.protocols import HypothesisClass

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
    """An index drawn from ``compute_log_probabilities`` without leaving log space: argmax of score plus standard Gumbel noise."""
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

    Warns (BelowGuarantee) when n is below DF20 Lemma 4's for the excess empirical error ``alpha``.

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
    with pay(budget, events, "exponential mechanism") as spending:
        index = draw_gumbel_max(-(errors / sample.n), epsilon * sample.n / 2, spending.noise)
    return ChosenHypothesis(candidates[index], index, events)
