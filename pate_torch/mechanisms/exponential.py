"""The exponential mechanism over the vote counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pate_torch.accounting.costs import ExponentialCost
from pate_torch.core import checks
from pate_torch.mechanisms.base import NoisyMaximum
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class ExponentialMechanism(NoisyMaximum):
    """The exponential mechanism: P(c) proportional to exp(h n_c), h = sqrt(2)/sigma, drawn by Gumbel-max.

    Attributes:
        sigma: Noise scale, in votes. The zCDP cost rho = 1/sigma^2 equals that of GNMax with the same sigma, so the
            two can be compared at one value.

    Guarantee: a moved vote decreases one count by 1 and increases another by 1, so each query has 2h-bounded range,
    and is 2h-DP with rho = h^2/2 (Cesar & Rogers 2021; 2h-DP alone would give rho = 2 h^2), under the adjacency of the
    shards.
    Source: McSherry & Talwar 2007; the private prediction of DF20 Lemma 6 (Dwork & Feldman 2018).
    """

    name: str = "exponential"
    noise_kinds: ClassVar[tuple[str, ...]] = ("torch",)

    @property
    def rate(self) -> float:
        """Rate h, per vote."""
        return math.sqrt(2) / self.sigma

    @property
    def cost(self) -> ExponentialCost:
        return ExponentialCost(self.rate)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        score_QC = self.rate * self._cast_counts(votes)
        label_Q = (score_QC + noise.draw_gumbel(tuple(score_QC.shape), score_QC.device)).argmax(1)
        return Answers(label_Q, self.privacy_events(len(votes)))


def compute_log_probabilities(utility_M: NDArray[Any], rate: float) -> NDArray[np.float64]:
    """Compute ln P(i), float64 [M], where P(i) is proportional to exp(rate * utility_i).

    Raises:
        ValueError: A utility is NaN or infinite.
    """
    utility = np.asarray(utility_M, dtype=np.float64)
    if utility.ndim != 1 or len(utility) == 0 or not np.isfinite(utility).all():
        raise ValueError("utility: must be a non-empty vector of finite numbers")
    score = rate * (utility - utility.max())
    return score - math.log(np.exp(score).sum())


def draw_gumbel_max(utility_M: NDArray[Any], rate: float, noise: NoiseSource) -> int:
    """Draw an index from ``compute_log_probabilities`` as the argmax of score plus standard Gumbel noise."""
    gumbel = noise.draw_gumbel((len(utility_M),), torch.device("cpu")).numpy()
    return int(np.argmax(compute_log_probabilities(utility_M, rate) + gumbel))


def draw_model_index(errors_M: NDArray[Any], epsilon: float, noise: NoiseSource, *, adjacency: str) -> int:
    """Draw the index of a model with few errors by the exponential mechanism.

    Args:
        errors_M: Error *counts* on private validation records that trained no model, one record of each privacy unit,
            int [M]. Error rates are not allowed, because their denominator is private under add_remove.
        epsilon: Cost of the choice, a bounded range.
        noise: Source of noise that was paid for.
        adjacency: Neighboring relation, "replace_one" or "add_remove".

    Guarantee: BoundedRange(epsilon), so epsilon-DP and rho = epsilon^2/8 (never looser than PureDP(epsilon)), under
        either adjacency. Let u_i = -errors_i and P(i) ~ exp(r u_i). Between neighbors ln P(i)/P'(i) =
        r (u_i - u'_i) + constant. Replace-one: each u_i - u'_i lies in [-1, 1], so the log-ratios span 2 r and
        r = epsilon/2. Add/remove: all u_i move in the same direction, each by 0 or 1, so the log-ratios span r only
        and r = epsilon, which is twice the rate for the same cost.
    Source: McSherry & Talwar 2007; bounded range: Durfee & Rogers 2019, Cesar & Rogers 2021.
    """
    checks.positive("epsilon", epsilon)
    checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
    errors = np.asarray(errors_M)
    if errors.ndim != 1 or len(errors) == 0:
        raise checks.error("errors_M.shape", errors.shape, "must be (M,), one error count for each of M >= 1 models")
    if not np.issubdtype(errors.dtype, np.integer) or (errors < 0).any():
        raise ValueError("errors_M: must be error counts (integers of at least 0), not error rates")
    rate = epsilon if adjacency == "add_remove" else epsilon / 2
    return draw_gumbel_max(-errors.astype(np.int64), rate, noise)
