"""``pate runs``: what was released under one home, newest first, from the summaries in the release folders."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.core.run_folders import check_root, get_home_folder, get_runs_folder

COLUMNS = ("run", "dataset", "mechanism", "student", "epsilon", "delta", "charged", "accuracy", "release")


def load_summaries(root: Path) -> list[dict[str, Any]]:
    """Every finished run under ``root``, newest first; ``run``: its folder below runs/."""
    dated_summaries = []
    for file in (root / "runs").glob("*/*/*/release/summary.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            folder = file.parents[1]
            dated_summaries.append(
                (file.stat().st_mtime_ns, {"run": str(folder.relative_to(root / "runs")), **content})
            )
        except (OSError, ValueError, TypeError, RecursionError):
            continue  # half written, or not ours
    return [content for _, content in sorted(dated_summaries, key=lambda item: item[0], reverse=True)]


def format_table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as text, a line each. A run that is not private shows no epsilon."""
    rows = [COLUMNS, *map(_format_row, runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def _format_row(run: dict[str, Any]) -> tuple[str, ...]:
    private = run.get("private") is True
    accuracy = run.get("student_accuracy")
    return (
        run["run"].rsplit("/", 1)[-1],
        str(run.get("dataset")),
        str(run.get("mechanism")),
        str(run.get("student") or "-"),
        _format_epsilon(run.get("epsilon")) if private else "NOT PRIVATE",
        format_delta(run["delta"]) if private and run.get("delta") is not None else "-",
        _format_epsilon(run.get("epsilon_charged")) if private else "-",
        "-" if accuracy is None else f"{accuracy:.1%}",
        str(run.get("release_id") or "-"),
    )


def _format_epsilon(epsilon: float | None) -> str:
    return "-" if epsilon is None else format_epsilon(epsilon)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pate runs``; its exit code. 0: done; 2: there is no such folder."""
    parser = argparse.ArgumentParser(prog="pate runs", description=(__doc__ or "").split(":", 1)[1].strip())
    parser.add_argument("--home", type=Path, help="the folder of all runs (default: PATE_HOME, or outputs)")
    parser.add_argument("--dataset", help="only runs charged to this account")
    parser.add_argument("--json", action="store_true", help="every key of every summary, unrounded")
    options = parser.parse_args(arguments)
    root = get_runs_folder(check_root(get_home_folder(options.home))).parent
    if not (root / "runs").is_dir():
        print(f"error: home={str(root)!r}: has no runs. Set PATE_HOME or --home.", file=sys.stderr)
        return 2
    runs = [run for run in load_summaries(root) if options.dataset in (None, run.get("dataset"))]
    print(json.dumps(runs, indent=1) if options.json else format_table(runs))
    return 0
