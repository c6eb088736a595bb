"""Draw docs/images/sites.svg: which files several sites exchange, and masks that cancel in a sum.

PYTHONPATH=. python docs/sites_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

FILE = Path(__file__).parent / "images" / "sites.svg"
SITES = ("Anna", "Bruno", "Clara")
LANES = {"Anna": 0.0, "Bruno": 1.0, "Clara": 2.0, "joiner": 3.3}
BLUE, ORANGE, GREEN, GRAY = "#1a5fb4", "#c64600", "#1e7a4d", "#555555"
STEPS = (
    ("1", "anna.key, ...: public keys", "to joiner", GRAY),
    ("2", "charter.json: who, with which keys, on what terms", "to sites", GRAY),
    ("3", "24 words, on the telephone", "between sites", ORANGE),
    ("3", "anna.confirmed, ...: consent", "to joiner", GRAY),
    ("4", "keys.json, round-0.json, round-0.public: the question", "to sites", GRAY),
    ("5", "anna.answer-0.pate, ...: masked tables", "to joiner", BLUE),
    ("6", "sum-0.json: the sum with noise", "to sites", GREEN),
)
"""Step on the page, content, direction and color of each exchange."""
MODULUS = 100
COUNTS, NOISE = (31, 12, 20), (2, -1, 1)
MASKS = {(0, 1): 58, (0, 2): 87, (1, 2): 44}
"""Mask of each pair of places, added at the first and subtracted at the second."""
_REMARK = """One number of the table, of which the last two digits are
kept. Real masks have 64 bits. Only the two sites of a pair
know their mask."""
PAIR_COLORS = {(0, 1): BLUE, (0, 2): ORANGE, (1, 2): GREEN}


def draw_exchange(panel: Axes) -> None:
    """Draw one row of arrows for each exchange."""
    bottom = -len(STEPS) - 0.1
    for name, x in LANES.items():
        panel.plot([x, x], [0, bottom], color="#bbbbbb", linewidth=1)
        panel.text(x, 0.2, name, ha="center", va="bottom", fontsize=10, fontweight="bold")
    for row, (step, content, direction, color) in enumerate(STEPS, 1):
        y, joiner = -row + 0.1, LANES["joiner"]
        panel.text(-0.35, y + 0.3, f"{step}  {content}", ha="left", va="center", fontsize=8.8, color=color,
                   bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        if direction == "between sites":
            ends = [("Anna", "Bruno"), ("Bruno", "Clara")]
            for first, second in ends:
                arrow = {"arrowstyle": "<->", "color": color, "linestyle": "dashed"}
                panel.annotate("", (LANES[first], y), (LANES[second], y), arrowprops=arrow)
            continue
        style = "->" if direction == "to joiner" else "<-"
        panel.annotate("", (joiner, y), (0, y), arrowprops={"arrowstyle": style, "color": color})
        panel.plot([LANES[site] for site in SITES], [y] * len(SITES), "o", color=color, markersize=4)
        panel.plot([joiner], [y], "s", color=color, markersize=5)
    panel.set_xlim(-0.4, 3.75)
    panel.set_ylim(bottom, 0.9)
    panel.axis("off")


def draw_masks(panel: Axes) -> None:
    """Draw the sum of one number over the sites, with each mask in one color."""
    columns = {"records": 0.75, "noise": 1.4, "masks": 2.2, "leaves the site": 3.2}
    for title, x in columns.items():
        panel.text(x, 0, title, ha="center", fontsize=9, fontweight="bold")
    total = 0
    for place, site in enumerate(SITES):
        y, answer = -1.0 - place, COUNTS[place] + NOISE[place]
        panel.text(-0.35, y, site, fontsize=9)
        panel.text(columns["records"], y, str(COUNTS[place]), ha="center", fontsize=9)
        panel.text(columns["noise"], y, f"{NOISE[place]:+d}".replace("-", "−"), ha="center", fontsize=9)
        for offset, (pair, mask) in zip((-0.25, 0.25), _list_masks(place), strict=True):
            answer += mask
            text = f"{mask:+d}".replace("-", "−")
            panel.text(columns["masks"] + offset, y, text, ha="center", fontsize=9, color=PAIR_COLORS[pair])
        panel.text(columns["leaves the site"], y, str(answer % MODULUS), ha="center", fontsize=9, fontweight="bold")
        total += answer % MODULUS
    panel.plot([-0.35, 3.7], [-3.45, -3.45], color="#bbbbbb", linewidth=1)
    assert total % MODULUS == sum(COUNTS) + sum(NOISE)
    panel.text(-0.35, -4.15, "sum", fontsize=9)
    panel.text(columns["records"], -4.15, str(sum(COUNTS)), ha="center", fontsize=9)
    panel.text(columns["noise"], -4.15, f"{sum(NOISE):+d}", ha="center", fontsize=9)
    panel.text(columns["masks"], -4.15, "0", ha="center", fontsize=9)
    panel.text(columns["leaves the site"], -4.15, str(total % MODULUS), ha="center", fontsize=9, fontweight="bold")
    panel.text(-0.35, -5.1, _REMARK, fontsize=8.5, va="top", color=GRAY)
    panel.set_xlim(-0.4, 3.75)
    panel.set_ylim(-6.6, 0.8)
    panel.axis("off")


def _list_masks(place: int) -> list[tuple[tuple[int, int], int]]:
    """List what a site adds for each of its pairs."""
    return [(pair, mask if pair[0] == place else -mask) for pair, mask in MASKS.items() if place in pair]


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "pate_torch"
    figure, (exchange, masks) = plt.subplots(2, 1, height_ratios=(7, 5))
    figure.set_size_inches(4.1, 6.3)
    draw_exchange(exchange)
    draw_masks(masks)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0, top=1, hspace=0)
    figure.savefig(FILE, metadata={"Date": None}, facecolor="white")
    print(FILE.relative_to(FILE.parents[2]))


if __name__ == "__main__":
    main()
