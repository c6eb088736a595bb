"""The ledger in a PostgreSQL database: races, kills, lost connections, restarts, the move, and credentials."""

import builtins
import contextlib
import json
import math
import multiprocessing
import os
import signal
import sqlite3
import sys
import warnings
from pathlib import Path

import pytest
import torch

from pate_torch import pipeline
from pate_torch.accounting import gdp
from pate_torch.accounting.events import GaussianEvent
from pate_torch.cli.main import main as pate
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.chain import HashChain, LedgerError, MissingLedgerError
from pate_torch.privacy.ledger import Ledger, find_account, open_ledger
from tests import killed_runs
from tests.postgres_server import AFTER, BEFORE, GONE, PASSWORD, USER, Proxy

TERMS = {"budget_epsilon": 4.0, "delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
FACTS = {"fingerprint": "f00d", "mechanism": "gaussian", "run": "runs/1"}
EACH = (GaussianEvent(mu=0.01),)
EVERY = pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow(reason="fault injection at every message of a client")), 19]
)


@pytest.fixture
def server(postgres_server):
    return postgres_server


@pytest.fixture
def database(server):
    return server.empty_database()


@pytest.fixture
def url(server, database):
    return server.get_url(database)


@pytest.fixture
def ledger(url):
    with Ledger(url) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=EACH)
        yield ledger


def fork(function, *given):
    """Start a function in a fork of this process."""
    child = multiprocessing.get_context("fork").Process(target=function, args=given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which the child does not need
        child.start()
    return child


def read_entries(server, database) -> list[dict]:
    """The entries of the table, read without the package."""
    if server.execute("SELECT to_regclass('pate_ledger.entries')::text", database) == [(None,)]:
        return []
    rows = server.execute("SELECT body FROM pate_ledger.entries ORDER BY seq", database)
    return [json.loads(body) for (body,) in rows]


def read_reservations(server, database) -> list[str]:
    return [e["facts"]["reservation"] for e in read_entries(server, database) if e["kind"] == "reserve"]


def shows_no_credentials(text: str) -> bool:
    return not any(secret in text for secret in (USER, PASSWORD, "hush", "w%25rd", "w%rd"))


# ---- races ----------------------------------------------------------------------------------------------------------


def spend(url, mu, attempts, counts, gate) -> None:
    """Reserve so many times, commit half of what is admitted, and count what is admitted and what fails."""
    event = (GaussianEvent(mu=mu),)
    gate.wait(60)
    with Ledger(url) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=event)
        for turn in range(attempts):
            try:
                reservation = ledger.reserve("svhn", event, **FACTS)
                counts[0] += 1
                if turn % 2:
                    ledger.commit(reservation, event)
            except BudgetExceeded:
                continue
            except LedgerError:
                counts[1] += 1


def race(server, url, processes, attempts, meanwhile=str) -> tuple[int, int, float]:
    """The number of admitted reservations and of failures, and mu of each, where 100 fit under the cap."""
    mu = math.sqrt(gdp.compute_mu(4.0, 9e-6) ** 2 / 100.5)
    context = multiprocessing.get_context("fork")
    gate, counts = context.Barrier(processes + 1), [context.Array("i", 2) for _ in range(processes)]
    workers = [fork(spend, url, mu, attempts, count, gate) for count in counts]
    gate.wait(60)
    meanwhile()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * processes
    admitted, failed = (sum(count[column] for count in counts) for column in (0, 1))
    return admitted, failed, mu


def test_four_processes_at_the_cap_are_admitted_as_often_as_fits(server, database, url):
    """From the creation of the tables on."""
    admitted, failed, mu = race(server, url, 4, 30)
    assert failed == 0 and admitted == len(read_reservations(server, database)) == 100
    with Ledger(url, create=False, readonly=True) as ledger:
        (account,) = ledger.verify()
        assert account.total_cost.scalar == pytest.approx(100 * mu**2, rel=1e-12)
        assert account.guarantee.epsilon <= 4.0


def test_a_server_that_crashes_during_a_race_loses_no_charge(server, database, url):
    def restart() -> None:
        while len(read_reservations(server, database)) < 20:
            pass
        server.stop(signal.SIGQUIT)
        server.start()

    admitted, failed, _ = race(server, url, 4, 20, restart)
    reserved = len(read_reservations(server, database))
    assert admitted <= reserved <= admitted + failed and 20 <= reserved <= 100 and failed > 0
    with Ledger(url, create=False, readonly=True) as ledger:
        ledger.verify()


def test_a_process_goes_on_after_a_restart_of_the_server(server, database, ledger):
    ledger.reserve("svhn", EACH, **FACTS)
    server.stop(signal.SIGINT)
    with pytest.raises(LedgerError, match=r"Connection refused\. Nothing was recorded\. Check that the server runs"):
        ledger.reserve("svhn", EACH, **FACTS)
    server.start()
    ledger.reserve("svhn", EACH, **FACTS)
    with pytest.raises(LedgerError, match="Nothing was recorded"), ledger._chain.transaction():
        ledger._catch_up()
        server.stop(signal.SIGQUIT)
        server.start()
        ledger._chain.append("close", "svhn", {"reason": "the lock was lost"})
    ledger.reserve("svhn", EACH, **FACTS)
    assert len(read_reservations(server, database)) == 3 and not ledger.verify()[0].is_closed


def test_a_lock_that_is_not_set_free_is_said(url, ledger, monkeypatch):
    monkeypatch.setattr("pate_torch.privacy.postgres._OPTIONS", "-c search_path=pate_ledger -c lock_timeout=50ms")
    refusal = pytest.raises(LedgerError, match=r"canceling statement due to lock timeout\. Nothing was recorded")
    with Ledger(url) as other, ledger._chain.transaction(), refusal:
        other.reserve("svhn", EACH, **FACTS)
    assert ledger.get_account("svhn").num_open == 0


# ---- lost connections and kills -------------------------------------------------------------------------------------


def charge(url, drawn) -> None:
    """Open a ledger and charge a release; notes the reservation where noise would be drawn."""
    with Ledger(url) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=EACH)
        reservation = ledger.reserve("svhn", EACH, **FACTS)
        drawn(reservation.id)
        ledger.commit(reservation, EACH)


def count_messages(server, database, call) -> int:
    with Proxy(server) as proxy:
        call(server.get_url(database, proxy.port))
        return proxy.count


@EVERY
@pytest.mark.parametrize("mode", [BEFORE, AFTER, GONE])
def test_a_lost_connection_draws_nothing_that_is_not_charged(server, database, ledger, mode, stride):
    """At every message of the client, of which each statement is one or two. Each failure is told in one line."""
    told = []
    for fail_at in range(0, count_messages(server, database, lambda url: charge(url, str)), stride):
        before, drawn = len(read_reservations(server, database)), []
        with Proxy(server, mode, fail_at) as proxy:
            try:
                charge(server.get_url(database, proxy.port), drawn.append)
            except LedgerError as error:
                told.append(str(error))
                assert "\n" not in told[-1] and shows_no_credentials(told[-1])
        new = read_reservations(server, database)[before:]
        assert len(new) <= 1 and set(drawn) <= set(new), (fail_at, told)
        if len(new) > len(drawn):
            assert mode == GONE and "Whether the last entry was written is unknown" in told[-1], (fail_at, told)
    assert told and all("ledger='postgresql+psycopg://127.0.0.1:" in line for line in told)
    ledger.reserve("svhn", EACH, **FACTS)  # the process that had opened the ledger before goes on
    ledger.verify()


def test_an_outcome_that_is_unknown_stops_the_release_and_is_found_out_if_it_can_be(server, database, ledger):
    """The server executes the COMMIT of a reservation, and its answer is lost."""
    for mode in (AFTER, GONE):
        count, drawn = len(read_reservations(server, database)), []
        with Proxy(server, mode) as proxy, Ledger(server.get_url(database, proxy.port)) as remote:
            budget = Budget.from_account(remote, "svhn", run="r")
            append = remote._chain.append

            def lose_commit(*entry, proxy=proxy, append=append):
                hash_ = append(*entry)
                proxy.fail_at = proxy.count + 1  # after the look at the newest entry comes COMMIT
                return hash_

            remote._chain.append = lose_commit
            with contextlib.ExitStack() as exit_stack:
                if mode == GONE:
                    exit_stack.enter_context(pytest.raises(LedgerError, match="no noise was drawn for it"))
                with budget.spend(EACH, mechanism="gaussian") as spending:
                    remote._chain.append, proxy.fail_at = append, None
                    drawn.append(spending.noise.draw_gaussian((1,), 1.0, torch.device("cpu")))
        assert len(read_reservations(server, database)) == count + 1
        assert len(drawn) == (mode == AFTER)


def attempt(server, database, mode, fail_at, port, file, call) -> None:
    """In a process of its own: a call that is killed at this message."""
    with Proxy(server, mode, fail_at, port) as proxy:
        proxy.on_failure = lambda: os.kill(os.getpid(), signal.SIGKILL)
        call(server.get_url(database, proxy.port), file)


def charge_and_note(url, file) -> None:
    charge(url, file.write_text)


@EVERY
@pytest.mark.parametrize("mode", [BEFORE, AFTER])
def test_a_killed_client_has_drawn_nothing_that_is_not_charged(server, database, ledger, tmp_path, mode, stride):
    count = count_messages(server, database, lambda url: charge(url, str))
    for fail_at in range(stride // 2, count, stride):
        before, note = len(read_reservations(server, database)), tmp_path / f"{fail_at}.txt"
        child = fork(attempt, server, database, mode, fail_at, 0, note, charge_and_note)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, fail_at
        new = read_reservations(server, database)[before:]
        assert len(new) <= 1 and (not note.exists() or [note.read_text()] == new), fail_at
    ledger.verify()


# ---- the move -------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path) -> Path:
    """The file of a ledger with a committed and an open release."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=EACH)
        ledger.commit(ledger.reserve("svhn", EACH, **FACTS), EACH)
        ledger.reserve("svhn", EACH, **FACTS)
    return tmp_path / "ledger.sqlite"


def read_kinds(file: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(file)) as db:
        return [json.loads(body)["kind"] for (body,) in db.execute("SELECT body FROM entries ORDER BY seq")]


def test_a_moved_ledger_goes_on_in_the_database_alone(server, database, url, old, monkeypatch, capsys):
    with Ledger(old) as before:
        accounts, head, open_one = before.list_accounts(), before.get_head(), list(before.get_charges("svhn"))[1]
        assert pate(["ledger", "move", url, "--path", str(old)]) == 0
        said = capsys.readouterr()
        assert shows_no_credentials(said.out + said.err) and "both were verified" in said.out
        for call in (lambda: before.reserve("svhn", EACH, **FACTS), lambda: before.commit(open_one, EACH)):
            with pytest.raises(LedgerError, match=r"was moved to postgresql\+psycopg://127.*Set PATE_LEDGER") as error:
                call()
            assert shows_no_credentials(str(error.value))
    assert read_kinds(old) == ["genesis", "open", "reserve", "commit", "reserve", "moved"]
    assert [e["kind"] for e in read_entries(server, database)] == [*read_kinds(old), "arrived"]
    assert not any(secret in old.read_bytes() for secret in (USER.encode(), PASSWORD.encode()))
    with pytest.raises(LedgerError, match="was moved to"):
        open_ledger(old.parent)
    with pytest.raises(LedgerError, match="was moved to"):
        find_account(old.parent, "svhn")
    monkeypatch.setenv("PATE_LEDGER", url)
    with open_ledger(old.parent) as ledger:
        assert ledger.list_accounts() == accounts and ledger.contains_head(head)
        ledger.commit(open_one, EACH)
        ledger.reserve("svhn", EACH, **FACTS)
    assert pate(["ledger", "move", url, "--path", str(old)]) == 0  # again: it has arrived
    assert find_account(old.parent, "svhn").num_open == 1


def test_a_database_with_another_ledger_is_refused(url, ledger, old, tmp_path, monkeypatch, capsys):
    assert pate(["ledger", "move", url, "--path", str(old)]) == 1
    assert "is another ledger" in capsys.readouterr().err and read_kinds(old)[-1] == "reserve"
    monkeypatch.setenv("PATE_LEDGER", url)
    with pytest.raises(LedgerError, match="lacks the charges in"):
        open_ledger(old.parent)
    with open_ledger(tmp_path / "elsewhere") as elsewhere:
        assert elsewhere.home == tmp_path / "elsewhere" and elsewhere.list_accounts() == ledger.list_accounts()


def test_a_file_with_charges_is_moved_before_an_empty_database_is_used(server, database, url, old, monkeypatch):
    monkeypatch.setenv("PATE_LEDGER", url)
    with pytest.raises(MissingLedgerError, match=r"holds no ledger.*pate ledger move"):
        open_ledger(old.parent)
    assert read_entries(server, database) == [] and find_account(old.parent, "svhn") is None


@pytest.mark.parametrize("loss", ["another database of the same name", "the same database without its tables"])
def test_a_ledger_that_has_arrived_does_not_begin_again(server, database, url, old, loss, capsys):
    """Charges since the move would be forgotten, or two ledgers would take charges."""
    place, again = f"postgresql+psycopg://{url.split('@')[0].split('//')[1]}@/same", url
    if loss.startswith("another"):
        server.execute("DROP DATABASE IF EXISTS two")
        server.execute("CREATE DATABASE two")
        address = f"host=127.0.0.1&port={server.port}&sslmode=disable&gssencmode=disable"
        url, again = (f"{place}?dbname={name}&{address}" for name in (database, "two"))
    assert pate(["ledger", "move", url, "--path", str(old)]) == 0
    with Ledger(url) as moved:
        moved.reserve("svhn", EACH, **FACTS)
    if not loss.startswith("another"):
        server.execute("DROP SCHEMA pate_ledger CASCADE", database)
    assert pate(["ledger", "move", again, "--path", str(old)]) == 1
    assert "was moved to" in capsys.readouterr().err
    with pytest.raises(MissingLedgerError, match="holds no ledger"):
        Ledger(again)


def test_an_older_copy_of_a_moved_ledger_is_not_said_to_be_moved(url, old, capsys):
    whole = old.read_bytes()
    assert pate(["ledger", "move", url, "--path", str(old)]) == 0
    old.with_name(f"{old.name}-wal").unlink(missing_ok=True)
    old.write_bytes(whole)
    assert pate(["ledger", "move", url, "--path", str(old)]) == 1
    assert "is an older copy of" in capsys.readouterr().err and read_kinds(old)[-1] == "reserve"


def test_a_move_that_fails_forgets_no_charge_of_another_process(url, old, monkeypatch):
    with Ledger(old) as ledger, Ledger(old) as other:
        other.reserve("svhn", EACH, **FACTS)
        with monkeypatch.context() as patch:
            patch.setattr(HashChain, "append", lambda *given: ledger._chain._db.execute("no disk space is left"))
            with pytest.raises(LedgerError, match="Nothing was recorded"):
                ledger.move(url)
        assert ledger.get_account("svhn").num_open == other.get_account("svhn").num_open == 2
        assert ledger.move(url) and ledger.list_accounts() == other.list_accounts()


def test_a_damaged_ledger_is_not_moved(server, database, url, old):
    with contextlib.closing(HashChain(old)) as chain, chain.transaction():
        chain.read_new_entries()
        chain.append("raise_cap", "svhn", {"budget_epsilon": 1.0})
    assert pate(["ledger", "move", url, "--path", str(old)]) == 1
    assert read_entries(server, database) == [] and read_kinds(old)[-1] == "raise_cap"


def move(url, file) -> None:
    with Ledger(file, create=False) as ledger:
        ledger.move(url)


def move_or_fail(url, file) -> None:
    with contextlib.suppress(LedgerError):
        move(url, file)


@EVERY
@pytest.mark.parametrize("mode", [BEFORE, AFTER, "kill"])
def test_an_interrupted_move_is_continued_and_never_leaves_two_ledgers(server, old, database, mode, stride):
    whole = old.read_bytes()
    with Proxy(server) as free:
        port = free.port  # the place of the new ledger is known by it
    count = count_messages(server, database, lambda url: move(url, old))
    for fail_at in range(stride // 2, count, stride):
        server.execute("DROP SCHEMA pate_ledger CASCADE", database)
        old.with_name(f"{old.name}-wal").unlink(missing_ok=True)
        old.write_bytes(whole)
        if mode == "kill":
            child = fork(attempt, server, database, AFTER, fail_at, port, old, move)
            child.join(60)
            assert child.exitcode == -signal.SIGKILL
        else:
            with Proxy(server, mode, fail_at, port):
                move_or_fail(server.get_url(database, port), old)
        assert read_kinds(old)[-1] == "moved" or read_entries(server, database) == [], fail_at
        with Proxy(server, port=port):
            move(server.get_url(database, port), old)
        assert read_kinds(old)[-2:] == ["reserve", "moved"], fail_at
        assert [e["kind"] for e in read_entries(server, database)] == [*read_kinds(old), "arrived"], fail_at


# ---- the guards -----------------------------------------------------------------------------------------------------


def test_the_table_refuses_edits_and_shows_what_was_done_behind_its_guards(server, database, url, ledger):
    ledger.reserve("svhn", EACH, **FACTS)
    for statement in ("UPDATE {} SET body = ''", "DELETE FROM {}", "TRUNCATE {}"):
        with pytest.raises(Exception, match="append-only"):
            server.execute(statement.format("pate_ledger.entries"), database)
    server.execute("ALTER TABLE pate_ledger.entries DISABLE TRIGGER append_only", database)
    with pytest.raises(LedgerError, match="guard against edits"):
        Ledger(url)
    server.execute("DELETE FROM pate_ledger.entries WHERE seq = 3", database)
    server.execute("ALTER TABLE pate_ledger.entries ENABLE TRIGGER append_only", database)
    with pytest.raises(LedgerError, match="ends at entry 2 of 3"):
        Ledger(url)
    with pytest.raises(LedgerError, match="ends at entry 2 of 3"):
        ledger.reserve("svhn", EACH, **FACTS)


def test_commits_reach_the_disk_whatever_the_server_is_set_to(server, database, url, ledger):
    server.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
    server.execute(f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")
    with ledger._chain._snapshot():
        assert ledger._chain._db.execute("SHOW synchronous_commit").scalar() == "on"
    with ledger._chain.transaction():
        assert ledger._chain._db.execute("SHOW transaction_isolation").scalar() == "read committed"
    server.execute("ALTER SYSTEM SET fsync = off")
    try:
        server.execute("SELECT pg_reload_conf(), pg_sleep(.2)")
        with pytest.raises(LedgerError, match=r"fsync and synchronous_commit are \[\(1, 'O', 'off', 'on'\)\]"):
            Ledger(url)
    finally:
        server.execute("ALTER SYSTEM RESET fsync")
        server.execute("SELECT pg_reload_conf()")


def test_a_pooler_that_drops_the_settings_of_a_session_is_refused(server, database, url, ledger, monkeypatch):
    monkeypatch.setattr("pate_torch.privacy.postgres._OPTIONS", "-c application_name=pooled")
    server.execute(f"ALTER ROLE {USER} SET search_path = pate_ledger; ALTER ROLE {USER} SET synchronous_commit = off")
    try:
        with pytest.raises(LedgerError, match=r"synchronous_commit are \[\(1, 'O', 'on', 'off'\)\]"):
            Ledger(url)
    finally:
        server.execute(f"ALTER ROLE {USER} RESET ALL")


def test_a_user_with_the_rights_in_the_documents_charges_and_cannot_edit(server, database, url, ledger):
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "ledger.md").read_text()
    server.execute(f"DROP ROLE IF EXISTS runs; CREATE ROLE runs LOGIN PASSWORD '{PASSWORD}'", database)
    for line in text.partition("```sql\n")[2].partition("```")[0].splitlines():
        server.execute(line, database)
    as_runs = url.replace(f"//{USER}:", "//runs:")
    with Ledger(as_runs) as limited:
        limited.commit(limited.reserve("svhn", EACH, **FACTS), EACH)
        limited.verify()
        with pytest.raises(LedgerError, match=r"must be owner of table entries|permission denied"):
            limited._chain._db.execute("ALTER TABLE entries DISABLE TRIGGER append_only")
    server.execute("DROP OWNED BY runs; DROP ROLE runs", database)


# ---- credentials and whole runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        f"postgresql+psycopg://{USER}:{PASSWORD}@127.0.0.1/ledger",  # an @ that was not written as %40
        f"postgresql+psycopg://{USER}:hush",
        f"postgresql+psycopg:/{USER}:hush@127.0.0.1/ledger",
        f"postgresql://{USER}:hush@127.0.0.1/ledger",
        f"mysql://{USER}:hush@127.0.0.1/ledger",
        f"postgresql+psycopg://{USER}:hush@127.0.0.1:hush/ledger",
        f"postgresql+psycopg://{USER}:hush@127.0.0.1:1",
        f"postgresql+psycopg://{USER}:p@ss/word?hush@127.0.0.1/ledger",
        f"{USER}:hush@127.0.0.1/ledger",
        f"host=127.0.0.1 dbname=ledger user={USER} password=hush",
    ],
)
def test_a_url_that_cannot_be_used_is_not_quoted(value, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATE_LEDGER", value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LedgerError, match="PATE_LEDGER: must be postgresql") as error:
        open_ledger(tmp_path)
    assert error.value.__cause__ is None and shows_no_credentials(str(error.value))
    assert list(tmp_path.iterdir()) == []
    assert pate(["ledger", "show", "--json"]) == 1
    Ledger(tmp_path / "ledger.sqlite").close()
    assert pate(["ledger", "move", value, "--path", str(tmp_path / "ledger.sqlite")]) == 1
    said = capsys.readouterr()
    assert shows_no_credentials(said.out + said.err)


def test_a_user_outside_the_name_of_the_server_is_not_shown(server):
    address = f"127.0.0.1:{server.port}/postgres?sslmode=disable&gssencmode=disable"
    with pytest.raises(LedgerError, match=r"authentication failed for user \*\*\*\.") as error:
        Ledger(f"postgresql+psycopg://{address}&user={USER}&password=hush")
    assert shows_no_credentials(str(error.value))


def test_no_credentials_show_in_what_runs_print_and_write(server, database, url, tmp_path, monkeypatch, capfd):
    """A run that ends well, one on a server that is not there, one with a wrong password, one without its ledger."""
    monkeypatch.setenv("PATE_LEDGER", url)

    def run(number: int) -> None:
        pipeline.run(killed_runs.plan(tmp_path, f"run{number}", opening_budget=killed_runs.CAP, quiet=False))

    run(0)
    (folder,) = tmp_path.glob("runs/*/*/run0")
    summary = json.loads((folder / "release" / "summary.json").read_text())
    assert read_entries(server, database)[-1]["kind"] == "commit" and not (tmp_path / "ledger.sqlite").exists()
    assert pate(["ledger", "verify", "--contains", summary["ledger_head"]]) == 0
    assert pate(["ledger", "backup", str(tmp_path / "copy.sqlite")]) == 0
    assert pate(["verify", str(folder), "--ledger", str(tmp_path / "copy.sqlite")]) == 0
    assert pate(["verify", str(folder), "--ledger"]) == 0
    with Ledger(tmp_path / "copy.sqlite", create=False, readonly=True) as copy, Ledger(url, readonly=True) as ledger:
        assert copy.read_entries() == ledger.read_entries()
    count = len(read_entries(server, database))
    monkeypatch.setenv("PATE_LEDGER", url.replace("hush", "hushed"))
    with pytest.raises(LedgerError, match="password authentication failed"):
        run(1)
    assert pate(["verify", str(folder), "--ledger"]) == 2
    with Proxy(server) as gone:
        monkeypatch.setenv("PATE_LEDGER", server.get_url(database, gone.port))
    with pytest.raises(LedgerError, match="Connection refused"):
        run(2)
    monkeypatch.delenv("PATE_LEDGER")
    with pytest.raises(ValueError, match=r"was charged in another privacy ledger.*or set PATE_LEDGER"):
        run(3)
    assert len(read_entries(server, database)) == count
    said = capfd.readouterr()
    assert f"postgresql+psycopg://127.0.0.1:{server.port}/{database}" in said.out
    assert shows_no_credentials(said.out + said.err)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or not any(s.encode() in file.read_bytes() for s in (USER, PASSWORD, "hush")), file


def test_without_the_extra_the_message_names_it(monkeypatch, url):
    inner = builtins.__import__

    def refuse(name, *given, **options):
        if name.startswith("sqlalchemy"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return inner(name, *given, **options)

    monkeypatch.delitem(sys.modules, "pate_torch.privacy.postgres")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LedgerError, match=r"No module named 'sqlalchemy'.*pate-torch\[postgres\]"):
        Ledger(url)
