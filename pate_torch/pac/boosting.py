"""From small expected error to small error with high probability (WLF16 Theorem 18)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.pac.classes import HypothesisClass, count_errors
from pate_torch.pac.exponential import ChosenHypothesis
from pate_torch.pac.nets import find_smallest
from pate_torch.pac.sample import Sample, charge_events, check_replace_one, warn_below_guarantee
from pate_torch.privacy.budget import NoiseProvider


def split_folds(n: int, count: int) -> list[slice]:
    """Cut n positions into ``count`` consecutive blocks, as equal as n allows; the longer ones first."""
    size, remainder = divmod(n, count)
    bounds = [size * i + min(i, remainder) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def compute_high_confidence_size(num_hypotheses: int, *, epsilon: float, alpha: float, failure: float) -> int:
    """Smallest n for excess error alpha (of the distribution) with probability 1 - failure, M candidates.

    With a = ceil(ln(3/failure)) and k records in a fold, each term with probability failure/3 at most:
    e xi + 2 sqrt(ln(6a/failure)/(2k)) + 2 ln(3a/failure)/(epsilon k), xi = 2 ln M/(epsilon k) + sqrt(ln M/(2k)).
    xi is a fold's expected excess error: the exponential mechanism's, and what M averages stray from their means.

    Source: the proof of WLF16 Theorem 18, equations (20)-(22); (21) prints 2n for the 2n/(a + 1) of one fold.
    """
    rounds = math.ceil(math.log(3 / failure))
    log_m = math.log(num_hypotheses)

    def compute_excess(k: int) -> float:
        expected_excess = 2 * log_m / (epsilon * k) + math.sqrt(log_m / (2 * k))
        deviation = math.sqrt(math.log(6 * rounds / failure) / (2 * k))
        return math.e * expected_excess + 2 * deviation + 2 * math.log(3 * rounds / failure) / (epsilon * k)

    return (rounds + 1) * find_smallest(lambda k: compute_excess(k) <= alpha)


def run_high_confidence(
    hypotheses: HypothesisClass,
    candidates: Sequence[Any],
    sample: Sample,
    *,
    epsilon: float,
    failure: float,
    budget: NoiseProvider,
    alpha: float = 0.5,
) -> ChosenHypothesis:
    """The exponential mechanism on a = ceil(ln(3/failure)) disjoint folds, then on the last fold among the winners.

    Each fold's winner has excess error at most e times its expectation with probability 1 - 1/e (Markov), so one of
    them does with probability 1 - failure/3; the last fold finds it. Warns below ``compute_high_confidence_size``. The
    folds are consecutive positions: the order of the records must not depend on them.

    Guarantee: the price of BoundedRange(epsilon), not a sum. A record sits in one fold. In a candidate's fold, all
        that follows is post-processing. In the last, the winners do not depend on it, and given them the draw is of
        bounded range; averaged over them it need not be (its log ratios may span 2 epsilon), but epsilon-DP, the Renyi
        and every other divergence that composes are no larger than given the winners (quasi-convexity). Replace-one.
    Source: WLF16 Theorem 18, whose statement prints log(3/n) where its proof has log(3/delta).
    """
    check_replace_one(sample, "high-confidence boosting")
    checks.positive("epsilon", epsilon)
    checks.between("failure", failure, 0, 1, exclusive=True)
    rounds = math.ceil(math.log(3 / failure))
    if sample.n <= rounds:
        raise checks.error(
            "sample.n", sample.n, f"must exceed {rounds}", f"failure={failure:g} takes {rounds + 1} folds."
        )
    if len(candidates) == 0:
        raise checks.error("candidates", [], "must hold at least one hypothesis")
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    min_n = compute_high_confidence_size(len(candidates), epsilon=epsilon, alpha=alpha, failure=failure)
    condition = f"excess error {alpha:g} with probability {1 - failure:g}"
    warn_below_guarantee("high-confidence boosting", sample.n, [(condition, min_n)])
    *training_folds, last_fold = (sample.select(block) for block in split_folds(sample.n, rounds + 1))
    if len(candidates) == 1:
        return ChosenHypothesis(candidates[0], 0, ())
    events: tuple[PrivacyEvent, ...] = (BoundedRangeEvent(eta=epsilon),)
    with charge_events(budget, events, "high-confidence boosting") as spending:

        def draw_fewest_errors(options: Sequence[Any], fold: Sample) -> int:
            return draw_gumbel_max(-count_errors(hypotheses, options, fold.x, fold.y), epsilon / 2, spending.noise)

        winners = [draw_fewest_errors(candidates, fold) for fold in training_folds]
        best_index = winners[draw_fewest_errors([candidates[i] for i in winners], last_fold)]
    return ChosenHypothesis(candidates[best_index], best_index, events)
