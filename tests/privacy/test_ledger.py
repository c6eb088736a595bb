"""The ledger: charges, refusals, caps, many processes, crashes, damage, and its command."""

import json
import math
import multiprocessing
import os
import re
import signal
import sqlite3
import stat
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pate_torch.accounting import gdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import DeltaEvent, GaussianEvent, LaplaceEvent, PureDPEvent, ZCDPEvent
from pate_torch.accounting.filters import ExactCost, FilterCost
from pate_torch.cli.main import main as run_pate
from pate_torch.core.formatting import format_epsilon
from pate_torch.privacy.accounts import BudgetExceeded, Charges
from pate_torch.privacy.chain import LedgerError
from pate_torch.privacy.ledger import Ledger

MU = math.sqrt(2) / 40
PLAN = (GaussianEvent(mu=MU, count=286),)
TERMS = {"budget_epsilon": 4.0, "delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
FACTS = {"fingerprint": "f00d", "mechanism": "gaussian", "run": "runs/1"}


BOTH = pytest.mark.parametrize("storage", ["sqlite", "postgres"], indirect=True)


def main(arguments):
    return run_pate(("ledger", *arguments))


@pytest.fixture
def storage(request) -> str:
    return request.param if hasattr(request, "param") else "sqlite"


@pytest.fixture
def path(storage, tmp_path, request) -> Path | str:
    """The path of a ledger, or the URL of a database without one."""
    if storage == "sqlite":
        return tmp_path / "home" / "ledger.sqlite"
    server = request.getfixturevalue("postgres_server")
    return server.get_url(server.empty_database())


@pytest.fixture
def ledger(path):
    with Ledger(path) as ledger:
        ledger.open_account("svhn", **TERMS, planned_events=PLAN)
        yield ledger


def raw(path: Path, *statements: str) -> None:
    """What a clumsy hand could do to the file."""
    db = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def used(ledger: Ledger) -> float:
    """What came out, of all that was reserved."""
    return ledger.get_account("svhn").ex_post_guarantee.epsilon


# ---- charging -------------------------------------------------------------------------------------------------------


@BOTH
def test_a_release_is_charged_exactly(ledger):
    assert ledger.get_account("svhn").guarantee.epsilon == 0 and ledger.get_account("svhn").guarantee.route == "none"
    reservation = ledger.reserve("svhn", PLAN, **FACTS)
    ledger.commit(reservation, PLAN, release_id="r1")
    account = ledger.get_account("svhn")
    guarantee = account.guarantee
    assert guarantee.epsilon == compute_guarantee(PLAN, 1e-5).epsilon == pytest.approx(2.4353597494239, rel=1e-12)
    facts = (guarantee.delta, guarantee.route, guarantee.adjacency, guarantee.unit)
    assert facts == (1e-5, "gdp", "add_remove", "record")
    assert (account.num_releases, account.num_open, account.is_private) == (1, 0, True)


def test_show_tells_what_counts_against_the_cap(path, capsys):
    """A filter of one order counts more than the claim, by the conversion of Canonne, Kamath & Steinke 2020."""
    with Ledger(path) as ledger:
        plan = (PureDPEvent(epsilon=2.0),)
        account = ledger.open_account("svhn", **TERMS, planned_events=plan)
        answers = [GaussianEvent(mu=MU, count=20)]
        ledger.commit(ledger.reserve("svhn", answers, **FACTS), answers)
        a, claim = account.filter.order, ledger.get_account("svhn").guarantee.epsilon
    counts = a * 20 * MU**2 / 2 + math.log1p(-1 / a) - (math.log(9e-6) + math.log(a)) / (a - 1)
    assert main(["show", "--json", "--path", str(path)]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["accounts"]
    assert shown["epsilon_against_cap"] == pytest.approx(counts, rel=1e-9) != pytest.approx(claim, rel=1e-3)
    assert main(["show", "--path", str(path)]) == 0
    assert f"; {format_epsilon(counts)} counts against the cap" in capsys.readouterr().out


@BOTH
def test_charging_replaying_and_verifying_take_no_sum_over_the_charges_before(path, ledger, monkeypatch):
    """The number of costs that are added up grows by the same for each release: the total is exact and running."""
    added, work = ExactCost.add, []
    monkeypatch.setattr(ExactCost, "add", lambda total, *rest: work.append(1) or added(total, *rest))
    monkeypatch.setattr(Charges, "__iter__", lambda charges: pytest.fail("every charge was read"))
    for _ in range(8):
        ledger.commit(ledger.reserve("svhn", [GaussianEvent(mu=MU, count=2)], **FACTS), [GaussianEvent(mu=MU)])
    ledger.check_terms("svhn")
    assert len(work) == 8 * 3  # the worst case in, and at the commit the worst case out and the incurred events in
    with Ledger(path) as again:
        again.verify()
        assert len(work) == 8 * 9
        assert again.get_account("svhn").total_cost == ledger.get_account("svhn").total_cost
    monkeypatch.undo()
    account = ledger.get_account("svhn")
    assert account.total_cost == FilterCost.from_sum(charge.charged_cost for charge in account.charges.values())
    with pytest.raises(TypeError, match="never deleted"):
        account.charges.popitem()


@BOTH
def test_commit_happens_once_and_for_at_most_what_a_reservation_holds(ledger):
    reservation = ledger.reserve("svhn", PLAN, **FACTS)
    head = ledger.get_head()
    dearer = [GaussianEvent(mu=MU, count=287)], [GaussianEvent(mu=MU * 1.001, count=286)]
    for incurred in (*dearer, [*PLAN, DeltaEvent(delta=1e-9)], [*PLAN, PureDPEvent(epsilon=1e-4)]):
        with pytest.raises(LedgerError, match="more than it reserved"):
            ledger.commit(reservation, incurred)
        assert ledger.get_head() == head and ledger.get_account("svhn").num_open == 1
    ledger.record(reservation, [GaussianEvent(mu=MU, count=3)])
    ledger.commit(reservation, [GaussianEvent(mu=MU)])
    for again in (lambda: ledger.commit(reservation, []), lambda: ledger.record(reservation, [])):
        with pytest.raises(LedgerError, match="already committed"):
            again()
    with pytest.raises(LedgerError, match="is not in this ledger"):
        ledger.commit("0123", [])
    assert used(ledger) == pytest.approx(gdp.compute_epsilon(MU, 1e-5), rel=1e-12)


@BOTH
def test_what_would_pass_the_cap_is_refused_before_it_is_charged(ledger):
    ledger.reserve("svhn", PLAN, **FACTS)
    head, spent = ledger.get_head(), ledger.get_account("svhn").guarantee
    with pytest.raises(BudgetExceeded) as refusal:
        ledger.reserve("svhn", [GaussianEvent(mu=MU, count=500)], **FACTS)
    assert ledger.get_head() == head and ledger.get_account("svhn").guarantee == spent
    error, text = refusal.value, str(refusal.value)
    assert isinstance(error, ValueError)
    # The filter converts at nine tenths of delta.
    for words in (
        f"{gdp.compute_epsilon(math.sqrt(286) * MU, 9e-6):.6g} is spent",
        f"costs {gdp.compute_epsilon(MU * math.sqrt(500), 9e-6):.6g}",
        "the cap 4 ",
        "Nothing was drawn",
        "raise-cap svhn",
        "times the noise",
    ):
        assert words in text
    # What it says would fit does fit, and one query more does not.
    count = math.floor(error.fitting_share * 500)
    assert not ledger.get_account("svhn").admits([GaussianEvent(mu=MU, count=count + 1)])
    ledger.reserve("svhn", [GaussianEvent(mu=MU, count=count)], **FACTS)


@BOTH
def test_unknown_accounts_and_events_are_refused(ledger):
    head = ledger.get_head()
    with pytest.raises(LedgerError, match=r"no account of this name \(accounts: svhn\)"):
        ledger.reserve("mnist", PLAN, **FACTS)
    with pytest.raises(ValueError, match="gdp filter"):
        ledger.reserve("svhn", [ZCDPEvent(rho=1e-6)], **FACTS)
    for bad in ([None], [0.1], ["gaussian"]):
        with pytest.raises(ValueError, match="event="):
            ledger.reserve("svhn", bad, **FACTS)
    assert ledger.get_head() == head


@BOTH
def test_other_plans_get_an_rdp_filter_and_a_reserve_for_failures(ledger):
    plan = [PureDPEvent(epsilon=0.05, count=20), DeltaEvent(delta=2e-6)]
    account = ledger.open_account("mnist", **TERMS, planned_events=plan)
    assert account.filter.kind == "rdp" and account.filter.delta_reserve == 5e-6
    terms = {"delta_reserve": 2e-6, "filter": "rdp"}
    chosen = ledger.open_account("digits", **TERMS, planned_events=[GaussianEvent(mu=MU)], **terms)
    assert (chosen.filter.kind, chosen.filter.delta_reserve) == ("rdp", 2e-6)
    ledger.reserve("digits", [DeltaEvent(delta=1e-6)], **FACTS)
    for key, value in (("delta_reserve", 1e-6), ("filter", "gdp")):
        with pytest.raises(ValueError, match=f"{key}={value!r}: account 'digits' was opened with {terms[key]!r}"):
            ledger.open_account("digits", **TERMS, planned_events=[], **{**terms, key: value})
    ledger.commit(ledger.reserve("mnist", plan, **FACTS), [PureDPEvent(epsilon=0.05, count=7), DeltaEvent(delta=2e-6)])
    assert ledger.get_account("mnist").ex_post_guarantee.route == "rdp"
    pure = compute_guarantee([PureDPEvent(epsilon=0.05, count=7)], 1e-5)
    assert ledger.get_account("mnist").ex_post_guarantee.epsilon >= pure.epsilon
    assert ledger.get_account("mnist").total_cost.delta == 2e-6
    with pytest.raises(BudgetExceeded, match="reserved for failures"):
        ledger.reserve("mnist", [DeltaEvent(delta=4e-6)], **FACTS)
    ledger.verify()


# ---- accounts -------------------------------------------------------------------------------------------------------


@BOTH
def test_an_account_that_was_never_charged_has_no_fixed_terms(path, ledger):
    head = ledger.get_head()
    ledger.open_account("svhn", **TERMS, planned_events=PLAN)
    assert ledger.get_head() == head  # the same terms are not written twice
    other = {"budget_epsilon": 2.0, "delta": 1e-6, "adjacency": "replace_one", "unit": "label of one record"}
    again = ledger.open_account("svhn", **other, planned_events=[LaplaceEvent(ratio=0.1)])
    assert (again.budget_epsilon, again.delta, again.adjacency, again.unit) == tuple(other.values())
    with Ledger(path) as read:
        assert read.verify() == (again,)
    with pytest.raises(ValueError, match=r"delta=1e-05.*was opened with 1e-06"):  # checked with the charge, too
        terms = {key: other[key] for key in ("adjacency", "unit")} | {"delta": 1e-5, "noise": "torch"}
        ledger.reserve("svhn", [LaplaceEvent(ratio=0.1)], **FACTS, terms=terms)
    ledger.close_account("svhn", "ended")
    with pytest.raises(ValueError, match="Set it back"):
        ledger.open_account("svhn", **TERMS, planned_events=PLAN)


@BOTH
def test_an_account_of_units_that_its_adjacency_does_not_protect_is_refused(ledger):
    with pytest.raises(ValueError, match=r"adjacency='replace_one': protects single records.*unit is group:user"):
        ledger.open_account("x", **TERMS | {"adjacency": "replace_one", "unit": "group:user"}, planned_events=PLAN)


CONDITIONS = {
    "first_charge_only": (True, r"account='svhn': has been charged already \(epsilon .*allow_refit=True adds"),
    "once": ("runs/", r"account='svhn': was already charged for 'runs/'\. Nothing was drawn"),
}


@BOTH
@pytest.mark.parametrize("condition", CONDITIONS)
def test_of_charges_under_a_condition_that_are_made_at_once_one_passes(path, ledger, condition):
    """The condition is part of the charge."""
    value, words = CONDITIONS[condition]
    options = FACTS | {condition: value}
    with ThreadPoolExecutor(4) as pool:

        def charge(_: int) -> str | None:
            with Ledger(path) as mine:
                try:
                    return mine.reserve("svhn", [GaussianEvent(mu=MU)], **options).id
                except ValueError as error:
                    assert re.search(words, str(error)) and ("interrupted" in str(error)) == (condition != "once")
                    return None

        made = [one for one in pool.map(charge, range(4)) if one is not None]
    assert len(made) == 1 and list(ledger.get_charges("svhn")) == made
    ledger.commit(made[0], [GaussianEvent(mu=MU)])
    with pytest.raises(ValueError, match=words):
        ledger.reserve("svhn", [GaussianEvent(mu=MU)], **options)
    ledger.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS | {"run": "other", "once": "other"})


OTHER_TERMS = (
    ({"budget_epsilon": 5.0}, "raise-cap svhn"),
    ({"budget_epsilon": 3.0}, "raise-cap svhn"),
    ({"delta": 1e-6}, "Set it back"),
    ({"adjacency": "replace_one"}, "Set it back"),
    ({"unit": "group:user"}, "Set it back"),
    ({"adjacency": "both"}, "must be one of"),
    ({"budget_epsilon": math.nan}, "budget_epsilon"),
)
IMPOSSIBLE_TERMS = {"budget_epsilon": (0, math.inf), "delta": (0.0, 1.0), "unit": ("",)}


@BOTH
def test_the_terms_of_a_charged_account_stay_and_others_are_refused(ledger):
    ledger.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS)
    head = ledger.get_head()
    for change, words in OTHER_TERMS:
        with pytest.raises(ValueError, match=words):
            ledger.open_account("svhn", **{**TERMS, **change}, planned_events=PLAN)
    for key, values in IMPOSSIBLE_TERMS.items():
        for value in values:
            with pytest.raises(ValueError):
                ledger.open_account("new", **{**TERMS, key: value}, planned_events=PLAN)
    again = ledger.open_account("svhn", **TERMS, planned_events=[LaplaceEvent(ratio=0.1)])
    assert again.filter.kind == "gdp" and ledger.get_head() == head
    assert [account.name for account in ledger.list_accounts()] == ["svhn"]


@BOTH
def test_raising_the_cap_is_recorded_and_lets_more_through(ledger):
    ledger.reserve("svhn", PLAN, **FACTS)
    twice = (GaussianEvent(mu=MU, count=2 * 286),)
    with pytest.raises(BudgetExceeded):
        ledger.reserve("svhn", twice, **FACTS)
    for bad in (4.0, 3.0, math.nan, -1.0):
        with pytest.raises(ValueError):
            ledger.raise_cap("svhn", bad, reason="more")
    with pytest.raises(ValueError, match="must state why"):
        ledger.raise_cap("svhn", 9.0, reason=" ")
    assert ledger.raise_cap("svhn", 9.0, reason="a second student").budget_epsilon == 9.0
    ledger.reserve("svhn", twice, **FACTS)
    entry = next(e for e in ledger.read_entries("svhn") if e.kind == "raise_cap")
    assert entry.facts == {"before": 4.0, "budget_epsilon": 9.0, "reason": "a second student"}
    ledger.verify()
    assert ledger.open_account("svhn", **{**TERMS, "budget_epsilon": 9.0}, planned_events=PLAN).budget_epsilon == 9.0


@BOTH
def test_a_closed_account_takes_no_more_charges(ledger):
    reservation = ledger.reserve("svhn", PLAN, **FACTS)
    ledger.close_account("svhn", "the project ended")
    with pytest.raises(LedgerError, match="closed"):
        ledger.reserve("svhn", [GaussianEvent(mu=1e-6)], **FACTS)
    with pytest.raises(LedgerError, match="already closed"):
        ledger.close_account("svhn", "again")
    ledger.commit(reservation, [])
    assert ledger.verify()[0].is_closed


# ---- many processes -------------------------------------------------------------------------------------------------


def spend(path: str, mu: float, attempts: int, admitted, gate) -> None:
    """Reserve so many times; commit half of what is admitted."""
    event = [GaussianEvent(mu=mu)]
    with Ledger(path) as ledger:
        ledger.open_account("shared", **TERMS, planned_events=event)
        gate.wait(120)
        for turn in range(attempts):
            try:
                reservation = ledger.reserve("shared", event, **FACTS)
            except BudgetExceeded:
                continue
            with admitted.get_lock():
                admitted.value += 1
            if turn % 2:
                ledger.commit(reservation, event)


@BOTH
@pytest.mark.slow(reason="a race of eight processes")
def test_a_race_at_the_cap_beside_backups_checks_and_a_raised_cap(path, tmp_path):
    """Eight processes ask thirty times each; the first cap admits a hundred. Its owner is busy with the file.

    They create the file and the account.
    """
    context = multiprocessing.get_context("spawn")
    admitted, gate = context.Value("i", 0), context.Barrier(9)
    small = math.sqrt(gdp.compute_mu(4.0, 1e-5) ** 2 / 100.5)  # no sum lies within rounding of a cap

    def fitting(cap: float) -> int:
        return math.floor(gdp.compute_mu(cap, 1e-5) ** 2 / small**2)

    workers = [context.Process(target=spend, args=(str(path), small, 30, admitted, gate)) for _ in range(8)]
    for worker in workers:
        worker.start()
    with Ledger(path) as ledger:
        gate.wait(120)
        for turn in range(6):
            ledger.backup(tmp_path / f"{turn}.sqlite")
            ledger.verify()
            if turn == 3:
                ledger.raise_cap("shared", 4.5, reason="agreed with the owner")
        for worker in workers:
            worker.join(120)
        assert [worker.exitcode for worker in workers] == [0] * 8
        (account,) = ledger.verify()
        assert fitting(4.0) <= account.num_releases + account.num_open == admitted.value <= fitting(4.5) < 240
        assert account.total_cost.scalar == pytest.approx(admitted.value * small**2, rel=1e-12)
        assert account.guarantee.epsilon <= 4.5
    for turn in range(6):
        with Ledger(tmp_path / f"{turn}.sqlite") as copy:
            copy.verify()
    print(f"{admitted.value} of 240 accepted, epsilon {account.guarantee.epsilon:.6f}")


def reserve_and_die(path: Path | str, moment: str) -> None:
    other = Ledger(path)
    if moment == "after reserving":
        other.reserve("svhn", [GaussianEvent(mu=0.5)], **FACTS)
        os.kill(os.getpid(), signal.SIGKILL)
    with other._chain.transaction():
        other._chain.append("close", "svhn", {"reason": "never written"})
        os.kill(os.getpid(), signal.SIGKILL)


def fork(call) -> int:
    """The exit code of a call in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(call())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@BOTH
@pytest.mark.parametrize(("moment", "num_open", "mu"), [("after reserving", 1, 0.5), ("inside a transaction", 0, 0.0)])
def test_a_killed_process_leaves_what_it_reserved_and_nothing_half_written(path, ledger, moment, num_open, mu):
    assert fork(lambda: reserve_and_die(path, moment)) == -signal.SIGKILL
    account, spent = ledger.get_account("svhn"), gdp.compute_epsilon(mu, 1e-5) if mu else 0
    assert account.guarantee.epsilon == pytest.approx(spent, rel=1e-12)
    assert account.num_open == num_open and not account.is_closed
    ledger.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS)
    ledger.verify()


@BOTH
def test_a_fork_is_refused_though_another_thread_held_the_ledger(ledger):
    """Refused, and not left waiting for a thread that its process does not have."""
    held, enough = threading.Event(), threading.Event()

    def hold():
        with ledger.exclusive_access():
            held.set()
            enough.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)

    def ask() -> int:
        try:
            ledger.get_account("svhn")
        except LedgerError as error:
            return 0 if "another process" in str(error) else 2
        return 3

    assert fork(ask) == 0
    enough.set()
    holder.join()


# ---- many threads ---------------------------------------------------------------------------------------------------


@BOTH
def test_threads_share_a_ledger_and_lose_no_charge(path, ledger):
    event, given = [GaussianEvent(mu=0.02)], []

    def spend_some(number):
        for turn in range(6):
            reservation = ledger.reserve("svhn", event, **FACTS)
            given.append(reservation.id)
            assert ledger.get_account("svhn").num_open + ledger.get_account("svhn").num_releases >= turn + 1
            if number % 2:
                ledger.commit(reservation, event)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(spend_some, range(4)))
    (account,) = ledger.verify()
    assert len(set(given)) == len(given) == 24
    assert (account.num_releases, account.num_open) == (12, 12)
    with Ledger(path) as again:
        assert again.get_account("svhn") == account


def test_a_closed_ledger_is_said_to_be_closed(ledger):
    ledger.close()
    for ask in (ledger.get_head, lambda: ledger.get_account("svhn"), lambda: ledger.reserve("svhn", PLAN, **FACTS)):
        with pytest.raises(LedgerError, match="closed") as error:
            ask()
        assert "damaged" not in str(error.value) and "backup" not in str(error.value)


def test_pages_that_hold_garbage_are_damage(path, ledger):
    for _ in range(30):
        ledger.reserve("svhn", [GaussianEvent(mu=1e-3)], **FACTS)
    ledger.close()
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"is damaged: .*restore a backup"):
        Ledger(path)


# ---- damage ---------------------------------------------------------------------------------------------------------

HUGE = {"reservation": "x", "failure": 0.0, "events": [], "insecure": False, **FACTS, "what": "labels"}
GUARDS = {
    name: f"CREATE TRIGGER {name} BEFORE {act} ON entries BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
    for name, act in (("no_update", "UPDATE"), ("no_delete", "DELETE"))
}
UNGUARD = tuple(f"DROP TRIGGER {name}" for name in GUARDS)


@pytest.fixture
def written(path, ledger):
    """A closed ledger of one committed and one open release: entries 1 to 5."""
    ledger.commit(ledger.reserve("svhn", PLAN, **FACTS), [GaussianEvent(mu=MU, count=200)], release_id="r1")
    ledger.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS)
    ledger.close()
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(LedgerError, match=words):
        Ledger(path)
    assert main(["verify", "--path", str(path)]) == 1


def test_the_file_refuses_edits_and_shows_dropped_guards(written):
    for statement in ("UPDATE entries SET body = '{}' WHERE seq = 3", "DELETE FROM entries WHERE seq = 5"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw(written, statement)
    raw(written, *UNGUARD)
    refused(written, "guards against edits were changed")


EDITS = {
    "UPDATE entries SET body = replace(body, 'scalar', 'other') WHERE seq = 3": "entry 3 was edited",
    "DELETE FROM entries WHERE seq = 3": "entry 3 is missing",
    "DELETE FROM entries WHERE seq = 5": "ends at entry 4 of 5",
    "DELETE FROM entries": "ends at entry 0",
    "UPDATE entries SET seq = 9 WHERE seq = 5": "entry 5 is missing",
    "UPDATE entries SET hash = 'x' WHERE seq = 4": "entry 4 was edited",
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_behind_the_guards_show(written, edit):
    raw(written, *UNGUARD, edit, *GUARDS.values())
    refused(written, EDITS[edit])


@BOTH
def test_a_forged_cost_shows_on_verify(path, ledger):
    """A rewritten chain of correct hashes whose cost is differs from the cost of the events."""
    with ledger._chain.transaction():
        ledger._catch_up()
        event = {"kind": "gaussian", "mu": 0.5, "count": 1}
        facts = {"reservation": "0" * 16, "events": [event], "scalar": 1e-9, "failure": 0.0, "insecure": False}
        facts |= {**FACTS, "what": "labels"}
        ledger._chain.append("reserve", "svhn", facts)
    with pytest.raises(LedgerError, match=r"entry 3 .*differs from the cost of the events"):
        ledger.verify()


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        ("refund", {"scalar": 1.0}, "unknown kind"),
        ("commit", {"reservation": "none", "events": [], "scalar": 0.0, "failure": 0.0}, "does not add up"),
        ("raise_cap", {"budget_epsilon": 1.0}, "a cap only rises"),
        ("reserve", {"reservation": "x", "scalar": -1.0, "failure": 0.0, "events": [], "insecure": False}, "add up"),
        ("reserve", {**HUGE, "scalar": 10**400}, "does not add up"),
        ("reserve", {"reservation": "x", "scalar": 0.0, "failure": 0.0, "events": [], "insecure": False}, "'what'"),
        ("open", {**TERMS, "filter": "gdp", "order": None, "delta_reserve": 0.0}, "'noise'"),
    ],
)
def test_entries_that_no_ledger_writes_are_refused_every_time(path, ledger, kind, facts, words):
    with ledger._chain.transaction():
        ledger._catch_up()
        ledger._chain.append(kind, "svhn", facts)
    for _ in range(2):  # a failed replay must not leave half a state behind
        with pytest.raises(LedgerError, match=words):
            ledger.reserve("svhn", PLAN, **FACTS)
    refused(path, words)


def test_a_cut_tail_shows_against_a_noted_head(path, ledger, tmp_path):
    ledger.reserve("svhn", PLAN, **FACTS)
    ledger.backup(tmp_path / "old.sqlite")
    ledger.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS)
    noted = ledger.get_head()
    assert ledger.contains_head(noted)
    with Ledger(tmp_path / "old.sqlite") as old:
        old.verify()
        assert not old.contains_head(noted) and ledger.contains_head(old.get_head())
    assert main(["verify", "--contains", noted, "--path", str(path)]) == 0
    assert main(["verify", "--contains", noted, "--path", str(tmp_path / "old.sqlite")]) == 1


def test_cut_and_foreign_files_are_refused_and_kept(written):
    whole = written.read_bytes()
    damaged = {b"": "is empty", whole[: len(whole) // 2]: "is damaged"}
    damaged |= dict.fromkeys((whole[:10], b"x" * 5000, b"{}"), "is not a database")
    for content, words in damaged.items():
        written.write_bytes(content)
        refused(written, words)
        assert written.read_bytes() == content


def test_other_databases_and_newer_versions_are_refused(written, tmp_path):
    other = tmp_path / "other.sqlite"
    raw(other, "CREATE TABLE t (x)")
    refused(other, "not a ledger")
    raw(written, "PRAGMA user_version = 2")
    refused(written, "newer version")
    raw(written, "PRAGMA user_version = 0")
    refused(written, "is damaged")


def test_a_missing_ledger_is_created_only_when_asked_and_never_beside_a_log(path):
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger(path, create=False)
    assert not path.exists()
    path.parent.mkdir()
    path.with_name(path.name + "-wal").write_bytes(b"charges")
    with pytest.raises(LedgerError, match="is gone, but its write-ahead log"):
        Ledger(path)


def test_a_change_under_an_open_ledger_shows_and_is_not_copied(path, ledger, tmp_path):
    raw(path, *UNGUARD, "UPDATE entries SET hash = 'x' WHERE seq = 2", *GUARDS.values())
    with pytest.raises(LedgerError, match="while the ledger was open"):
        ledger.reserve("svhn", PLAN, **FACTS)
    with pytest.raises(LedgerError, match="entry 2 was edited"):
        ledger.backup(tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()


# ---- the disk -------------------------------------------------------------------------------------------------------


def test_the_file_is_for_its_owner_only(path, ledger):
    mode = stat.S_IMODE
    assert mode(path.stat().st_mode) == 0o600
    assert mode(path.parent.stat().st_mode) == 0o700
    assert mode(path.with_name(path.name + "-wal").stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir() if p.name.startswith(".")) == []


def test_a_full_disk_loses_nothing(path, ledger):
    ledger.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS)
    head, spent = ledger.get_head(), ledger.get_account("svhn").guarantee
    pages = ledger._chain._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._chain._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own "database or disk is full"
    with pytest.raises(LedgerError, match=r"full.*Free some space"):
        ledger.reserve("svhn", PLAN, **{**FACTS, "run": "x" * 100_000})
    assert ledger.get_head() == head and ledger.get_account("svhn").guarantee == spent
    ledger._chain._db.execute("PRAGMA max_page_count = 1000000")
    ledger.reserve("svhn", PLAN, **FACTS)
    ledger.verify()


def test_a_read_only_ledger_reads_and_refuses_charges(path, ledger):
    ledger.reserve("svhn", PLAN, **FACTS)
    with Ledger(path, readonly=True) as reader:
        assert reader.get_account("svhn").guarantee == ledger.get_account("svhn").guarantee
        with pytest.raises(LedgerError, match=r"readonly.*writable"):
            reader.reserve("svhn", [GaussianEvent(mu=MU)], **FACTS)


def test_a_held_lock_is_said(path, ledger, monkeypatch):
    monkeypatch.setattr("pate_torch.privacy.chain.LOCK_TIMEOUT_SECONDS", 0.01)
    with Ledger(path) as other, ledger._chain.transaction():
        ledger._catch_up()
        with pytest.raises(LedgerError, match=r"locked.*Another process held it"):
            other.reserve("svhn", PLAN, **FACTS)


def test_a_transaction_that_was_rolled_back_is_not_taken_for_written(ledger):
    with pytest.raises(AssertionError, match="was rolled back"), ledger._chain.transaction():
        ledger._catch_up()
        ledger._chain.append("close", "svhn", {"reason": "lost"})
        ledger._chain._db.execute("ROLLBACK")
    assert not ledger.get_account("svhn").is_closed


def test_backup_is_whole_private_and_never_overwrites(ledger, tmp_path):
    ledger.reserve("svhn", PLAN, **FACTS)
    copy = tmp_path / "copy.sqlite"
    ledger.backup(copy)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with Ledger(copy) as copied:
        assert copied.get_head() == ledger.get_head() and copied.verify() == ledger.list_accounts()
    with pytest.raises(LedgerError, match="already exists"):
        ledger.backup(copy)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.sqlite", "home"]


# ---- the command ----------------------------------------------------------------------------------------------------


def answer(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_verify_and_show(written, capsys):
    at = ("--path", str(written))
    verified = answer(capsys, "verify", *at)
    assert verified["ok"] and verified["entries"] == 5
    shown = answer(capsys, "show", "svhn", *at)
    (account,) = shown["accounts"]
    assert account["epsilon_charged"] == pytest.approx(gdp.compute_epsilon(MU * math.sqrt(287), 1e-5), rel=1e-12)
    assert account["epsilon_charged_ex_post"] == pytest.approx(
        gdp.compute_epsilon(MU * math.sqrt(201), 1e-5), rel=1e-12
    )
    assert (account["releases"], account["uncommitted"], account["private"]) == (1, 1, True)
    assert [e["kind"] for e in shown["entries"]] == ["open", "reserve", "commit", "reserve"]
    assert shown["head"] == verified["head"] == shown["entries"][-1]["hash"]


def test_a_cost_is_shown_rounded_up_with_the_delta_as_given(path, ledger, capsys):
    ledger.open_account("mnist", **{**TERMS, "delta": 2.5e-5}, planned_events=[GaussianEvent(mu=0.1)])
    ledger.reserve("mnist", [GaussianEvent(mu=0.1)], **FACTS)
    true = gdp.compute_epsilon(0.1, 2.5e-5)
    assert main(["show", "--path", str(path)]) == 0
    (row,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("mnist"))
    _, epsilon, _, _, delta, *_ = row.split()
    assert true <= float(epsilon) < true + 1e-3 and delta == "2.5e-5"
    ledger.open_account("digits", **TERMS, planned_events=[PureDPEvent(epsilon=0.05), DeltaEvent(delta=2e-6)])
    ledger.reserve("digits", [DeltaEvent(delta=2e-6)], **FACTS)
    assert main(["show", "--path", str(path)]) == 0
    assert "only delta is spent: 2e-06" in capsys.readouterr().out


def test_the_table_fits_eighty_columns(path, ledger, capsys):
    ledger.open_account("a" * 60, **{**TERMS, "unit": "group:" + "u" * 90}, planned_events=[ZCDPEvent(rho=1.0)])
    ledger.reserve("svhn", PLAN, **{**FACTS, "run": "r" * 100}, insecure=True)
    for arguments in (["show"], ["show", "svhn"]):
        assert main([*arguments, "--path", str(path)]) == 0
        text = capsys.readouterr().out
        assert max(len(line) for line in text.splitlines()) <= 80
        assert "NOT PRIVATE" in text and "svhn" in text


def test_export_backup_raise_cap_and_close(written, tmp_path, capsys):
    at = ("--path", str(written))
    assert main(["export", *at]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5] and rows[2]["facts"]["fingerprint"] == "f00d"
    output = tmp_path / "entries.jsonl"
    assert answer(capsys, "export", "--output", str(output), *at)["count"] == 5
    assert stat.S_IMODE(output.stat().st_mode) == 0o600 and len(output.read_text().splitlines()) == 5
    assert main(["export", "--output", str(output), *at]) == 1
    assert answer(capsys, "backup", str(tmp_path / "b.sqlite"), *at)["ok"]
    assert answer(capsys, "raise-cap", "svhn", "6", "--reason", "why", *at)["budget_epsilon"] == 6
    assert answer(capsys, "close", "svhn", "--reason", "done", *at)["closed"]
    assert answer(capsys, "verify", *at)["entries"] == 7


def test_exit_codes_and_messages(path, written, capsys):
    at = ("--path", str(written))
    assert main(["raise-cap", "svhn", "1", "--reason", "lower", *at]) == 1
    assert "cannot be lowered" in capsys.readouterr().err
    assert main(["verify", "--path", str(path.parent / "none.sqlite"), "--json"]) == 1
    assert "does not exist" in json.loads(capsys.readouterr().out)["problem"]
    assert not (path.parent / "none.sqlite").exists()
    for arguments in ([], ["refund"], ["raise-cap", "svhn", "--reason", "x"], ["close", "svhn"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


def test_the_ledger_lies_in_the_home_folder_or_else_in_the_store_of_the_user(written, monkeypatch, capsys):
    monkeypatch.setenv("PATE_HOME", str(written.parent))
    assert answer(capsys, "verify")["entries"] == 5
    monkeypatch.delenv("PATE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(written.parent.parent))
    written.parent.rename(written.parent.with_name("pate_torch"))
    assert answer(capsys, "verify")["entries"] == 5
