"""Stored teachers are trained once, and used on the records and beside the ledger that they belong to."""

import dataclasses

import pytest

from pate_torch.privacy.ledger import Ledger
from pate_torch.teachers.store import EnsembleFinder, TeacherStore
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import even_shards, identity_of, recipe, records, spec


@pytest.fixture
def finder(tmp_path):
    store, messages = TeacherStore(tmp_path), []
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield EnsembleFinder(store, ledger, identity_of(store, records(8)), messages.append)


def train_two(folder):
    return train(records(8), spec(), even_shards(2, 4), recipe(), seed=0, folder=folder), 7


def test_teachers_are_trained_once(finder):
    asked = []
    stored, votes = finder.find_or_train(train_two, lambda: asked.append(1))
    again, no_votes = finder.find_or_train(lambda _: pytest.fail("trained again"), asked.clear)
    assert votes == 7 and no_votes is None and again.id == stored.id
    assert len(asked) == 2  # before the training, and before the wait for others; not for teachers that are there
    assert not list(finder.store.folder.glob(".partial-*[!k]")), "checkpoints are left"


def test_what_stops_the_training_stores_nothing(finder):
    with pytest.raises(ValueError, match="cap"):
        finder.find_or_train(lambda _: pytest.fail("trained"), lambda: (_ for _ in ()).throw(ValueError("cap")))
    assert finder.find() is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("dataset", "circles"), ("num_teachers", 3), ("partition", {"name": "replace_one"}), ("fingerprint", "0" * 64)],
)
def test_teachers_of_other_data_are_refused(finder, key, value):
    stored, _ = finder.find_or_train(train_two, lambda: None)
    other = dataclasses.replace(finder, identity=dataclasses.replace(finder.identity, **{key: value}))
    with pytest.raises(ValueError, match=f"were trained with {key}") as refused:
        other.load(stored.id)
    assert stored.identity.fingerprint not in str(refused.value)
    assert other.find() is None


def test_teachers_that_were_used_with_another_ledger_are_refused(finder):
    stored, _ = finder.find_or_train(train_two, lambda: None)
    finder.store.set_ledger_head(stored.id, "0" * 64)
    for one in (finder, dataclasses.replace(finder, ledger=None)):
        with pytest.raises(ValueError, match=r"another privacy ledger.*ledger\.sqlite"):
            one.load(stored.id)
