"""List past runs.

The finished runs of one home folder are listed, newest first, from the summaries of their releases.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pate_torch.core import checks
from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.core.run_folders import find_home, get_runs_folder

COLUMNS = ("run", "dataset", "mechanism", "student", "epsilon", "delta", "charged", "accuracy", "release")


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raise ValueError if the home folder has no runs."""
    folder = get_runs_folder(find_home(options.home, "--home"))
    if not folder.is_dir():
        raise checks.error("home", str(folder.parent), "contains no runs", "Set PATE_HOME or --home.")
    runs = [run for run in _load_summaries(folder) if options.dataset in (None, run.get("dataset"))]
    if options.json:
        print(json.dumps(runs, indent=1))
        return 0
    rows = [COLUMNS, *map(_format_row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _load_summaries(folder: Path) -> list[dict[str, Any]]:
    dated_summaries = []
    for file in folder.glob("*/*/*/release/summary.json"):
        try:
            summary = {"run": str(file.parents[1].relative_to(folder)), **json.loads(file.read_text(encoding="utf-8"))}
            dated_summaries.append((file.stat().st_mtime_ns, summary))
        except (OSError, ValueError, TypeError, RecursionError):
            continue  # incomplete, or a file of another program
    return [summary for _, summary in sorted(dated_summaries, key=lambda item: item[0], reverse=True)]


def _format_row(run: dict[str, Any]) -> tuple[str, ...]:
    """Format the cells of a run. A run that is not private has no epsilon."""

    def format_number(key: str, pattern: Callable[[float], str]) -> str:
        return "-" if run.get(key) is None else pattern(run[key])

    private = run.get("private") is True
    return (
        run["run"].rsplit("/", 1)[-1],
        str(run.get("dataset")),
        str(run.get("mechanism")),
        str(run.get("student") or "-"),
        format_number("epsilon", format_epsilon) if private else "NOT PRIVATE",
        format_number("delta", format_delta) if private else "-",
        format_number("epsilon_charged", format_epsilon) if private else "-",
        format_number("student_accuracy", "{:.1%}".format),
        str(run.get("release_id") or "-"),
    )
