"""What a bad public pool costs: accuracy of PATEClassifier with public points of a shifted population, or with few.

    PYTHONPATH=. python benchmarks/public_pool.py

Records are drawn: ten numbers, three classes, epsilon 1. The public points are shifted along a random direction, or
have other units in half of their columns, or are few. Writes benchmarks/results/public_pool.csv and the figure
docs/images/public-pool.svg.
"""

from __future__ import annotations

import csv
import tempfile
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

from pate_torch import PATEClassifier

ROOT = Path(__file__).parents[1]
SEEDS, SHIFTS, COUNTS, FACTORS = range(5), (0.0, 0.5, 1.0, 2.0, 4.0), (20, 50, 100, 200, 500), (1.0, 2.0, 5.0, 20.0)


def draw(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw correlated points, and classes by a linear rule with noise."""
    x = random.normal(size=(count, 10)) @ np.linalg.cholesky(0.5 * np.eye(10) + 0.5)
    scores = x @ np.random.default_rng(0).normal(size=(10, 3)) + random.normal(size=(count, 3))
    return x, scores.argmax(1)


def measure(seed: int, *, shift: float = 0.0, count: int = 500, factor: float = 1.0) -> tuple[float, float]:
    """Measure the accuracy of the private model, and of a model without privacy."""
    random = np.random.default_rng(seed)
    (x, y), (public, _), (test, truth) = (draw(random, size) for size in (4000, count, 2000))
    direction = random.normal(size=10)
    public = public + shift * direction / np.linalg.norm(direction) * np.sqrt(10)
    public[:, ::2] *= factor
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf = PATEClassifier(
            epsilon=1, account="records", classes=[0, 1, 2], home=home, verbose=False, spend_anyway=True
        )
        private = float(clf.fit(x, y, public=public).score(test, truth))
    return private, float(LogisticRegression(max_iter=1000).fit(x, y).score(test, truth))


def main() -> None:
    cases = [("shift", value) for value in SHIFTS]
    cases += [("count", value) for value in COUNTS] + [("factor", value) for value in FACTORS]
    rows = []
    for name, value in cases:
        found = np.array([measure(seed, **{name: value}) for seed in SEEDS])
        error = found[:, 0].std(ddof=1) / np.sqrt(len(SEEDS))
        rows.append((name, value, round(found[:, 0].mean(), 4), round(error, 4), round(found[:, 1].mean(), 4)))
        print(*rows[-1], flush=True)
    with (ROOT / "benchmarks" / "results" / "public_pool.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("changed", "value", "accuracy", "standard_error", "without_privacy"))
        writer.writerows(rows)
    labels = {
        "shift": "shift, standard deviations in each column",
        "count": "number of public points",
        "factor": "factor of the units in half of the columns",
    }
    plt.rcParams["svg.hashsalt"] = "pate_torch"
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for panel, (name, label) in zip(panels, labels.items(), strict=True):
        _, values, means, errors, plain = zip(*(row for row in rows if row[0] == name), strict=True)
        panel.errorbar(range(len(values)), 100 * np.array(means), 200 * np.array(errors), fmt="o-", color="#1a5fb4")
        panel.axhline(100 * np.mean(plain), color="#555555", linestyle="--", label="without privacy")
        panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        panel.set_xlabel(label)
        panel.grid(color="#dddddd", linewidth=0.5)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "public-pool.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
