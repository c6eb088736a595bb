"""A site charges its own ledger before it draws its share of noise, and answers a slot once."""

import json
import math
import multiprocessing
import os
import shutil
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.core import files
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.chain import HashChain, LedgerError
from pate_torch.privacy.ledger import open_ledger
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.keys import load_joiner_key
from pate_torch.sites.rounds import accept_sum, read_round, sum_answers
from pate_torch.sites.shares import TableChange, compute_events
from pate_torch.sites.site import PURPOSE_SHARE, Site
from pate_torch.sites.tables import COUNT_STEPS, SiteTable, read_public_file
from tests.sites.site_tables import PUBLIC, RECORD_KINDS, make_consortium, make_kind, make_rows, select_rows


def get_charges(site):
    with open_ledger(site.home, readonly=True) as ledger:
        return list(ledger.get_charges("scans").values())


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
    change = TableChange(length_squared=(1 << 30) ** 2, numbers=kind.shape[0] * kind.shape[1])
    for site in consortium.sites:
        (charge,) = get_charges(site)
        assert charge.reserved_events == charge.incurred_events == compute_events(change, current_round.share, 2)
        assert charge.is_committed and charge.purpose == PURPOSE_SHARE and not charge.insecure
        assert charge.run.endswith(f"slot 0 round {current_round.digest.hex()}")
    epsilon = compute_guarantee(charge.reserved_events, 1e-5).epsilon
    assert 0.4999 < epsilon <= 0.5
    guarantees = consortium.joiner.compute_guarantees([0])
    assert guarantees[1].epsilon == epsilon and consortium.joiner.compute_total().epsilon == epsilon
    assert guarantees[0].epsilon < guarantees[1].epsilon < guarantees[2].epsilon
    sigma = float(current_round.share) / 2**30  # of one share: the price against all other sites
    mu = math.sqrt(sum(event.mu**2 for event in compute_events(change, current_round.share, 1) if event.kind[0] == "g"))
    assert mu == pytest.approx(1 / sigma, rel=1e-9)


def test_the_same_round_gives_the_same_bytes_and_no_second_charge(tmp_path):
    consortium = make_consortium(tmp_path)
    site, kind = consortium.sites[0], make_kind("histogram")
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    first = site.answer(raw, public, consortium.data[0])
    assert site.answer(raw, public, make_rows(50, 77)) == first
    assert site.answer(raw, public, lambda **_: pytest.fail("the data must not be read")) == first
    assert len(get_charges(site)) == 1


def test_a_cap_that_does_not_admit_the_price_is_refused_before_the_slot_is_spent(tmp_path):
    consortium = make_consortium(tmp_path, cap=0.6)
    kind = make_kind("histogram")
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    _, total = consortium.joiner.sum(consortium.answer_all(raw, public))
    site = consortium.sites[0]
    accept_sum(site.state, total)
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
@pytest.mark.parametrize("name", RECORD_KINDS)
def test_the_least_noise_is_asked_for_at_any_epsilon(tmp_path, name, epsilon):
    consortium, kind = make_consortium(tmp_path), make_kind(name)
    consortium.joiner.ask(kind, epsilon)
    guarantee = consortium.joiner.compute_guarantees([0])[1]
    assert 0.9999 * epsilon < guarantee.epsilon <= epsilon


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
@pytest.mark.parametrize("name", RECORD_KINDS)
def test_one_record_changes_a_table_by_at_most_what_is_priced(name, adjacency):
    kind, rows = make_kind(name), make_rows(40, 1)
    change, count = kind.make_change(adjacency), 0.0
    full = kind.count(kind.read_records(rows, "record"), adjacency)
    full.check_change(change)
    for row in range(40):
        others = [i for i in range(40) if i != row]
        if adjacency == "add_remove":
            neighbor = select_rows(rows, others)
        else:
            neighbor = select_rows(rows, [i if i != row else (row + 1) % 40 for i in range(40)])
        table = kind.count(kind.read_records(neighbor, "record"), adjacency)
        moved = (table.numbers - full.numbers).ravel()
        squared = sum(int(number) ** 2 for number in moved)
        assert squared <= change.length_squared
        count = max(count, squared / change.length_squared)
        if name != "class_sums":
            assert abs(moved).max() <= COUNT_STEPS
    assert count > 0.2  # the bound is not vacuous


def test_a_table_of_a_larger_sensitivity_is_refused():
    kind = make_kind("histogram")
    table = kind.count(kind.read_records(PUBLIC, "record"), "add_remove")
    wide = Sensitivity(l1=2.0, l2=math.sqrt(2), linf=1.0, adjacency="add_remove")
    with pytest.raises(ValueError, match="is more than the price of the round covers"):
        SiteTable(table.numbers, wide, COUNT_STEPS, table.records).check_change(kind.make_change("add_remove"))


def test_rows_that_cannot_be_used_add_nothing(tmp_path):
    kind = make_kind("class_sums")
    consortium = make_consortium(tmp_path)
    rows = {name: column.to_pylist() for name, column in make_rows(3, 1).items()}
    rows["y"][1], rows["f0"][2] = "unknown", "nan"
    import pyarrow as pa

    damaged = {name: pa.array(values) for name, values in rows.items()}
    site = consortium.sites[0]
    table = site._count(consortium.joiner.charter, kind, damaged, None)
    assert len(table.records) == 2  # a missing number is filled by the public mean, an unknown class is left out


# ---- wrong files -----------------------------------------------------------------------------------------------------


def test_every_wrong_file_gives_one_clear_line(tmp_path):
    consortium, kind = make_consortium(tmp_path / "a"), make_kind("histogram")
    other = make_consortium(tmp_path / "b")
    site, rows = consortium.sites[0], consortium.data[0]
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    _, other_raw, other_public = other.joiner.ask(kind, 0.5)
    name, charter = "histogram", consortium.joiner.charter

    def refuse(match, *arguments):
        with pytest.raises(ValueError, match=match) as caught:
            site.answer(*arguments)
        assert "\n" not in str(caught.value)

    refuse("has another length than it states", raw[:-1], public, rows)
    refuse("is not signed by the joiner", raw.replace(b'"slot":0', b'"slot":1'), public, rows)
    refuse("belongs to another charter", other_raw, public, rows)
    refuse("is not the public file that the round file names", raw, other_public, rows)
    refuse("is not the public file that the round file names", raw, public[:-1], rows)
    refuse("data='label'|data='y'", raw, public, {key: value for key, value in rows.items() if key != "y"})
    with pytest.raises(ValueError, match="is not signed by the joiner"):
        read_public_file(charter, public.replace(b'"label":"y"', b'"label":"z"'))
    joiner = consortium.joiner
    answers = consortium.answer_all(raw, public)
    current_round = read_round(raw, charter)
    with pytest.raises(ValueError, match="have not answered"):
        joiner.sum({key: answers[key] for key in list(answers)[1:]})
    with pytest.raises(ValueError, match="is the second answer of Site 0"):
        joiner.sum(answers | {"copy": answers["site-0"]})
    with pytest.raises(ValueError, match="belongs to another charter"):
        joiner.sum(answers | {"site-0": other.answer_all(other_raw, other_public)["site-0"]})
    with pytest.raises(ValueError, match="has another length than it states"):
        joiner.sum(answers | {"site-0": answers["site-0"][:-3]})
    assert sum_answers(charter, current_round, answers)[0].shape == kind.shape and name == kind.name
    assert all(len(get_charges(each)) == 1 for each in consortium.sites)


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
        consortium, kind = make_consortium(folder, num_sites=2, num_rows=20, colluding=0), make_kind("histogram")
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
        consortium = make_consortium(tmp_path / str(step), num_sites=2, num_rows=20, colluding=0)
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


@pytest.mark.parametrize("name", RECORD_KINDS)
def test_units_at_two_sites_pay_twice_mu(tmp_path, name):
    sigmas = {}
    for max_sites in (1, 2):
        consortium = make_consortium(tmp_path / str(max_sites), max_sites_per_unit=max_sites)
        slot, raw, public = consortium.joiner.ask(make_kind(name), 0.5)
        consortium.joiner.sum(consortium.answer_all(raw, public))
        sigmas[max_sites] = consortium.joiner.load_sum(slot).sigma
        epsilon = compute_guarantee(get_charges(consortium.sites[0])[0].reserved_events, 1e-5).epsilon
        assert 0.4999 < epsilon <= 0.5
    assert sigmas[2] == pytest.approx(2 * sigmas[1], rel=1e-6)


def test_a_patient_with_many_rows_is_counted_once():
    import pyarrow as pa

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
    consortium, kind = make_consortium(tmp_path, num_sites=2, colluding=0), make_kind("class_sums")
    joiner = consortium.joiner
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


def test_a_round_that_was_aborted_stays_in_the_total(tmp_path):
    consortium, kind = make_consortium(tmp_path), make_kind("histogram")
    consortium.joiner.ask(kind, 0.5)
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    consortium.joiner.sum(consortium.answer_all(raw, public))
    total = consortium.joiner.compute_total().epsilon
    assert total > 1.3 * consortium.joiner.compute_guarantees([1])[1].epsilon


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
    consortium, kind = make_consortium(tmp_path), make_kind("histogram")
    joiner = consortium.joiner

    read = Joiner._read

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
    assert joiner.compute_total().epsilon == pytest.approx(0.5, rel=1e-3)
    assert joiner.ask(kind, 0.5)[0] == 1 and (joiner.folder / "round-0.json").exists()
