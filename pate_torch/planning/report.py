"""The plan report: a table for the terminal, one object for programs."""

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
    """Everything a plan says.

    Attributes:
        dataset: Declared name of the data set.
        budget_epsilon: The cap that the questions must fit.
        budget_source: Where it comes from.
        delta: The account's delta.
        target_epsilon: The epsilon that ``sigma_for_target`` meets.
        choices: The rows of the table.
        notes: Whole lines.
    """

    dataset: str
    budget_epsilon: float
    budget_source: str
    delta: float
    target_epsilon: float
    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()

    @property
    def best_choice(self) -> Choice | None:
        """The recommended choice; None if none works."""
        return select_best(self.choices)

    def to_json(self) -> str:
        """The report as one JSON object; what is infinite is null."""
        best = None if self.best_choice is None else self.choices.index(self.best_choice)
        text = json.dumps({**dataclasses.asdict(self), "best": best})
        return json.dumps(json.loads(text, parse_constant=lambda _: None), allow_nan=False)


def format_report(report: PlanReport) -> str:
    """The whole plan report within 80 columns."""
    choices, best = report.choices, report.best_choice
    budget = f"budget epsilon {report.budget_epsilon:g} ({report.budget_source})"
    head = f"Plan for {report.dataset}: delta {format_delta(report.delta)}, {budget}. No private record was read"
    lines = [*_wrap(f"{head}; nothing is charged.", 2), "", *format_table(report), ""]
    verdicts = {choice.verdict for choice in choices} - {"cannot"}
    for name, meaning in VERDICTS.items():
        lines += _wrap(f"{name:>8}  {meaning}") if name in verdicts else []
    for problem in dict.fromkeys(choice.problem for choice in choices if choice.problem is not None):
        lines += _wrap(f"{'cannot':>8}  {problem}")
    if any(choice.lead is not None for choice in choices):
        lines += _wrap("    lead  votes by which the winner must lead every other class for a useful label")
    sigmas = {(c.mechanism, c.num_queries): c.sigma_for_target for c in choices if c.sigma_for_target}
    parts = [f"{format_noise_scale(sigma)} ({name}, {asked} questions)" for (name, asked), sigma in sigmas.items()]
    notes = [f"Least sigma for epsilon {report.target_epsilon:g}, in votes: {', '.join(parts)}."] if parts else []
    if verdicts and all(choice.max_queries == 0 for choice in choices if choice.problem is None):
        notes.append(f"The budget, epsilon {report.budget_epsilon:g}, does not hold a single question.")
    if best is None:
        notes += [*report.notes, "None of these choices works."]
        return "\n".join([*lines, "", *(line for note in notes for line in _wrap(note, 2))])
    routes = ", ".join(f"{route} {format_epsilon(value)}" for route, value in best.routes.items())
    rule = "whose labels need a lead of at most a quarter of the votes, or else of half of them"
    rule = rule if best.forecast is None else "of those within 2 % of the most right labels that the budget holds"
    notes += [*report.notes, f"* The least epsilon {rule}. By each route: {routes}."]
    command = textwrap.wrap(
        " ".join(["python train.py", *best.settings]), WIDTH - 4, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(
        [*lines, "", *(line for note in notes for line in _wrap(note, 2)), "  " + " \\\n    ".join(command)]
    )


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


def format_table(report: PlanReport) -> list[str]:
    """One line a choice, the best marked; of columns that do not fit into 80, those of one value leave first."""
    columns = {name: [name, *map(cell, report.choices)] for name, cell in _CELLS.items()}
    widths = {name: max(map(len, cells)) for name, cells in columns.items() if set(cells) != {name, "-"}}
    for name in sorted(
        ("screen", "thr", "asked", "mechanism", "answered", "shard"), key=lambda n: len(set(columns[n])) > 2
    ):
        if sum(widths.values()) + 2 * len(widths) - 1 > WIDTH:
            widths.pop(name, None)
    marks = [" ", *("*" if choice is report.best_choice else " " for choice in report.choices)]
    rows = zip(*(columns[name] for name in widths), strict=True)
    cells = ((cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True)) for row in rows)
    return [mark + "  ".join(row) for mark, row in zip(marks, cells, strict=True)]


def _wrap(line: str, indent: int = 10) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
