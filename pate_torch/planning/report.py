"""The plan report: a table for the terminal, one object for programs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pate_torch.accounting.formatting import format_delta, format_epsilon, format_noise_scale
from pate_torch.ledger import Account
from pate_torch.planning.choice import MOST_QUERIES, VERDICTS, Choice

WIDTH = 80


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanReport:
    """Everything a plan says.

    Attributes:
        target: The epsilon that ``sigma_for_target`` meets.
        swept: Keys that differ between rows.
        notes: Whole lines.
    """

    dataset: str
    budget: float
    budget_from: str
    target: float
    pilot: str
    choices: tuple[Choice, ...]
    best: Choice | None
    account: Account | None = None
    ledger: Path | None = None
    swept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# ---- for the terminal ----------------------------------------------------------------------------------------------


def text(sheet: PlanReport) -> str:
    """The whole plan report within 80 columns."""
    first = sheet.choices[0]
    head = (
        f"Plan for {sheet.dataset}: {_several(sheet, 'mechanism', 'mechanisms')}, "
        f"{_several(sheet, 'num_queries', 'several numbers of')} questions, delta {format_delta(first.delta)}, "
        f"budget epsilon {sheet.budget:g} ({sheet.budget_from}). No private record was read; nothing is charged."
    )
    lines = [*_wrap(head), *_wrap(f"Pilot: {sheet.pilot}"), "", *table(sheet), ""]
    seen = {choice.verdict for choice in sheet.choices}
    lines += [f"{name:>8}  {meaning}" for name, meaning in VERDICTS.items() if name in seen and name != "cannot"]
    if any(choice.outcome is not None and choice.outcome.interval for choice in sheet.choices):
        lines.append(f"{'95 %':>8}  interval of the share right, on average over questions")
    for message, sizes in _problems(sheet).items():
        lines += _wrap(f"{'cannot':>8}  (K {', '.join(map(str, sizes))}) {message}", "          ")
    lines += ["", *_closing(sheet)]
    return "\n".join(lines)


def _problems(sheet: PlanReport) -> dict[str, list[int]]:
    """What is wrong -> the K it is wrong for; K itself is left out of the message."""
    found: dict[str, list[int]] = {}
    for choice in sheet.choices:
        if choice.problem is not None:
            message = choice.problem.replace(f"num_teachers={choice.num_teachers}:", "num_teachers", 1)
            sizes = found.setdefault(message, [])
            if choice.num_teachers not in sizes:
                sizes.append(choice.num_teachers)
    return found


def _several(sheet: PlanReport, field: str, otherwise: str) -> str:
    values = {str(getattr(choice, field)) for choice in sheet.choices}
    return values.pop() if len(values) == 1 else otherwise


def table(sheet: PlanReport) -> list[str]:
    """One line a choice, the best marked; columns that do not fit into 80 are left out, the least needed first."""
    columns = _columns(sheet)
    for spare in ("shard", "thr", "screen", "fits", "answered"):
        if _width(columns) <= WIDTH or spare in sheet.swept:
            break
        columns.pop(spare, None)
    names = list(columns)
    size = [max(map(len, (name, *columns[name]))) for name in names]
    marks = [" ", *("*" if choice is sheet.best else " " for choice in sheet.choices)]
    rows = zip(*([name, *columns[name]] for name in names), strict=True)
    return [
        mark + "  ".join(cell.rjust(width) for cell, width in zip(row, size, strict=True))
        for mark, row in zip(marks, rows, strict=True)
    ]


def _width(columns: dict[str, list[str]]) -> int:
    return 1 + sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items()) - 2


def _columns(sheet: PlanReport) -> dict[str, list[str]]:
    """Header -> cells."""
    shown: dict[str, Callable[[Choice], str]] = {
        "mechanism": lambda c: c.mechanism,
        "K": lambda c: str(c.num_teachers or "-"),
        "shard": lambda c: "-" if not c.num_teachers else "?" if c.shard is None else str(c.shard),
        "sigma": lambda c: "-" if c.sigma is None else format_noise_scale(c.sigma),
        "screen": lambda c: _number(c.screen_sigma),
        "thr": lambda c: _number(c.threshold),
        "asked": lambda c: str(c.num_queries),
        "epsilon": lambda c: "-" if c.epsilon is None else format_epsilon(c.epsilon),
        "fits": lambda c: "-" if c.problem else "any" if c.fits >= MOST_QUERIES else str(c.fits),
        "answered": lambda c: "-" if c.outcome is None else f"{100 * c.outcome.answered:.1f} %",
        "right": lambda c: "-" if c.outcome is None or c.outcome.right is None else f"{100 * c.outcome.right:.1f} %",
        "95 %": lambda c: "-" if c.outcome is None or c.outcome.interval is None else _range(c.outcome.interval),
        "verdict": lambda c: c.verdict,
    }
    columns = {name: [cell(choice) for choice in sheet.choices] for name, cell in shown.items()}
    if len(set(columns["mechanism"])) == 1:
        del columns["mechanism"]
    if len(set(columns["asked"])) == 1:
        del columns["asked"]
    for name in ("sigma", "screen", "thr"):
        if set(columns[name]) == {"-"}:
            del columns[name]
    return columns


def _closing(sheet: PlanReport) -> list[str]:
    """What the table has no room for: routes, the calibrated noise, the account, the command to run."""
    lines = []
    shown = sheet.best or next((choice for choice in sheet.choices if choice.routes), None)
    if shown is not None:
        routes = ", ".join(f"{route} {format_epsilon(value)}" for route, value in shown.routes.items())
        name = "the best" if sheet.best else f"K {shown.num_teachers}" if shown.num_teachers else "the first"
        lines += _wrap(f"Epsilon of {name} by each route, at delta {format_delta(shown.delta)}: {routes}.")
    lines += _wrap(_least_noise(sheet)) + _wrap(_leads(sheet))
    possible = [choice for choice in sheet.choices if choice.problem is None]
    if possible and all(choice.fits == 0 for choice in possible):
        lines += _wrap(f"The budget, epsilon {sheet.budget:g}, does not hold a single question.")
    if sheet.account is not None:
        lines += _wrap(_account(sheet))
    for note in sheet.notes:
        lines += _wrap(note)
    if sheet.best is None:
        lines.append("None of these choices works.")
    else:
        lines += [*_wrap(_rule(sheet.best)), *_command(sheet.best.settings), *_wrap(_edge(sheet))]
    return lines


def _rule(best: Choice) -> str:
    """What the star stands for (``choice.best``)."""
    if not best.num_teachers:
        return "* gradients: a larger share of their labels is right than of any teachers' for no more epsilon:"
    return "* of the choices within 2 % of the most right labels that the budget holds, the one of the least epsilon:"


def _edge(sheet: PlanReport) -> str:
    """Where the star lies at an end of what was tried: what lies beyond may be better."""
    assert sheet.best is not None
    found = []
    for key in sheet.swept:
        tried = [getattr(choice, key.split(".")[-1], None) for choice in sheet.choices if choice.num_teachers]
        values = {value for value in tried if isinstance(value, int | float)}
        chosen = getattr(sheet.best, key.split(".")[-1], None)
        if chosen is not None and len(values) > 1 and chosen in (min(values), max(values)):
            end, word = ("least", "less") if chosen == min(values) else ("largest", "more")
            found.append(f"{key}={chosen:g} is the {end} that was tried; {word} may be better")
    return f"{'; '.join(found)}." if found and sheet.best.num_teachers else ""


def _least_noise(sheet: PlanReport) -> str:
    """The calibrated sigma of every mechanism and number of questions that the table has."""
    found = {(c.mechanism, c.num_queries): c.sigma_for_target for c in sheet.choices if c.sigma_for_target}
    several = len({mechanism for mechanism, _ in found}) > 1
    parts = [
        f"{m + ' ' if several else ''}{format_noise_scale(sigma)} ({q} questions)" for (m, q), sigma in found.items()
    ]
    return f"Least sigma for epsilon {sheet.target:g}, in votes: {', '.join(parts)}." if parts else ""


def _leads(sheet: PlanReport) -> str:
    """From which lead labels are worth their price, for every mechanism and noise that the table has."""
    found = {(c.mechanism, c.sigma): c.break_even for c in sheet.choices if c.break_even is not None}
    several = len({mechanism for mechanism, _ in found}) > 1
    parts = [
        f"{lead:.3g} ({m + ' ' if several else ''}sigma {format_noise_scale(s)})" for (m, s), lead in found.items() if s
    ]
    return f"Nearer to the truth than to a guess from a lead of so many votes: {', '.join(parts)}." if parts else ""


def _account(sheet: PlanReport) -> str:
    account, shown = sheet.account, sheet.best or sheet.choices[0]
    assert account is not None
    state = "closed" if account.is_closed else f"has spent {_charged(account)}"
    left = "any number" if (shown.left or 0) >= MOST_QUERIES else str(shown.left)
    return (
        f"Account {account.name} in {sheet.ledger}: {state} of {account.budget_epsilon:g} at delta "
        f"{format_delta(account.delta)}; what is left holds {left} questions at K {shown.num_teachers}"
        + (f", sigma {shown.sigma:g}." if shown.sigma is not None else ".")
    )


def _charged(account: Account) -> str:
    total = account.guarantee
    return "no total (NOT PRIVATE: seeded noise)" if total is None else f"epsilon {format_epsilon(total.epsilon)}"


def _command(settings: Iterable[str]) -> list[str]:
    lines, line = list[str](), "  python train.py"
    for setting in settings:
        if len(line) + 1 + len(setting) > WIDTH - 2:
            lines.append(line + " \\")
            line = "   "
        line += f" {setting}"
    return [*lines, line]


def _range(interval: tuple[float, float]) -> str:
    """In whole per cent, outwards."""
    return f"{math.floor(100 * interval[0]):g}-{math.ceil(100 * interval[1]):g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _wrap(line: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


# ---- for programs --------------------------------------------------------------------------------------------------


def payload(sheet: PlanReport) -> dict[str, Any]:
    """The plan report as plain values; what is infinite is null."""
    account = sheet.account
    return {
        "dataset": sheet.dataset,
        "budget_epsilon": sheet.budget,
        "budget_from": sheet.budget_from,
        "target_epsilon": sheet.target,
        "pilot": sheet.pilot,
        "choices": [_row(choice) for choice in sheet.choices],
        "best": next((i for i, choice in enumerate(sheet.choices) if choice is sheet.best), None),
        "account": account
        and {
            "name": account.name,
            "epsilon_charged": None if account.guarantee is None else account.guarantee.epsilon,
            "budget_epsilon": account.budget_epsilon,
            "delta": account.delta,
            "closed": account.is_closed,
        },
        "notes": list(sheet.notes),
    }


def _row(choice: Choice) -> dict[str, Any]:
    plain = asdict(choice) | {"epsilon": choice.epsilon, "route": choice.route, "verdict": choice.verdict}
    plain["works"] = choice.verdict == "ok"
    plain["routes"] = {route: _finite(value) for route, value in choice.routes.items()}
    plain["epsilon"] = _finite(choice.epsilon)
    plain["settings"] = list(choice.settings)
    return plain


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
