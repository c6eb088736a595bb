"""A site charges its own ledger before it draws its share of noise, and answers a slot once."""

import copy
import json
import math
import multiprocessing
import os
import shutil
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.core import files
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.chain import HashChain, LedgerError
from pate_torch.privacy.ledger import open_ledger
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.keys import load_joiner_key
from pate_torch.sites.rounds import accept_sum, read_round
from pate_torch.sites.shares import compute_events
from pate_torch.sites.site import PURPOSE_SHARE, Site
from pate_torch.sites.tables import COUNT_STEPS, SiteTable, read_public_file
from pate_torch.sites.training import make_vote_counts
from tests.sites.site_tables import (
    PUBLIC,
    RECORD_KINDS,
    add_weights,
    compute_squared_change,
    get_charges,
    make_consortium,
    make_descent,
    make_kind,
    make_rows,
    select_rows,
)


def count_exactly(consortium, kind):
    terms = consortium.joiner.charter.terms
    tables = [kind.count(kind.read_records(rows, terms.unit), terms.adjacency) for rows in consortium.data]
    return sum(table.numbers for table in tables) / kind.unit_length


@pytest.mark.parametrize("name", RECORD_KINDS)
def test_the_sum_is_exact_up_to_noise_of_the_stated_size(tmp_path, name):
    consortium, kind = make_consortium(tmp_path), make_kind(name)
    slot, raw, public = consortium.joiner.ask(kind, 0.5)
    consortium.joiner.sum(consortium.answer_all(raw, public))
    noisy, exact = consortium.joiner.load_sum(), count_exactly(consortium, kind)
    error = (noisy.numbers - exact).ravel() / noisy.sigma
    assert slot == noisy.slot == 0 and exact.any()
    # The mean and the mean square of n standard normal numbers have standard deviations 1/sqrt(n) and sqrt(2/n).
    assert abs(error.mean()) < 5 / math.sqrt(len(error))
    assert abs((error**2).mean() - 1) < 5 * math.sqrt(2 / len(error))


def test_the_charge_is_that_of_the_shares_of_all_but_t_sites(tmp_path):
    consortium, kind = make_consortium(tmp_path), make_kind("class_sums")
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    consortium.answer_all(raw, public)
    charter = consortium.joiner.charter
    current_round = read_round(raw, charter)
    change = (1 << 30) ** 2, kind.shape[0] * kind.shape[1]
    for site in consortium.sites:
        (charge,) = get_charges(site)
        assert charge.reserved_events == charge.incurred_events == compute_events(*change, current_round.share, 2)
        assert charge.is_committed and charge.purpose == PURPOSE_SHARE and not charge.insecure
        assert charge.run.endswith(f"slot 0 round {current_round.digest.hex()}")
    epsilon = compute_guarantee(charge.reserved_events, 1e-5).epsilon
    assert 0.4999 < epsilon <= 0.5
    guarantees = consortium.joiner.compute_guarantees([0])
    assert guarantees[1].epsilon == epsilon and consortium.joiner.compute_guarantees()[1].epsilon == epsilon
    assert guarantees[0].epsilon < guarantees[1].epsilon < guarantees[2].epsilon
    sigma = float(current_round.share) / 2**30  # of one share: the cost against all other sites
    gaussian, _ = compute_events(*change, current_round.share, 1)
    assert gaussian.mu == pytest.approx(1 / sigma, rel=1e-9)


def test_the_same_round_gives_the_same_bytes_and_no_second_charge(tmp_path):
    consortium = make_consortium(tmp_path)
    site, kind = consortium.sites[0], make_kind("histogram")
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    first = site.answer(raw, public, consortium.data[0])
    assert site.answer(raw, public, make_rows(50, 77)) == first
    assert site.answer(raw, public, lambda **_: pytest.fail("the data must not be read")) == first
    assert len(get_charges(site)) == 1


def test_a_cap_that_does_not_admit_the_cost_is_refused_before_the_slot_is_spent(tmp_path):
    consortium = make_consortium(tmp_path, cap=0.6)
    kind = make_kind("histogram")
    consortium.run_round(*consortium.joiner.ask(kind, 0.5)[1:])
    site = consortium.sites[0]
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    with pytest.raises(BudgetExceeded):
        site.answer(raw, public, consortium.data[0])
    with site.state.open() as secrets:
        assert secrets.next_slot == 1 and len(get_charges(site)) == 1


def test_a_folder_that_was_restored_does_not_answer_a_slot_again(tmp_path, monkeypatch):
    consortium = make_consortium(tmp_path)
    site, kind = consortium.sites[0], make_kind("histogram")
    path = site.state.folder / "secrets.json"
    copy = path.read_bytes()
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    site.answer(raw, public, consortium.data[0])
    path.write_bytes(copy)
    with pytest.raises(ValueError, match="the folder of keys is an old copy"):
        site.answer(raw, public, consortium.data[0])
    assert len(get_charges(site)) == 1
    # A process with a copy of the folder that looked at the ledger before this charge must not charge the slot, either.
    monkeypatch.setattr(Site, "_check_copies", lambda *_: None)
    with pytest.raises(LedgerError, match=r"already charged for 'charter [0-9a-f]{64} slot 0'"):
        site.answer(raw, public, consortium.data[0])
    assert len(get_charges(site)) == 1


@pytest.mark.parametrize("epsilon", [0.02, 4.0])
def test_the_least_noise_is_asked_for_and_units_at_two_sites_pay_twice_mu(tmp_path, epsilon):
    one = make_consortium(tmp_path / "one", teachers=(3,) * 3).joiner
    two = make_consortium(tmp_path / "two", teachers=(3,) * 3, max_sites_per_unit=2).joiner
    for slot, kind in enumerate((*map(make_kind, RECORD_KINDS), make_vote_counts(PUBLIC, "y", "abc", 12, {}))):
        for joiner in (one, two):
            joiner.ask(kind, epsilon)
            assert 0.9999 * epsilon < joiner.compute_guarantees([slot])[1].epsilon <= epsilon
        sigmas = [float(joiner.load_rounds()[slot].round.sigma) for joiner in (one, two)]
        assert sigmas[1] == pytest.approx(2 * sigmas[0], rel=1e-6)


def test_a_ledger_that_was_restored_pays_for_no_round(tmp_path):
    """A ledger without the charge of an answer would admit more than the cap."""
    consortium = make_consortium(tmp_path)
    site, kind = consortium.sites[0], make_kind("histogram")
    shutil.copytree(site.home, tmp_path / "copy")
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    first = site.answer(raw, public, consortium.data[0])
    shutil.rmtree(site.home)
    shutil.copytree(tmp_path / "copy", site.home)
    assert site.answer(raw, public, consortium.data[0]) == first and not get_charges(site)
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    with pytest.raises(ValueError, match="the ledger is an old copy"):
        site.answer(raw, public, consortium.data[0])
    with site.state.open() as secrets:
        assert secrets.next_slot == 1 and not get_charges(site)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("name", [*RECORD_KINDS, "first step", "step with small weights", "step with large weights"])
def test_one_record_changes_a_table_by_at_most_what_is_priced(name, adjacency):
    if "step" in name:
        kind = make_descent() if name == "first step" else add_weights(make_descent(), 0.3 if "small" in name else 30.0)
    else:
        kind = make_kind(name)
    rows, ratio, largest = make_rows(30, 1), {"add_remove": 1, "replace_one": 2}[adjacency], 0.0
    ratio = ratio if name in ("histogram", "marginals") else ratio**2  # a count moves, or a vector turns round
    full = kind.count(kind.read_records(rows, "record"), adjacency)
    full.check_sensitivity(kind.compute_squared_length(adjacency))
    assert kind.compute_squared_length(adjacency) == ratio * kind.compute_squared_length("add_remove")
    for row in range(30):
        others = [i for i in range(30) if i != row]
        swapped = [i if i != row else (row + 1) % 30 for i in range(30)]
        neighbor = select_rows(rows, others if adjacency == "add_remove" else swapped)
        table = kind.count(kind.read_records(neighbor, "record"), adjacency)
        largest = max(largest, compute_squared_change(kind, table.numbers, full.numbers) / ratio)
        if name in ("histogram", "marginals"):
            assert abs(table.numbers - full.numbers).max() <= COUNT_STEPS
    assert 0.2 < largest <= 1  # the bound holds and is not vacuous


def test_the_lengths_of_the_changes_of_a_record():
    lengths = {name: make_kind(name).compute_squared_length("add_remove") for name in RECORD_KINDS}
    assert lengths == {"class_sums": 2**60, "histogram": 2**56, "marginals": 3 * 2**56}  # three tables of counts
    assert make_descent(clip_norm=0.5).compute_squared_length("add_remove") == 2**58


def test_a_table_of_a_larger_sensitivity_is_refused():
    kind = make_kind("histogram")
    table = kind.count(kind.read_records(PUBLIC, "record"), "add_remove")
    wide = Sensitivity(l1=2.0, l2=math.sqrt(2), linf=1.0, adjacency="add_remove")
    with pytest.raises(ValueError, match="is more than the cost of the round covers"):
        SiteTable(table.numbers, wide, COUNT_STEPS, table.records).check_sensitivity(COUNT_STEPS**2)


def test_rows_that_cannot_be_used_add_nothing(tmp_path):
    kind = make_kind("class_sums")
    consortium = make_consortium(tmp_path)
    rows = {name: column.to_pylist() for name, column in make_rows(3, 1).items()}
    rows["y"][1], rows["f0"][2] = "unknown", "nan"
    damaged = {name: pa.array(values) for name, values in rows.items()}
    table = consortium.sites[0]._count(consortium.joiner.charter, 0, kind, damaged, None)
    assert len(table.records) == 2  # a missing number is filled by the public mean, an unknown class is left out


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


def run_and_kill(step: int, call) -> bool:
    """Run a call in a process that is killed at a durable step. Return whether the process was killed."""

    def work() -> None:
        steps = iter(range(1000))

        def kill_before(function):
            def wrapped(*arguments, **options):
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = function(*arguments, **options)
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return wrapped

        Path.replace = kill_before(Path.replace)
        HashChain.append = kill_before(HashChain.append)
        files.os.fsync = kill_before(os.fsync)
        call()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow(reason="a process is killed at every durable step")
def test_kill_9_at_every_step_of_a_site_spends_nothing_twice(tmp_path):
    outcomes = set()
    for step in range(60):
        folder = tmp_path / str(step)
        consortium, kind = make_consortium(folder, num_sites=2, num_rows=20), make_kind("histogram")
        site, rows = consortium.sites[0], consortium.data[0]
        slot, raw, public = consortium.joiner.ask(kind, 0.5)
        was_killed = run_and_kill(step, lambda: site.answer(raw, public, rows))  # noqa: B023
        with site.state.open() as secrets:
            is_begun, is_answered = "0" in secrets.rounds, "0" in secrets.answers
        assert len(get_charges(site)) <= is_begun, "a charge without a spent slot could be made twice"
        if is_answered or not is_begun:
            first = site.answer(raw, public, rows)
            assert site.answer(raw, public, rows) == first and len(get_charges(site)) == 1
            other = consortium.sites[1].answer(raw, public, consortium.data[1])
            consortium.joiner.sum({"0": first, "1": other})
        else:
            with pytest.raises(ValueError, match="was begun in slot 0 and not finished, so its answer is lost"):
                site.answer(raw, public, rows)
            num_charges = len(get_charges(site))
            slot, raw, public = consortium.joiner.ask(kind, 0.5)
            consortium.joiner.sum(consortium.answer_all(raw, public))
            assert slot == 1 and len(get_charges(site)) == num_charges + 1
        outcomes.add((is_begun, is_answered))
        if not was_killed:
            break
    assert not was_killed and outcomes == {(False, False), (True, False), (True, True)}


@pytest.mark.slow(reason="a process is killed at every durable step")
def test_kill_9_at_every_step_of_the_joiner_loses_nothing(tmp_path):
    for step in range(40):
        consortium = make_consortium(tmp_path / str(step), num_sites=2, num_rows=20)
        joiner, kind = consortium.joiner, make_kind("histogram")
        was_killed = run_and_kill(step, lambda: joiner.ask(kind, 0.5))  # noqa: B023
        slot, raw, public = joiner.ask(kind, 0.5)
        answers = consortium.answer_all(raw, public)
        run_and_kill(step, lambda: joiner.sum(answers))  # noqa: B023
        first = joiner.sum(answers)
        assert joiner.sum(answers) == first and joiner.load_sum().slot == slot
        assert all(len(get_charges(site)) == 1 for site in consortium.sites)
        if not was_killed:
            break
    assert not was_killed


def test_the_account_has_the_terms_of_the_charter(tmp_path):
    consortium = make_consortium(tmp_path, adjacency="replace_one", records=(200, 200, 200))
    with open_ledger(consortium.sites[0].home, readonly=True) as ledger:
        account = ledger.get_account("scans")
    assert account.adjacency == "replace_one" and account.noise == "discrete" and account.budget_epsilon == 2.0
    assert account.delta == float(Fraction("1/100000")) and account.unit == "record"
    _, raw, public = consortium.joiner.ask(make_kind("histogram"), 0.5)
    with pytest.raises(ValueError, match="the charter states 200, which is public"):
        consortium.sites[0].answer(raw, public, make_rows(199, 0))
    assert len(consortium.answer_all(raw, public)) == 3


def test_a_patient_with_many_rows_is_counted_once():
    rows = make_rows(60, 1)
    rows["patient"] = pa.array([f"p{i // 6}" for i in range(60)])
    for name in RECORD_KINDS:
        kind = make_kind(name)
        numbers = kind.count(kind.read_records(rows, "group:patient"), "add_remove").numbers
        if name == "histogram":
            assert numbers.sum() == 10 * COUNT_STEPS
        if name == "marginals":
            assert numbers.sum() == 10 * len(kind.cliques) * COUNT_STEPS
        if name == "class_sums":
            assert np.linalg.norm(numbers / 2.0**30) <= 10
    with pytest.raises(ValueError, match="patient"):
        kind.read_records(make_rows(5, 1), "group:patient")


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    joiner, kind = make_consortium(tmp_path, num_sites=2).joiner, copy.deepcopy(make_kind("class_sums"))
    key = load_joiner_key(joiner.folder / "joiner.key")
    public = kind.to_file(joiner.charter, key)
    assert read_public_file(joiner.charter, public).shape == kind.shape
    kind.whitening.axis_DE[0, 0] = math.nan
    with pytest.raises(ValueError, match="not finite or exceed 2"):
        read_public_file(joiner.charter, kind.to_file(joiner.charter, key))
    content = {"kind": "histogram", "label": "y", "facts": '{"spec": NaN}', "names": [], "shapes": []}
    with pytest.raises(ValueError, match="NaN is not finite"):
        read_public_file(joiner.charter, joiner.charter.make_file("public", content, key))
    with pytest.raises(ValueError, match="1e999 is not finite"):
        read_public_file(
            joiner.charter, joiner.charter.make_file("public", content | {"facts": '{"spec": 1e999}'}, key)
        )
    facts, arrays = make_kind("histogram").to_content()
    facts["spec"]["std"] = [10**400] * 6
    content |= {"facts": json.dumps(facts), "names": ["query_QD"], "shapes": [[20, 6]]}
    body = arrays["query_QD"].tobytes()
    with pytest.raises(ValueError, match="does not describe a table of the kind histogram"):
        read_public_file(joiner.charter, joiner.charter.make_file("public", content, key, body))


def test_a_late_answer_still_gives_the_sum_of_an_older_round(tmp_path):
    consortium, kind = make_consortium(tmp_path), make_kind("histogram")
    answers = [consortium.answer_all(*consortium.joiner.ask(kind, 0.5)[1:]) for _ in range(2)]
    _, newest = consortium.joiner.sum(answers[1])
    slot, late = consortium.joiner.sum(answers[0], 0)
    assert slot == 0
    for site in consortium.sites:
        accept_sum(site.state, late)
        accept_sum(site.state, newest)
    assert consortium.joiner.load_sum(0).numbers.shape == consortium.joiner.load_sum(1).numbers.shape
    assert len(consortium.answer_all(*consortium.joiner.ask(kind, 0.5)[1:])) == 3


def test_a_joiner_that_dies_while_it_asks_counts_the_round(tmp_path, monkeypatch):
    joiner, kind, read = make_consortium(tmp_path).joiner, make_kind("histogram"), Joiner._read
    assert (joiner.folder / "joiner.key").stat().st_mode & 0o777 == 0o600

    def die(*_):
        raise KeyboardInterrupt

    def die_at_the_round(joiner, name, digest):
        return die() if name == "round-0.json" else read(joiner, name, digest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Joiner, "_save", die)
        joiner.ask(kind, 0.5)
    assert not (joiner.folder / "round-0.json").exists()  # what no total counts cannot be sent
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Joiner, "_read", die_at_the_round)
        joiner.ask(kind, 0.5)
    assert not (joiner.folder / "round-0.json").exists()
    assert joiner.compute_guarantees()[1].epsilon == pytest.approx(0.5, rel=1e-3)
    assert joiner.ask(kind, 0.5)[0] == 1 and (joiner.folder / "round-0.json").exists()
