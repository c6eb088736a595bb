"""Names of units are unambiguous; roles follow the fractions, each by its own unit's id or by the position alone."""

import numpy as np
import pandas as pd
import pytest
import torch

from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.unit_ids import (
    PRIVATE,
    UnitIds,
    assign_by_hash,
    assign_by_position,
    compute_content_id,
    number_copies,
)


def test_assign_by_hash_follows_the_fractions_and_each_id_alone():
    ids, fractions = np.array([f"person{i}" for i in range(20_000)]), (0.7, 0.2, 0.1)
    file_N = np.zeros(len(ids), dtype=int)
    role_N = assign_by_hash(ids, file_N, {PRIVATE}, fractions, 3)
    assert np.abs(np.bincount(role_N) / len(ids) - fractions).max() < 0.015  # over four deviations
    some = np.arange(0, len(ids), 7)
    np.testing.assert_array_equal(assign_by_hash(ids[some], file_N[some], {PRIVATE}, fractions, 3), role_N[some])
    assert (assign_by_hash(ids, file_N, {PRIVATE}, fractions, 4) != role_N).mean() > 0.3


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({0, 1, 2}, {0: {0}, 1: {1}, 2: {2}}),
        ({0, 1}, {0: {0}, 1: {1, 2}}),
        ({0, 2}, {0: {0, 1}, 2: {2}}),
        ({0}, {0: {0, 1, 2}}),
    ],
)
def test_records_of_a_file_given_for_a_role_keep_it(files, allowed):
    ids = np.array([str(i) for i in range(3000)])
    file_N = np.array(sorted(files))[np.arange(3000) % len(files)]
    role_N = assign_by_hash(ids, file_N, files, (0.8, 0.1, 0.1), 0)
    assert {file: set(role_N[file_N == file].tolist()) for file in files} == allowed


def test_assign_by_position_has_the_sizes_printed_in_lzcw21():
    for count, sizes in (8124, [6499, 163, 1462]), (48842, [39073, 977, 8792]), (72309, [57847, 1447, 13015]):
        assert np.bincount(assign_by_position(count, (0.8, 0.02, 0.18), 0)).tolist() == sizes


@pytest.mark.parametrize(
    "ids",
    [
        [1.0, 2.0],
        ["a", None],
        ["a", ""],
        [1, "1"],
        [1, 2.5],
        pd.Series([1, None]),
        np.array([1.0, np.nan]),
        ["a"],
        ["12.0", "7.5"],
        ["a", "1.5e+17"],
    ],
)
def test_missing_and_ambiguous_ids_are_refused_without_their_values(ids):
    with pytest.raises(ValueError, match=r"ids|one id for each") as refused:
        PrivateRecords.from_rows(torch.zeros(2, 1), [0, 1], ids)
    assert not any(repr(value) in str(refused.value) for value in ids)


def test_content_ids_tell_boundaries_apart():
    assert compute_content_id([b"ab", b"c"]) != compute_content_id([b"a", b"bc"])
    assert compute_content_id([b"ab", b"c"]) == compute_content_id([b"ab", b"c"])


def test_each_copy_of_a_record_has_a_name_and_removing_one_renames_no_other():
    names = np.array(["a", "b", "a", "c", "a", "b"]).view(UnitIds)
    assert number_copies(names).tolist() == ["a", "b", "a 2", "c", "a 3", "b 2"]
    for gone, last in {0: "a 3", 1: "b 2", 3: "c", 4: "a 3"}.items():
        left = number_copies(np.delete(names, gone).view(UnitIds)).tolist()
        assert sorted([*left, last]) == sorted(number_copies(names).tolist())
    assert number_copies(names[:0]).tolist() == []


@pytest.mark.parametrize("row", [((1.0, 2.0), 7), ((float("nan"), 0.0), 0)], ids=["bad label", "bad point"])
def test_an_unusable_row_renames_no_record_that_equals_its_filler(row):
    """Otherwise a record that is absent would move another one to another shard."""
    point, label = row
    x, y = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), torch.tensor([0, 0, 1])
    both_x, both_y = torch.cat([torch.tensor([point]), x]), torch.cat([torch.tensor([label]), y])
    names = PrivateRecords.from_rows(x, y, num_classes=2).unit_id.tolist()
    with_unusable = PrivateRecords.from_rows(both_x, both_y, num_classes=2)
    assert with_unusable.usable_N.tolist() == [False, True, True, True]
    assert with_unusable.unit_id.tolist()[1:] == names and with_unusable.unit_id.tolist()[0] not in names
