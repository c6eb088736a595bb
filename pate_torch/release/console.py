"""The closing table of a run, for the person at the terminal: at most 80 columns, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pate_torch.accounting.formatting import format_epsilon
from pate_torch.release import statement
from pate_torch.release.report import ReleaseReport
from pate_torch.release.statement import NOT_PRIVATE

WIDTH = 80
PRIVATE_NOTE = "private, for the owner"

Rows = Iterable[tuple[str, str]]


def print_summary(
    report: ReleaseReport,
    *,
    owner: Mapping[str, str] | None = None,
    paths: Mapping[str, Path] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print the table.

    Args:
        report: What is released.
        owner: Shown beside it, marked private: name -> value.
        paths: What lies where: name -> path.
        stream: Where to print; None is the terminal.
    """
    console = Console(file=stream, width=None if stream is None else WIDTH)
    if not console.is_terminal or console.width > WIDTH:
        console = Console(file=stream, width=WIDTH)
    if not report.claim.private:
        frame = box.ROUNDED if console.is_terminal else box.ASCII
        console.print(
            Panel(
                Text(statement.NOT_PRIVATE_REASON), title=NOT_PRIVATE, border_style="bold red", box=frame, width=WIDTH
            )
        )
    table = Table(box=box.HORIZONTALS if console.is_terminal else box.ASCII, show_header=False, width=WIDTH)
    table.add_column(width=22, style="bold")
    table.add_column(ratio=1)
    # Text, not markup: a name is shown as it stands.
    for rows in (_list_privacy_rows(report), statement.list_run_facts(report).items(), _list_accuracy_rows(report)):
        for name, value in rows:
            table.add_row(Text(name), Text(value))
    if owner:
        table.add_section()
        table.add_row(Text("For the owner only"), Text("not in the release folder; not to be published"))
        for name, value in owner.items():
            table.add_row(Text(name), Text(f"{value}  ({PRIVATE_NOTE})"), style="dim")
    console.print(table)
    for name, path in (paths or {}).items():
        console.print(Text(f"  {name:<16}{path}"), soft_wrap=True)  # never folded: a path is there to be copied


def _list_privacy_rows(report: ReleaseReport) -> Rows:
    yield "Data set", report.record.dataset
    if report.claim.epsilon is None:
        yield "Privacy", statement.format_headline(report)
        return
    guarantee, *other_prices = statement.list_epsilon_lines(report)
    yield "What is private", f"{report.claim.unit_words}, in all that this run released"
    delta, *other_terms = statement.list_terms(report).items()
    yield "Guarantee", f"epsilon = {format_epsilon(report.claim.epsilon)}, delta = {delta[1]}"
    yield from ((f"  {name}", value) for name, value in other_terms)
    for price in other_prices:
        route_note = f" ({price.route})" if price.route != guarantee.route else ""
        terms = "" if price.epsilon is None else f"epsilon = {format_epsilon(price.epsilon)}, same terms{route_note}"
        if terms or price.note:
            yield price.name, ". ".join(filter(None, (terms, price.note)))


def _list_accuracy_rows(report: ReleaseReport) -> Rows:
    """What a benchmark lets out is left out: it is the owner's own figures over again, which stand below, marked."""
    own_names = [row.name for row in report.evaluation.baselines]
    for name, accuracy, description in statement.make_accuracy_table(report).rows:
        if name not in own_names:
            yield name, f"{accuracy} correct: {description}"
    if report.majority_warning is not None:
        yield "", report.majority_warning
