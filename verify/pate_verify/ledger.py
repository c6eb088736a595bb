"""Checks of a release against the owner's ledger: hash chain, account terms, charges and cap."""

from __future__ import annotations

import hashlib
import importlib
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pate_verify import costs
from pate_verify.events import Event
from pate_verify.release import (
    ANSWER_FILES,
    CHOICE,
    RELATIVE_TOLERANCE,
    STUDENT_FILE,
    TABLE_FILES,
    TEST,
    Check,
    ReleaseFolder,
    check_spent,
    make_check,
    parse_json,
    run_check,
)

SEEDED_SUFFIX, INTERRUPTED_SUFFIX = ", NOT PRIVATE: seeded noise", ", interrupted: charged at its worst case"
"""What a statement adds to the purpose of a reservation."""


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
        entry = parse_json(body)
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
    last_seq = heads[0] if heads else len(chain)
    own_entries = [entry for entry in chain if entry["account"] == account["dataset"]]
    past_entries = [entry for entry in own_entries if entry["seq"] <= last_seq]
    facts, terms, charges = _collect_charges(past_entries), dict[str, Any](), _collect_charges(own_entries)
    for entry in past_entries:
        if entry["kind"] in ("open", "raise_cap"):
            terms |= entry["facts"]
    stated_terms = {key: statement["guarantee"][key] for key in ("delta", "adjacency", "unit")}
    stated_terms |= {"budget_epsilon": account["account_cap"], "noise": statement["mechanism"]["noise"]}
    is_equal = {key: terms.get(key) == value for key, value in stated_terms.items()}
    yield make_check("terms", is_equal, "differ from the terms of the account", "equal the terms of the account")
    part_by_id = {part["release_id"]: part for part in (*folder.parts, *statement["other_releases"])}
    results = {name: name in facts and name in part_by_id for name in facts.keys() | part_by_id.keys()}
    for name in facts.keys() & part_by_id.keys():
        compared = _compare_part(folder, part_by_id[name], charges[name], "commit" in facts[name])
        results |= {f"{name} ({key})": is_ok for key, is_ok in compared}
    mechanisms = {
        facts[part["release_id"]]["reserve"]["mechanism"] for part in folder.parts if part["release_id"] in facts
    }
    results["mechanism"] = statement["mechanism"]["name"] in mechanisms
    results |= {f"{name} (no part)": False for name in _list_missing_parts(folder, own_entries, last_seq)}
    if test := statement["utility"]["private_test"]:
        digest = _hash_file(folder.path / "private_test.json")
        commit = charges.get(test["id"], {}).get("commit", {})
        results["private_test.json"] = commit.get("private_test_sha256") == digest
        tests = [name for name, fact in facts.items() if fact["reserve"]["what"].startswith(TEST)]
        results["number of the test"] = tests[test["number"] - 1 : test["number"]] == [test["id"]]
    yield make_check("charges", results, "differ from the ledger", f"{len(part_by_id)}, all equal in the ledger")
    incurred = {name: charge.get("commit", charge["reserve"])["events"] for name, charge in facts.items()}
    yield from run_check(check_spent, folder, incurred)
    if terms:
        yield _check_cap(terms, [e for events in incurred.values() for e in events])
    else:
        yield Check("cap", False, f"this ledger has no account {account['dataset']!r}")


def _collect_charges(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Collect the facts of the entries by reservation and kind."""
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in entries:
        if "reservation" in entry["facts"]:
            facts.setdefault(entry["facts"]["reservation"], {})[entry["kind"]] = entry["facts"]
    return facts


def _compare_part(
    folder: ReleaseFolder, part: Mapping[str, Any], charge: Mapping[str, Mapping[str, Any]], is_committed: bool
) -> Iterator[tuple[str, bool]]:
    """Compare a reservation in the statement with its entries, and its files with their hashes in the ledger.

    The entries are those of the whole chain, so that no older head hides the commit, without which there is no hash.
    ``is_committed`` states whether the commit precedes the head of the statement.
    """
    statement, reserve, commit = folder.statement, charge["reserve"], charge.get("commit", {})
    is_secret = statement["private"] and not reserve["insecure"]
    what = part["what"].removesuffix(SEEDED_SUFFIX).removesuffix(INTERRUPTED_SUFFIX)
    yield "events", part["events"] == (reserve["events"] if is_secret else [])
    yield "what", what == reserve["what"]
    yield "seeded", part["what"].endswith(SEEDED_SUFFIX) == reserve["insecure"]
    is_interrupted = INTERRUPTED_SUFFIX in part["what"]
    if part not in folder.parts:
        yield "interrupted", is_interrupted != is_committed
        return
    yield "commit", bool(commit) and not is_interrupted
    yield "private", not (statement["private"] and reserve["insecure"])
    if folder.is_table:
        for key, file in TABLE_FILES.items():
            yield key, commit.get(key) == _hash_file(folder.path / file)
    if "student_sha256" in commit:  # the test of a student adjusts its file
        test, digest = statement["utility"]["private_test"], _hash_file(folder.path / STUDENT_FILE)
        yield "student_sha256", commit["student_sha256"] == (test["tested_sha256"] if test else digest)
    record = folder.release or {}
    if record.get("release_id") == part["release_id"]:
        for key in ANSWER_FILES:
            yield key, commit.get(key) == record.get(key)
        yield "incurred", not statement["private"] or commit.get("events") == record.get("incurred")
    elif "labels_sha256" in commit:
        yield "release.json", bool(statement["composition"]["labels_reused"])


def _list_missing_parts(folder: ReleaseFolder, entries: Sequence[Mapping[str, Any]], last_seq: int) -> Iterator[str]:
    """List the reservations that paid for this folder and are no parts of it.

    After a reservation for answers or a model, its run reserves for the choice and for tests of its student. Of several
    with one purpose, only the newest counts, because an interrupted call is finished by another reservation. The
    labels of an earlier run are reused without its student. A test may be later than the statement.
    """
    part_ids, charges = {part["release_id"] for part in folder.parts}, _collect_charges(entries)
    leader_by_run, newest_by_leader = dict[str, str](), dict[str, dict[str, str]]()
    for entry in (entry for entry in entries if entry["kind"] == "reserve"):
        name, run, what = (entry["facts"][key] for key in ("reservation", "run", "what"))
        if not what.startswith((CHOICE, TEST)):
            leader_by_run[run] = name
        commit = charges[name].get("commit")
        is_later_test = entry["seq"] > last_seq and what.startswith(TEST)
        if commit is not None and not commit.get("stopped") and not is_later_test:
            newest_by_leader.setdefault(leader_by_run.get(run, run), {})[what] = name
    for leader, newest in newest_by_leader.items():
        ids = {*newest.values()}
        if part_ids & ids - ({leader} if folder.statement["composition"]["labels_reused"] else set()):
            yield from ids - part_ids


def _hash_file(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


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
