"""The cells of LZCW21 Table 4, beside the paper's, as text (80 columns), CSV, JSON and a picture."""

from __future__ import annotations

import csv
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.replications.splits import Cell, Mean, format_share, replace_infinities

WIDTH = 80
"""Columns of the text."""

PAPER: dict[str, dict[tuple[str, float], tuple[float, float]]] = {
    "mushroom": {
        **{("PSQ", math.inf): (0.9773, 0.0006), ("ASQ", math.inf): (0.9146, 0.0036)},
        **{("PSQ", 0.5): (0.6416, 0.0036), ("ASQ", 0.5): (0.6418, 0.0091)},
        **{("PSQ", 1.0): (0.7534, 0.0045), ("ASQ", 1.0): (0.7727, 0.0098)},
        **{("PSQ", 2.0): (0.8974, 0.0027), ("ASQ", 2.0): (0.8858, 0.0059)},
    },
    "a9a": {
        **{("PSQ", math.inf): (0.5555, 0.0157), ("ASQ", math.inf): (0.5461, 0.0160)},
        **{("PSQ", 0.5): (0.5040, 0.0034), ("ASQ", 0.5): (0.5212, 0.0088)},
        **{("PSQ", 1.0): (0.5171, 0.0050), ("ASQ", 1.0): (0.5369, 0.0103)},
        **{("PSQ", 2.0): (0.5176, 0.0070), ("ASQ", 2.0): (0.5543, 0.0089)},
    },
    "real_sim": {
        **{("PSQ", math.inf): (0.8234, 0.0014), ("ASQ", math.inf): (0.8289, 0.0008)},
        **{("PSQ", 0.5): (0.6355, 0.0065), ("ASQ", 0.5): (0.7389, 0.0014)},
        **{("PSQ", 1.0): (0.7550, 0.0058), ("ASQ", 1.0): (0.8040, 0.0009)},
        **{("PSQ", 2.0): (0.8025, 0.0037), ("ASQ", 2.0): (0.8231, 0.0009)},
    },
}
"""Data set -> (method, epsilon) -> (accuracy, its printed half-width): LZCW21 Table 4."""


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """One split: its sizes, the majority class's share of the test set, and what the teachers know without noise.

    Attributes:
        majority: Share of the test set that the majority class has.
        teacher: Accuracy of one teacher, on average.
        plurality: Accuracy of the plurality.
        gap: Median lead of the plurality on the public points, in votes, to be compared with the noise.
    """

    dataset: str
    private: int
    public: int
    test: int
    teachers: int
    majority: float
    teacher: float
    plurality: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class Table4Cell(Cell):
    """One method at one epsilon on one split.

    Attributes:
        sigma: GNMax noise, in votes.
    """

    sigma: float
    queries: int
    epsilon_ex_post: float
    label_accuracy: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method at one epsilon, over all splits, and the paper's accuracy."""

    dataset: str
    method: str
    epsilon: float
    sigma: float
    queries: Mean
    epsilon_ex_post: Mean
    label_accuracy: Mean
    accuracy: Mean
    balanced: Mean
    paper: Mean | None


@dataclass(frozen=True, kw_only=True)
class Paired:
    """ASQ minus PSQ on the same splits, at one epsilon."""

    dataset: str
    epsilon: float
    accuracy: Mean
    balanced: Mean


def average_cells(cells: Sequence[Table4Cell]) -> list[Row]:
    """Average the cells over splits: the table's rows, in the order in which they were first measured."""
    groups: dict[tuple[str, str, float], list[Table4Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.dataset, cell.method, cell.epsilon), []).append(cell)
    return [
        Row(
            dataset=dataset,
            method=method,
            epsilon=epsilon,
            sigma=group[0].sigma,
            paper=_paper(dataset, method, epsilon),
            **{name: Mean.of(getattr(c, name) for c in group) for name in MEASURED},
        )
        for (dataset, method, epsilon), group in groups.items()
    ]


MEASURED = ("queries", "epsilon_ex_post", "label_accuracy", "accuracy", "balanced")


def _paper(dataset: str, method: str, epsilon: float) -> Mean | None:
    found = PAPER.get(dataset, {}).get((method, epsilon))
    return None if found is None else Mean(mean=found[0], half=found[1])


def compare_methods(cells: Sequence[Table4Cell]) -> list[Paired]:
    """Average the differences on equal splits: what the splits have in common drops out."""
    by = {(c.dataset, c.epsilon, c.method, c.split): c for c in cells}
    found = []
    for dataset, epsilon in dict.fromkeys((c.dataset, c.epsilon) for c in cells):
        splits = [c.split for c in cells if (c.dataset, c.epsilon, c.method) == (dataset, epsilon, "ASQ")]
        pairs = [[by[dataset, epsilon, method, split] for method in ("ASQ", "PSQ")] for split in splits]
        found.append(
            Paired(
                dataset=dataset,
                epsilon=epsilon,
                accuracy=Mean.of(a.accuracy - p.accuracy for a, p in pairs),
                balanced=Mean.of(a.balanced - p.balanced for a, p in pairs),
            )
        )
    return found


def format_tables(facts: Sequence[SplitFacts], cells: Sequence[Table4Cell]) -> str:
    """Format the tables as text of at most 80 columns."""
    head = (
        "LZCW21 Table 4: means over splits ± 1.96 standard errors. sigma: votes of GNMax noise; label: released labels"
        " that are right; spent: epsilon ex post"
    )
    lines = textwrap.wrap(head, WIDTH)
    table, differences = average_cells(cells), compare_methods(cells)
    for dataset in dict.fromkeys(f.dataset for f in facts):
        lines += ["", *_describe(dataset, [f for f in facts if f.dataset == dataset])]
        lines.append(
            f"{'method':<7} {'eps':>3} {'asked':>6} {'spent':>6} {'sigma':>5} {'label':>5} "
            f"{'accuracy':<13} {'balanced':<13} paper"
        )
        mine = [row for row in table if row.dataset == dataset]
        lines += [_format_row(row) for row in sorted(mine, key=lambda row: math.isfinite(row.epsilon))]
        lines += [
            f"ASQ - PSQ, eps {_format_epsilon(d.epsilon)}: "
            f"{d.accuracy.show(signed=True)}, balanced {d.balanced.show(signed=True)}"
            for d in differences
            if d.dataset == dataset
        ]
    if any(row.paper is not None for row in table):
        note = "The paper's intervals as printed: sqrt(30) times as wide they are 95 % (docs/reference/papers.md)."
        lines += textwrap.wrap(note, WIDTH)
    return "\n".join(lines)


def _describe(dataset: str, facts: Sequence[SplitFacts]) -> list[str]:
    first, names = facts[0], ("majority", "teacher", "plurality", "gap")
    mean = {name: float(np.mean([getattr(fact, name) for fact in facts])) for name in names}
    shares = {name: format_share(value) for name, value in mean.items()}
    return textwrap.wrap(
        f"{dataset}: {first.private} private, {first.public} public, {first.test} test; {len(facts)} splits;"
        f" {first.teachers} teachers, one alone {shares['teacher']}, their plurality {shares['plurality']},"
        f" median lead {mean['gap']:.0f} votes; majority class {shares['majority']}",
        WIDTH,
    )


def _format_row(row: Row) -> str:
    name = row.method + ("-NP" if math.isinf(row.epsilon) else "")
    paper = "" if row.paper is None else row.paper.show()
    spent = _format_epsilon(row.epsilon_ex_post.mean, 4)
    return (
        f"{name:<7} {_format_epsilon(row.epsilon):>3} {row.queries.mean:>6.1f} {spent:>6} "
        f"{row.sigma:>5.1f} {format_share(row.label_accuracy.mean, 3):>5} "
        f"{row.accuracy.show():<13} {row.balanced.show():<13} {paper}"
    ).rstrip()


def _format_epsilon(value: float, digits: int = 1) -> str:
    return "inf" if math.isinf(value) else f"{value:.{digits}f}"


def write_tables(folder: Path, facts: Sequence[SplitFacts], cells: Sequence[Table4Cell]) -> None:
    """Write the tables: a text, a CSV of every cell of every split, JSON of means and intervals, and a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "liu2021_table4"
    base.with_suffix(".txt").write_text(format_tables(facts, cells) + "\n", encoding="utf-8")
    with base.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Table4Cell)])
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)
    content = {
        "splits": [asdict(fact) for fact in facts],
        "rows": [asdict(row) for row in average_cells(cells)],
        "asq_minus_psq": [asdict(difference) for difference in compare_methods(cells)],
    }
    base.with_suffix(".json").write_text(json.dumps(replace_infinities(content), indent=2) + "\n", encoding="utf-8")
    plot_accuracies(facts, cells).savefig(base.with_suffix(".png"), dpi=150)


def plot_accuracies(facts: Sequence[SplitFacts], cells: Sequence[Table4Cell]) -> Figure:
    """Plot accuracy against epsilon, ours beside the paper's, one panel a data set."""
    names = list(dict.fromkeys(f.dataset for f in facts))
    figure = Figure(figsize=(4.6 * len(names), 3.6), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        mine = [row for row in average_cells(cells) if row.dataset == name and math.isfinite(row.epsilon)]
        for method, color in (("PSQ", "#1f4e79"), ("ASQ", "#c55a11")):
            ours = [row for row in mine if row.method == method]
            epsilons = [row.epsilon for row in ours]
            for label, style, points in (
                (method, "o-", [row.accuracy for row in ours]),
                (f"{method}, balanced", "^:", [row.balanced for row in ours]),
            ):
                heights, halves = [p.mean for p in points], [p.half for p in points]
                axes.errorbar(epsilons, heights, yerr=halves, fmt=style, color=color, label=label, capsize=2)
            printed = [(row.epsilon, row.paper) for row in ours if row.paper is not None]
            if printed:
                axes.errorbar(
                    [epsilon for epsilon, _ in printed],
                    [p.mean for _, p in printed],
                    yerr=[p.half for _, p in printed],
                    fmt="x--",
                    color=color,
                    alpha=0.5,
                    label=f"{method}, LZCW21",
                )
        majority = float(np.mean([f.majority for f in facts if f.dataset == name]))
        axes.axhline(majority, color="black", linewidth=0.8, linestyle=":", label="majority class")
        axes.set(title=name, xlabel="epsilon", ylabel="test accuracy", xscale="log")
        axes.set_xticks([row.epsilon for row in mine], [f"{row.epsilon:g}" for row in mine])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right", frameon=False, fontsize=7)  # "best" warns on a busy machine
    return figure
