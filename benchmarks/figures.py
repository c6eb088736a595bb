"""Draw the figures of the documents from the tables in benchmarks/results/.

PYTHONPATH=. python benchmarks/figures.py
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.mechanisms.gaussian import GNMax

RESULTS, IMAGES = Path(__file__).parent / "results", Path(__file__).parents[1] / "docs" / "images"
DELTA, EPSILONS = 1e-5, ("0.1", "0.5", "1", "2")
TITLES = {
    "a9a": "a9a (table)", "ag_news-minilm": "AG News (texts, MiniLM)",
    "fashion-lite0": "Fashion-MNIST (images, EfficientNet-Lite0)", "mushroom": "mushroom (table)",
    "ag_news-wordllama": "AG News (texts, WordLlama)", "mnist-lite0": "MNIST (EfficientNet-Lite0)",
    "mnist-learnt": "MNIST (features of 5,000 public images)", "pneumonia-lite0": "PneumoniaMNIST (subset, seen)",
}  # fmt: skip
STYLES = {
    "default (noisy gradients)": ("pate_torch, default (noisy gradients)", "#1a5fb4", "o-"),
    "teachers": ("pate_torch, teachers (PATE)", "#62a0ea", "s-"),
    "DP-SGD": ("DP-SGD (Opacus)", "#c64600", "^-"),
}
"""Method of a table -> label, color and form of its line."""
SYNTHESIS_STYLES = {
    "pate_torch": ("synthetic rows, pate_torch", "#1a5fb4", "o-"),
    "aim": ("synthetic rows, AIM", "#c64600", "^-"),
    "independent": ("synthetic rows, independent columns", "#999999", "v-"),
    "classifier, 100 public rows": ("PATEClassifier", "#26a269", "s-"),
}
"""Method of ``synthesis.csv`` -> label, color and form of its line; a method without rows is left out."""


def read_rows(name: str) -> list[dict[str, str]]:
    """Read a table of results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def draw_accuracy(tasks: Sequence[str], columns: int, file: str) -> None:
    """Draw accuracy against epsilon, one panel for each data set."""
    rows = read_rows("same_encoder.csv")
    figure, axes = plt.subplots(-(-len(tasks) // columns), columns, squeeze=False)
    figure.set_size_inches(3.5 * columns, 2.9 * len(axes))
    for task, panel in zip(tasks, axes.flat, strict=True):
        found = {(row["method"], row["epsilon"]): row for row in rows if row["task"] == task}
        top = float(found["no privacy", ""]["accuracy"])
        panel.axhline(top, color="#555555", linestyle="--", label="without privacy")
        for method, (label, color, form) in STYLES.items():
            points = [found[method, epsilon] for epsilon in EPSILONS]
            heights = [float(row["accuracy"]) for row in points]
            errors = [2 * float(row["standard_error"] or 0) for row in points]
            panel.errorbar(range(4), heights, errors, fmt=form, color=color, label=label, markersize=4, capsize=2)
        panel.set_title(TITLES[task], fontsize=9)
        panel.set_xticks(range(4), EPSILONS)
        panel.grid(color="#dddddd", linewidth=0.5)
    for panel in axes[-1]:
        panel.set_xlabel("epsilon")
    for panel in axes[:, 0]:
        panel.set_ylabel("test accuracy, %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    save(figure, file)


def draw_cost(file: str) -> None:
    """Draw epsilon against the number of queries, by exact Gaussian accounting."""
    figure, panel = plt.subplots(figsize=(6, 3.6))
    counts = [1, 3, 10, 30, 100, 300, 1000, 3000, 10_000]
    for sigma, color in ((10, "#c64600"), (40, "#62a0ea"), (150, "#1a5fb4")):
        events = [GNMax(sigma=sigma).privacy_events(count) for count in counts]
        epsilons = [compute_guarantee(one, DELTA).epsilon for one in events]
        panel.plot(counts, epsilons, "o-", color=color, markersize=3, label=f"teachers, sigma = {sigma} votes")
    panel.axhline(1, color="#26a269", label="noisy gradients, planned for epsilon 1")
    panel.set(xscale="log", yscale="log", xlabel="labeled public points (queries)", ylabel="epsilon", ylim=(0.01, 30))
    panel.grid(color="#dddddd", linewidth=0.5)
    panel.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, file)


def draw_growth(file: str) -> None:
    """Draw processor time and memory against size."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    rows = read_rows("growth.csv")
    for work in dict.fromkeys(row["work"] for row in rows):
        found = [row for row in rows if row["work"] == work]
        for panel, key in zip(panels, ("seconds", "mib"), strict=True):
            heights = [float(row[key]) for row in found]
            panel.plot([int(row["size"]) for row in found], heights, "o-", label=work, markersize=3)
    panels[0].set(ylabel="processor time, s", ylim=(0.1, 300))
    panels[1].set(ylabel="memory besides imports, MiB", ylim=(5, 5000))
    for panel in panels:
        panel.set(xscale="log", yscale="log", xlabel="records or points")
        panel.grid(color="#dddddd", linewidth=0.5)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    save(figure, file)


def draw_synthesis(file: str) -> None:
    """Draw the accuracy of classifiers trained on synthetic rows, and of classifiers of private rows, by epsilon."""
    rows = read_rows("synthesis.csv")
    tables = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = plt.subplots(2, 4, figsize=(11, 5.4))
    for table, panel in zip(tables, axes.flat, strict=False):
        found = [row for row in rows if row["data"] == table]
        top = next(float(row["accuracy"]) for row in found if row["method"] == "no privacy")
        panel.axhline(100 * top, color="#555555", linestyle="--", label="private rows, without privacy")
        for method, (label, color, form) in SYNTHESIS_STYLES.items():
            points = sorted((r for r in found if r["method"] == method), key=lambda row: float(row["epsilon"]))
            heights = [100 * float(row["accuracy"]) for row in points]
            errors = [200 * float(row["accuracy_error"]) for row in points]
            places = [EPSILONS[1:].index(f"{float(row['epsilon']):g}") for row in points]
            if points:
                panel.errorbar(places, heights, errors, fmt=form, color=color, label=label, markersize=4, capsize=2)
        panel.set_title(table, fontsize=9)
        panel.set_xticks(range(3), EPSILONS[1:])
        panel.grid(color="#dddddd", linewidth=0.5)
    for panel in axes[:, 0]:
        panel.set_ylabel("test accuracy, %")
    for panel in axes[-1]:
        panel.set_xlabel("epsilon")
    axes[-1, -1].axis("off")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[-1, -1].legend(handles, labels, loc="center", fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, file)


def save(figure: plt.Figure, file: str) -> None:
    """Save a figure without the date, so that equal figures have equal bytes."""
    figure.savefig(IMAGES / file, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    print(IMAGES / file)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "pate_torch"
    draw_accuracy(("a9a", "ag_news-minilm", "fashion-lite0"), 3, "accuracy.svg")
    draw_accuracy(tuple(TITLES), 4, "accuracy-all.svg")
    draw_cost("cost-of-queries.svg")
    draw_growth("growth.svg")
    draw_synthesis("synthesis.svg")


if __name__ == "__main__":
    main()
