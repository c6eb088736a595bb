"""The exponential mechanism over finitely many hypotheses (McSherry & Talwar 2007; WLF16 Alg. 1; DF20 section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.pac.classes import HypothesisClass, count_errors
from pate_torch.pac.sample import Sample, charge_events, check_replace_one, warn_below_guarantee
from pate_torch.privacy.budget import NoiseProvider

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
