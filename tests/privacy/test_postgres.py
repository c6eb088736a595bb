"""The ledger in a PostgreSQL database: races, kills, lost connections, restarts, the move, and credentials."""

import contextlib
import json
import logging
import math
import multiprocessing
import os
import signal
import warnings

import pytest

from pate_torch import pipeline
from pate_torch.accounting import gdp
from pate_torch.accounting.events import GaussianEvent
from pate_torch.cli.ledger import main
from pate_torch.core import run_folders
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.chain import LedgerError, MissingLedgerError
from pate_torch.privacy.ledger import Ledger, find_account, open_ledger
from tests import killed_runs
from tests.postgres_server import AFTER, BEFORE, GONE, PASSWORD, USER, Proxy, running_server

TERMS = {"budget_epsilon": 4.0, "delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
FACTS = {"fingerprint": "f00d", "mechanism": "gaussian", "run": "runs/1"}
EACH = (GaussianEvent(mu=0.01),)


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture
def database(server):
    """The name of an empty database."""
    return server.create_database()


@pytest.fixture
def url(server, database):
    return server.get_url(database)


@pytest.fixture
def ledger(url):
    with Ledger(url) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=EACH)
        yield ledger


def fork(function, *given):
    """Run a function in a fork of this process, and return the exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which the child does not need
        child = multiprocessing.get_context("fork").Process(target=function, args=given)
        child.start()
    return child


def read_reservations(server, database) -> list[str]:
    """What the table holds, read without the package."""
    rows = server.execute("SELECT body FROM pate_ledger.entries ORDER BY seq", database)
    entries = [json.loads(body) for (body,) in rows]
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry["facts"]["reservation"] for entry in entries if entry["kind"] == "reserve"]


# ---- races ----------------------------------------------------------------------------------------------------------


def spend(url, mu, attempts, admitted, gate) -> None:
    """Reserve so many times, and commit half of what is admitted; a call that fails is repeated."""
    event = (GaussianEvent(mu=mu),)
    gate.wait(60)
    with Ledger(url) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=event)
        for turn in range(attempts):
            try:
                reservation = ledger.reserve("svhn", event, **FACTS)
            except BudgetExceeded:
                continue
            with admitted.get_lock():
                admitted.value += 1
            if turn % 2:
                ledger.commit(reservation, event)


def test_eight_processes_at_the_cap_are_admitted_as_often_as_fits(server, database, url):
    """From the creation of the tables on."""
    context = multiprocessing.get_context("fork")
    admitted, gate = context.Value("i", 0), context.Barrier(8)
    mu = math.sqrt(gdp.compute_mu(4.0, 9e-6) ** 2 / 100.5)
    workers = [fork(spend, url, mu, 30, admitted, gate) for _ in range(8)]
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert admitted.value == len(read_reservations(server, database)) == 100
    with Ledger(url, create=False, readonly=True) as ledger:
        (account,) = ledger.verify()
        assert account.total_cost.scalar == pytest.approx(100 * mu**2, rel=1e-12)
        assert account.guarantee.epsilon <= 4.0


# ---- lost connections and kills -------------------------------------------------------------------------------------


def charge(url, drawn) -> None:
    """Open a ledger and charge a release; notes the reservation where noise would be drawn."""
    with Ledger(url) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=EACH)
        reservation = ledger.reserve("svhn", EACH, **FACTS)
        drawn.append(reservation.id)
        ledger.commit(reservation, EACH)


def count_messages(server, database, call) -> int:
    with Proxy(server) as proxy:
        call(server.get_url(database, proxy.port))
        return proxy.count


@pytest.mark.parametrize("mode", [BEFORE, AFTER, GONE])
def test_a_lost_connection_draws_nothing_that_is_not_charged(server, database, ledger, mode):
    """At every message of the client, of which each statement is one or two."""
    with open("/tmp/led-tmp/log", "w") as log:
        for fail_at in range(count_messages(server, database, lambda url: charge(url, []))):
            before, drawn = read_reservations(server, database), []
            with Proxy(server, mode, fail_at) as proxy:
                url = server.get_url(database, proxy.port)
                try:
                    charge(url, drawn)
                    told = None
                except LedgerError as error:
                    told = str(error)
                new = read_reservations(server, database)[len(before) :]
                print(fail_at, told, drawn, new, file=log)
                assert set(drawn) <= set(new) and len(new) <= 1, (fail_at, told)
                if told is not None:
                    assert "\n" not in told and PASSWORD not in told and USER not in told, told
                    assert ("Nothing was recorded" in told) != ("if the entry was written" in told.lower()), told
