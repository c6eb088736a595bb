"""The same-encoder table: one task, every method on the same frozen features, public points and splits.

    python -m benchmarks.same_encoder ag_news-wordllama --rows rows.jsonl --cache features --fashion FOLDER

First 20 settings of each method, drawn from its grid by a fixed seed, are tried on the task's public stand-in at
epsilon .5; the most accurate is taken for every epsilon. ``by rule`` and teachers have none to choose: they are what
``PATEClassifier`` does by itself; ``by rule`` alone is ours in a comparison, and no test figure decided it. Every trial
and every cell is a line of ``--rows``; what is there is not run again. ``--table`` prints what is there. delta 1e-5,
add_remove, unit record.

The encoders' packages (encoders.toml) are installed by name; Fashion-MNIST is Debian's dataset-fashion-mnist.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.measuring import Rows, make_parser
from benchmarks.same_encoder import data, others, ours
from benchmarks.same_encoder.report import show

TRIALS = 20
TRIED_AT = 0.5
EPSILONS = (0.1, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        run: From split, epsilon and a setting to predicted classes and what else is shown.
        grid: Option -> values; empty: nothing is chosen.
        tables_only: Takes columns with public ranges, no features.
        free: Has no privacy, hence one column.
    """

    run: Callable[..., ours.Answer]
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tables_only: bool = False
    free: bool = False

    def settings(self) -> list[dict[str, Any]]:
        """At most ``TRIALS`` of the grid, drawn by a fixed seed."""
        every = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        order = np.random.default_rng(20).permutation(len(every))[:TRIALS]
        return [every[place] for place in sorted(order)]


RIDGES = (None, 1.0, 10.0)


def methods(diffprivlib: str | None) -> dict[str, Method]:
    """Name -> method, in the table's order."""
    found = {
        "no privacy": Method(others.no_privacy, {"C": np.logspace(-4, 1, TRIALS).tolist()}, free=True),
        "by rule": Method(ours.by_rule),
        "teachers": Method(ours.teachers),
        "teachers, transductive": Method(functools.partial(ours.teachers, transductive=True)),
        "reverse k-NN": Method(
            ours.reverse_knn, {"cells_a_class": (10, 20, 40, 80), "alpha": (0.5, 0.9, 0.99), "keep": (0.8, 1.0)}
        ),
        "DP-SGD": Method(
            others.dp_sgd,
            {
                "steps": (50, 100, 200),
                "rate": (0.05, 0.2),
                "learning_rate": (0.5, 2.0, 8.0),
                "clip": (0.2, 1.0),
                "ridge": RIDGES,
            },
        ),
        "DP-LS": Method(
            others.least_squares,
            {"share": (0.1, 0.3, 0.5), "penalty": (0.001, 0.003, 0.01, 0.03, 0.1), "ridge": RIDGES},
        ),
        "DP-FC": Method(
            others.feature_covariance,
            {
                "share": (0.1, 0.3),
                "steps": (1, 4, 16),
                "learning_rate": (0.5, 1.0, 2.0, 4.0),
                "clip": (0.3, 1.0),
                "penalty": (0.003, 0.01, 0.03, 0.1),
            },
        ),
        "class means": Method(
            others.class_means,
            {"cosine": (True, False), "ridge": (None, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)},
        ),
        "DPPL-Public": Method(
            others.public_prototypes, {"prototypes": (1, 2, 4, 8, 16), "low": (0.0, 0.2), "high": (0.5, 1.0)}
        ),
        "Private-kNN": Method(
            others.private_knn,
            {
                "neighbors": (50, 150, 400),
                "rate": (0.1, 0.3),
                "questions_a_class": (6, 12, 25, 50),
                "ridge": (None, 3.0),
            },
        ),
    }
    if diffprivlib:
        run = tables.make_diffprivlib(diffprivlib)
        found["diffprivlib LR"] = Method(lambda split, epsilon: (run(split, epsilon), {}), tables_only=True)
    if importlib.util.find_spec("interpret"):
        found["DP-EBM"] = Method(lambda split, epsilon: (tables.ebm(split, epsilon), {}), tables_only=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, "data", "fashion", "rows")
    parser.add_argument("task", choices=[name for name, source in data.SOURCES.items() if source.stand_in])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--diffprivlib", metavar="PYTHON")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    known = methods(args.diffprivlib)
    if args.table:
        return print(show(Rows(args.rows).read(), args.task, list(known)))
    load = functools.cache(lambda name: data.task(name, args.data, args.fashion, args.cache))
    rows, stand_in = Rows(args.rows), data.SOURCES[args.task].stand_in
    assert stand_in is not None
    for name in args.methods or known:
        method = known[name]
        if method.tables_only and load(args.task).split(0).encoded:
            continue
        setting = _chosen(name, method, stand_in, load, rows)
        for seed in range(args.seeds):
            split = None
            for epsilon in (float("inf"),) if method.free else args.epsilons:
                key = {"task": args.task, "method": name, "epsilon": str(epsilon), "seed": seed}
                if not rows.find(key):
                    split = split or load(args.task).split(seed)
                    _measure(method, split, epsilon, setting, key, rows)


def _chosen(name: str, method: Method, stand_in: str, load: Any, rows: Rows) -> dict[str, Any]:
    """The most accurate setting on the stand-in, each tried once."""
    settings = method.settings()
    if settings == [{}]:
        return {}
    split = None
    for setting in settings:
        key = {"stand_in": stand_in, "method": name, "setting": setting}
        if not rows.find(key):
            split = split or load(stand_in).split(0)
            _measure(method, split, TRIED_AT, setting, key, rows)
    tried = rows.find({"stand_in": stand_in, "method": name})
    best: dict[str, Any] = max(tried, key=lambda row: row["accuracy"])["setting"]
    return best


def _measure(
    method: Method, split: data.Split, epsilon: float, setting: dict[str, Any], key: dict[str, Any], rows: Rows
) -> None:
    """One line more."""
    began = time.process_time()
    try:
        predicted, shown = method.run(split, epsilon, **setting)
    except ValueError as refused:  # such as a plan that cannot work at this epsilon
        predicted, shown = np.full(len(split.truth), -1), {"why": str(refused).split("\n")[0]}
    recall = [float((predicted[split.truth == c] == c).mean()) for c in np.unique(split.truth)]
    figures = {
        "setting": setting,
        "accuracy": float((predicted == split.truth).mean()),
        "balanced": float(np.mean(recall)),
        "worst": min(recall),
        "right": "".join("01"[int(hit)] for hit in predicted == split.truth),
        "processor_time": time.process_time() - began,
        **shown,
    }
    rows.add(key, **figures)


if __name__ == "__main__":
    main()
