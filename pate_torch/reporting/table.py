"""The closing table of a run, for the person at the terminal: at most 80 columns, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pate_torch.accounting.shown import show_delta, show_epsilon
from pate_torch.reporting import statement
from pate_torch.reporting.charts import show_share
from pate_torch.reporting.released import ReleasedReport
from pate_torch.reporting.statement import NOT_PRIVATE, show_route

WIDTH = 80
PRIVATE_MARK = "private, for the owner"


@dataclass(frozen=True, kw_only=True)
class OwnerLine:
    """Something the owner may see and nobody else, ready to print."""

    name: str
    value: str


def show_closing(
    report: ReleasedReport,
    *,
    owner: Sequence[OwnerLine] = (),
    places: Mapping[str, Path] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print the table. ``owner``: shown beside the released figures, marked private; ``places``: name -> path."""
    console = Console(file=stream, width=None if stream is None else WIDTH)
    if not console.is_terminal or console.width > WIDTH:
        console = Console(file=stream, width=WIDTH)
    if not report.private:
        console.print(
            Panel(Text(statement.WHY_NOT), title=NOT_PRIVATE, border_style="bold red", box=_box(console), width=WIDTH)
        )
    console.print(_table(console, _rows(report), owner))
    for name, path in (places or {}).items():
        # Text, not markup, and never folded: a path is there to be copied.
        console.print(Text(f"  {name:<16}{path}"), soft_wrap=True)


def _box(console: Console) -> box.Box:
    return box.ROUNDED if console.is_terminal else box.ASCII


def _table(console: Console, rows: Sequence[tuple[str, str]], owner: Sequence[OwnerLine]) -> Table:
    table = Table(box=box.HORIZONTALS if console.is_terminal else box.ASCII, show_header=False, width=WIDTH)
    table.add_column(width=22, style="bold")
    table.add_column(ratio=1)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    if owner:
        table.add_section()
        table.add_row(Text("For the owner only"), Text("not in the release folder; not to be published"))
        for line in owner:
            table.add_row(Text(line.name), Text(f"{line.value}  ({PRIVATE_MARK})"), style="dim")
    return table


def _rows(report: ReleasedReport) -> list[tuple[str, str]]:
    """(name, value) of the released part."""
    rows = [("Data set", report.dataset), *_privacy(report)]
    if report.num_teachers:
        asked = f"{report.queries_answered} of {report.queries_asked} answered, by {report.num_teachers} teachers"
        rows.append(("Questions", asked))
    if report.census_rounds:
        turns = "" if report.census_rounds == 1 else f" in {report.census_rounds} rounds"
        said = "asked which way a public model should move" if report.slopes else "counted at the one nearest to it"
        rows.append(("Questions", f"{report.queries_asked}{turns}, every record {said}"))
    mechanism = f"{report.mechanism} ({report.parameters_words})" if report.parameters else report.mechanism
    rows.append(("Mechanism", mechanism))
    if report.student_share is not None:
        size = f", on {report.student_share.size} test points" if report.student_share.size else ""
        rows.append((f"Accuracy of {report.student}", f"{show_share(report.student_share)}{size}"))
        if report.below_majority is not None:
            rows.append(("", report.below_majority))
    if report.label_share is not None:
        rows.append(("Released labels", f"{show_share(report.label_share)} correct"))
    # What a benchmark lets out is the owner's own figures over again: they stand below, marked.
    rows += [(base.name, show_share(base.share)) for base in report.baselines if base.because != "benchmark"]
    if report.release_id:
        again = "use again: free" if report.private else NOT_PRIVATE
        rows.append(("Release", f"labels={report.release_id} ({again})"))
    if report.census_rounds:
        return rows
    if report.teachers_id and not report.teachers_kept:
        rows.append(("Votes", f"{report.teachers_id} (bring them again: charged)"))
    elif report.teachers_id:
        rows.append(("Teachers", f"teachers={report.teachers_id} (use again: charged)"))
    return rows


def _privacy(report: ReleasedReport) -> list[tuple[str, str]]:
    eps = report.claimed_epsilon
    if eps is None:
        return [("Privacy", f"{NOT_PRIVATE}: no guarantee")]
    rows = [
        ("What is private", f"{report.unit_words}, in all that this run released"),
        ("Guarantee", f"epsilon = {show_epsilon(eps)}, delta = {show_delta(report.delta)}"),
        ("  neighbours", f"{report.adjacency_words} ({report.adjacency})"),
        ("  unit", report.unit),
        ("  route", report.route_words),
    ]
    if len(report.parts) > 1:
        rows += [(f"  {p.what}", "none" if p.epsilon is None else f"epsilon = {show_epsilon(p.epsilon)}")
                 for p in report.parts]  # fmt: skip
    if report.epsilon_charged is None:
        rows.append(("All releases together", statement.NO_TOTAL))
    else:
        route = show_route(report.charged_accountant or report.accountant)
        free = "; this run added nothing" if report.free else ""
        same = "" if route == report.route_words else f", by {route}"
        many = f". {statement.ADAPTIVE}" if report.other_releases else ""
        rows.append(
            ("All releases together", f"epsilon = {show_epsilon(report.epsilon_charged)}, same terms{same}{free}{many}")
        )
    if report.budget_epsilon is not None:
        left, reserved = "", report.epsilon_charged
        if reserved is not None:
            share = min(1.0, reserved / report.budget_epsilon) if report.budget_epsilon else 1.0
            left = f" ({share:.0%} reserved, {show_left(report)} left of it)"
        rows.append(("Budget", f"epsilon = {show_epsilon(report.budget_epsilon)}, same terms{left}"))
    return rows


def show_left(report: ReleasedReport) -> str:
    """The cap less what the account's releases reserved, rounded down."""
    cap, reserved = (Decimal(repr(float(v or 0.0))) for v in (report.budget_epsilon, report.epsilon_charged))
    return str(max(Decimal(0), cap - reserved).quantize(Decimal("0.001"), rounding=ROUND_FLOOR))
