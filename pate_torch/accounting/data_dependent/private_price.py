"""Publication of a data-dependent cost: the private cost plus noise in proportion to its smooth sensitivity.

The method is PATE 2018 (arXiv 1802.08908), appendix B, with a corrected cost (``compute_publication_rdp``). An upward
shift of the noise makes the published cost an upper bound with a given confidence. The shift in absolute terms is not
published, because the shift is a multiple of the smooth sensitivity, which is private. All parameters are chosen from
public quantities (``choose_plan``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from pate_torch.accounting import rdp
from pate_torch.accounting.data_dependent import smooth_sensitivity, theorems
from pate_torch.accounting.events import RdpCurveEvent
from pate_torch.accounting.prices import OutcomeModel
from pate_torch.core import checks

CANDIDATE_ORDERS = tuple(float(a) for a in np.geomspace(2, 40, 24))
"""Renyi orders that ``choose_plan`` compares. A smaller order makes the conversion to epsilon expensive, and a larger
order forces a small decay."""


@dataclass(frozen=True, kw_only=True)
class PublicationPlan:
    """Public parameters of the publication of a cost.

    Attributes:
        order: Renyi order of the published cost.
        decay: Decay of the smooth sensitivity, which weights the local sensitivity after d moved votes by e^{-decay d}.
        sigma: Standard deviation of the noise, in units of the smooth sensitivity.
        confidence: Probability that the published cost is at least the true cost.
    """

    order: float
    decay: float
    sigma: float
    confidence: float = 0.95

    def __post_init__(self) -> None:
        checks.between("confidence", self.confidence, 0.5, 1 - 1e-12)
        compute_publication_rdp(self.order, self.decay, self.sigma, self.shift)

    @property
    def shift(self) -> float:
        """Upward shift of the noise, in units of the smooth sensitivity."""
        return self.sigma * float(ndtri(self.confidence))

    @property
    def publication_rdp(self) -> float:
        """Renyi cost of the publication, at ``order``."""
        return compute_publication_rdp(self.order, self.decay, self.sigma, self.shift)

    @property
    def publication_event(self) -> RdpCurveEvent:
        """Event of the publication, with a cost at ``order`` and at all default orders below 1/(1 - e^{-2 decay})."""
        orders = sorted({self.order, *(a for a in rdp.ORDERS.tolist() if a * -math.expm1(-2 * self.decay) < 1)})
        costs = (compute_publication_rdp(a, self.decay, self.sigma, self.shift) for a in orders)
        return RdpCurveEvent(orders=tuple(orders), rdp=tuple(costs), source="smooth sensitivity (PATE 2018, B)")


@dataclass(frozen=True, kw_only=True)
class PrivatePrice:
    """A data-dependent cost that may be published.

    Attributes:
        plan: Public parameters.
        rdp: Noisy forward Renyi cost of the released labels at ``plan.order``. With probability ``plan.confidence``
            over the noise, this is an upper bound on the true cost.
    """

    plan: PublicationPlan
    rdp: float

    def compute_epsilon(self, delta: float) -> float:
        """Compute epsilon of the labels and of this publication together, which is valid with ``plan.confidence``."""
        return rdp.to_epsilon([self.plan.order], [self.rdp + self.plan.publication_rdp], delta)


def compute_publication_rdp(order: float, decay: float, sigma: float, shift: float = 0.0) -> float:
    """Compute the Renyi cost of publishing f + SS (shift + sigma N(0, 1)), SS the decay-smooth sensitivity of f.

    With a the order, b the decay, m the shift and k = 1 - a (1 - e^{-2b}) > 0:

        R = a (e^{-b} + m (1 - e^{-b}))^2 / (2 sigma^2 k) - (a b + ln(k)/2) / (a - 1).

    Proof. Neighbors have S' = S e^x with |x| <= b, and |f - f'| <= min(S, S'). Between normals,
    R = a D^2/(2 v) + ln(s'/s) + ln(s'^2/v)/(2 (a-1)), v = a s'^2 + (1-a) s^2. Here v = sigma^2 S^2 k(x),
    k(x) = 1 + a (e^{2x} - 1), and D <= S (min(1, e^x) + m |1 - e^x|). With u = e^{-|x|} and n = u + m (1 - u) the first
    term is at most a n^2/(2 sigma^2 (1 - a (1 - u^2))) for x < 0 and a n^2/(2 sigma^2 (u^2 + a (1 - u^2))) for x > 0.
    The second denominator is the larger, and the first bound grows with |x|, as n/u and u^2/(1 - a (1 - u^2)) do. The
    rest is g(x) = (a x - ln(k(x))/2)/(a-1), where g' has the sign of x and g(-|x|) >= g(|x|). So x = -b is the worst
    case. A pair of neighbors can attain the worst case, so R is tight.

    The printed formula, a e^{2b}/sigma^2 + (a b - ln(1 - 2ab)/2)/(a-1) for a < 1/(2b), has a first term that is too
    small near the end of its range and a second term that is too large everywhere.

    Raises:
        ValueError: The cost is infinite, because k <= 0, or an argument is out of range.
    """
    if checks.number("order", order) <= 1:
        raise checks.error("order", order, "must be above 1")
    checks.positive("decay", decay)
    checks.positive("sigma", sigma)
    checks.non_negative("shift", shift)
    k = 1 + order * math.expm1(-2 * decay)
    if k <= 0:
        largest_decay = -math.log1p(-1 / order) / 2
        raise checks.error("decay", decay, f"must be below {largest_decay:.6g} for a finite cost at order {order:g}")
    scaled_shift = math.exp(-decay) - shift * math.expm1(-decay)
    return order * scaled_shift**2 / (2 * sigma**2 * k) - (order * decay + math.log(k) / 2) / (order - 1)


def compute_private_price(plan: PublicationPlan, model: OutcomeModel, votes: ArrayLike, z: float) -> PrivatePrice:
    """Compute the noisy cost of queries that were fixed beforehand.

    Args:
        plan: Public parameters.
        model: Distribution of the answer to one query.
        votes: PRIVATE. Integers [Q, C]. No query may depend on earlier answers, because costs would not add up.
        z: Fresh standard normal number from the noise of a ``Spending`` that reserved ``plan.publication_event``.

    Raises:
        ValueError: No bound on the sensitivity is known.

    Guarantee: Renyi DP by the curve ``plan.publication_event``, if one privacy unit moves one vote in every query.
    Source: PATE 2018, appendix B, with a corrected cost.
    """
    checks.number("z", z)
    return _add_noise_to_price(plan, model, votes, len(np.asarray(votes)), z)


def forecast_epsilon(
    plan: PublicationPlan, model: OutcomeModel, example_votes: ArrayLike, *, num_queries: int, delta: float
) -> float:
    """Compute the median of epsilon of labels and publication together, for votes like the PUBLIC ``example_votes``."""
    return _add_noise_to_price(plan, model, example_votes, num_queries, 0.0).compute_epsilon(delta)


def _add_noise_to_price(
    plan: PublicationPlan, model: OutcomeModel, votes: ArrayLike, num_queries: int, z: float
) -> PrivatePrice:
    """Compute the noisy cost of ``num_queries`` queries with such votes, at most the data-independent cost."""
    scale, order_A = num_queries / len(np.asarray(votes)), np.array([plan.order])
    local_DA = scale * smooth_sensitivity.compute_local_sensitivity(model, votes, order_A)
    sensitivity = float(smooth_sensitivity.compute_smooth_sensitivity(local_DA, plan.decay)[0])
    price = scale * float(smooth_sensitivity.compute_total_price(model, votes, order_A)[0])
    noisy_price = price + sensitivity * (plan.shift + plan.sigma * z)
    max_price = num_queries * float(rdp.compute_curve(model.privacy_events(1), order_A)[0])
    return PrivatePrice(plan=plan, rdp=min(max(noisy_price, 0.0), max_price))


def choose_plan(
    model: OutcomeModel, example_votes: ArrayLike, *, num_queries: int, delta: float, confidence: float = 0.95
) -> PublicationPlan:
    """Choose the plan with the smallest median of the published epsilon, for votes like ``example_votes``.

    Args:
        model: Distribution of the answer to one query.
        example_votes: PUBLIC integers [Q', C], from ``make_example_votes`` or an ensemble trained on public data. The
            votes of the release are private and must not be used here.
        num_queries: Number of queries.
        delta: Delta at which epsilons are compared.
        confidence: Probability that the published cost is at least the true cost.

    Raises:
        ValueError: The bound on the sensitivity is proved at no order of ``CANDIDATE_ORDERS``.
    """
    orders_A = np.array(CANDIDATE_ORDERS)
    distinct_rows = theorems.group_votes(example_votes)
    usable_A = smooth_sensitivity.find_usable_orders(
        model, orders_A, num_teachers=distinct_rows.num_teachers, num_classes=distinct_rows.num_classes
    )
    if not usable_A.any():
        rule = f"no order is usable with {distinct_rows.num_teachers} teachers and this noise"
        raise checks.error("orders", orders_A.tolist(), rule, "Publish the data-independent cost.")
    orders_A = orders_A[usable_A]
    scale = num_queries / len(distinct_rows.inverse_Q)
    price_A = scale * smooth_sensitivity.compute_total_price(model, example_votes, orders_A)
    local_DA = scale * smooth_sensitivity.compute_local_sensitivity(model, example_votes, orders_A)
    conversion_A = rdp.compute_conversion_term(orders_A, delta)
    smallest_epsilon, best_plan = math.inf, None
    for i, order in enumerate(orders_A):
        # The share is 1 - k of ``compute_publication_rdp``. Near 0 the smooth sensitivity is close to the global
        # sensitivity, and at 1 the cost is infinite.
        for decay_share in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
            decay = -math.log1p(-decay_share / order) / 2
            sensitivity = float(smooth_sensitivity.compute_smooth_sensitivity(local_DA[:, i : i + 1], decay)[0])
            # More noise has a lower cost and a larger shift. Below sigma = 1 the cost exceeds order/2. The best sigma
            # for ensembles of a few to thousands of teachers was between 3 and 52.
            for sigma in np.geomspace(1, 300, 40):
                candidate = PublicationPlan(order=float(order), decay=decay, sigma=float(sigma), confidence=confidence)
                noisy_price = price_A[i] + sensitivity * candidate.shift
                epsilon = noisy_price + candidate.publication_rdp + conversion_A[i]
                if epsilon < smallest_epsilon:
                    smallest_epsilon, best_plan = epsilon, candidate
    assert best_plan is not None
    return best_plan


def make_example_votes(num_teachers: int, num_classes: int, agreement: Sequence[float]) -> np.ndarray:
    """Make one row of votes for each public guess of the winner's share, integers [Q', C].

    The other votes are spread evenly over the other classes.
    """
    rows = np.zeros((len(agreement), num_classes), dtype=np.int64)
    for row, top_share in zip(rows, agreement, strict=True):
        row[0] = round(checks.between("agreement", top_share, 0, 1) * num_teachers)
        votes_per_rival, num_extra_votes = divmod(num_teachers - int(row[0]), num_classes - 1)
        row[1:] = votes_per_rival
        row[1 : 1 + num_extra_votes] += 1
    return rows
