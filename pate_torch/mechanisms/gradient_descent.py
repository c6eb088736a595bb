"""Noisy gradient descent: a few steps along the sum of the clipped gradients of all records, with Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pate_torch.accounting import discrete_gaussian
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.mechanisms.neighboring_values import NeighborPair, make_gradient_pair
from pate_torch.privacy import sensitive
from pate_torch.privacy.noise import MAX_LARGE_SCALE, NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext

_MAX_DISCRETE_NUMBERS = 1 << 20
"""Largest number of numbers in a sum with discrete noise, for which its cost holds."""


@dataclass(frozen=True, kw_only=True)
class GradientDescent(RecordMechanism):
    """W <- W + step_size * scale * (sum of clipped gradients(W) / clip_norm + N(0, sigma^2)), from public weights W.

    This is the mechanism of ``method=gradients``. The cost pays for a model, which gives labels and logits for all
    public points, so the cost does not depend on the number of queries.

    Attributes:
        sigma: Standard deviation of the noise of each coordinate of the sum, in clipping norms.
        early_noise_multiplier: Factor of sigma in all rounds but the last. The models of these rounds only serve to
            learn the features in which the last model is fitted.
        clip_norm: Clipping norm of a record's residual e_y - softmax(z W), at most 1. After a few steps most residuals
            are short, because the model predicts most records well. A smaller clipping norm gives well-predicted
            records more weight relative to the noise and to the other records.
        steps: Number of steps in each round.
        first_step_size: Size of the first step. Whitened features are divided by their clipping norm R before the fit
            (``Whitening.radius``). A step of size R is then a Newton step for a loss of curvature ``clip_norm``. (The
            curvature of a logistic loss is at most 1/2, and mostly far smaller.)
        step_size: Size of the later steps, in the same unit.

    Guarantee: each round composes ``steps`` adaptive D/s-GDP mechanisms, hence rho = steps D^2/(2 s^2) (zCDP). Here s
    is sigma in the last round and early_noise_multiplier x sigma before, and D is the L2 sensitivity of the sum divided
    by clip_norm: 1 under adjacency add_remove, 2 under replace_one. With discrete noise the same holds, up to a delta
    of at most 1e-9 (``accounting.discrete_gaussian``) for sums of at most 2^20 numbers; with too little noise for this
    delta, only rho holds.
    Source: Bassily, Smith & Thakurta 2014, Algorithm 1, with full batches; Dong, Roth & Su 2022, Corollary 3.3.
    """

    method: ClassVar[str] = "gradients"
    input_type: ClassVar[Any] = sensitive.GradientSums
    sensitivity_unit: ClassVar[str] = "step"
    name: str = "gradient_descent"
    early_noise_multiplier: float = 1.0
    clip_norm: float = 1.0
    steps: int = 2
    first_step_size: float = 8.0
    step_size: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.early_noise_multiplier", self.early_noise_multiplier)
        checks.between("mechanism.clip_norm", self.clip_norm, sensitive.MIN_CLIP_NORM, 1)
        checks.integer("mechanism.steps", self.steps, low=1)
        checks.positive("mechanism.first_step_size", self.first_step_size)
        checks.positive("mechanism.step_size", self.step_size)

    @property
    def max_sensitivity(self) -> sensitive.Sensitivity:
        # In clipping norms: a unit adds one clipped gradient. L1 is infinite, because the cost depends on L2 only.
        return replace(sensitive.make_vector_sum_sensitivity(self.adjacency, 1), l1=math.inf)

    @property
    def has_independent_queries(self) -> bool:
        return False

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        # With this scale the noise of a logit after the first step has standard deviation 1.
        return [make_gradient_pair(1 / (self.first_step_size * self.sigma), self.adjacency)]

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        if num_queries == 0:
            return self._make_events(0)
        early_events = self._make_events(self.steps * (rounds - 1), self.early_noise_multiplier) if rounds > 1 else ()
        return (*early_events, *self._make_events(self.steps))

    def check_discrete(self, shape: tuple[int, int]) -> None:
        """Raise ValueError if sums of this shape cannot have discrete noise at the stated cost."""
        if self.discrete and math.prod(shape) > _MAX_DISCRETE_NUMBERS:
            problem = f"covers sums of at most {_MAX_DISCRETE_NUMBERS:,} numbers, and these have {math.prod(shape):,}"
            raise checks.error("noise", self.noise, problem, "Use noise=torch, or fewer features.")
        scale = max(1.0, self.early_noise_multiplier) * self.sigma * self.clip_norm * sensitive.UNIT_NORM
        if self.discrete and scale > MAX_LARGE_SCALE:
            raise checks.error("mechanism.sigma", self.sigma, "is too large for noise=discrete", "Use noise=torch.")

    def _make_events(self, count: int, noise_factor: float = 1.0) -> tuple[PrivacyEvent, ...]:
        """Make the events of ``count`` sums with noise of ``noise_factor`` times sigma."""
        if not self.discrete:
            return (self._make_event(count, noise_factor),)
        variance = (noise_factor * self.sigma * self.clip_norm * sensitive.UNIT_NORM) ** 2
        mu = self.max_sensitivity.l2 / (noise_factor * self.sigma)
        return discrete_gaussian.make_events(mu, variance, numbers=_MAX_DISCRETE_NUMBERS, count=count)

    def draw(self, votes: sensitive.GradientSums, noise: NoiseSource, context: MechanismContext) -> Answers:
        if len(votes) == 0:
            return Answers(torch.zeros(0, dtype=torch.int64), self._make_events(0))
        self.check_discrete(votes.shape)
        noise_factor = 1.0 if context.is_last_round else self.early_noise_multiplier
        clip_length = self.clip_norm * sensitive.UNIT_NORM
        sigma = noise_factor * self.sigma * clip_length
        weight_DC = torch.zeros(votes.shape, dtype=torch.float64) if votes.start_DC is None else votes.start_DC
        for step in range(self.steps):
            gradient_DC = votes.compute_gradient_sum(weight_DC, self.clip_norm)
            # The sum is rounded to whole grid units, because the last bits of a float could reveal the exact sum.
            noisy_DC = (noise.draw_gaussian(votes.shape, sigma, gradient_DC.device) + gradient_DC).double().round()
            step_size = self.step_size if step else self.first_step_size
            weight_DC = weight_DC + step_size * votes.scale * noisy_DC / clip_length
        score_PC = votes.compute_scores(weight_DC)
        score_QC = score_PC if votes.query_Q is None else score_PC[votes.query_Q]
        events = self._make_events(self.steps, noise_factor)
        return Answers(score_QC.argmax(1), events, score_PC=score_PC, model=votes.make_model(weight_DC))
