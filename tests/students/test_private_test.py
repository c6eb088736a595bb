"""The private test: sensitivity by brute force, noise, what an interruption leaves, and what follows from the table."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from scipy.stats import beta

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import GaussianEvent, PureDPEvent
from pate_torch.accounting.gdp import compute_epsilon
from pate_torch.core.files import compute_file_digest
from pate_torch.core.progress import do_nothing
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import drop_unusable
from pate_torch.privacy.records import Dataset, Evaluation, PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY
from pate_torch.students import store as student_store
from pate_torch.students.private_test import (
    PrivateTest,
    compute_accuracy_bound,
    compute_tail,
    count_predictions,
    make_test_mechanism,
    read_test,
    release_test,
)
from pate_torch.teachers.store import TeacherStore
from tests.students.tasks import ROWS, make_student

STUDENT = make_student(ROWS, "mlp")
POINTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)) * 3


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store whose account "a" holds out about half of its units, by a fixed key."""
    store = TeacherStore(tmp_path)
    monkeypatch.setattr("secrets.randbits", lambda bits: 7)
    store.set_test_rule("a", 0.5, None)
    return store


# ---- one unit moves the table by no more than is paid for ---------------------------------------------------------


def make_records(rows, ids):
    """Records of (point, label, unit). With "groups" a unit has several rows, with "none" each row is one."""
    x, y = torch.stack([POINTS[point] for point, *_ in rows]), torch.tensor([label for _, label, *_ in rows])
    units = None if ids == "none" else np.array([name for *_, name in rows])
    return PrivateRecords.from_rows(x, y, units, "group:person" if ids == "groups" else "record", num_classes=2)


def split(store, records, adjacency):
    return store.hold_out_units("a", records, adjacency)[:2]


def count(store, records, adjacency):
    test = split(store, records, adjacency)[1]
    return count_predictions(STUDENT, test, adjacency, do_nothing)


ROW_LIST = [(point, label, f"p{unit}") for unit, (point, label) in enumerate(itertools.product(range(4), range(2)))]
ROW_LIST += ROW_LIST[:3] + ROW_LIST[:1]  # ids that repeat, and equal rows
GROUPS = [(point, label, f"p{(3 * point + label) % 5}") for point, label, _ in ROW_LIST]
NEW_ROWS = [(0, 0, "p0"), (1, 1, "p1"), (2, 0, "new"), (3, 1, "another")]


def list_neighbors(rows, ids, adjacency):
    """All data sets without one unit, or with another record at one position; and some with a new unit."""
    if adjacency == "replace_one":
        for place, row in itertools.product(range(len(rows)), NEW_ROWS):
            yield [*rows[:place], row, *rows[place + 1 :]]
        return
    names = [name for *_, name in rows] if ids == "groups" else list(range(len(rows)))
    for name in set(names):
        yield [row for row, other in zip(rows, names, strict=True) if other != name]
    for added, place in itertools.product(NEW_ROWS, (0, 5, len(rows))):
        if ids != "groups":
            yield [*rows[:place], added, *rows[place:]]
        else:  # a unit of two records, in any order among the others
            yield [*rows[:place], (*added[:2], "new"), *rows[place:], (1, 0, "new")]


@pytest.mark.parametrize(
    "ids,adjacency",
    [("none", "add_remove"), ("repeated", "add_remove"), ("groups", "add_remove"),
     ("none", "replace_one"), ("repeated", "replace_one")],
)  # fmt: skip
def test_the_sensitivity_is_the_largest_distance_between_neighbors(store, ids, adjacency):
    rows, largest = GROUPS if ids == "groups" else ROW_LIST, dict.fromkeys(("l1", "l2", "linf"), 0.0)
    table = count(store, make_records(rows, ids), adjacency)
    assert table.sensitivity == COUNT_SENSITIVITY[adjacency]
    for neighbor in list_neighbors(rows, ids, adjacency):
        change = (table.counts_QC - count(store, make_records(neighbor, ids), adjacency).counts_QC).double().flatten()
        for norm, order in {"l1": 1, "l2": 2, "linf": math.inf}.items():
            largest[norm] = max(largest[norm], float(torch.linalg.vector_norm(change, order)))
    assert largest == {norm: pytest.approx(getattr(table.sensitivity, norm)) for norm in largest}


def test_a_table_of_all_records_of_a_unit_would_be_found(store):
    """The brute force above rejects the wrong answer: with every record of a unit, one unit moves the table further."""
    records = make_records([(0, 0, "p"), (1, 1, "p"), (2, 0, "p")], "groups")
    assert int(count_predictions(STUDENT, records, "add_remove", do_nothing).counts_QC.sum()) == 3
    rows = [(point, label, name) for name in ("p", "q", "r") for point, label, _ in ROW_LIST]
    assert 1 <= len(split(store, make_records(rows, "groups"), "add_remove")[1]) <= 3


@pytest.mark.parametrize("ids,adjacency", [("none", "add_remove"), ("groups", "add_remove"), ("none", "replace_one")])
def test_no_unit_moves_another_into_or_out_of_the_test(store, ids, adjacency):
    rows = GROUPS if ids == "groups" else ROW_LIST

    def list_records(rows):
        parts = split(store, make_records(rows, ids), adjacency)
        return [sorted((*p.x[i].tolist(), int(p.y[i]), str(p.unit_id[i])) for i in range(len(p))) for p in parts]

    here = list_records(rows)
    assert all(here), "both parts hold units"
    for neighbor in list_neighbors(rows, ids, adjacency):
        for part, other in zip(here, list_records(neighbor), strict=True):
            if adjacency == "replace_one":  # the name of a record without an id is no part of its role
                assert len(part) == len(other)
                part, other = ([record[:-1] for record in records] for records in (part, other))
            changes = [(Counter(one) - Counter(two)).elements() for one, two in ((part, other), (other, part))]
            lost, won = map(list, changes)
            if adjacency == "replace_one":
                assert len(lost) == len(won) <= 1
            else:
                assert len({name for *_, name in lost + won}) <= 1


def test_a_unit_speaks_through_the_record_that_its_own_rows_choose(store):
    rows = [(point, label, name) for name in ("p0", "p1", "p2") for point, label in [(0, 0), (1, 1), (2, 0), (3, 1)]]
    chosen = []
    for shift in range(4):
        records = make_records([*rows[shift:], *rows[:shift]], "groups")
        one = split(store, records, "add_remove")[1]
        chosen.append(sorted((name, *x.tolist()) for name, x in zip(one.unit_id.tolist(), one.x, strict=True)))
    assert chosen[0] and chosen[0] == chosen[1] == chosen[2] == chosen[3]


def test_a_prediction_is_that_of_the_record_alone(store):
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    records = PrivateRecords.from_rows(x, torch.zeros(30).long(), num_classes=2)
    counts = count_predictions(STUDENT, records, "add_remove", do_nothing).counts_QC
    predictions = STUDENT.predict(x)
    right = int((predictions == 0).sum())
    assert counts.tolist() == [[right, 30 - right], [0, 0]] and 0 < right < 30
    nothing = store.hold_out_units("other", records, "add_remove")[1]
    assert count_predictions(STUDENT, nothing, "add_remove", do_nothing).counts_QC.tolist() == [[0, 0], [0, 0]]


# ---- the release ---------------------------------------------------------------------------------------------------

MECHANISM = Histogram(sigma=4.0, adjacency="add_remove")
TERMS = {"delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
RECORDS = PrivateRecords.from_rows(
    torch.randn(200, 6, generator=torch.Generator().manual_seed(2)), torch.arange(200) % 2, num_classes=2
)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("a", budget_epsilon=5.0, **TERMS, planned_events=MECHANISM.privacy_events(1))
        yield ledger


def make_budget(ledger, run="run", **options):
    return Budget(ledger=ledger, account="a", fingerprint="f", run=run, **TERMS, **options)


def release(ledger, folder, student=STUDENT, records=RECORDS, **options):
    folder.mkdir(exist_ok=True)
    student_store.save(student, folder / "student.safetensors")
    budget = make_budget(ledger, **options)
    return release_test(student, folder / "student.safetensors", records, POINTS, MECHANISM, budget, do_nothing)[0]


class Killed(BaseException):
    """The end of a process, as far as one process can show it."""


def kill(*_, **__):
    raise Killed


def test_the_table_costs_what_was_planned_and_draws_this_noise_once(ledger, tmp_path, monkeypatch):
    drawn = []

    def draw(self, shape, sigma, device):
        self._check_draw_allowed()
        drawn.append((shape, sigma))
        return torch.full(shape, 0.4, dtype=torch.float64)

    monkeypatch.setattr(NoiseSource, "draw_gaussian", draw)
    shown = release(ledger, tmp_path / "one")
    exact = count_predictions(STUDENT, RECORDS, "add_remove", do_nothing).counts_QC
    assert drawn == [((2, 2), 4.0)] and [*map(list, shown.counts)] == exact.tolist()  # rounded after the noise
    (charge,) = ledger.get_charges("a").values()
    assert charge.incurred_events == charge.reserved_events == (GaussianEvent(mu=1 / 4.0),)
    assert (charge.is_committed, charge.purpose, shown.number) == (True, "test of the model on held-out units", 1)
    written = json.loads((tmp_path / "one" / "private_test.json").read_text())
    assert written["counts"] == [*map(list, shown.counts)] and written["sigma"] == 4.0


OTHER_STUDENT = STUDENT.adjust_logits(1.0, torch.tensor([0.0, 1.0]))


def test_the_same_call_reads_the_table_and_another_student_is_refused(ledger, tmp_path, monkeypatch):
    first = release(ledger, tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "draw_gaussian", kill)
        assert release(ledger, tmp_path / "one", first_charge_only=True) == first
        with pytest.raises(ValueError, match=r"account='a': has been charged already"):
            release(ledger, tmp_path / "one", OTHER_STUDENT, first_charge_only=True)
    assert len(ledger.get_charges("a")) == 1
    assert release(ledger, tmp_path / "one", OTHER_STUDENT).number == 2 == len(ledger.get_charges("a"))


def test_a_second_test_of_the_account_says_that_it_is_the_second(ledger, tmp_path):
    first, second = (release(ledger, tmp_path / name, run=name) for name in ("one", "two"))
    assert (first.number, second.number) == (1, 2) and first.id != second.id
    purposes = [charge.purpose for charge in ledger.get_charges("a").values()]
    assert purposes[1] == f"{purposes[0]} (number 2 of this account)" and str(second).startswith(
        "test 2 on held-out units"
    )


@pytest.mark.parametrize(
    "place", ["pate_torch.students.private_test.write_atomically", "pate_torch.privacy.ledger.Ledger.commit"]
)
def test_noise_that_was_drawn_and_not_recorded_stays_spent(place, ledger, tmp_path, monkeypatch):
    with monkeypatch.context() as interrupted, pytest.raises(Killed):
        interrupted.setattr(place, kill)
        release(ledger, tmp_path / "one")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"charged already .*1 of its releases were"):
        patch.setattr(NoiseSource, "draw_gaussian", kill)
        release(ledger, tmp_path / "one", first_charge_only=True)
    assert release(ledger, tmp_path / "one").number == 2  # a new charge, of an owner who allows it
    assert [charge.is_committed for charge in ledger.get_charges("a").values()] == [False, True]


def test_a_table_that_was_edited_is_not_read(ledger, tmp_path):
    release(ledger, tmp_path / "one")
    file = tmp_path / "one" / "private_test.json"
    file.write_text(file.read_text().replace("4.0", "1.0"))
    with pytest.raises(ValueError, match="charged already"):
        release(ledger, tmp_path / "one", first_charge_only=True)


def test_a_test_over_the_cap_draws_nothing(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw_gaussian", kill)
    dear = replace(MECHANISM, sigma=0.3)
    monkeypatch.setitem(globals(), "MECHANISM", dear)
    with pytest.raises(BudgetExceeded):
        release(ledger, tmp_path / "one")
    assert not ledger.get_charges("a") and not (tmp_path / "one" / "private_test.json").exists()


def test_the_test_names_the_tested_and_the_released_student(ledger, tmp_path, monkeypatch):
    """A temperature makes another file, which changes no prediction, and the ledger holds the hash of both names."""
    monkeypatch.setattr(PrivateTest, "compute_logit_multiple", lambda self, logit_PC: 0.7)
    test, file = release(ledger, tmp_path / "one"), tmp_path / "one" / "student.safetensors"
    student_store.save(STUDENT, tmp_path / "tested.safetensors")
    assert test.tested_sha256 == compute_file_digest(tmp_path / "tested.safetensors") != test.student_sha256
    assert test.student_sha256 == compute_file_digest(file) and test.multiple == 0.7
    logits = student_store.load(file).compute_logits(POINTS)
    assert torch.allclose(logits, 0.7 * STUDENT.compute_logits(POINTS), atol=1e-5)
    (commit,) = [entry.facts for entry in ledger.read_entries("a") if entry.kind == "commit"]
    assert commit["private_test_sha256"] == compute_file_digest(tmp_path / "one" / "private_test.json")
    assert read_test(file, "student_sha256") == test and read_test(file, "tested_sha256") is None
    again = release(ledger, tmp_path / "one")  # trains and saves the tested student again
    assert again == test and compute_file_digest(file) == test.student_sha256
    student_store.save(OTHER_STUDENT, file)
    assert read_test(file, "student_sha256") is None  # nothing is claimed for another student


def test_an_unusable_record_keeps_its_place_and_adds_zero():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    x[:10] = math.nan  # each is replaced by a filler of class 0
    y = torch.ones(40).long()
    y[35:] = -1
    records = PrivateRecords.from_rows(x, y, num_classes=2)
    data = Dataset(STUDENT.spec, records, PublicPool(POINTS), Evaluation(POINTS[:0], y[:0]))
    kept = drop_unusable(data, "replace_one").private
    counts = count_predictions(STUDENT, kept, "replace_one", do_nothing).counts_QC
    assert len(kept) == 40 and counts[0].tolist() == [0, 0] and int(counts.sum()) == 25
    as_fillers = count_predictions(STUDENT, replace(kept, usable_N=None), "replace_one", do_nothing).counts_QC
    assert int(as_fillers[0].sum()) == 15  # the wrong answer
    assert (
        int(
            count_predictions(
                STUDENT, drop_unusable(data, "add_remove").private, "add_remove", do_nothing
            ).counts_QC.sum()
        )
        == 25
    )


def test_the_cost_is_a_tenth_of_mu2_for_any_noise():
    gaussian = (GaussianEvent(mu=0.1, count=90),)
    mechanism = make_test_mechanism(gaussian, "replace_one", 1e-5, "torch")
    assert math.sqrt(2) / mechanism.sigma == pytest.approx(math.sqrt(0.9 / 9), rel=1e-6)
    pure = (PureDPEvent(epsilon=0.1, count=10),)
    mu = math.sqrt(9) / make_test_mechanism(pure, "add_remove", 1e-5, "discrete").sigma
    assert compute_epsilon(mu, 1e-5) == pytest.approx(compute_guarantee(pure, 1e-5).epsilon, rel=1e-6)


# ---- the bound -----------------------------------------------------------------------------------------------------


def compute_tail_slowly(p, right, wrong, std, n):
    """P(T >= t) by mpmath: the sum over the binomial number of normal tails."""
    with mp.workdps(40):
        p, noise = mpf(p), mpf(std) * mp.sqrt(mpf(p) ** 2 + (1 - mpf(p)) ** 2)
        excess = (1 - p) * right - p * wrong - mpf(1) / 2
        tails = [mp.ncdf((k - n * p - excess) / noise) for k in range(n + 1)]
        return float(mp.fsum(mp.binomial(n, k) * p**k * (1 - p) ** (n - k) * tails[k] for k in range(n + 1)))


@pytest.mark.parametrize(
    "p,right,wrong,std,n",
    [(0.9, 280, 20, 5.0, 300), (0.934, 560, 30, 30.8, 600), (0.5, 30, 20, 0.4, 50), (0.999, 400, -3, 2.0, 410)],
)
def test_the_tail_is_that_of_mpmath(p, right, wrong, std, n):
    expected = max(p**n, compute_tail_slowly(p, right, wrong, std, n))
    assert compute_tail(p, right, wrong, std, n) == pytest.approx(expected, rel=1e-9)


def draw_counts(p, n, sigma, num_classes, draws, seed=0):
    """Noisy, rounded numbers of right and wrong predictions, summed over the classes."""
    draw = np.random.default_rng(seed)
    right_N = draw.binomial(n, p, draws)
    noise = np.rint(draw.normal(0, sigma, (2, draws, num_classes))).sum(2)  # the counts are integers
    return (
        (right_N + noise[0]).astype(int),
        (n - right_N + noise[1]).astype(int),
        math.sqrt(num_classes * (sigma**2 + 1 / 12)),
    )


def covers(p, right, wrong, std, n):
    """Whether the bound is at most p: the excess increases with p (checked below), so its sign at p decides."""
    failure = 0.05
    if n is None:
        n = max(0, math.ceil(right + wrong + 2.5758293035489 * math.sqrt(2) * std))
        failure = 0.045
    return n == 0 or compute_tail(p, right, wrong, std, n) >= failure


COVERAGE = [
    (0.934, 1000, 30.8, 1),
    (0.99, 1000, 5.0, 2),
    (0.6, 300, 10.0, 3),
    (0.8, 60, 0.3, 2),
    (0.95, 5000, 20.0, 10),
]


@pytest.mark.parametrize("is_public", [False, True])
@pytest.mark.parametrize("p,n,sigma,num_classes", COVERAGE)
def test_the_bound_holds_with_its_probability(p, n, sigma, num_classes, is_public):
    right_N, wrong_N, std = draw_counts(p, n, sigma, num_classes, 4000)
    size = n if is_public else None
    held = [covers(p, right, wrong, std, size) for right, wrong in zip(right_N.tolist(), wrong_N.tolist(), strict=True)]
    assert 0.94 <= np.mean(held) <= 0.985  # the standard error is 0.0035
    for right, wrong, holds in zip(right_N[:8].tolist(), wrong_N[:8].tolist(), held[:8], strict=True):
        assert (compute_accuracy_bound(right, wrong, std, size) <= p) == holds
        if compute_accuracy_bound(right, wrong, std, size) > 0 and size is not None:
            excess = [compute_tail(q, right, wrong, std, size) for q in np.linspace(0.3, 1, 60)]
            assert (np.diff(excess) >= -1e-9).all()


def test_wrong_margins_do_not_hold():
    """Clopper-Pearson on the noisy counts, and the noise of one count in place of both."""
    right_N, wrong_N, std = draw_counts(0.934, 1000, 30.8, 1, 2000)
    low_N = beta.ppf(0.05, right_N, np.maximum(wrong_N, 0) + 1)
    assert np.mean(low_N <= 0.934) < 0.8
    pairs = list(zip(right_N.tolist(), wrong_N.tolist(), strict=True))
    assert np.mean([covers(0.934, *pair, std / 2, None) for pair in pairs]) < 0.9


def test_the_bound_is_that_of_the_oracle():
    """Figures that were computed before the code: .884 at a true .934, against .833 of two separate tails."""
    right_N, wrong_N, std = draw_counts(0.934, 1000, 30.8, 1, 200)
    bounds = [compute_accuracy_bound(r, w, std, None) for r, w in zip(right_N.tolist(), wrong_N.tolist(), strict=True)]
    assert np.median(bounds) == pytest.approx(0.884, abs=0.006)


@pytest.mark.parametrize("right,wrong", [(-5, 3), (0, 0), (4, -300), (3, 900)])
def test_a_bound_that_says_nothing_is_zero(right, wrong):
    assert compute_accuracy_bound(right, wrong, 10.0, None) == 0.0


# ---- what follows from the table -----------------------------------------------------------------------------------


def make_test(counts, sigma=1e-9):
    return PrivateTest(
        counts=tuple(map(tuple, counts)), sigma=sigma, num_units=None, number=1, id="id", tested_sha256=""
    )


def test_the_accuracy_stays_in_its_range():
    assert make_test([[60, 10], [110, 20]]).accuracy[0] == pytest.approx(0.85)
    assert make_test([[60, -9], [60, -9]], 10.0).accuracy[0] == 1.0
    assert make_test([[-5, 0], [-5, 0]], 10.0).accuracy[0] == 0.0
    assert make_test([[0, 0], [0, 0]], 1.0).accuracy[1] > 0.4
    assert [recall for recall, _ in make_test([[60, 20], [110, 0]]).recalls] == [0.75, 1.0]


@pytest.mark.parametrize(
    "size,accuracy,sigma,num_classes", [(1000, 0.9, 12.0, 2), (3000, 0.7, 20.0, 5), (500, 0.8, 0.5, 3)]
)
def test_the_standard_deviation_is_that_of_sampling_and_noise(size, accuracy, sigma, num_classes):
    draw, tests = np.random.default_rng(0), []
    p_C2 = np.array([[accuracy, 1 - accuracy]] * num_classes) / num_classes
    for _ in range(3000):
        counts = draw.multinomial(size, p_C2.ravel()).reshape(p_C2.shape) + draw.normal(0, sigma, p_C2.shape)
        tests.append(make_test(np.rint(counts).astype(int).tolist(), sigma))
    for values in ([test.accuracy for test in tests], [test.recalls[0] for test in tests]):
        estimates, stated = np.array(values).T
        assert np.mean(stated) == pytest.approx(np.std(estimates), rel=0.08)
    sampling_alone = math.sqrt(accuracy * (1 - accuracy) / size)
    if sigma > 1:
        assert np.std([test.accuracy[0] for test in tests]) > 1.2 * sampling_alone  # the wrong answer is rejected


LOGITS = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)) * 2


def compute_confidence(multiple):
    return float((multiple * LOGITS.double()).softmax(1).max(1).values.mean())


@pytest.mark.parametrize("accuracy", [0.55, 0.7, 0.9])
def test_the_multiple_makes_the_mean_confidence_the_accuracy(accuracy):
    right = round(100_000 * accuracy)
    test = make_test([[right, 100_000 - right], [0, 0], [0, 0]], 1.0)
    multiple = test.compute_logit_multiple(LOGITS)
    grid = np.geomspace(0.2, 5, 4001)
    best = grid[np.argmin([abs(compute_confidence(one) - accuracy) for one in grid])]
    assert multiple == pytest.approx(best, rel=1e-3) and compute_confidence(multiple) == pytest.approx(
        accuracy, abs=1e-6
    )
    assert torch.equal((multiple * LOGITS).argmax(1), LOGITS.argmax(1))


def test_the_multiple_has_limits_and_needs_an_accurate_test():
    never, always = [[0, 10**5], [0, 0], [0, 0]], [[10**5, 0], [0, 0], [0, 0]]
    assert make_test(never).compute_logit_multiple(LOGITS) == 0.2
    assert make_test(always).compute_logit_multiple(LOGITS) == 5.0
    assert make_test([[900, 100], [0, 0], [0, 0]], 40.0).compute_logit_multiple(LOGITS) == 1.0
    noisy = make_test([[1000, 0], [0, 0], [0, 0]], 11.0)  # an accuracy of 1 by noise
    multiple = noisy.compute_logit_multiple(3 * LOGITS)
    expected = 1 - noisy.accuracy[1]
    assert noisy.accuracy[1] < 0.03 and compute_confidence(3 * multiple) == pytest.approx(expected, abs=1e-6)
