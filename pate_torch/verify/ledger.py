"""The checks against the owner's ledger: its chain read and hashed anew, its entries held against the statement."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pate_torch.verify.prices import Event, converted, divergence, dominating_mu, gaussian
from pate_torch.verify.release import ANSWERS, EQUAL, Check, Folder


def entries(path: Path) -> list[dict[str, Any]]:
    """Every entry in order, each with its hash.

    Raises:
        ValueError: There is no ledger, or an entry does not follow the one before it.
    """
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
            rows = database.execute("SELECT seq, hash, body FROM entries ORDER BY seq").fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"ledger={str(path)!r}: cannot be read ({error}). Name a ledger.sqlite.") from error
    before, found = "0" * 64, []
    for number, (seq, signature, body) in enumerate(rows, 1):
        entry = json.loads(body)
        if (
            seq != number
            or entry["seq"] != seq
            or entry["prev"] != before
            or hashlib.sha256(body.encode()).hexdigest() != signature
        ):
            raise ValueError(f"ledger={str(path)!r}: its chain breaks at entry {number}: it was edited.")
        before = signature
        found.append({**entry, "hash": signature})
    return found


def checks(folder: Folder, path: Path) -> Iterator[Check]:
    """The statement against the account as it stood when it was written."""
    s, account = folder.statement, folder.statement["composition"]
    chain = entries(path)
    heads = [entry["seq"] for entry in chain if entry["hash"] == s["verification"]["ledger_head"]]
    where = f"entry {heads[0]}" if heads else "not among them: another ledger, or newer entries were lost"
    yield Check("chain", bool(heads), f"{len(chain)} entries follow one another; the statement's head is {where}")
    mine = [entry for entry in chain[: heads[0] if heads else None] if entry["account"] == account["dataset"]]
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    terms: dict[str, Any] = {}
    for entry in mine:
        if entry["kind"] in ("open", "raise_cap"):
            terms |= entry["facts"]
        elif "reservation" in entry["facts"]:
            facts.setdefault(entry["facts"]["reservation"], {})[entry["kind"]] = entry["facts"]
    said = {"delta": s["guarantee"]["delta"], "adjacency": s["guarantee"]["adjacency"], "unit": s["guarantee"]["unit"],
            "budget_epsilon": account["account_cap"]}  # fmt: skip
    wrong = [key for key, value in said.items() if terms.get(key) != value]
    yield Check(
        "terms", not wrong, f"the account's are others: {', '.join(wrong)}" if wrong else "as the account was opened"
    )
    listed = {part["release_id"]: part for part in (*folder.parts, *s["other_releases"])}
    wrong = sorted(facts.keys() ^ listed.keys())
    for name in facts.keys() & listed.keys():
        reserve, commit = facts[name]["reserve"], facts[name].get("commit", {})
        secret = not reserve["insecure"] and "NOT PRIVATE" not in listed[name]["what"]
        wrong += [name] if s["private"] and secret and reserve["events"] != listed[name]["events"] else []
        wrong += (
            [f"{name} (what)"]
            if "what" in reserve and listed[name]["what"].partition(",")[0] != reserve["what"]
            else []
        )
        wrong += [f"{name} (seeded)"] if s["private"] and reserve["insecure"] and listed[name] in folder.parts else []
        if folder.release is not None and folder.release.get("release_id") == name:
            wrong += [f"{name} ({key})" for key in ANSWERS if key in commit and commit[key] != folder.release.get(key)]
    yield Check(
        "charges",
        not wrong,
        f"not as they were charged: {', '.join(wrong)}" if wrong else f"{len(listed)}, as they were charged",
    )
    spent = [e for one in facts.values() for e in one.get("commit", one["reserve"])["events"]]
    yield _kept(terms, spent)


def _kept(terms: dict[str, Any], spent: list[Event]) -> Check:
    """Whether the account's filter still held when the statement was written.

    Source: Smith & Thakurta 2022 (mu^2 adds up); Feldman & Zrnic 2021 (divergences of one order add up).
    """
    smooth = [e for e in spent if e["kind"] != "delta"]
    failed = math.fsum(e["count"] * e["delta"] for e in spent if e["kind"] == "delta")
    left = terms["delta"] - terms["delta_reserve"]
    if not smooth:
        epsilon = 0.0
    elif terms["filter"] == "gdp":
        epsilon = gaussian(math.sqrt(math.fsum(e["count"] * dominating_mu(e) ** 2 for e in smooth)), left)
    else:
        epsilon = converted(terms["order"], divergence(smooth, terms["order"]), left)
    held = epsilon <= terms["budget_epsilon"] * (1 + EQUAL) and failed <= terms["delta_reserve"] * (1 + EQUAL)
    return Check(
        "cap",
        held,
        f"epsilon {epsilon:.6g} of {terms['budget_epsilon']:.6g} is used, by the account's filter ({terms['filter']})",
    )
