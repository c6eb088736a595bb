"""What the report's pictures show: curves, scales and images for the page, as the page needs them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from pate_torch.release.report import AccountClaim, Accuracy, ReleaseReport

MAX_POINTS = 300  # more cannot be told apart on a page
MAX_CLASSES = 24  # a larger confusion matrix cannot be read, nor a longer list of classes

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named curve.

    Attributes:
        color: "a" or "c" of the page's style.
        is_reference: Whether it is a reference level, drawn dashed.
    """

    name: str
    points: Points
    color: str = "a"
    is_reference: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis from low to high, on which a place is given in percent."""

    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float], *, starts_at_zero: bool = False, margin: float = 0.0) -> Scale:
        """The axis from the least value to the greatest.

        Args:
            values: What it must show.
            starts_at_zero: Whether it starts at 0.
            margin: Above and below, as a share of the span.
        """
        low = 0.0 if starts_at_zero else min(values)
        span = (max(values) - low) or max(1.0, abs(low))
        return cls(low if starts_at_zero else low - margin * span, low + span + margin * span)

    def to_percent(self, value: float) -> float:
        """The place of a value, in percent from the lower end."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def to_percent_from_top(self, value: float) -> float:
        """The place of a value, in percent from the upper end."""
        return round(100 * (self.high - value) / (self.high - self.low), 3)

    def make_ticks(self, max_ticks: int = 5) -> list[float]:
        """Round values on the axis, at most ``max_ticks`` + 1 of them."""
        raw = (self.high - self.low) / max_ticks
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * (1 - 1e-9))
        first_index, last_index = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first_index, last_index + 1)]


def number_points(values: Sequence[float]) -> list[tuple[float, float]]:
    """The points (1, first value), (2, second value), ..."""
    return [(q, value) for q, value in enumerate(values, start=1)]


def make_share_scale(rows: Sequence[Accuracy]) -> Scale:
    """The axis for accuracies with their intervals: it ends at 1, and begins at a tenth below all of them."""
    min_share = min((row.share.interval or (row.share.value,))[0] for row in rows)
    return Scale(max(0.0, math.floor((min_share - 0.01) * 10) / 10), 1.0)


def thin_points(points: Points, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``max_points`` of the points, first and last among them."""
    if len(points) <= max_points:
        return list(points)
    index = np.unique(np.linspace(0, len(points) - 1, max_points).round().astype(int))
    return [points[i] for i in index]


def make_price_curves(claim: AccountClaim) -> list[Curve]:
    """How this release's price grew, below the guarantee and the cap."""
    ends = (1, len(claim.epsilon_curve))
    curves = [Curve(name="this release", points=thin_points(number_points(claim.epsilon_curve)))]
    if claim.epsilon is not None and claim.epsilon > 1.001 * claim.epsilon_curve[-1]:
        curves.append(Curve(name="guarantee", points=[(q, claim.epsilon) for q in ends], is_reference=True))
    if claim.budget_epsilon is not None and not is_cap_far(claim):
        cap_points = [(q, claim.budget_epsilon) for q in ends]
        curves.append(Curve(name="cap", points=cap_points, color="c", is_reference=True))
    return curves


def is_cap_far(claim: AccountClaim) -> bool:
    """Whether the cap is so far above the curves that it would flatten them."""
    highest = max(*claim.epsilon_curve, claim.epsilon or 0.0)
    return claim.budget_epsilon is not None and claim.budget_epsilon > 2.5 * highest


def select_worst_classes(report: ReleaseReport) -> list[Accuracy]:
    """The student's accuracies on the classes of the test set, in order; of many, on the least known, worst first."""
    measured_accuracies = [accuracy for accuracy in report.class_accuracies if accuracy]
    if len(measured_accuracies) <= MAX_CLASSES:
        return measured_accuracies
    return sorted(measured_accuracies, key=lambda accuracy: accuracy.share.value)[:MAX_CLASSES]


def find_top_confusions(report: ReleaseReport, max_pairs: int = 12) -> list[tuple[int, int, int]]:
    """The commonest confusions as (count, truth, prediction)."""
    rows = enumerate(report.evaluation.confusion)
    pairs = ((count, true, guess) for true, row in rows for guess, count in enumerate(row) if count and true != guess)
    return sorted(pairs, reverse=True)[:max_pairs]


def encode_picture(image_CHW: np.ndarray) -> str:
    """One uint8 image [Ch, H, W] as a data URI."""
    buffer = io.BytesIO()
    Image.fromarray(_to_image_array(image_CHW)).save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _to_image_array(image_CHW: np.ndarray) -> np.ndarray:
    """[H, W] of a gray image, [H, W, 3] of another."""
    return image_CHW[0] if image_CHW.shape[0] == 1 else np.ascontiguousarray(np.moveaxis(image_CHW, 0, 2))
