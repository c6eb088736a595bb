"""Confident GNMax: a noisy check whether the teachers agree, and GNMax for the questions that pass it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.accounting import events, outcomes
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.gaussian import make_answer_event
from pate_torch.mechanisms.neighbors import NeighborPair, make_screened_pairs
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


def make_screen_event(sigma: float, count: int, discrete: bool) -> PrivacyEvent:
    """Make the event of ``count`` noisy checks of a number that a moved vote changes by at most 1; sigma in votes."""
    if discrete:
        return events.ZCDPEvent(rho=1 / (2 * sigma**2), count=count)
    return events.GaussianEvent(mu=1 / sigma, count=count)


def count_queries_to_ask(passed_Q: Tensor, max_passes: int | None) -> int:
    """Return the number of questions up to the ``max_passes``-th pass, or all if ``max_passes`` is None."""
    if max_passes is None:
        return len(passed_Q)
    return int((passed_Q.cumsum(0) - passed_Q.long() < max_passes).sum())


@dataclass(frozen=True, kw_only=True)
class ConfidentGNMax(VoteMechanism):
    """Confident GNMax: argmax(n + N(0, sigma^2)) if max(n) + N(0, screen_sigma^2) >= threshold, else no answer.

    The noise of the check is *one* number for each question. Noise on each class before the maximum would be another
    mechanism with a higher price.

    Attributes:
        sigma: Standard deviation of the noise of an answer, in votes.
        screen_sigma: Standard deviation of the noise of the check, in votes.
        threshold: Number of votes that the noisy top count must reach.
        max_answers: Number of answers, over all rounds, after which the mechanism stops. None if it never stops. Later
            questions cost nothing, and the answers are those of a *prefix* of the questions.

    Guarantee: rho = 1/(2 screen_sigma^2) for each checked question and 1/sigma^2 for each answered question, both
    Gaussian (GDP with mu = 1/screen_sigma and sqrt(2)/sigma), under the adjacency of the shards (the top count has
    sensitivity 1). The set of answered questions depends on private data, so the guarantee is the worst case that
    ``privacy_events`` returns (Smith & Thakurta 2022) and not the incurred cost. Discrete noise has the same rho, by
    zCDP.
    Source: PATE 2018 (arXiv 1802.08908) Algorithm 1.
    """

    name: str = "confident"
    sigma: float
    screen_sigma: float
    threshold: float
    max_answers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "It is the noise of the answer, in votes.")
        checks.noise_scale("mechanism.screen_sigma", self.screen_sigma, "It is the noise of the check, in votes.")
        checks.number("mechanism.threshold", self.threshold, "It is a number of votes.")
        if self.max_answers is not None:
            checks.integer("mechanism.max_answers", self.max_answers, low=1, fix="Null sets no cap.")

    def _make_events(self, num_asked: int, num_answered: int) -> tuple[PrivacyEvent, ...]:
        return (
            make_screen_event(self.screen_sigma, num_asked, self.discrete),
            make_answer_event(self.sigma, num_answered, self.discrete),
        )

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError for a threshold that unanimous teachers pass less than once in a thousand questions."""
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        if self.threshold > num_teachers + 3.1 * self.screen_sigma:
            raise checks.error(
                "mechanism.threshold",
                self.threshold,
                f"is out of reach of {num_teachers} teachers, even unanimous, at screen_sigma={self.screen_sigma:g}",
                f"Set it below {num_teachers}, or train more teachers.",
            )

    @property
    def has_independent_queries(self) -> bool:
        return self.max_answers is None

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        return make_screened_pairs(self.threshold, self.screen_sigma, self.sigma, num_queries)

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Return the price of a check for each question and of the largest possible number of answers."""
        num_answered = num_queries if self.max_answers is None else min(num_queries, self.max_answers)
        return self._make_events(num_queries, num_answered)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Check all questions, then answer those that pass."""
        top_Q = self._cast_counts(votes).max(1).values
        passed_Q = top_Q + noise.draw_gaussian((len(votes),), self.screen_sigma, top_Q.device) >= self.threshold
        num_asked = count_queries_to_ask(
            passed_Q, None if self.max_answers is None else self.max_answers - context.num_answered
        )
        passed_Q = passed_Q[:num_asked]
        asked_votes = votes.select(torch.arange(num_asked))
        label_Q = self._draw_labels_where(asked_votes, noise, self.sigma, passed_Q)
        return Answers(label_Q, self._make_events(num_asked, int(passed_Q.sum())))

    def make_outcome_model(self) -> outcomes.ConfidentOutcomes | None:
        """Return the distribution of one answer, or None with ``max_answers`` or discrete noise."""
        if self.discrete or self.max_answers is not None:
            return None
        return outcomes.ConfidentOutcomes(screen_sigma=self.screen_sigma, threshold=self.threshold, sigma=self.sigma)
