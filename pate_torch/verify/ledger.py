"""The checks against the owner's ledger: its chain read and hashed anew, its entries held against the statement."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpmath import mp, mpf

from pate_torch.verify.prices import Event, converted, divergence, gaussian, loss
from pate_torch.verify.release import ANSWERS, EQUAL, Check, Folder, compared


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
    said = {key: s["guarantee"][key] for key in ("delta", "adjacency", "unit")} | {
        "budget_epsilon": account["account_cap"]
    }
    agreed = {key: terms.get(key) == value for key, value in said.items()}
    yield compared("terms", agreed, "the account's are others", "as the account was opened")
    listed = {part["release_id"]: part for part in (*folder.parts, *s["other_releases"])}
    holds = {name: name in facts and name in listed for name in facts.keys() | listed.keys()}
    for name in facts.keys() & listed.keys():
        reserve, commit, part = facts[name]["reserve"], facts[name].get("commit", {}), listed[name]
        secret = not reserve["insecure"] and "NOT PRIVATE" not in part["what"]
        holds[f"{name} (events)"] = not (s["private"] and secret) or reserve["events"] == part["events"]
        holds[f"{name} (what)"] = part["what"].partition(",")[0] == reserve["what"]
        holds[f"{name} (seeded)"] = not (s["private"] and reserve["insecure"] and part in folder.parts)
        if folder.release is not None and folder.release.get("release_id") == name:
            holds |= {f"{name} ({key})": commit.get(key) == folder.release.get(key) for key in ANSWERS}
            holds[f"{name} (incurred)"] = not s["private"] or commit.get("events") == folder.release.get("incurred")
    yield compared("charges", holds, "not as they were charged", f"{len(listed)}, as they were charged")
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


def dominating_mu(event: Event) -> float:
    """The mu of the Gaussian that dominates the event. Source: Dong, Roth & Su 2022, where the two curves touch."""
    if event["kind"] == "gaussian":
        return float(event["mu"])
    with mp.workdps(50):
        return float(2 * mp.sqrt(2) * mp.erfinv(mp.tanh(mpf(loss(event)) / 2)))
