"""Show, check, export, copy and move the privacy ledger, which is private; raise a cap, or close an account."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pate_torch.accounting.accountant import DELTA_ONLY_ROUTE, Guarantee
from pate_torch.api.messages import reword_errors
from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.ledger import Ledger, get_default_path, open_ledger

EXIT_OK, EXIT_PROBLEM = 0, 1  # argparse exits with 2 for a wrong command line
_LINE_WIDTH = 80


def main(options: argparse.Namespace) -> int:
    """Run one subcommand. Return 0 if it succeeds, and 1 if it is refused or the ledger is damaged."""
    try:
        path = options.path or (get_default_path() if options.command == "move" else None)
        open_it = partial(Ledger, path) if path else open_ledger
        with open_it(create=False, readonly=options.command in ("verify", "show", "export", "backup")) as ledger:
            result, text = _COMMANDS[options.command](ledger, options)
    except (ValueError, OSError) as error:
        if options.json:
            print(json.dumps({"ok": False, "problem": str(error)}))
        else:
            print(error, file=sys.stderr)
        return EXIT_PROBLEM
    print(json.dumps({"ok": True, **result}, sort_keys=True) if options.json else text)
    return EXIT_OK


CommandResult = tuple[dict[str, Any], str]


def _verify(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    accounts = ledger.verify()
    if options.contains and not ledger.contains_head(options.contains):
        problem = "is not in this ledger: entries of the ledger were lost, or the hash is from another ledger"
        raise ValueError(f"contains={options.contains!r}: {problem}. Restore a backup that contains the hash.")
    entries, head = len(ledger.read_entries()), ledger.get_head()
    text = f"{ledger.place}: {entries} entries and {len(accounts)} accounts are consistent\nhead {head}"
    return {"entries": entries, "head": head, "accounts": [_describe_account(a) for a in accounts]}, text


def _show(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    accounts = ledger.list_accounts() if options.account is None else (ledger.get_account(options.account),)
    lines = ["PRIVATE: for the owner of the data.", f"head {ledger.get_head()}", "", *_format_table(accounts)]
    result: dict[str, Any] = {"head": ledger.get_head(), "accounts": [_describe_account(a) for a in accounts]}
    if options.account is not None:
        entries = ledger.read_entries(options.account)
        result["entries"] = [asdict(entry) for entry in entries]
        lines += ["", *(_format_entry(e.seq, e.time, e.kind, e.facts) for e in entries)]
    return result, "\n".join(lines)


def _export(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    rows = [asdict(entry) for entry in ledger.read_entries()]
    text = "\n".join(json.dumps(row, sort_keys=True) for row in rows)
    if options.output is None:
        return {"entries": rows}, text
    with os.fdopen(os.open(options.output, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text + "\n")
    return {"written": str(options.output), "count": len(rows)}, f"{len(rows)} entries written to {options.output}"


def _backup(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    ledger.verify()
    ledger.backup(options.destination)
    text = f"{ledger.place} was copied to {options.destination}"
    return {"backup": str(options.destination), "head": ledger.get_head()}, text


def _move(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    with reword_errors({"^PATE_LEDGER(?=: )": "url"}):
        place = ledger.move(options.url)
    text = f"{ledger.place} was moved to {place}, and both were verified. Set PATE_LEDGER on every machine."
    return {"place": place}, text


def _raise_cap(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    with reword_errors({"^budget_epsilon(?==)": "epsilon"}):
        account = ledger.raise_cap(options.account, options.epsilon, reason=options.reason)
    return _describe_account(account), f"{account.name}: the cap is now epsilon {account.budget_epsilon:g}"


def _close(ledger: Ledger, options: argparse.Namespace) -> CommandResult:
    account = ledger.close_account(options.account, options.reason)
    return _describe_account(account), f"{account.name}: closed at epsilon {_format_guarantee(account.guarantee)}"


_COMMANDS = {
    "verify": _verify,
    "show": _show,
    "export": _export,
    "backup": _backup,
    "move": _move,
    "raise-cap": _raise_cap,
    "close": _close,
}


def _describe_account(account: Account) -> dict[str, Any]:
    return {
        "account": account.name,
        "epsilon_charged": account.guarantee and account.guarantee.epsilon,
        "epsilon_charged_ex_post": account.ex_post_guarantee and account.ex_post_guarantee.epsilon,
        "epsilon_against_cap": account.filter.to_epsilon(account.total_cost),
        **{key: getattr(account, key) for key in ("noise", "budget_epsilon", "delta", "adjacency", "unit")},
        **{"filter": account.filter.kind, "order": account.filter.order},
        "delta_reserve": account.filter.delta_reserve,
        "releases": account.num_releases,
        "uncommitted": account.num_open,
        "closed": account.is_closed,
        "private": account.is_private,
    }


def _format_table(accounts: Sequence[Account]) -> list[str]:
    """Format two lines of at most 80 columns for each account."""
    row = "{:<16} {:>9} {:>9} {:>9} {:>8} {:<6} {:>8} {:>5}"
    lines = [row.format("account", "epsilon", "ex post", "cap", "delta", "filter", "releases", "open")]
    for account in accounts:
        epsilons = map(_format_guarantee, (account.guarantee, account.ex_post_guarantee))
        terms = (f"{account.budget_epsilon:g}", format_delta(account.delta), account.filter.kind)
        counts = (account.num_releases, account.num_open)
        lines.append(row.format(_truncate(account.name, 16), *epsilons, *terms, *counts))
        notes = [f"{account.adjacency}, unit {account.unit}"]
        if used_epsilon := account.filter.to_epsilon(account.total_cost):
            notes += [f"{format_epsilon(used_epsilon)} counts against the cap"]
        notes += ["closed"] if account.is_closed else []
        if account.guarantee is not None and account.guarantee.route == DELTA_ONLY_ROUTE:
            notes += [f"only delta is spent: {account.total_cost.delta:.3g}"]
        notes += [] if account.is_private else ["NOT PRIVATE (seeded noise): no total"]
        lines.append(_truncate("  " + "; ".join(notes), _LINE_WIDTH))
    return lines if accounts else ["no accounts"]


def _format_guarantee(guarantee: Guarantee | None) -> str:
    return "none" if guarantee is None else format_epsilon(guarantee.epsilon)


def _format_entry(seq: int, time: str, kind: str, facts: dict[str, Any]) -> str:
    words = [str(facts[key]) for key in ("what", "mechanism", "run", "release", "reason") if facts.get(key)]
    if kind in ("open", "raise_cap"):
        words.insert(0, f"cap {facts['budget_epsilon']:g}")
    words += ["NOT PRIVATE"] if facts.get("insecure") else []
    return _truncate(f"{seq:>5} {time[:19]} {kind:<9} {'  '.join(words)}".rstrip(), _LINE_WIDTH)


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
