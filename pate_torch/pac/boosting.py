"""From small expected error to small error with high probability (WLF16 Theorem 18)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from pate_torch import checks
from pate_torch.accounting.events import BoundedRange
from pate_torch.noise import NoiseSource
from pate_torch.pac.classes import error_counts
from pate_torch.pac.exponential import Chosen, choose, df20_lemma_4
from pate_torch.pac.sample import Charge, Sample, pay, require_replace_one, warn_below
from pate_torch.protocols import HypothesisClass


def folds(n: int, count: int) -> list[slice]:
    """``count`` consecutive blocks of positions, as equal as n allows; the longer ones first."""
    size, longer = divmod(n, count)
    ends = [size * i + min(i, longer) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def high_confidence(
    hypotheses: HypothesisClass,
    candidates: Sequence[Any],
    sample: Sample,
    *,
    epsilon: float,
    failure: float,
    noise: NoiseSource,
    charge: Charge | None = None,
    alpha: float = 0.5,
) -> Chosen:
    """The exponential mechanism on a = ceil(ln(3/failure)) disjoint folds, then on the last fold among the winners.

    Each fold's winner has excess error at most e times its expectation with probability 1 - 1/e (Markov), so one of
    them does with probability 1 - failure/3; the last fold finds it. Needs fold sizes n/(a+1), for which alpha is
    stated. The folds are consecutive positions: the order of the records must not depend on them.

    Guarantee: BoundedRange(epsilon) in all, not a sum: a record sits in one fold, the other folds' draws do not see
        it, and the final draw after a candidate's fold is post-processing (which keeps bounded range). Replace-one.
    Source: WLF16 Theorem 18, whose statement prints log(3/n) where its proof has log(3/delta).
    """
    require_replace_one(sample, "high-confidence boosting")
    checks.positive("epsilon", epsilon)
    checks.between("failure", failure, 0, 1, open_=True)
    rounds = math.ceil(math.log(3 / failure))
    if sample.n <= rounds:
        raise checks.fail(
            "sample.n", sample.n, f"must exceed {rounds}", f"failure={failure:g} takes {rounds + 1} folds."
        )
    needed = (rounds + 1) * df20_lemma_4(max(len(candidates), rounds), epsilon, alpha)
    warn_below("high-confidence boosting", sample.n, [(f"excess empirical error {alpha:g} in every fold", needed)])
    *training, last = (sample.take(block) for block in folds(sample.n, rounds + 1))
    if len(candidates) == 1:
        return Chosen(candidates[0], 0, ())
    events = pay(charge, (BoundedRange(eta=epsilon),))
    winners = []
    for fold in training:
        wrong = error_counts(hypotheses, candidates, fold.x, fold.y)
        winners.append(choose(wrong / fold.n, n=fold.n, epsilon=epsilon, noise=noise)[0])
    wrong = error_counts(hypotheses, [candidates[i] for i in winners], last.x, last.y)
    best = winners[choose(wrong / last.n, n=last.n, epsilon=epsilon, noise=noise)[0]]
    return Chosen(candidates[best], best, events)
