"""What a task's rows say: means over seeds, and differences to ours by the same test points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import tables

OURS = "by rule"


def show(rows: Sequence[dict[str, Any]], task: str, methods: Sequence[str]) -> str:
    """Accuracy / balanced accuracy / worst class in per cent ± standard error, and ours less the row's."""
    mine = [row for row in rows if row.get("task") == task]
    epsilons = sorted({float(row["epsilon"]) for row in mine})
    lines = [f"{task}: accuracy / balanced / worst class, % ± standard error; [ours less this, 95 % interval]"]
    for method in methods:
        for epsilon in epsilons:
            cell = {row["seed"]: row for row in mine if row["method"] == method and float(row["epsilon"]) == epsilon}
            if not cell:
                continue
            rival = {row["seed"]: row for row in mine if row["method"] == OURS and float(row["epsilon"]) == epsilon}
            lines.append(f"{method:24} {epsilon:<4g} {_figures(list(cell.values()))}  {_against(rival, cell)}".rstrip())
    return "\n".join(lines)


def _figures(cells: Sequence[dict[str, Any]]) -> str:
    parts = []
    for key in ("accuracy", "balanced", "worst"):
        value = 100 * np.array([cell[key] for cell in cells])
        error = value.std(ddof=1) / np.sqrt(len(value)) if len(value) > 1 else float("nan")
        parts.append(f"{value.mean():.1f} ± {error:.1f}")
    beside = []
    for key, name in (("logistic", "logistic"), ("labels_right", "labels right"), ("plurality", "plurality")):
        value = np.array([cell[key] for cell in cells if key in cell])
        if len(value):
            beside.append(f"{name} {100 * value.mean():.1f}")
    seconds = np.median([cell["processor_time"] for cell in cells])
    return " / ".join(parts) + f" ({len(cells)} seeds, {seconds:.1f} s" + "".join(f", {b}" for b in beside) + ")"


def _against(ours: dict[int, dict[str, Any]], cell: dict[int, dict[str, Any]]) -> str:
    """Paired over seeds and test points: the wider of the two intervals, for either may be what decides."""
    both = sorted(set(ours) & set(cell))
    if not both or ours[both[0]] is cell[both[0]]:
        return ""
    gap_ST = [_hits(ours[seed]) - _hits(cell[seed]) for seed in both]
    mean_S = 100 * np.array([gap_T.mean() for gap_T in gap_ST])
    points = 196 * np.mean([gap_T.std(ddof=1) / np.sqrt(len(gap_T)) for gap_T in gap_ST])
    half = max(points, tables.half_width(mean_S) if len(both) > 1 else 0.0)
    told = "" if abs(mean_S.mean()) > half else ", not told apart"
    return f"[{mean_S.mean():+.1f} ± {half:.1f}{told}]"


def _hits(row: dict[str, Any]) -> np.ndarray:
    return np.array([int(hit) for hit in row["right"]])
