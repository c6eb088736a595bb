"""The exponential mechanism over a ball of parameters, for a convex loss: drawn approximately, by a Markov chain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtri

from pate_torch.accounting.events import BoundedRange, Delta, Event
from pate_torch.budget import Door
from pate_torch.core import checks
from pate_torch.noise.source import NoiseSource
from pate_torch.pac.exponential import VACUOUS, Chosen
from pate_torch.pac.sample import Floats, pay, warn_below

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class HitAndRun:
    """Hit-and-run in a ball: a uniform direction, then an exact slice along the chord through it.

    Attributes:
        radius: Radius of the ball.
        steps: From the center; for a log-concave density in D dimensions of the order of D^2 log(1/error) or more.
        distance: A total variation distance to the target that the caller has *proved* for these steps, or None.
    """

    radius: float
    steps: int
    distance: float | None = None

    def __post_init__(self) -> None:
        checks.positive("radius", self.radius)
        checks.integer("steps", self.steps, low=1)
        if self.distance is not None:
            checks.between("distance", self.distance, 0, 1)

    def draw(self, log_density: Callable[[Floats], float], dimension: int, noise: NoiseSource) -> Floats:
        """One point of the ball, float64 [D]; the slice is an interval because the log-density is concave."""
        point = np.zeros(dimension)
        level = log_density(point)
        for _ in range(self.steps):
            u = noise.uniform((dimension + 1,), _CPU).numpy()
            direction = ndtri(u[:dimension])
            direction /= np.linalg.norm(direction)
            point, level = self._slice(log_density, point, level + math.log(u[dimension]), direction, noise)
        return point

    def _slice(
        self,
        log_density: Callable[[Floats], float],
        point: Floats,
        floor: float,
        direction: Floats,
        noise: NoiseSource,
    ) -> tuple[Floats, float]:
        """Uniform on {t : log-density >= floor} along the chord, by shrinking it towards t = 0 (Neal 2003)."""
        middle = float(point @ direction)
        half = math.sqrt(max(0.0, middle**2 + self.radius**2 - float(point @ point)))
        low, high = -middle - half, -middle + half
        while True:
            t = low + (high - low) * float(noise.uniform((1,), _CPU)[0])
            candidate = point + t * direction
            level = log_density(candidate)
            if math.isnan(level):
                raise ValueError("loss: returned NaN inside the ball")
            if level >= floor or high - low < 1e-14 * self.radius:
                return candidate, level
            low, high = (t, high) if t < 0 else (low, t)


def convex_size(dimension: int, *, epsilon: float, alpha: float, loss_range: float) -> float:
    """Smallest n with E[mean loss + g] <= min + alpha under the target law: n = 2 D range/(epsilon alpha).

    For F >= 0 convex with F(0) = 0 over a convex body, Z(r) = integral of exp(-r F) in D dimensions: shrinking the body
    by s >= 1 gives Z(r) >= s^-D Z(r/s), so r^D Z(r) does not fall, and E[F] = -d ln Z/dr <= D/r; here r = epsilon n /
    (2 range). (WLF16 Theorem 17 by its sublevel sets: 9 (D + 2) ln n and more in the place of 2 D.)
    """
    return 2 * dimension * loss_range / (epsilon * alpha)


def convex_exponential_mechanism(
    loss_n: Callable[[Floats], Floats],
    *,
    n: int,
    dimension: int,
    loss_range: float,
    epsilon: float,
    sampler: HitAndRun,
    budget: Door,
    regularizer: Callable[[Floats], float] = lambda _: 0.0,
    alpha: float | None = None,
) -> Chosen:
    """Draw theta in the ball, *approximately*, with density ~ exp(epsilon n q / (2 range)), q = -mean loss - g.

    Warns below ``convex_size``.

    Args:
        loss_n: theta [D] -> the n records' losses, each convex in theta and within one interval of length
            ``loss_range`` over the whole ball.
        n: Records, public.
        dimension: Number D of parameters.
        loss_range: Length of that interval.
        epsilon: Epsilon of the target law.
        sampler: Draws theta.
        budget: Pays, and gives the noise.
        regularizer: g, convex and public.
        alpha: Excess for which ``convex_size`` warns; None: half of loss_range, which any theta has on average or
            nearly.

    Guarantee: the target distribution is BoundedRange(epsilon), replace-one. What is released is a Markov chain's draw,
        at total variation t of the target: (epsilon, (1 + e^epsilon) t)-DP, the second charged as Delta. Where no t is
        proved there is no price, and nothing is drawn.
    Source: WLF16 Algorithm 1 and Proposition 19 (Applegate & Kannan's chain there); hit-and-run: Lovasz & Vempala 2006.
    """
    if sampler.distance is None:
        fix = "State a total variation distance that is proved for these steps."
        raise checks.fail("sampler.distance", None, "a draw at no known distance from its law has no price", fix)
    checks.positive("epsilon", epsilon)
    checks.positive("loss_range", loss_range)
    checks.integer("n", n, low=1)
    checks.integer("dimension", dimension, low=1)
    alpha = VACUOUS * loss_range if alpha is None else checks.positive("alpha", alpha)
    needed = convex_size(dimension, epsilon=epsilon, alpha=alpha, loss_range=loss_range)
    warn_below("convex exponential mechanism", n, [(f"excess mean loss {alpha:g}", needed)])
    rate = epsilon * n / (2 * loss_range)

    def log_density(theta: Floats) -> float:
        loss = np.asarray(loss_n(theta), dtype=np.float64)
        if loss.shape != (n,) or np.ptp(loss) > loss_range * (1 + 1e-9):
            raise checks.fail("loss_n", loss.shape, f"must return {n} losses within an interval of {loss_range:g}")
        return -rate * (float(loss.mean()) + regularizer(theta))

    incurred: tuple[Event, ...] = (BoundedRange(eta=epsilon),)
    if sampler.distance:
        incurred += (Delta(delta=(1 + math.exp(epsilon)) * sampler.distance),)
    with pay(budget, incurred, "convex exponential mechanism") as spending:
        theta = sampler.draw(log_density, dimension, spending.noise)
    return Chosen(theta, -1, incurred, approximate=True)
