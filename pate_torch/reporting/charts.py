"""Charts of the report: inline SVG for marks, HTML for words, so that text keeps its size on a phone.

Marks are drawn in a 100 by 100 box that stretches with the page; strokes do not stretch with it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from pate_torch.reporting.intervals import Share
from pate_torch.reporting.markup import Markup, join, tag

MAX_POINTS = 300  # more cannot be told apart on a page


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def show_share(share: Share) -> str:
    """97.4 % (96.1 to 98.3)."""
    if share.interval is None:
        return percent(share.value)
    low, high = share.interval
    return f"{percent(share.value)} ({100 * low:.1f} to {100 * high:.1f})"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from low to high (inclusive where they fall on one), at most ``most`` + 1 of them."""
    if high <= low:
        return [low]
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a dot plot. ``strong``: what the page is about; the others are there to compare."""

    name: str
    share: Share
    note: str = ""
    strong: bool = False


def dots(rows: Sequence[Row], label: str, *, dense: bool = False) -> Markup:
    """Shares with their intervals on one scale. It need not begin at zero: dots, unlike bars, claim no length."""
    ends = [end for row in rows for end in (row.share.interval or (row.share.value, row.share.value))]
    low = max(0.0, math.floor((min(ends) - 0.01) * 10) / 10)
    spread = 1.0 - low

    def at(value: float) -> str:
        return f"{100 * (value - low) / spread:.3f}%"

    values = ticks(low, 1.0, 2 if dense else 4)
    marks = [tag("span", percent(t, 0), style=f"left:{at(t)}") for t in values]
    grid = join(tag("line", x1=at(t), x2=at(t), y1="0", y2="100%", class_="grid") for t in values)
    lines = []
    for row in rows:
        bar = None
        if row.share.interval is not None:
            left, right = row.share.interval
            bar = tag("line", x1=at(left), x2=at(right), y1="50%", y2="50%", class_="range")
        dot = tag("circle", cx=at(row.share.value), cy="50%", r=5, class_="dot")
        title = tag("title", f"{row.name}: {show_share(row.share)}")
        kind = "dots-row strong" if row.strong else "dots-row"
        lines.append(
            tag(
                "div",
                tag("div", row.name, tag("small", row.note) if row.note else None, class_="dots-name"),
                tag(
                    "div",
                    tag("svg", title, grid, bar, dot, role="img", aria_label=show_share(row.share)),
                    class_="dots-track",
                ),
                tag("div", _value(row.share), class_="dots-value"),
                class_=kind,
            )
        )
    axis = tag("div", tag("div"), tag("div", *marks, class_="dots-ticks"), tag("div"), class_="dots-row axis")
    name = f"--name:{max(len(row.name) for row in rows) + 1}ch"
    kind = "dots dense" if dense else "dots"
    return tag("div", *lines, axis, class_=kind, style=name, role="group", aria_label=label)


def _value(share: Share) -> Markup:
    if share.interval is None:
        return tag("b", percent(share.value))
    low, high = share.interval
    return join([tag("b", percent(share.value)), tag("small", f"{100 * low:.1f} to {100 * high:.1f}")])


@dataclass(frozen=True, kw_only=True)
class Line:
    """A named curve; ``flat`` draws a reference level, dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "a"
    flat: bool = False


def lines(curves: Sequence[Line], *, x_name: str, y_name: str, zero: bool = True) -> Markup:
    """Curves over a common x. ``zero``: whether y begins there."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    left, right = min(xs), max(max(xs), min(xs) + 1e-9)
    bottom = 0.0 if zero else min(ys)
    room = (max(ys) - bottom) or 1.0
    top = max(ys) + 0.06 * room
    bottom = bottom if zero else bottom - 0.06 * room

    def place(x: float, y: float) -> tuple[float, float]:
        return 100 * (x - left) / (right - left), 100 * (top - y) / (top - bottom)

    y_ticks = [t for t in ticks(bottom, top) if bottom <= t <= top]
    x_ticks = ticks(left, right, 4)
    grid = join(tag("line", x1=0, x2=100, y1=f"{y:.3f}", y2=f"{y:.3f}") for _, y in (place(left, t) for t in y_ticks))
    drawn = [tag("g", grid, class_="grid")]
    for curve in curves:
        shown = thinned(curve.points)
        path = "M" + "L".join("{:.2f} {:.2f}".format(*place(x, y)) for x, y in shown)
        drawn.append(tag("path", d=path, class_=f"line {curve.kind}{' flat' if curve.flat else ''}"))
        if not curve.flat:  # a line without length and with round ends stays round when the box is stretched
            end_x, end_y = place(*shown[-1])
            drawn.append(tag("path", d=f"M{end_x:.2f} {end_y:.2f}h0", class_=f"end {curve.kind}"))
    plot = tag("svg", *drawn, viewBox="0 0 100 100", preserveAspectRatio="none", role="img", aria_label=y_name)
    y_labels = [tag("span", _number(t), style=f"top:{place(left, t)[1]:.3f}%") for t in y_ticks]
    x_labels = [tag("span", _number(t), style=f"left:{place(t, bottom)[0]:.3f}%") for t in x_ticks]
    keys = [tag("li", tag("i", class_=f"key {c.kind}{' flat' if c.flat else ''}"), c.name) for c in curves if c.name]
    return tag(
        "div",
        tag("div", y_name, class_="y-name"),
        tag("ul", *keys, class_="legend") if len(keys) > 1 else None,
        tag("div", tag("div", *y_labels, class_="y-axis"), tag("div", plot, class_="plot"), class_="lines-body"),
        tag("div", *x_labels, class_="x-axis"),
        tag("div", x_name, class_="x-name"),
        class_="lines",
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of them, first and last among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    chosen = np.unique(np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int))
    return [points[i] for i in chosen]


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.0e}"


def picture(image_CHW: np.ndarray, alt: str) -> Markup:
    """One uint8 image [Ch, H, W] as a data URI."""
    rows = image_CHW[0] if image_CHW.shape[0] == 1 else np.moveaxis(image_CHW, 0, 2)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(buffer, format="PNG", optimize=True)
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return tag("img", src=f"data:image/png;base64,{content}", alt=alt)


def confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Markup:
    """Truth by row, prediction by column; shade: share of the row. Numbers are counts."""
    corner = tag("th", tag("span", "true", class_="corner"), scope="col")
    head = tag("tr", corner, *[tag("th", tag("span", name), scope="col") for name in names])
    body = []
    for true, row in enumerate(counts):
        total = sum(row) or 1
        cells = []
        for guess, count in enumerate(row):
            share = count / total
            kind = "hit" if guess == true else "miss"
            # A miss of a percent must be seen beside a hit of ninety-nine: the root, and a stronger colour.
            shade = share if kind == "hit" else math.sqrt(share)
            cells.append(
                tag(
                    "td",
                    count if count else tag("span", "·", class_="none"),
                    class_=f"{kind}{' deep' if shade > 0.72 else ''}",
                    style=f"--v:{0.92 * shade:.3f}",
                    title=f"{names[true]} taken for {names[guess]}: {count} of {sum(row)}",
                )
            )
        body.append(tag("tr", tag("th", names[true], scope="row"), *cells))
    tall = " tall" if max(map(len, names)) > 2 else ""  # long names stand upright, so that the columns stay equal
    table = tag("table", tag("thead", head), tag("tbody", *body), class_=f"confusion{tall}")
    return tag("div", table, class_="scroll")
