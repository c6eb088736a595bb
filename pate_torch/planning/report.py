"""Plan report as a table for the terminal, and as a JSON object for programs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from pate_torch.accounting.formatting import format_delta, format_epsilon, format_noise_scale
from pate_torch.planning.choice import MAX_QUERIES, VERDICTS, Choice, select_best

WIDTH = 80


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanReport:
    """Result of ``pate plan``.

    Attributes:
        dataset: Declared name of the data set.
        budget_epsilon: Cap of the account, in epsilon.
        budget_source: Origin of the cap, a key or the account.
        delta: Delta of the account.
        choices: Rows of the table.
        notes: Sentences below the table.
    """

    dataset: str
    budget_epsilon: float
    budget_source: str
    delta: float
    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()

    @property
    def best_choice(self) -> Choice | None:
        """Recommended choice. None if no choice works."""
        return select_best(self.choices)

    def to_json(self) -> str:
        """Convert the report to one JSON object, with null for infinity."""
        best = None if self.best_choice is None else self.choices.index(self.best_choice)
        text = json.dumps({**dataclasses.asdict(self), "best": best})
        return json.dumps(json.loads(text, parse_constant=lambda _: None), allow_nan=False)


def format_report(report: PlanReport) -> str:
    """Format the report in 80 columns."""
    budget = f"budget epsilon {report.budget_epsilon:g} ({report.budget_source})"
    head = f"Plan for {report.dataset}: delta {format_delta(report.delta)}, {budget}."
    lines = [*_wrap(f"{head} No private record was read; nothing is charged.", 2), "", *format_table(report), ""]
    lines += _explain_verdicts(report.choices)
    notes, best = [*report.notes], report.best_choice
    if best is None:
        notes.append("None of these choices works.")
    elif best.forecast is None:
        notes.append(
            "* The smallest epsilon at which useful labels need a lead of at most a quarter (or half) of the votes."
        )
    else:
        notes.append("* The smallest epsilon with at least 98 % of the largest number of correct labels.")
    lines += ["", *(line for note in notes for line in _wrap(note, 2))]
    if best is not None:
        words = " ".join(["python train.py", *best.settings])
        command = textwrap.wrap(words, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        lines.append("  " + " \\\n    ".join(command))
    return "\n".join(lines)


def _explain_verdicts(choices: tuple[Choice, ...]) -> list[str]:
    verdicts = {choice.verdict for choice in choices} - {"cannot"}
    meanings = [(name, meaning) for name, meaning in VERDICTS.items() if name in verdicts]
    meanings += [("cannot", problem) for problem in dict.fromkeys(c.problem for c in choices) if problem is not None]
    if any(choice.lead is not None for choice in choices):
        meanings.append(("lead", "lead over every other class that a useful label needs, in votes"))
    return [line for name, meaning in meanings for line in _wrap(f"{name:>8}  {meaning}")]


def _format_number(value: float | None, pattern: str = "{:.4g}") -> str:
    return "-" if value is None else pattern.format(value)


_CELLS: dict[str, Callable[[Choice], str]] = {
    "mechanism": lambda c: c.mechanism,
    "K": lambda c: str(c.num_teachers or "-"),
    "shard": lambda c: _format_number(c.shard_size, "{}"),
    "sigma": lambda c: format_noise_scale(c.parameters["sigma"]) if "sigma" in c.parameters else "-",
    "screen": lambda c: _format_number(c.parameters.get("screen_sigma")),
    "thr": lambda c: _format_number(c.parameters.get("threshold")),
    "asked": lambda c: str(c.num_queries),
    "epsilon": lambda c: "-" if c.epsilon is None else format_epsilon(c.epsilon),
    "fits": lambda c: "-" if c.problem else "any" if c.max_queries >= MAX_QUERIES else str(c.max_queries),
    "lead": lambda c: _format_number(c.lead, "{:.3g}"),
    "answered": lambda c: "-" if c.forecast is None else f"{c.forecast.answer_rate:.1%}",
    "right": lambda c: "-" if c.forecast is None else _format_number(c.forecast.accuracy, "{:.1%}"),
    "verdict": lambda c: c.verdict,
}
_OPTIONAL_COLUMNS = ("screen", "thr", "asked", "mechanism", "answered", "shard")


def format_table(report: PlanReport) -> list[str]:
    """Format one line of 80 columns for each choice, and mark the best. Columns with one value are dropped first."""
    columns = {name: [name, *map(cell, report.choices)] for name, cell in _CELLS.items()}
    widths = {name: max(map(len, cells)) for name, cells in columns.items() if set(cells) != {name, "-"}}
    for name in sorted(_OPTIONAL_COLUMNS, key=lambda name: len(set(columns[name])) > 2):
        if sum(widths.values()) + 2 * len(widths) - 1 > WIDTH:
            widths.pop(name, None)
    marks = [" ", *("*" if choice is report.best_choice else " " for choice in report.choices)]
    rows = zip(*(columns[name] for name in widths), strict=True)
    cells = ((cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True)) for row in rows)
    return [mark + "  ".join(row) for mark, row in zip(marks, cells, strict=True)]


def _wrap(line: str, indent: int = 10) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
