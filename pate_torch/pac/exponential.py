"""The exponential mechanism over finitely many hypotheses (McSherry & Talwar 2007; WLF16 Alg. 1; DF20 section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pate_torch.accounting.events import BoundedRange, Event
from pate_torch.budget import Door
from pate_torch.core import checks
from pate_torch.noise.source import NoiseSource
from pate_torch.pac.classes import error_counts
from pate_torch.pac.sample import Floats, Ints, Sample, pay, require_replace_one, warn_below
from pate_torch.protocols import HypothesisClass

VACUOUS = 0.5
"""An excess error that any guess attains: a theorem that promises no less says nothing."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Chosen:
    """A privately chosen hypothesis.

    Attributes:
        hypothesis: The chosen one.
        index: Its place among the candidates.
        events: What choosing it cost.
        approximate: It was drawn by a Markov chain, so ``events`` hold only up to the chain's distance from its target.
    """

    hypothesis: Any
    index: int
    events: tuple[Event, ...]
    approximate: bool = False


def log_law(utility_M: Floats | Ints, rate: float) -> Floats:
    """Log-probabilities ln P(i), P(i) proportional to exp(rate utility_i), float64 [M].

    Raises:
        ValueError: A NaN or infinite utility.
    """
    utility = np.asarray(utility_M, dtype=np.float64)
    if utility.ndim != 1 or len(utility) == 0 or not np.isfinite(utility).all():
        raise ValueError("utility: must be a non-empty vector of finite numbers")
    score = rate * (utility - utility.max())
    return score - math.log(np.exp(score).sum())


def gumbel_max(utility_M: Floats | Ints, rate: float, noise: NoiseSource) -> int:
    """An index drawn from ``log_law`` without leaving log space: argmax of score plus standard Gumbel noise."""
    gumbel = noise.gumbel((len(utility_M),), _CPU).numpy()
    return int(np.argmax(log_law(utility_M, rate) + gumbel))


def df20_lemma_4(num_hypotheses: int, epsilon: float, alpha: float) -> float:
    """Smallest n with E[empirical error] <= min + alpha: n = 2 ln M / (epsilon alpha) (DF20 Lemma 4)."""
    return 2 * math.log(num_hypotheses) / (epsilon * alpha)


def choose(
    mean_loss_M: Floats,
    *,
    n: int,
    epsilon: float,
    budget: Door,
    loss_range: float = 1.0,
    regularizer_M: Floats | None = None,
) -> tuple[int, tuple[Event, ...]]:
    """Draw i with P(i) proportional to exp(epsilon n q_i / (2 range)), q = -mean loss - g (WLF16 Algorithm 1).

    The candidates are public. A single one is returned free of charge.

    Args:
        mean_loss_M: Average over n records of a loss within an interval of length ``loss_range``.
        n: Records, public.
        epsilon: Price of the choice (bounded range).
        budget: Pays, and gives the noise.
        loss_range: Length of that interval.
        regularizer_M: g, a public function of the hypothesis.

    Returns:
        The index, and what choosing it cost.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one, n public. Sensitivity of q: range / n
        (WLF16 prints 2/n for losses in [0, 1], which would only spend half the budget).
    Source: WLF16 Algorithm 1 (q, with the smaller sensitivity); bounded range: Cesar & Rogers 2021.
    """
    utility = _utility(mean_loss_M, n, epsilon, loss_range, regularizer_M)
    if len(utility) == 1:
        return 0, ()
    events: tuple[Event, ...] = (BoundedRange(eta=epsilon),)
    with pay(budget, events, "exponential mechanism") as spending:
        return gumbel_max(utility, epsilon * n / (2 * loss_range), spending.noise), events


def _utility(mean_loss_M: Floats, n: int, epsilon: float, loss_range: float, regularizer_M: Floats | None) -> Floats:
    """q, checked before anything is charged."""
    checks.positive("epsilon", epsilon)
    checks.positive("loss_range", loss_range)
    checks.integer("n", n, low=1)
    loss = np.asarray(mean_loss_M, dtype=np.float64)
    utility = -loss if regularizer_M is None else -loss - np.asarray(regularizer_M, dtype=np.float64)
    if len(loss) and float(np.ptp(loss)) > loss_range * (1 + 1e-9):
        raise checks.fail("loss_range", loss_range, "must cover the spread of the mean losses", "Clip the loss.")
    log_law(utility, 1.0)  # refuses NaN
    return utility


def exponential_mechanism(
    hypotheses: HypothesisClass,
    candidates: Sequence[Any],
    sample: Sample,
    *,
    epsilon: float,
    budget: Door,
    regularizer_M: Floats | None = None,
    alpha: float = VACUOUS,
) -> Chosen:
    """Choose among public ``candidates`` by their errors on the private sample: P(h) ~ exp(-epsilon errors(h)/2).

    Warns (BelowGuarantee) when n is below DF20 Lemma 4's for the excess empirical error ``alpha``.

    Guarantee: as ``choose``; error counts have sensitivity 1.
    Source: DF20 section 2; WLF16 Algorithm 1 with the 0-1 loss.
    """
    require_replace_one(sample, "the exponential mechanism")
    checks.between("alpha", alpha, 0, 1, open_=True)
    checks.positive("epsilon", epsilon)
    if len(candidates) == 0:
        raise checks.fail("candidates", [], "must hold at least one hypothesis")
    needed = df20_lemma_4(len(candidates), epsilon, alpha)
    warn_below("exponential mechanism", sample.n, [(f"excess empirical error {alpha:g}", needed)])
    wrong = error_counts(hypotheses, candidates, sample.x, sample.y)
    index, events = choose(wrong / sample.n, n=sample.n, epsilon=epsilon, budget=budget, regularizer_M=regularizer_M)
    return Chosen(candidates[index], index, events)
