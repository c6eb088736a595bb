"""``pate runs``: list the finished runs of one home folder, newest first, from the summaries of their releases."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.core.run_folders import check_root, get_home_folder, get_runs_folder

COLUMNS = ("run", "dataset", "mechanism", "student", "epsilon", "delta", "charged", "accuracy", "release")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, or 2 if the home folder has no runs."""
    description = "List the finished runs of one home folder, newest first, from the summaries of their releases."
    parser = argparse.ArgumentParser(prog="pate runs", description=description)
    parser.add_argument("--home", type=Path, help="folder that contains runs/ (default: PATE_HOME, or outputs)")
    parser.add_argument("--dataset", help="list only runs that were charged to this account")
    parser.add_argument("--json", action="store_true", help="print all keys of the summaries as JSON")
    options = parser.parse_args(arguments)
    folder = get_runs_folder(check_root(get_home_folder(options.home)))
    if not folder.is_dir():
        print(f"error: home={str(folder.parent)!r}: contains no runs. Set PATE_HOME or --home.", file=sys.stderr)
        return 2
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
    """Load the summary of each finished run, newest first, with the folder of the run as key ``run``."""
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
