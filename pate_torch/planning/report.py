"""The plan report: a table for the terminal, one object for programs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pate_torch.accounting.formatting import format_delta, format_epsilon, format_noise_scale
from pate_torch.planning.choice import MAX_QUERIES, VERDICTS, Choice
from pate_torch.privacy.accounts import Account

WIDTH = 80


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanReport:
    """Everything a plan says.

    Attributes:
        target: The epsilon that ``sigma_for_target`` meets.
        sweep_keys: Keys that differ between rows.
        notes: Whole lines.
    """

    dataset: str
    budget: float
    budget_source: str
    target: float
    pilot: str
    choices: tuple[Choice, ...]
    best_choice: Choice | None
    account: Account | None = None
    ledger_path: Path | None = None
    sweep_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# ---- for the terminal ----------------------------------------------------------------------------------------------


def format_report(report: PlanReport) -> str:
    """The whole plan report within 80 columns."""
    first_choice = report.choices[0]
    queries = _format_common_value(report, "num_queries", "several numbers of")
    head = (
        f"Plan for {report.dataset}: {_format_common_value(report, 'mechanism', 'mechanisms')}, "
        f"{queries} questions, delta {format_delta(first_choice.delta)}, budget epsilon {report.budget:g} "
        f"({report.budget_source}). No private record was read; nothing is charged."
    )
    lines = [*_wrap(head), *_wrap(f"Pilot: {report.pilot}"), "", *format_table(report), ""]
    verdicts = {choice.verdict for choice in report.choices}
    lines += [f"{name:>8}  {meaning}" for name, meaning in VERDICTS.items() if name in verdicts and name != "cannot"]
    if any(choice.forecast is not None and choice.forecast.interval for choice in report.choices):
        lines.append(f"{'95 %':>8}  interval of the share right, on average over questions")
    for message, sizes in _group_problems(report).items():
        lines += _wrap(f"{'cannot':>8}  (K {', '.join(map(str, sizes))}) {message}", "          ")
    lines += ["", *_format_closing(report)]
    return "\n".join(lines)


def _group_problems(report: PlanReport) -> dict[str, list[int]]:
    """What is wrong -> the K it is wrong for; K itself is left out of the message."""
    sizes_by_message: dict[str, list[int]] = {}
    for choice in report.choices:
        if choice.problem is not None:
            message = choice.problem.replace(f"num_teachers={choice.num_teachers}:", "num_teachers", 1)
            sizes = sizes_by_message.setdefault(message, [])
            if choice.num_teachers not in sizes:
                sizes.append(choice.num_teachers)
    return sizes_by_message


def _format_common_value(report: PlanReport, field: str, fallback: str) -> str:
    values = {str(getattr(choice, field)) for choice in report.choices}
    return values.pop() if len(values) == 1 else fallback


def format_table(report: PlanReport) -> list[str]:
    """One line a choice, the best marked; columns that do not fit into 80 are left out, the least needed first."""
    columns = _format_columns(report)
    for column in ("shard", "thr", "screen", "fits", "answered"):
        if _compute_width(columns) <= WIDTH or column in report.sweep_keys:
            break
        columns.pop(column, None)
    names = list(columns)
    size = [max(map(len, (name, *columns[name]))) for name in names]
    marks = [" ", *("*" if choice is report.best_choice else " " for choice in report.choices)]
    rows = zip(*([name, *columns[name]] for name in names), strict=True)
    return [
        mark + "  ".join(cell.rjust(width) for cell, width in zip(row, size, strict=True))
        for mark, row in zip(marks, rows, strict=True)
    ]


def _compute_width(columns: dict[str, list[str]]) -> int:
    return 1 + sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items()) - 2


def _format_columns(report: PlanReport) -> dict[str, list[str]]:
    """Header -> cells."""
    formatters: dict[str, Callable[[Choice], str]] = {
        "mechanism": lambda c: c.mechanism,
        "K": lambda c: str(c.num_teachers or "-"),
        "shard": lambda c: "-" if not c.num_teachers else "?" if c.shard_size is None else str(c.shard_size),
        "sigma": lambda c: "-" if c.sigma is None else format_noise_scale(c.sigma),
        "screen": lambda c: _format_number(c.screen_sigma),
        "thr": lambda c: _format_number(c.threshold),
        "asked": lambda c: str(c.num_queries),
        "epsilon": lambda c: "-" if c.epsilon is None else format_epsilon(c.epsilon),
        "fits": lambda c: "-" if c.problem else "any" if c.max_queries >= MAX_QUERIES else str(c.max_queries),
        "answered": lambda c: "-" if c.forecast is None else f"{100 * c.forecast.answer_rate:.1f} %",
        "right": lambda c: (
            "-" if c.forecast is None or c.forecast.accuracy is None else f"{100 * c.forecast.accuracy:.1f} %"
        ),
        "95 %": lambda c: (
            "-" if c.forecast is None or c.forecast.interval is None else _format_range(c.forecast.interval)
        ),
        "verdict": lambda c: c.verdict,
    }
    columns = {name: [cell(choice) for choice in report.choices] for name, cell in formatters.items()}
    if len(set(columns["mechanism"])) == 1:
        del columns["mechanism"]
    if len(set(columns["asked"])) == 1:
        del columns["asked"]
    for name in ("sigma", "screen", "thr"):
        if set(columns[name]) == {"-"}:
            del columns[name]
    return columns


def _format_closing(report: PlanReport) -> list[str]:
    """What the table has no room for: routes, the calibrated noise, the account, the command to run."""
    lines = []
    example = report.best_choice or next((choice for choice in report.choices if choice.routes), None)
    if example is not None:
        routes = ", ".join(f"{route} {format_epsilon(value)}" for route, value in example.routes.items())
        name = (
            "the best" if report.best_choice else f"K {example.num_teachers}" if example.num_teachers else "the first"
        )
        lines += _wrap(f"Epsilon of {name} by each route, at delta {format_delta(example.delta)}: {routes}.")
    lines += _wrap(_format_min_sigmas(report)) + _wrap(_format_leads(report))
    possible_choices = [choice for choice in report.choices if choice.problem is None]
    if possible_choices and all(choice.max_queries == 0 for choice in possible_choices):
        lines += _wrap(f"The budget, epsilon {report.budget:g}, does not hold a single question.")
    if report.account is not None:
        lines += _wrap(_format_account(report))
    for note in report.notes:
        lines += _wrap(note)
    if report.best_choice is None:
        lines.append("None of these choices works.")
    else:
        lines += [
            *_wrap(_format_rule(report.best_choice)),
            *_format_command(report.best_choice.settings),
            *_wrap(_format_edge_notes(report)),
        ]
    return lines


def _format_rule(choice: Choice) -> str:
    """What the star stands for (``choice.select_best``)."""
    if not choice.num_teachers:
        return "* gradients: a larger share of their labels is right than of any teachers' for no more epsilon:"
    return "* of the choices within 2 % of the most right labels that the budget holds, the one of the least epsilon:"


def _format_edge_notes(report: PlanReport) -> str:
    """Where the star lies at an end of what was tried: what lies beyond may be better."""
    assert report.best_choice is not None
    notes = []
    for key in report.sweep_keys:
        tried_values = [getattr(choice, key.split(".")[-1], None) for choice in report.choices if choice.num_teachers]
        values = {value for value in tried_values if isinstance(value, int | float)}
        best_value = getattr(report.best_choice, key.split(".")[-1], None)
        if best_value is not None and len(values) > 1 and best_value in (min(values), max(values)):
            end, word = ("least", "less") if best_value == min(values) else ("largest", "more")
            notes.append(f"{key}={best_value:g} is the {end} that was tried; {word} may be better")
    return f"{'; '.join(notes)}." if notes and report.best_choice.num_teachers else ""


def _format_min_sigmas(report: PlanReport) -> str:
    """The calibrated sigma of every mechanism and number of questions that the table has."""
    sigmas = {(c.mechanism, c.num_queries): c.sigma_for_target for c in report.choices if c.sigma_for_target}
    has_several = len({mechanism for mechanism, _ in sigmas}) > 1
    parts = [
        f"{m + ' ' if has_several else ''}{format_noise_scale(sigma)} ({q} questions)"
        for (m, q), sigma in sigmas.items()
    ]
    return f"Least sigma for epsilon {report.target:g}, in votes: {', '.join(parts)}." if parts else ""


def _format_leads(report: PlanReport) -> str:
    """From which lead labels are worth their price, for every mechanism and noise that the table has."""
    leads = {(c.mechanism, c.sigma): c.break_even_lead for c in report.choices if c.break_even_lead is not None}
    has_several = len({mechanism for mechanism, _ in leads}) > 1
    parts = [
        f"{lead:.3g} ({m + ' ' if has_several else ''}sigma {format_noise_scale(s)})"
        for (m, s), lead in leads.items()
        if s
    ]
    return f"Nearer to the truth than to a guess from a lead of so many votes: {', '.join(parts)}." if parts else ""


def _format_account(report: PlanReport) -> str:
    account, choice = report.account, report.best_choice or report.choices[0]
    assert account is not None
    state = "closed" if account.is_closed else f"has spent {_format_charge(account)}"
    remaining_queries = (
        "any number" if (choice.remaining_queries or 0) >= MAX_QUERIES else str(choice.remaining_queries)
    )
    return (
        f"Account {account.name} in {report.ledger_path}: {state} of {account.budget_epsilon:g} at delta "
        f"{format_delta(account.delta)}; what is left holds {remaining_queries} questions at K {choice.num_teachers}"
        + (f", sigma {choice.sigma:g}." if choice.sigma is not None else ".")
    )


def _format_charge(account: Account) -> str:
    total = account.guarantee
    return "no total (NOT PRIVATE: seeded noise)" if total is None else f"epsilon {format_epsilon(total.epsilon)}"


def _format_command(settings: Iterable[str]) -> list[str]:
    lines, line = list[str](), "  python train.py"
    for setting in settings:
        if len(line) + 1 + len(setting) > WIDTH - 2:
            lines.append(line + " \\")
            line = "   "
        line += f" {setting}"
    return [*lines, line]


def _format_range(interval: tuple[float, float]) -> str:
    """In whole per cent, outwards."""
    return f"{math.floor(100 * interval[0]):g}-{math.ceil(100 * interval[1]):g}"


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _wrap(line: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


# ---- for programs --------------------------------------------------------------------------------------------------


def to_payload(report: PlanReport) -> dict[str, Any]:
    """The plan report as plain values; what is infinite is null."""
    account = report.account
    return {
        "dataset": report.dataset,
        "budget_epsilon": report.budget,
        "budget_from": report.budget_source,
        "target_epsilon": report.target,
        "pilot": report.pilot,
        "choices": [_to_row(choice) for choice in report.choices],
        "best": next((i for i, choice in enumerate(report.choices) if choice is report.best_choice), None),
        "account": account
        and {
            "name": account.name,
            "epsilon_charged": None if account.guarantee is None else account.guarantee.epsilon,
            "budget_epsilon": account.budget_epsilon,
            "delta": account.delta,
            "closed": account.is_closed,
        },
        "notes": list(report.notes),
    }


def _to_row(choice: Choice) -> dict[str, Any]:
    plain = asdict(choice) | {"epsilon": choice.epsilon, "route": choice.route, "verdict": choice.verdict}
    plain["works"] = choice.verdict == "ok"
    plain["routes"] = {route: _replace_infinity(value) for route, value in choice.routes.items()}
    plain["epsilon"] = _replace_infinity(choice.epsilon)
    plain["settings"] = list(choice.settings)
    return plain


def _replace_infinity(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
