"""What a report shows of a synthetic table: distributions, associations, and classifiers trained on it."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pate_torch.core import checks, files
from pate_torch.release.report import Accuracy, ColumnReport, Share, TableReport
from pate_torch.release.store import ROWS_FILE_NAME
from pate_torch.synthesis.model import TableModel

MIN_SHARE = 0.01
"""Smallest share of the rows that a code must have to be counted in the associations."""


def write_rows(folder: Path, table: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Write synthetic rows as a CSV file, with empty cells for missing values; return its SHA-256 for the ledger."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([files.escape_spreadsheet_cell(name) for name in table])
    for row in zip(*table.values(), strict=True):
        writer.writerow(
            ["" if v is None else files.escape_spreadsheet_cell(v) if isinstance(v, str) else v for v in row]
        )
    files.write_atomically(folder / ROWS_FILE_NAME, text.getvalue())
    return {"rows_sha256": files.compute_file_digest(folder / ROWS_FILE_NAME)}


def describe_table(model: TableModel, seed: int) -> TableReport:
    """Describe the model of a table and rows drawn from it."""
    codes_NJ = model.sample_codes(model.size, np.random.default_rng(seed))
    columns = []
    for index, column in enumerate(model.domain.columns):
        counts, variance = _average_tables(model, index)
        total = max(1.0, float(np.sum(counts)))
        shares = np.bincount(codes_NJ[:, index], minlength=column.size) / len(codes_NJ)
        names = tuple(name or "missing" for name in column.names)
        noisy_shares, error = tuple((counts / total).tolist()), float(np.sqrt(variance) / total)
        facts: dict[str, Any] = {
            "codes": names,
            "shares": tuple(shares.tolist()),
            "noisy_shares": noisy_shares,
            "error": error,
        }
        columns.append(ColumnReport(name=column.name, **facts))
    associations = compute_associations(codes_NJ, model.domain.sizes)
    return TableReport(num_rows=len(codes_NJ), columns=tuple(columns), associations=associations)


def _average_tables(model: TableModel, column: int) -> tuple[np.ndarray, float]:
    """Return the mean noisy count of each code, [S], over all tables with this column, and the variance of a mean."""
    parts, variances = [], []
    for clique, counts in model.tables.counts.items():
        if column in clique:
            axis = clique.index(column)
            part = counts.double().numpy().sum(tuple(i for i in range(counts.ndim) if i != axis))
            parts.append(part)
            variances.append(model.tables.sigma**2 * counts.numel() / len(part))
    return np.mean(parts, axis=0), float(np.sum(variances)) / len(parts) ** 2


def compute_associations(codes_NJ: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Compute Cramer's V of each pair of columns, [J][J], with 1 on the diagonal.

    Codes of less than ``MIN_SHARE`` of the rows are left out, because a few rows with two rare codes, which noise alone
    can produce, would outweigh all other rows.
    """
    result, is_common = np.eye(len(sizes)), []
    for codes_N, size in zip(codes_NJ.T, sizes, strict=True):
        is_common.append(np.bincount(codes_N, minlength=size) >= MIN_SHARE * len(codes_N))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        table = np.bincount(codes_NJ[:, a] * sizes[b] + codes_NJ[:, b], minlength=sizes[a] * sizes[b])
        table = table.reshape(sizes[a], sizes[b])[is_common[a]][:, is_common[b]]
        expected = np.outer(table.sum(1), table.sum(0)) / max(1, table.sum())
        seen = expected > 0
        freedom = min((table.sum(1) > 0).sum(), (table.sum(0) > 0).sum()) - 1
        chi2 = float(((table - expected)[seen] ** 2 / expected[seen]).sum())
        result[a, b] = result[b, a] = np.sqrt(chi2 / table.sum() / freedom) if freedom > 0 else 0.0
    return tuple(map(tuple, np.round(result, 4).tolist()))


def measure_usefulness(model: TableModel, test_NJ: np.ndarray, seed: int = 0) -> tuple[Accuracy, ...]:
    """Measure the accuracy on PUBLIC test rows of classifiers of the target that were trained on synthetic rows.

    Synthetic rows whose target occurs in no test row, such as a missing value, are left out of the training, because
    gradient boosting diverges if a class has a few rows among thousands.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    if (target := model.domain.target_index) is None:
        raise checks.error("evaluation", "test rows", "needs a target", "Pass target=..., the column to predict.")
    rows = model.sample_codes(model.size, np.random.default_rng(seed))
    is_tested_N = np.isin(rows[:, target], test_NJ[:, target])
    rows = rows[is_tested_N] if is_tested_N.any() else rows
    truth_N, most_frequent = test_NJ[:, target], np.bincount(rows[:, target]).argmax()

    def measure(prediction: Any) -> Share:
        return Share(value=float((truth_N == prediction).mean()), size=len(truth_N))

    constant = Accuracy(name="Most frequent value", share=measure(most_frequent), description="the constant prediction")
    if len(np.unique(rows[:, target])) < 2:
        return (constant,)
    learners = {
        "Logistic regression": LogisticRegression(max_iter=500),
        "Gradient boosting": HistGradientBoostingClassifier(),
    }
    result = [constant]
    for name, learner in learners.items():
        x, test = (_encode_features(codes, model.domain.sizes, target, name) for codes in (rows, test_NJ))
        share, description = measure(learner.fit(x, rows[:, target]).predict(test)), "trained on the synthetic rows"
        result.append(Accuracy(name=name, share=share, description=description, is_primary=True))
    return tuple(result)


def _encode_features(codes_NJ: np.ndarray, sizes: Sequence[int], target: int, learner: str) -> np.ndarray:
    columns = [column for column in range(len(sizes)) if column != target]
    if learner == "Gradient boosting":
        return codes_NJ[:, columns]
    return np.concatenate([np.eye(sizes[column])[codes_NJ[:, column]] for column in columns], 1)
