"""Selections of private records by privacy unit: held-out records, usable records and one record for each unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.privacy.unit_ids import UnitIds, compute_keyed_hash, make_position_ids


def get_unit_ids(private: PrivateRecords, adjacency: str) -> UnitIds:
    """PRIVATE. Return the privacy unit of each record, str [N]: its unit id, or its position under replace_one.

    Under replace_one each record is a unit of its own. An id may be a hash of the record that is replaced, so that
    two records with equal ids are still two units.
    """
    return private.unit_id if adjacency == "add_remove" else make_position_ids(len(private))


def hold_out(
    private: PrivateRecords, share: float, adjacency: str, seed: int, purpose: str
) -> tuple[PrivateRecords, PrivateRecords]:
    """PRIVATE. Split off about ``share`` of the units; return (remaining records, held-out records).

    The keyed hash of a unit's own name (``get_unit_ids``) decides, so no record affects the role of another unit.
    """
    is_held_out_N = compute_keyed_hash(get_unit_ids(private, adjacency).tolist(), seed, purpose)[:, 0] / 2.0**64 < share
    return select(private, np.flatnonzero(~is_held_out_N)), select(private, np.flatnonzero(is_held_out_N))


def select(private: PrivateRecords, index: np.ndarray) -> PrivateRecords:
    """PRIVATE. Select records by integer indices."""
    rows = torch.from_numpy(index)
    usable_N = None if private.usable_N is None else private.usable_N[rows]
    return PrivateRecords(private.x[rows], private.y[rows], private.unit_id[index], private.unit, usable_N=usable_N)


def drop_unusable(data: Dataset, adjacency: str) -> Dataset:
    """PRIVATE. Drop the records that are marked as unusable.

    Under replace_one they stay with their fillers, so that no other record changes its position: neighboring data
    sets then still differ in one record, because a filler is a valid record.
    """
    private = data.private
    if private.usable_N is None:
        return data
    if adjacency == "replace_one":
        return replace(data, private=replace(private, usable_N=None))
    usable_N = private.usable_N
    origin = None if private.origin is None else private.origin[usable_N]
    return replace(
        data, private=replace(select(private, np.flatnonzero(usable_N.numpy())), origin=origin, usable_N=None)
    )


def select_one_per_unit(private: PrivateRecords, adjacency: str) -> PrivateRecords:
    """PRIVATE. Select the first record of each unit; under replace_one every record."""
    return select(private, np.unique(get_unit_ids(private, adjacency), return_index=True)[1])
