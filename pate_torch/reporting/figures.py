"""What the report's pictures show: curves, scales and images for the page, figures for TensorBoard."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from pate_torch.reporting.report import Accuracy, Examples, ReleaseReport

if TYPE_CHECKING:  # drawing costs a second to import, and is done once, at the end of a run
    from matplotlib.figure import Figure

MAX_POINTS = 300  # more cannot be told apart on a page
MAX_EXAMPLES = 40
MAX_PICTURES = 20  # of them on the board
MAX_CLASSES = 24  # a larger confusion matrix cannot be read, nor a longer list of classes

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named curve.

    Attributes:
        color: "a", "b" or "c" of the page's style.
        flat: Whether it is a reference level, drawn dashed.
    """

    name: str
    points: list[tuple[float, float]]
    color: str = "a"
    flat: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis from low to high, on which a place is given in percent."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], *, zero: bool = False, room: float = 0.0) -> Scale:
        """The axis from the least value to the greatest.

        Args:
            values: What it must show.
            zero: Whether it starts at 0.
            room: Above and below, as a share of the span.
        """
        low = 0.0 if zero else min(values)
        span = (max(values) - low) or max(1.0, abs(low))
        return cls(low if zero else low - room * span, low + span + room * span)

    def at(self, value: float) -> float:
        """The place of a value, in percent from the lower end."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def below(self, value: float) -> float:
        """The place of a value, in percent from the upper end."""
        return round(100 * (self.high - value) / (self.high - self.low), 3)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values on the axis, at most ``most`` + 1 of them."""
        raw = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    """The points (1, first value), (2, second value), ..."""
    return [(q, value) for q, value in enumerate(values, start=1)]


def share_scale(rows: Sequence[Accuracy]) -> Scale:
    """The axis for accuracies with their intervals: it ends at 1, and begins at a tenth below all of them."""
    least = min((row.share.interval or (row.share.value,))[0] for row in rows)
    return Scale(max(0.0, math.floor((least - 0.01) * 10) / 10), 1.0)


def thinned(points: Points, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` of the points, first and last among them."""
    if len(points) <= most:
        return list(points)
    chosen = np.unique(np.linspace(0, len(points) - 1, most).round().astype(int))
    return [points[i] for i in chosen]


def price_curves(report: ReleaseReport) -> list[Curve]:
    """How this release's price and the account's total grew, below the guarantee and the cap."""
    ends = (1, report.queries_asked)
    curves = [Curve(name="this release", points=thinned(numbered(report.epsilon_curve)))]
    if report.account_curve:
        curves.append(Curve(name="all releases together", points=thinned(numbered(report.account_curve)), color="b"))
    if report.epsilon is not None and report.epsilon > 1.001 * report.epsilon_curve[-1]:
        curves.append(Curve(name="guarantee", points=[(q, report.epsilon) for q in ends], flat=True))
    if report.budget_epsilon is not None and not cap_is_far(report):
        curves.append(Curve(name="cap", points=[(q, report.budget_epsilon) for q in ends], color="c", flat=True))
    return curves


def cap_is_far(report: ReleaseReport) -> bool:
    """Whether the cap is so far above the curves that it would flatten them."""
    highest = max(*report.epsilon_curve, *report.account_curve, report.epsilon or 0.0)
    return report.budget_epsilon is not None and report.budget_epsilon > 2.5 * highest


def student_curves(report: ReleaseReport) -> list[Curve]:
    """One curve for each tag of more than one point."""
    return [Curve(name=tag, points=thinned(points)) for tag, points in report.student_curves.items() if len(points) > 1]


def least_known(report: ReleaseReport) -> list[Accuracy]:
    """The student's accuracies on the classes of the test set, in order; of many, on the least known, worst first."""
    tested = [accuracy for accuracy in report.class_accuracies if accuracy]
    if len(tested) <= MAX_CLASSES:
        return tested
    return sorted(tested, key=lambda accuracy: accuracy.share.value)[:MAX_CLASSES]


def most_confused(report: ReleaseReport, most: int = 12) -> list[tuple[int, int, int]]:
    """The commonest confusions as (count, truth, prediction)."""
    pairs = (
        (count, true, guess) for true, row in enumerate(report.confusion) for guess, count in enumerate(row) if count
    )
    return sorted((pair for pair in pairs if pair[1] != pair[2]), reverse=True)[:most]


def picture(image_CHW: np.ndarray) -> str:
    """One uint8 image [Ch, H, W] as a data URI."""
    buffer = io.BytesIO()
    Image.fromarray(_rows(image_CHW)).save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _rows(image_CHW: np.ndarray) -> np.ndarray:
    """[H, W] of a gray image, [H, W, 3] of another."""
    return image_CHW[0] if image_CHW.shape[0] == 1 else np.ascontiguousarray(np.moveaxis(image_CHW, 0, 2))


def confusion_figure(report: ReleaseReport) -> Figure:
    """The student's test counts, shaded by share of the row."""
    from matplotlib.figure import Figure

    counts = np.array(report.confusion)
    size = len(counts)
    side = min(12.0, 1.6 + 0.36 * size)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    names = report.confusion_names
    axes.set_xticks(range(size), names, rotation=0 if max(map(len, names)) < 3 else 60)
    axes.set_yticks(range(size), names)
    axes.set(xlabel="predicted", ylabel="true")
    for true, guess in zip(*np.nonzero(counts), strict=True):
        ink = "white" if share[true, guess] > 0.5 else "black"
        axes.text(guess, true, str(counts[true, guess]), ha="center", va="center", color=ink, fontsize=10)
    return figure


def examples_figure(report: ReleaseReport) -> Figure:
    """Some public points, each under the label released for it."""
    from matplotlib.figure import Figure

    shown = report.examples
    assert isinstance(shown, Examples)
    count = min(MAX_PICTURES, len(shown.label))
    columns = min(5, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(0.9 * columns, 1.2 * rows))
    axes = figure.add_axes((0, 0, 1, 1))  # one for all of them: to lay out twenty takes half a second
    for place in range(count):
        row, x = divmod(place, columns)
        y = 1.2 * (rows - 1 - row)
        axes.imshow(_rows(shown.image[place]), cmap="gray", vmin=0, vmax=255, extent=(x, x + 0.8, y, y + 0.8))
        axes.text(x + 0.4, y + 0.85, report.class_name(shown.label[place]), ha="center", fontsize=12)
    axes.set(xlim=(-0.1, columns - 0.1), ylim=(-0.1, 1.2 * rows - 0.1))
    axes.axis("off")
    return figure
