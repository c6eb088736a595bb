"""Votes of teachers at sites: one unit moves at most one vote at each question, and the student learns from the sum."""

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.methods import teacher_votes
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import open_ledger
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import Shards
from pate_torch.sites import training
from pate_torch.sites.keys import load_joiner_key
from pate_torch.sites.rounds import read_round
from pate_torch.sites.tables import COUNT_STEPS, read_public_file
from pate_torch.sites.votes import make_recipe
from pate_torch.teachers import training as teachers_training
from pate_torch.teachers.independence import RetrainingCheck
from pate_torch.teachers.store import TeacherStore
from tests.sites.site_tables import CLASSES, PUBLIC, get_charges, make_consortium, make_rows, make_terms, select_rows

RIDGE = {"optimizer": "ridge", "weight_decay": 1.0}
"""Teachers that learn in closed form; a teacher with one record votes for the class of this record everywhere."""


@functools.cache
def make_questions(num_questions: int):
    return training.make_vote_counts(PUBLIC, "y", CLASSES, num_questions, RIDGE)


def make_votes(num_questions: int = 12, **settings):
    return replace(make_questions(num_questions), teacher=make_recipe(RIDGE | settings))


@pytest.fixture
def no_trial(monkeypatch):
    """Train no teacher a second time, which takes seconds."""
    monkeypatch.setattr(RetrainingCheck, "run", lambda *_: None)


def get_ensembles(home):
    return [TeacherStore(home).load(path.parent.name) for path in (home / "teachers").glob("*/manifest.json")]


# ---- the sum ---------------------------------------------------------------------------------------------------------


def test_three_sites_give_the_noisy_sum_of_their_teachers_votes_and_a_student(tmp_path):
    consortium = make_consortium(tmp_path, cap=4.0, teachers=(20, 25, 30))
    kind, joiner = make_votes(60), consortium.joiner
    _, raw, public = joiner.ask(kind, 3.0)
    current_round = read_round(raw, joiner.charter)
    assert current_round.bound == 75 * COUNT_STEPS and current_round.shape == (60, 3)
    consortium.run_round(raw, public)
    exact_QC = np.zeros((60, 3), dtype=np.int64)
    for site, num_teachers in zip(consortium.sites, (20, 25, 30), strict=True):
        (stored,) = get_ensembles(site.home)
        vote_KQ = stored.ensemble.predict(kind.query_x).numpy()
        assert vote_KQ.shape == (num_teachers, 60)
        for teacher_Q in vote_KQ:  # each teacher by itself
            exact_QC[np.arange(60), teacher_Q] += 1
        with open_ledger(site.home, readonly=True) as ledger:
            (charge,) = ledger.get_charges("scans").values()
            assert ledger.get_head() == stored.ledger_head  # an older ledger cannot use these teachers
        assert 2.999 < compute_guarantee(charge.reserved_events, 1e-5).epsilon <= 3.0
        mu = next(event.mu for event in charge.reserved_events if event.kind == "gaussian")
        two_shares = math.sqrt(2) * float(current_round.share) / COUNT_STEPS
        assert mu == pytest.approx(math.sqrt(2 * 60) / two_shares, rel=1e-9)
    assert (exact_QC.sum(1) == 75).all()
    noisy = joiner.load_sum()
    error = (noisy.numbers - exact_QC).ravel() / noisy.sigma
    assert abs((error**2).mean() - 1) < 5 * math.sqrt(2 / len(error))
    assert np.abs(error).max() > 1, "noise must have been drawn"

    test_rows = make_rows(1000, 98)
    y_N = np.array([CLASSES.index(name) for name in test_rows.pop("y").to_pylist()])
    x = torch.from_numpy(kind.spec.schema.encode(test_rows))
    accuracy = (training.train_student(noisy, PUBLIC).predict(x).numpy() == y_N).mean()
    assert accuracy > 0.7
    wrong = replace(noisy, numbers=-noisy.numbers)
    assert (training.train_student(wrong, PUBLIC).predict(x).numpy() == y_N).mean() < 0.3

    # A later round with the same settings uses the same teachers, and is charged.
    _, raw, public = joiner.ask(make_votes(30), 0.5)
    train, teacher_votes.train = teacher_votes.train, lambda *_, **__: pytest.fail("no teacher is trained again")
    try:
        joiner.sum(consortium.answer_all(raw, public))
    finally:
        teacher_votes.train = train
    assert joiner.load_sum().numbers.shape == (30, 3) and len(get_ensembles(consortium.sites[0].home)) == 1
    assert len(get_charges(consortium.sites[0])) == 2


def test_a_site_without_records_answers_with_votes_for_one_class(tmp_path, no_trial):
    kind = make_votes().at_site(3, tmp_path)
    table = kind.count(kind.read_records(select_rows(make_rows(5, 1), []), "record"), "add_remove")
    assert (table.numbers == [[3 * COUNT_STEPS, 0, 0]] * 12).all()


# ---- sensitivity -----------------------------------------------------------------------------------------------------


def count(kind, home, rows, adjacency, unit, num_teachers):
    bound_kind = kind.at_site(num_teachers, home)
    table = bound_kind.count(bound_kind.read_records(rows, unit), adjacency)
    table.check_sensitivity(kind.compute_squared_length(adjacency))
    assert (table.numbers.sum(1) == num_teachers * COUNT_STEPS).all()
    return table.numbers // COUNT_STEPS


def list_neighbors(rows, adjacency, unit):
    """List tables that differ in one unit; ``rows`` have the columns of make_rows, and perhaps "patient"."""
    size = len(rows["y"])
    if unit == "record":
        units = [[row] for row in range(size)]
    else:
        patients = rows["patient"].to_pylist()
        units = [[row for row in range(size) if patients[row] == name] for name in sorted(set(patients))]
    if adjacency == "add_remove":
        return [select_rows(rows, [row for row in range(size) if row not in unit]) for unit in units]
    neighbors = []
    for (row,) in units:
        labels = rows["y"].to_pylist()
        labels[row] = CLASSES[(CLASSES.index(labels[row]) + 1) % 3] if row % 2 else "unknown"
        f0 = rows["f0"].to_pylist()
        f0[row] = "3.5"
        neighbors.append(rows | {"y": pa.array(labels), "f0": pa.array(f0)})
    return neighbors


def measure_largest_change(home, rows, adjacency, unit, num_teachers):
    kind = make_votes()
    full = count(kind, home, rows, adjacency, unit, num_teachers)
    changes = [
        count(kind, home, neighbor, adjacency, unit, num_teachers) - full
        for neighbor in list_neighbors(rows, adjacency, unit)
    ]
    largest = max(int((change.astype(np.int64) ** 2).sum()) for change in changes)
    return largest, kind.compute_squared_length(adjacency) // COUNT_STEPS**2


def make_patients():
    rows = make_rows(18, 3)
    rows["patient"] = pa.array([f"p{i % 6}" for i in range(18)])  # each id appears three times
    return rows


def make_copies():
    return select_rows(make_rows(10, 3), [0, 1, 2, 2, 2, 3, 4, 4, 5, 6])


CASES = {
    "records added or removed": (make_rows(10, 3), "add_remove", "record", 14),
    "equal records added or removed": (make_copies(), "add_remove", "record", 14),
    "patients added or removed": (make_patients(), "add_remove", "group:patient", 8),
    "records replaced": (make_rows(10, 3), "replace_one", "record", 10),
    "equal records replaced": (make_copies(), "replace_one", "record", 10),
}


@pytest.mark.parametrize("name", CASES)
def test_one_unit_moves_at_most_one_vote_at_each_question(tmp_path, no_trial, name):
    largest, priced = measure_largest_change(tmp_path, *CASES[name])
    assert priced == 2 * 12
    assert largest <= priced
    if "patients" not in name:
        assert largest == priced  # a teacher with one record moves its vote at every question
    assert largest > 0


def test_shards_in_which_two_teachers_see_one_unit_are_refused(tmp_path, no_trial, monkeypatch):
    make_shards = AddRemove.make_shards

    def give_records_to_two_teachers(self, private, num_teachers, seed):
        shards = make_shards(self, private, num_teachers, seed)
        both_KS = torch.cat([shards.index_KS, shards.index_KS.roll(1, 0)], 1)
        return Shards(both_KS, both_KS >= 0, shards.adjacency, shards.unit)

    def split_patients(self, private, num_teachers, seed):
        index_KS = torch.arange(len(private)).reshape(num_teachers, -1)
        return Shards(index_KS, index_KS >= 0, "add_remove", private.unit)

    for fault, message in (
        (give_records_to_two_teachers, "one record would reach two teachers"),
        (split_patients, "assigns one group:patient to two shards"),
    ):
        monkeypatch.setattr(AddRemove, "make_shards", fault)
        with pytest.raises(ValueError, match=message):
            count(make_votes(), tmp_path, make_patients(), "add_remove", "group:patient", 9)


@pytest.mark.parametrize("name", ["records added or removed", "records replaced"])
def test_a_training_in_which_two_teachers_see_one_unit_is_found(tmp_path, no_trial, monkeypatch, name):
    gather_chunk = teachers_training.gather_chunk

    def leak(private, shards, teachers):
        both = SimpleNamespace(
            mask_KS=torch.cat([shards.mask_KS, shards.mask_KS.roll(-1, 0)], 1),
            get_indices=lambda k: torch.cat([shards.get_indices(i % shards.num_teachers) for i in (k, k + 1)]),
        )
        return gather_chunk(private, both, teachers)

    monkeypatch.setattr(teachers_training, "gather_chunk", leak)
    largest, priced = measure_largest_change(tmp_path, *CASES[name])
    assert largest > priced


def test_votes_on_images_need_add_remove():
    image = {"image": np.random.default_rng(0).integers(0, 255, (30, 8, 8), dtype=np.uint8)}
    kind = training.make_vote_counts(image, "y", CLASSES, 6, {})
    assert kind.query_x.shape[1:] == (1, 8, 8) and kind.query_x.dtype == torch.uint8
    assert kind.compute_bound(make_terms(3, teachers=(2, 3, 4))) == 9 * COUNT_STEPS
    facts, arrays = kind.to_content()
    read = type(kind).from_content("y", json.loads(json.dumps(facts)), arrays)
    assert torch.equal(read.query_x, kind.query_x) and read.query_x.dtype == torch.uint8
    with pytest.raises(ValueError, match="another name of one file moves other files to other shards"):
        kind.compute_bound(make_terms(3, teachers=(2, 3, 4), adjacency="replace_one", records=(9, 9, 9)))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_asked_is_refused_before_a_charge(tmp_path, no_trial, monkeypatch):
    refusals = {
        "teachers=0: must be an integer": {},
        "num_teachers=10: must be": {"adjacency": "replace_one", "records": (20, 20, 9), "teachers": 10},
    }
    for number, (match, changes) in enumerate(refusals.items()):
        teachers = (changes.pop("teachers", 0),) * 3
        consortium = make_consortium(tmp_path / str(number), teachers=teachers, **changes)
        with pytest.raises(ValueError, match=match):
            consortium.joiner.ask(make_votes(), 0.5)
    with pytest.raises(ValueError, match="is learned from all public points"):
        make_votes(start={"features": {}})
    with pytest.raises(ValueError, match="exceed 2"):
        make_votes(steps=1 << 41)
    with pytest.raises(ValueError, match="epochs"):
        make_votes(epochs=3)

    consortium = make_consortium(tmp_path / "cap", cap=0.4, teachers=(3,) * 3)
    _, raw, public = consortium.joiner.ask(make_votes(), 0.5)
    site = consortium.sites[0]
    with monkeypatch.context() as patch:
        patch.setattr(teacher_votes, "train", lambda *_, **__: pytest.fail("the budget is checked before training"))
        with pytest.raises(BudgetExceeded):
            site.answer(raw, public, consortium.data[0])
    with site.state.open() as secrets:
        assert not secrets.rounds


def test_the_public_file_keeps_all_settings_and_bad_ones_are_refused(tmp_path):
    consortium = make_consortium(tmp_path, num_sites=2, teachers=(3, 3))
    joiner, kind = consortium.joiner, make_votes(5)
    key = load_joiner_key(joiner.folder / "joiner.key")
    read = read_public_file(joiner.charter, kind.to_file(joiner.charter, key))
    assert read.teacher == kind.teacher and read.spec == kind.spec
    assert torch.equal(read.query_x, kind.query_x) and read.query_x.dtype == torch.float32
    facts, arrays = kind.to_content()
    content = {"kind": "votes", "label": "y", "names": ["query_x"], "shapes": [list(arrays["query_x"].shape)]}
    body = arrays["query_x"].astype("<f8").tobytes()

    def refuse(reason="", **changes):
        text = json.dumps(facts | changes)
        with pytest.raises(ValueError, match=rf"does not describe a table of the kind votes \(.*{reason}"):
            read_public_file(joiner.charter, joiner.charter.make_file("public", content | {"facts": text}, key, body))

    refuse(teacher={"network": "unknown"})
    refuse(teacher={"learning_rate": 1e308})
    refuse(teacher={"steps": 0})
    # A joiner cannot make a site train a network of any size, or for any time.
    for hidden in ([10**9], [4097], [4] * 17):
        refuse("must be at most 16 numbers of at most 4,096", teacher={"network": "mlp", "options": {"hidden": hidden}})
    large = {"network": "mlp", "options": {"hidden": [4096] * 3}}
    refuse("teacher.network=33603587: must be at most 16,777,216", teacher=large)
    refuse("batch_size=33554432: must be at most", teacher={"network": "mlp", "steps": 1 << 20, "batch_size": 32})
    assert make_votes(network="mlp", optimizer="adam", options={"hidden": [2048, 2048]}).teacher.steps == 900
    refuse(dtype="float64")
    refuse(spec={})
