"""Shards: disjoint, one unit in one shard, and neighbors that differ in one shard alone."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.core import rng
from pate_torch.privacy.partition import (
    AddRemove,
    ReplaceOne,
    assign_shards,
    get_unit_ids,
    select_one_per_unit,
)
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.unit_ids import compute_keyed_hash, make_position_ids


def private(ids, unit="record"):
    count = len(ids)
    return PrivateRecords.from_rows(
        torch.arange(count, dtype=torch.float32)[:, None], torch.zeros(count).long(), np.array(ids, dtype=str), unit
    )


def named(data, shards):
    """Per teacher, the (unit id, original record) pairs in order: what a teacher would see."""
    return [
        [(data.unit_id[i], int(data.x[i, 0])) for i in shards.get_indices(k).tolist()]
        for k in range(shards.num_teachers)
    ]


ids = st.lists(st.text("abcxyz0189:é", max_size=5).map("u".__add__), min_size=1, max_size=60)


@given(ids=ids, seed=st.integers(0, 2**40), teachers=st.integers(1, 12))
@settings(max_examples=30)
def test_hash_shards_equal_the_slow_rule_record_by_record(ids, seed, teachers):
    data = private(ids, "group:user")
    shards = AddRemove().make_shards(data, teachers, seed)

    key = rng.derive_seed(seed, "partition", "add_remove").to_bytes(8, "big")
    rows = [[] for _ in range(teachers)]
    for position, name in enumerate(ids):
        digest = hashlib.blake2b(name.encode(), key=key, digest_size=16).digest()
        shard = int.from_bytes(digest[:8], "big") % teachers
        rows[shard].append((int.from_bytes(digest[8:], "big"), position))
    assert [shards.get_indices(k).tolist() for k in range(teachers)] == [
        [position for _, position in sorted(row)] for row in rows
    ]
    assert sorted(shards.index_KS[shards.mask_KS].tolist()) == list(range(len(ids)))
    assert shards.index_KS.dtype == torch.int64 and shards.mask_KS.dtype == torch.bool and shards.unit == data.unit
    assert shards.adjacency == AddRemove().adjacency == "add_remove"


@given(ids=ids, seed=st.integers(0, 1000), victim=st.integers(0, 1000), capacity=st.sampled_from([None, 1, 3]))
@settings(max_examples=40)
def test_removing_a_unit_changes_one_shard_and_no_order(ids, seed, victim, capacity):
    units = sorted(set(ids))
    if len(units) < 3:
        return
    gone = units[victim % len(units)]
    data = private(ids, "group:user")
    kept = np.flatnonzero(data.unit_id != gone)
    less = PrivateRecords.from_rows(data.x[kept], data.y[kept], data.unit_id[kept], data.unit)
    partition = AddRemove(capacity=capacity)
    before, after = (named(d, partition.make_shards(d, 2, seed)) for d in (data, less))
    changed = [k for k in range(2) if before[k] != after[k]]
    home = int(compute_keyed_hash([gone], seed, "partition", "add_remove")[0, 0] % np.uint64(2))
    assert set(changed) <= {home}
    survivors = [pair for pair in before[home] if pair[0] != gone]
    # Without the unit the others stand in the same order; with a capacity, later ones may move up behind them.
    assert after[home][: len(survivors)] == survivors
    if capacity is None:
        assert after[home] == survivors and changed == [home]


def test_capacity_fixes_the_shape_and_keeps_the_first_by_hash():
    data = private([str(i) for i in range(300)])
    full = AddRemove().make_shards(data, 10, 0)
    cut = AddRemove(capacity=20).make_shards(data, 10, 0)
    assert cut.index_KS.shape == (10, 20)
    assert int(full.mask_KS.sum(1).max()) > 20
    assert all(cut.get_indices(k).tolist() == full.get_indices(k).tolist()[:20] for k in range(10))
    assert AddRemove(capacity=1000).make_shards(data, 10, 0).index_KS.shape == (10, 1000)


@pytest.mark.parametrize(("count", "teachers"), [(10, 3), (12, 4), (7, 7), (1000, 33), (5, 1)])
def test_chunks_are_equal_and_a_function_of_the_numbers_alone(count, teachers):
    shards = ReplaceOne().make_shards(private([str(i) for i in range(count)]), teachers, 5)
    sizes = shards.mask_KS.sum(1).tolist()
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1
    assert sorted(shards.index_KS[shards.mask_KS].tolist()) == list(range(count))
    assert shards.adjacency == ReplaceOne().adjacency == "replace_one"
    replaced = PrivateRecords.from_rows(
        torch.rand(count, 4), torch.ones(count).long(), np.array([f"other{i}" for i in range(count)])
    )
    assert torch.equal(ReplaceOne().make_shards(replaced, teachers, 5).index_KS, shards.index_KS)
    others = [ReplaceOne().make_shards(replaced, teachers, seed).index_KS.flatten().tolist() for seed in range(5)]
    assert len(set(map(tuple, others))) > 1  # permuted by the seed


@pytest.mark.parametrize(
    ("partition", "data", "teachers", "message"),
    [
        (AddRemove(), private(list("aab"), "group:user"), 0, r"num_teachers=0"),
        (ReplaceOne(), private(list("aab")), 4, r"num_teachers=4.*3 private records"),
        (ReplaceOne(), private(list("aab")), 0, r"num_teachers=0"),
        (ReplaceOne(), private(["a", "b"], "group:user"), 2, r"group:user.*partition=add_remove"),
    ],
)
def test_what_cannot_be_dealt_is_refused(partition, data, teachers, message):
    with pytest.raises(ValueError, match=message):
        partition.make_shards(data, teachers, 0)


@pytest.mark.parametrize("unit", ["record", "group:user"])
def test_how_many_units_there_are_refuses_no_number_of_teachers(unit):
    """It is private; the teachers that get none have empty shards."""
    data = private(list("aabb"), unit)
    shards = AddRemove().make_shards(data, 5, 0)
    assert shards.num_teachers == 5 and int(shards.mask_KS.sum()) == 4 and int(shards.mask_KS.any(1).sum()) <= 2
    with pytest.raises(ValueError) as error:
        AddRemove().make_shards(data, 0, 0)
    assert "2" not in str(error.value) and "4" not in str(error.value)


def test_capacity_is_checked_and_nothing_private_shows():
    with pytest.raises(ValueError, match=r"partition\.capacity=0"):
        AddRemove(capacity=0)
    text = repr(AddRemove().make_shards(private(["secret1", "secret2"]), 2, 0))
    assert "secret" not in text and "tensor" not in text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mislabeled(AddRemove):
    """Says add/remove, and cuts a permutation of positions."""

    def make_shards(self, private, num_teachers, seed):
        return ReplaceOne().make_shards(private, num_teachers, seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splitting(AddRemove):
    def make_shards(self, private, num_teachers, seed):
        return super().make_shards(
            dataclasses.replace(private, unit_id=make_position_ids(len(private))), num_teachers, seed
        )


def test_a_partition_is_held_to_what_it_says():
    x, y, names = torch.zeros(30, 2), torch.zeros(30, dtype=torch.int64), np.repeat(np.arange(10), 3).astype(str)
    private = PrivateRecords.from_rows(x, y, names, "group:person")
    assert assign_shards(AddRemove(), private, 3, 0).num_teachers == 3
    with pytest.raises(ValueError, match="two shards"):
        assign_shards(Splitting(), private, 3, 0)
    with pytest.raises(ValueError, match="not of add_remove"):
        assign_shards(Mislabeled(), PrivateRecords.from_rows(x, y, names), 3, 0)


def test_one_record_of_a_unit_is_chosen_by_the_smallest_hash_or_is_the_first():
    data = private(list("abcab"), "group:user")
    assert get_unit_ids(data, "add_remove").tolist() == list("abcab")
    assert get_unit_ids(data, "replace_one").tolist() == list("01234")
    hash_N = np.array([5, 1, 9, 3, 7], dtype=np.uint64)
    cases = [("add_remove", None, [0, 1, 2]), ("add_remove", hash_N, [3, 1, 2])]
    cases += [("replace_one", hashes, [0, 1, 2, 3, 4]) for hashes in (None, hash_N)]
    for adjacency, hashes, expected in cases:
        selected = select_one_per_unit(data, adjacency, hashes)
        assert selected.x[:, 0].long().tolist() == expected


def test_single_records_of_one_id_are_one_unit_only_if_they_are_equal():
    """No added record may displace another record, whatever its id and its place in the file are."""
    rows = [(2.0, 0, "b"), (1.0, 0, "a"), (1.0, 1, "a"), (1.0, 0, "a"), (3.0, 1, "a")]

    def make(rows, unit="record"):
        x, y, ids = zip(*rows, strict=True)
        return PrivateRecords.from_rows(np.array(x)[:, None], y, list(ids), unit)

    def select_rows(rows, **options):
        chosen = select_one_per_unit(make(rows), "add_remove", **options)
        return sorted(zip(chosen.x[:, 0].tolist(), chosen.y.tolist(), strict=True))

    assert len(select_one_per_unit(make(rows, "group:person"), "add_remove")) == 2
    whole = select_rows(rows)
    assert whole == [(1, 0), (1, 1), (2, 0), (3, 1)]
    for row, place in itertools.product([(1.0, 0, "a"), (4.0, 0, "a"), (2.0, 1, "b")], range(6)):
        more = select_rows([*rows[:place], row, *rows[place:]], hash_N=np.arange(6)[::-1])
        assert [one for one in more if one != row[:2]] == [one for one in whole if one != row[:2]]


def test_shards_without_a_record_are_empty():
    """All units may be held out for tests. A refusal would tell that there are no others."""
    shards = assign_shards(AddRemove(), private([]), 3, 0)
    assert shards.index_KS.shape == (3, 1) and not bool(shards.mask_KS.any())
