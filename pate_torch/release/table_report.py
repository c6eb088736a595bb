"""What a report shows of a synthetic table: distributions, associations, and classifiers trained on it."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pate_torch.core import checks, files
from pate_torch.release.report import Accuracy, Share
from pate_torch.synthesis.model import TableModel


@dataclass(frozen=True, kw_only=True)
class ColumnReport:
    """Releasable. Distribution of one column.

    Attributes:
        name: Name of the column.
        codes: Text of each code.
        shares: Share of each code among the synthetic rows.
        noisy_shares: Noisy share of the units with each code.
        error: Standard deviation of the noise of a noisy share.
    """

    name: str
    codes: tuple[str, ...]
    shares: tuple[float, ...]
    noisy_shares: tuple[float, ...]
    error: float


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """Releasable. What a report shows of a synthetic table.

    Attributes:
        num_rows: Number of synthetic rows.
        columns: Distribution of each column.
        associations: Cramer's V of each pair of columns among the synthetic rows, 0 for independent columns.
    """

    num_rows: int
    columns: tuple[ColumnReport, ...]
    associations: tuple[tuple[float, ...], ...]


def write_rows(path: Path, table: Mapping[str, Sequence[Any]]) -> None:
    """Write synthetic rows as a CSV file, with empty cells for missing values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([files.escape_spreadsheet_cell(name) for name in table])
    for row in zip(*table.values(), strict=True):
        writer.writerow(
            ["" if v is None else files.escape_spreadsheet_cell(v) if isinstance(v, str) else v for v in row]
        )
    files.write_atomically(path, text.getvalue())


def describe_table(model: TableModel, seed: int) -> TableReport:
    """Describe the model of a table and rows drawn from it."""
    codes_NJ = model.sample_codes(model.size, np.random.default_rng(seed))
    columns = []
    for index, column in enumerate(model.domain.columns):
        counts, variance = _sum_tables(model, index)
        total = max(1.0, float(np.sum(counts)))
        shares = np.bincount(codes_NJ[:, index], minlength=column.size) / len(codes_NJ)
        names = tuple(name or "missing" for name in column.names)
        noisy_shares, error = tuple((counts / total).tolist()), float(np.sqrt(variance) / total)
        columns.append(
            ColumnReport(
                name=column.name, codes=names, shares=tuple(shares.tolist()), noisy_shares=noisy_shares, error=error
            )
        )
    return TableReport(
        num_rows=len(codes_NJ), columns=tuple(columns), associations=compute_associations(codes_NJ, model.domain.sizes)
    )


def _sum_tables(model: TableModel, column: int) -> tuple[np.ndarray, float]:
    """Return the mean noisy count of each code over all tables with this column, and its largest variance."""
    parts, variances = [], []
    for clique, counts in model.tables.counts.items():
        if column in clique:
            axis = clique.index(column)
            part = counts.double().numpy().sum(tuple(i for i in range(counts.ndim) if i != axis))
            parts.append(part)
            variances.append(model.tables.sigma**2 * counts.numel() / len(part))
    return np.mean(parts, axis=0), float(np.sum(variances)) / len(parts) ** 2


def compute_associations(codes_NJ: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Compute Cramer's V of each pair of columns, [J][J], with 1 on the diagonal."""
    result = np.eye(len(sizes))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        table = np.bincount(codes_NJ[:, a] * sizes[b] + codes_NJ[:, b], minlength=sizes[a] * sizes[b]).reshape(
            sizes[a], sizes[b]
        )
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        seen = expected > 0
        freedom = min((table.sum(1) > 0).sum(), (table.sum(0) > 0).sum()) - 1
        chi2 = float(((table - expected)[seen] ** 2 / expected[seen]).sum())
        result[a, b] = result[b, a] = np.sqrt(chi2 / table.sum() / freedom) if freedom else 0.0
    return tuple(map(tuple, np.round(result, 4).tolist()))


def measure_usefulness(model: TableModel, test_NJ: np.ndarray) -> tuple[Accuracy, ...]:
    """Measure the accuracy on PUBLIC test rows of classifiers of the target that were trained on synthetic rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    if (target := model.domain.target_index) is None:
        raise checks.error("evaluation", "test rows", "needs a target", "Pass target=..., the column to predict.")
    rows = model.sample_codes(model.size, np.random.default_rng(0))
    truth_N, most_frequent = test_NJ[:, target], np.bincount(rows[:, target]).argmax()
    learners = {
        "Logistic regression": LogisticRegression(max_iter=500),
        "Gradient boosting": HistGradientBoostingClassifier(),
    }
    result = [
        Accuracy(
            name="Most frequent value",
            share=Share(value=float((truth_N == most_frequent).mean()), size=len(truth_N)),
            description="the constant prediction",
        )
    ]
    for name, learner in learners.items():
        x, test = (_encode_features(codes, model.domain.sizes, target, name) for codes in (rows, test_NJ))
        if len(np.unique(rows[:, target])) > 1:
            accuracy = float((learner.fit(x, rows[:, target]).predict(test) == truth_N).mean())
            result.append(
                Accuracy(
                    name=name,
                    share=Share(value=accuracy, size=len(truth_N)),
                    description="trained on the synthetic rows",
                )
            )
    return tuple(result)


def _encode_features(codes_NJ: np.ndarray, sizes: Sequence[int], target: int, learner: str) -> np.ndarray:
    """Encode all columns but the target: one-hot for the logistic regression, and as codes for trees."""
    columns = [column for column in range(len(sizes)) if column != target]
    if learner == "Gradient boosting":
        return codes_NJ[:, columns]
    return np.concatenate([np.eye(sizes[column])[codes_NJ[:, column]] for column in columns], 1)
