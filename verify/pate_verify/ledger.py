"""Checks of a release against the owner's ledger: hash chain, account terms, charges and cap."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pate_verify import costs
from pate_verify.events import Event
from pate_verify.release import ANSWER_FILES, RELATIVE_TOLERANCE, TABLE_FILES, Check, ReleaseFolder, make_check


def read_entries(ledger: Path | str) -> list[dict[str, Any]]:
    """Read all entries of a file or of the database at a URL, which may hold a password and so is not shown.

    Raises:
        ValueError: There is no ledger, or the hash chain is broken.
    """
    name = f"ledger={str(ledger)!r}" if isinstance(ledger, Path) else "PATE_LEDGER"
    if isinstance(ledger, Path):
        try:
            with sqlite3.connect(f"{ledger.resolve().as_uri()}?mode=ro", uri=True) as database:
                rows = database.execute("SELECT seq, hash, body FROM entries ORDER BY seq").fetchall()
        except sqlite3.Error as error:
            raise ValueError(f"{name}: cannot be read ({error}). Name a ledger.sqlite.") from error
    else:
        try:
            sqlalchemy = importlib.import_module("sqlalchemy")  # only the extra postgres installs it
            settings = {"client_encoding": "utf8", "connect_timeout": 10}
            engine = sqlalchemy.create_engine(ledger, poolclass=sqlalchemy.NullPool, connect_args=settings)
            with engine.connect() as database:
                rows = database.exec_driver_sql("SELECT seq, hash, body FROM pate_ledger.entries ORDER BY seq").all()
        except ImportError:
            raise
        except Exception as error:  # of any driver, whose message may show the password
            raise ValueError(f"{name}: cannot be read ({type(error).__name__}). Try pate ledger verify.") from None
    previous_hash, chain = "0" * 64, []
    for number, (seq, digest, body) in enumerate(rows, 1):
        entry = json.loads(body)
        is_next = (seq, entry["seq"], entry["prev"]) == (number, number, previous_hash)
        if not is_next or hashlib.sha256(body.encode()).hexdigest() != digest:
            raise ValueError(f"{name}: was edited, because its chain breaks at entry {number}.")
        previous_hash = digest
        chain.append({**entry, "hash": digest})
    return chain


def run_checks(folder: ReleaseFolder, place: Path | str) -> Iterator[Check]:
    """Compare the statement with the ledger's entries up to the head in the statement."""
    statement, account = folder.statement, folder.statement["composition"]
    chain = read_entries(place)
    heads = [entry["seq"] for entry in chain if entry["hash"] == statement["verification"]["ledger_head"]]
    position = f"entry {heads[0]}" if heads else "not in this ledger: this is another ledger, or entries are missing"
    yield Check("chain", bool(heads), f"{len(chain)} entries follow one another; the statement's head is {position}")
    own_entries = [entry for entry in chain[: heads[0] if heads else None] if entry["account"] == account["dataset"]]
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    terms: dict[str, Any] = {}
    for entry in own_entries:
        if entry["kind"] in ("open", "raise_cap"):
            terms |= entry["facts"]
        elif "reservation" in entry["facts"]:
            facts.setdefault(entry["facts"]["reservation"], {})[entry["kind"]] = entry["facts"]
    stated_terms = {key: statement["guarantee"][key] for key in ("delta", "adjacency", "unit")}
    stated_terms["budget_epsilon"] = account["account_cap"]
    is_equal = {key: terms.get(key) == value for key, value in stated_terms.items()}
    yield make_check("terms", is_equal, "differ from the terms of the account", "equal the terms of the account")
    part_by_id = {part["release_id"]: part for part in (*folder.parts, *statement["other_releases"])}
    results = {name: name in facts and name in part_by_id for name in facts.keys() | part_by_id.keys()}
    for name in facts.keys() & part_by_id.keys():
        reserve, commit, part = facts[name]["reserve"], facts[name].get("commit", {}), part_by_id[name]
        is_secret = not reserve["insecure"] and "NOT PRIVATE" not in part["what"]
        results[f"{name} (events)"] = not (statement["private"] and is_secret) or reserve["events"] == part["events"]
        results[f"{name} (what)"] = part["what"].partition(",")[0] == reserve["what"]
        results[f"{name} (seeded)"] = not (statement["private"] and reserve["insecure"] and part in folder.parts)
        if folder.is_table and part in folder.parts:
            digests = {k: hashlib.sha256((folder.path / f).read_bytes()).hexdigest() for k, f in TABLE_FILES.items()}
            results |= {f"{name} ({key})": commit.get(key) == digest for key, digest in digests.items()}
        if folder.release is not None and folder.release.get("release_id") == name:
            results |= {f"{name} ({key})": commit.get(key) == folder.release.get(key) for key in ANSWER_FILES}
            is_equal_cost = commit.get("events") == folder.release.get("incurred")
            results[f"{name} (incurred)"] = not statement["private"] or is_equal_cost
    if test := statement["utility"]["private_test"]:
        digest = hashlib.sha256((folder.path / "private_test.json").read_bytes()).hexdigest()
        results["private_test.json"] = facts.get(test["id"], {}).get("commit", {}).get("private_test_sha256") == digest
        tests = [name for name, fact in facts.items() if fact["reserve"]["what"].startswith("test of")]
        results["number of the test"] = tests[test["number"] - 1 : test["number"]] == [test["id"]]
    yield make_check("charges", results, "differ from the ledger", f"{len(part_by_id)}, all equal in the ledger")
    spent_events = [e for charge in facts.values() for e in charge.get("commit", charge["reserve"])["events"]]
    if terms:
        yield _check_cap(terms, spent_events)
    else:
        yield Check("cap", False, f"this ledger has no account {account['dataset']!r}")


def _check_cap(terms: dict[str, Any], events: list[Event]) -> Check:
    """Check that the account's privacy filter keeps the cap for these events.

    Source: Smith & Thakurta 2022 (mu^2 is additive); Feldman & Zrnic 2021 (divergences of one order are additive).
    """
    smooth_events, tolerance = [e for e in events if e["kind"] != "delta"], 1 + RELATIVE_TOLERANCE
    failing_events = events if terms["filter"] == "gdp" else [e for e in events if e["kind"] == "delta"]
    failure_delta = costs.sum_failures(failing_events)
    delta, cap, epsilon = terms["delta"] - terms["delta_reserve"], terms["budget_epsilon"], 0.0
    if smooth_events and terms["filter"] == "gdp":
        mu2 = math.fsum(e["count"] * costs.compute_dominating_mu(e) ** 2 for e in smooth_events)
        epsilon = costs.compute_gaussian_epsilon(math.sqrt(mu2), delta)
    elif smooth_events:
        divergence = costs.compute_divergence(smooth_events, terms["order"])
        epsilon = costs.convert_divergence(terms["order"], divergence, delta)
    is_within_cap = epsilon <= cap * tolerance and failure_delta <= terms["delta_reserve"] * tolerance
    message = f"epsilon {epsilon:.6g} of {cap:.6g} is used, by the account's filter ({terms['filter']})"
    return Check("cap", is_within_cap, message)
