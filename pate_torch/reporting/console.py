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

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.reporting import statement
from pate_torch.reporting.report import ReleaseReport
from pate_torch.reporting.statement import NOT_PRIVATE, Price

WIDTH = 80
PRIVATE_MARK = "private, for the owner"

Rows = Iterable[tuple[str, str]]


def show_closing(
    report: ReleaseReport,
    *,
    owner: Mapping[str, str] | None = None,
    places: Mapping[str, Path] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print the table.

    Args:
        report: What is released.
        owner: Shown beside it, marked private: name -> value.
        places: What lies where: name -> path.
        stream: Where to print; None is the terminal.
    """
    console = Console(file=stream, width=None if stream is None else WIDTH)
    if not console.is_terminal or console.width > WIDTH:
        console = Console(file=stream, width=WIDTH)
    if not report.private:
        frame = box.ROUNDED if console.is_terminal else box.ASCII
        console.print(
            Panel(Text(statement.WHY_NOT), title=NOT_PRIVATE, border_style="bold red", box=frame, width=WIDTH)
        )
    table = Table(box=box.HORIZONTALS if console.is_terminal else box.ASCII, show_header=False, width=WIDTH)
    table.add_column(width=22, style="bold")
    table.add_column(ratio=1)
    # Text, not markup: a name is shown as it stands.
    for rows in (_privacy(report), statement.run_facts(report).items(), _accuracies(report)):
        for name, value in rows:
            table.add_row(Text(name), Text(value))
    if owner:
        table.add_section()
        table.add_row(Text("For the owner only"), Text("not in the release folder; not to be published"))
        for name, value in owner.items():
            table.add_row(Text(name), Text(f"{value}  ({PRIVATE_MARK})"), style="dim")
    console.print(table)
    for name, path in (places or {}).items():
        console.print(Text(f"  {name:<16}{path}"), soft_wrap=True)  # never folded: a path is there to be copied


def _privacy(report: ReleaseReport) -> Rows:
    yield "Data set", report.dataset
    if report.epsilon is None:
        yield "Privacy", statement.headline(report)
        return
    guarantee, *others = statement.prices(report)
    yield "What is private", f"{report.unit_words}, in all that this run released"
    yield "Guarantee", f"epsilon = {format_epsilon(report.epsilon)}, delta = {format_delta(report.delta)}"
    yield "  neighbors", report.adjacency_words
    yield "  unit", report.unit
    yield "  route", guarantee.route
    for price in others:
        if price.epsilon is not None or price.note:
            yield price.name, _in_short(price, guarantee.route)


def _in_short(price: Price, route: str) -> str:
    """An epsilon on the guarantee's terms; its route where that is another."""
    if price.epsilon is None:
        return price.note
    other = f" ({price.route})" if price.route != route else ""
    return f"epsilon = {format_epsilon(price.epsilon)}, same terms{other}{f'. {price.note}' if price.note else ''}"


def _accuracies(report: ReleaseReport) -> Rows:
    """What a benchmark lets out is left out: it is the owner's own figures over again, which stand below, marked."""
    known = [base.name for base in report.baselines if base.because == "benchmark"]
    for row in report.accuracies:
        if row.name not in known:
            yield row.name, f"{row.share} correct: {row.of}"
    if report.below_majority is not None:
        yield "", report.below_majority
