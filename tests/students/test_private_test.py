"""The private test: sensitivity by brute force, noise, what an interruption leaves, and what follows from the table."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from pate_torch.accounting.events import GaussianEvent
from pate_torch.core.progress import do_nothing
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY
from pate_torch.students import store as student_store
from pate_torch.students.private_test import NoisyConfusion, count_predictions, release_confusion
from pate_torch.teachers.store import TeacherStore
from tests.students.tasks import ROWS, make_student

STUDENT = make_student(ROWS, "mlp")
POINTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)) * 3


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store whose account "a" holds out about half of its units, by a fixed key."""
    store = TeacherStore(tmp_path)
    monkeypatch.setattr("secrets.randbits", lambda bits: 7)
    store.fix_test_share("a", 0.5, is_charged=False)
    return store


# ---- one unit moves the table by no more than is paid for ---------------------------------------------------------


def make_records(rows, ids):
    """Records of (point, label, unit). With "groups" a unit has several rows, with "none" each row is one."""
    x, y = torch.stack([POINTS[point] for point, *_ in rows]), torch.tensor([label for _, label, *_ in rows])
    units = None if ids == "none" else np.array([name for *_, name in rows])
    return PrivateRecords.from_rows(x, y, units, "group:person" if ids == "groups" else "record", num_classes=2)


def split(store, records, adjacency):
    return store.hold_out_units("a", records, adjacency)


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
    names = make_records(rows, ids).unit_id
    for name in set(names.tolist()):
        yield [row for row, other in zip(rows, names, strict=True) if other != name]
    for added, place in itertools.product(NEW_ROWS, (0, 5, len(rows))):
        if ids == "none":
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
    assert counts[:, 0].tolist() == torch.bincount(STUDENT.predict(x), minlength=2).tolist() and not counts[:, 1].any()
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


def release(ledger, folder, student=STUDENT, **options):
    folder.mkdir(exist_ok=True)
    student_store.save(student, folder / "student.safetensors")
    budget = make_budget(ledger, **options)
    return release_confusion(student, folder / "student.safetensors", RECORDS, MECHANISM, budget, do_nothing)


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
    assert drawn == [((2, 2), 4.0)] and torch.equal(shown.counts_CC, exact)  # rounded after the noise
    (charge,) = ledger.get_charges("a").values()
    assert charge.incurred_events == charge.reserved_events == (GaussianEvent(mu=1 / 4.0),)
    assert (charge.is_committed, charge.purpose, shown.number) == (True, "test of the model on held-out units", 1)
    written = json.loads((tmp_path / "one" / "private_test.json").read_text())
    assert written["counts"] == shown.counts_CC.tolist() and written["sigma"] == 4.0


OTHER_STUDENT = STUDENT.adjust_logits(1.0, torch.tensor([0.0, 1.0]))


def test_the_same_call_reads_the_table_and_another_student_is_refused(ledger, tmp_path, monkeypatch):
    first = release(ledger, tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "draw_gaussian", kill)
        again = release(ledger, tmp_path / "one", first_charge_only=True)
        assert torch.equal(again.counts_CC, first.counts_CC)
        assert (again.sigma, again.number, again.id) == (first.sigma, first.number, first.id)
        with pytest.raises(ValueError, match=r"student='mlp': is not the student that was tested"):
            release(ledger, tmp_path / "one", OTHER_STUDENT, first_charge_only=True)
    assert len(ledger.get_charges("a")) == 1
    assert release(ledger, tmp_path / "one", OTHER_STUDENT).number == 2 == len(ledger.get_charges("a"))


def test_a_second_test_of_the_account_says_that_it_is_the_second(ledger, tmp_path):
    first, second = (release(ledger, tmp_path / name, run=name) for name in ("one", "two"))
    assert (first.number, second.number) == (1, 2) and first.id != second.id
    purposes = [charge.purpose for charge in ledger.get_charges("a").values()]
    assert purposes[1] == f"{purposes[0]} (number 2 of this account)" and str(second).endswith("test 2 of the account")


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


# ---- what follows from the table -----------------------------------------------------------------------------------


def make_confusion(counts, sigma=0.0):
    return NoisyConfusion(torch.tensor(counts), sigma, 1, "id")


def test_the_accuracy_stays_in_its_range():
    assert make_confusion([[60, 10], [20, 110]]).accuracy == pytest.approx(0.85)
    assert make_confusion([[60, -9], [-9, 60]], 10.0).accuracy == 1.0
    assert make_confusion([[-5, 0], [0, -5]], 10.0).accuracy == 0.0
    assert make_confusion([[0, 0], [0, 0]], 1.0).accuracy_std > 0.4


@pytest.mark.parametrize(
    "size,accuracy,sigma,num_classes", [(1000, 0.9, 12.0, 2), (3000, 0.7, 20.0, 5), (500, 0.8, 0.5, 3)]
)
def test_the_standard_deviation_is_that_of_sampling_and_noise(size, accuracy, sigma, num_classes):
    draw, estimates, stated = np.random.default_rng(0), [], []
    wrong = (1 - accuracy) / (num_classes - 1) / num_classes
    p_CC = np.full((num_classes, num_classes), wrong)
    np.fill_diagonal(p_CC, accuracy / num_classes)
    for _ in range(3000):
        counts = draw.multinomial(size, p_CC.ravel()).reshape(p_CC.shape) + draw.normal(0, sigma, p_CC.shape)
        confusion = make_confusion(np.rint(counts).astype(int).tolist(), sigma)
        estimates.append(confusion.accuracy)
        stated.append(confusion.accuracy_std)
    assert np.mean(stated) == pytest.approx(np.std(estimates), rel=0.06)
    sampling_alone = math.sqrt(accuracy * (1 - accuracy) / size)
    if sigma > 1:
        assert np.std(estimates) > 1.2 * sampling_alone  # the wrong answer is rejected


LOGITS = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)) * 2


def compute_confidence(multiple):
    return float((multiple * LOGITS.double()).softmax(1).max(1).values.mean())


@pytest.mark.parametrize("accuracy", [0.55, 0.7, 0.9])
def test_the_multiple_makes_the_mean_confidence_the_accuracy(accuracy):
    right = round(100_000 * accuracy)
    confusion = make_confusion([[right, 0, 0], [100_000 - right, 0, 0], [0, 0, 0]], 1.0)
    multiple = confusion.compute_logit_multiple(LOGITS)
    grid = np.geomspace(0.2, 5, 4001)
    best = grid[np.argmin([abs(compute_confidence(one) - accuracy) for one in grid])]
    assert multiple == pytest.approx(best, rel=1e-3) and compute_confidence(multiple) == pytest.approx(
        accuracy, abs=1e-6
    )
    assert torch.equal((multiple * LOGITS).argmax(1), LOGITS.argmax(1))


def test_the_multiple_has_limits_and_needs_an_accurate_test():
    never, always = ([[0, 0, 0], [10**5, 0, 0], [0, 0, 0]], [[10**5, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert make_confusion(never).compute_logit_multiple(LOGITS) == 0.2
    assert make_confusion(always).compute_logit_multiple(LOGITS) == 5.0
    assert make_confusion([[900, 0, 0], [100, 0, 0], [0, 0, 0]], 40.0).compute_logit_multiple(LOGITS) == 1.0
    noisy = make_confusion([[1000, 0, 0], [0, 0, 0], [0, 0, 0]], 11.0)  # an accuracy of 1 by noise
    multiple = noisy.compute_logit_multiple(3 * LOGITS)
    expected = 1 - noisy.accuracy_std
    assert noisy.accuracy_std < 0.03 and compute_confidence(3 * multiple) == pytest.approx(expected, abs=1e-6)
