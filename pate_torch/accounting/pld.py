"""Pessimistic privacy loss distributions of Gaussian, Laplace, pure and sampled Gaussian events, by dp_accounting.

The parameter of an event is its sensitivity relative to its noise (with noise s a moved vote has mu = sqrt(2)/s), so
each event is a mechanism of sensitivity 1 under the library's add-or-remove relation. The library's replace-one
relation would count the sensitivity twice. The library is imported only where an event is not Gaussian, because the
import takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pate_torch.accounting import rdp
from pate_torch.accounting.events import (
    GaussianEvent,
    LaplaceEvent,
    PrivacyEvent,
    SampledGaussianEvent,
    get_pure_epsilon,
    split_off_deltas,
)
from pate_torch.core import checks

_MAX_GRID_STEP = 1e-4
_MAX_GRID_CELLS = 2e6
_MAX_SAMPLED_GRID_CELLS = 1e5  # fewer, because the library computes the losses of a sampled Gaussian one by one
_ROUNDING_DELTA_PER_COMPOSITION = 1e-14
"""Upper bound on the rounding error of delta by one composition. A k-fold power of a Fourier transform of length n has
an error of k 1e-16 log n."""


def can_compose(events: Iterable[PrivacyEvent]) -> bool:
    """Whether the loss distribution of every event is known, and composing all of them takes at most a few seconds."""
    noise_events, _ = split_off_deltas(events)
    if not all(
        isinstance(e, GaussianEvent | SampledGaussianEvent) or get_pure_epsilon(e) is not None for e in noise_events
    ):
        return False
    if not noise_events:
        return True
    is_sampled = any(isinstance(e, SampledGaussianEvent) for e in noise_events)
    max_cells = _MAX_SAMPLED_GRID_CELLS if is_sampled else _MAX_GRID_CELLS
    return 2 * _compute_loss_range(noise_events) / _compute_grid_step(noise_events) <= max_cells


def compute_epsilon(events: Iterable[PrivacyEvent], delta: float, max_rounding_share: float = 1e-3) -> float:
    """Compute epsilon of the composed events at delta, rounded up.

    Epsilon is infinite if rounding errors could reach this share of delta.
    """
    checks.delta("delta", delta)
    noise_events, _ = split_off_deltas(events)
    delta_left = delta - _compute_rounding_delta(noise_events)
    if delta_left < (1 - max_rounding_share) * delta:
        return math.inf
    return float(_compose(noise_events).get_epsilon_for_delta(delta_left)) if noise_events else 0.0


def compute_delta(events: Iterable[PrivacyEvent], epsilon: float) -> float:
    """Compute delta of the composed events at epsilon, rounded up."""
    checks.non_negative("epsilon", epsilon)
    noise_events, _ = split_off_deltas(events)
    if not noise_events:
        return 0.0
    grid_delta = max(0.0, float(_compose(noise_events).get_delta_for_epsilon(epsilon)))
    return min(1.0, grid_delta + _compute_rounding_delta(noise_events))


def _compute_rounding_delta(noise_events: tuple[PrivacyEvent, ...]) -> float:
    num_compositions = sum(1 if isinstance(e, GaussianEvent) else e.count for e in noise_events)
    num_compositions += sum(e.count * (e.steps - 1) for e in noise_events if isinstance(e, SampledGaussianEvent))
    return _ROUNDING_DELTA_PER_COMPOSITION * num_compositions


def _get_largest_loss(event: PrivacyEvent) -> float:
    """Return the largest privacy loss of an event; for a Gaussian event, the standard deviation mu of the loss."""
    loss = event.mu if isinstance(event, GaussianEvent) else get_pure_epsilon(event)
    assert loss is not None
    return loss


def _compute_loss_range(noise_events: tuple[PrivacyEvent, ...]) -> float:
    """Compute a bound below which almost all of the composed loss lies."""
    if any(isinstance(e, SampledGaussianEvent) for e in noise_events):
        return rdp.compute_epsilon(noise_events, _ROUNDING_DELTA_PER_COMPOSITION)
    variance = math.fsum(e.count * _get_largest_loss(e) ** 2 for e in noise_events)
    gaussian_range = variance / 2 + 9 * math.sqrt(variance)
    if any(isinstance(e, GaussianEvent) for e in noise_events):
        return gaussian_range
    return min(math.fsum(e.count * _get_largest_loss(e) for e in noise_events), gaussian_range)


def _compute_grid_step(noise_events: tuple[PrivacyEvent, ...]) -> float:
    """Choose a grid step, small against the losses of all events, that divides the most frequent pure loss exactly."""
    sampled_events = [e for e in noise_events if isinstance(e, SampledGaussianEvent)]
    other_events = [e for e in noise_events if not isinstance(e, SampledGaussianEvent)]
    step = min([_MAX_GRID_STEP, *(_get_largest_loss(e) / 4 for e in other_events)])
    step = min([step, *(e.rate / max(1.0, e.noise_multiplier) / 50 for e in sampled_events)])
    if sampled_events and all(isinstance(e, GaussianEvent) for e in other_events):  # a coarser grid for large losses
        return max(step, 2.01 * _compute_loss_range(noise_events) / _MAX_SAMPLED_GRID_CELLS)
    pure_events = [e for e in other_events if not isinstance(e, GaussianEvent | LaplaceEvent)]
    if pure_events:
        loss = _get_largest_loss(max(pure_events, key=lambda e: e.count))
        step = loss / math.ceil(loss / step)
    return step


@lru_cache(maxsize=32)
def _compose(noise_events: tuple[PrivacyEvent, ...]) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as library

    if not can_compose(noise_events):
        rule = "have no known privacy loss distribution, or one that takes too long to compose"
        raise checks.error("events", noise_events, rule, "Use the RDP accountant.")
    step = _compute_grid_step(noise_events)
    composed_distribution = library.identity(value_discretization_interval=step)
    for event in noise_events:
        match event:
            case GaussianEvent():
                event_distribution = library.from_gaussian_mechanism(
                    1 / (event.mu * math.sqrt(event.count)), value_discretization_interval=step
                )
            case SampledGaussianEvent():
                event_distribution = library.from_gaussian_mechanism(
                    event.noise_multiplier, value_discretization_interval=step, sampling_prob=event.rate
                ).self_compose(event.steps * event.count)
            case LaplaceEvent():
                event_distribution = library.from_laplace_mechanism(1 / event.ratio, value_discretization_interval=step)
                event_distribution = event_distribution.self_compose(event.count)
            case _:
                event_distribution = _make_randomized_response(library, _get_largest_loss(event), step).self_compose(
                    event.count
                )
        composed_distribution = composed_distribution.compose(event_distribution)
    return composed_distribution


def _make_randomized_response(library: Any, loss: float, step: float) -> Any:
    """Make the pair that dominates every mechanism of this pure loss, with both losses rounded up to the grid.

    The library's ``from_privacy_parameters`` is not used, because a loss *on* the grid can exceed its cell by a
    rounding error. That function would then round the loss up by a whole cell in each composition.
    """

    def round_up_to_cell(value: float) -> int:
        nearest = round(value / step)
        return nearest if abs(value / step - nearest) < 1e-9 else math.ceil(value / step)

    flip_probability = 1 / (1 + math.exp(loss)) if loss < 700 else 0.0
    masses = {round_up_to_cell(loss): 1 - flip_probability}
    masses[round_up_to_cell(-loss)] = masses.get(round_up_to_cell(-loss), 0.0) + flip_probability
    return library.PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step)
