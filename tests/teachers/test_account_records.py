"""Records known again under another account: shuffled, grown or partly edited ones are, other people's are not."""

import numpy as np
import pytest
import torch

from pate_torch.privacy.records import PrivateRecords
from pate_torch.teachers.account_records import AccountRecords, RecordHashes
from pate_torch.teachers.store import TeacherStore


def records(x, y=None, units=None) -> PrivateRecords:
    x = torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else torch.as_tensor(y)
    return PrivateRecords.from_rows(
        x, y, np.arange(len(x)).astype(str) if units is None else np.asarray(units).astype(str)
    )


@pytest.fixture
def store(tmp_path):
    return TeacherStore(tmp_path)


def charge(store, account, private) -> None:
    AccountRecords(store, account, RecordHashes.from_data(private, store)).record_ledger_head("0" * 64)


def find(store, private) -> str | None:
    """The account that these records are known from."""
    return AccountRecords(store, "second", RecordHashes.from_data(private, store)).find_duplicate(["first"])


def charge_then_find(store, charged, asked) -> str | None:
    """The account that ``asked`` is known from, after "first" was charged for the other records."""
    charge(store, "first", charged)
    return find(store, asked)


X = np.random.default_rng(0).normal(size=(400, 3))
CHANGES = {
    "the same": X,
    "shuffled": X[::-1],
    "one value moved": np.concatenate([X[:1] + 1e-6, X[1:]]),
    "a train_test_split": X[np.random.default_rng(1).permutation(400)[:300]],
    "grown eightfold": np.concatenate([X, np.random.default_rng(2).normal(size=(2800, 3))]),
    "a fifth of them": np.concatenate([X[:80], np.random.default_rng(3).normal(size=(320, 3))]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_records_of_another_account_are_known_again(store, change):
    assert charge_then_find(store, records(X), records(CHANGES[change])) == "first"


def test_other_records_and_those_of_the_same_account_pass(store):
    others = np.concatenate([X[:30], np.random.default_rng(4).normal(size=(370, 3))])  # 7.5 % are known
    assert charge_then_find(store, records(X), records(others)) is None
    assert AccountRecords(store, "first", RecordHashes.from_data(records(X), store)).find_duplicate([]) is None


@pytest.mark.parametrize("values,size", [(4, 300), (60, 300), (2000, 900), (2000, 100)])
def test_records_of_few_values_coincide_by_chance(store, values, size):
    """Other people's records of the same few values pass; the same people's are known where values tell them apart."""
    draw = np.random.default_rng(values)
    first, other = (draw.integers(0, values, (size, 1)).astype(float) for _ in range(2))
    assert charge_then_find(store, records(first), records(other)) is None
    if values == 2000:
        assert find(store, records(first)) == "first"


def test_a_unit_is_known_by_any_of_its_records(store):
    units = np.arange(400) // 4
    one_each = X.copy()
    one_each[units * 4 != np.arange(400)] += 1.0  # a quarter of the records, but of every patient
    assert charge_then_find(store, records(X, units=units), records(one_each, units=units)) == "first"


def test_an_account_that_grows_knows_all_its_records(store):
    more = np.random.default_rng(5).normal(size=(400, 3))
    for part in (X, np.concatenate([X, more])):
        charge(store, "first", records(part))
    assert find(store, records(more)) == "first"


def test_labels_and_types_are_part_of_a_record(store):
    assert charge_then_find(store, records(X), records(X, y=np.ones(400, dtype=np.int64))) is None
    foreign = RecordHashes.from_data(records(X), TeacherStore(store.root / "elsewhere"))  # under another key
    assert AccountRecords(store, "second", foreign).find_duplicate(["first"]) is None
