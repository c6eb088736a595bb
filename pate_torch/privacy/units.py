"""Records chosen by their privacy units: those held out, those that can be used, and one for each unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.privacy.unit_ids import UnitIds, compute_keyed_hash, make_position_ids


def get_unit_ids(private: PrivateRecords, adjacency: str) -> UnitIds:
    """PRIVATE. The unit each record belongs to, str [N]: its id, or under replace_one its position.

    There records are single and an id may be made of what is replaced: equal ids are then as many units.
    """
    return private.unit_id if adjacency == "add_remove" else make_position_ids(len(private))


def hold_out(
    private: PrivateRecords, share: float, adjacency: str, seed: int, purpose: str
) -> tuple[PrivateRecords, PrivateRecords]:
    """PRIVATE. (The rest, about ``share`` of the units), decided unit by unit: no record has a say in another's role.

    By the hash of a unit's name (``get_unit_ids``).
    """
    is_held_out_N = compute_keyed_hash(get_unit_ids(private, adjacency).tolist(), seed, purpose)[:, 0] / 2.0**64 < share
    return select(private, np.flatnonzero(~is_held_out_N)), select(private, np.flatnonzero(is_held_out_N))


def select(private: PrivateRecords, index: np.ndarray) -> PrivateRecords:
    """PRIVATE. Some of the records, by integer indices."""
    rows = torch.from_numpy(index)
    usable_N = None if private.usable_N is None else private.usable_N[rows]
    return PrivateRecords(private.x[rows], private.y[rows], private.unit_id[index], private.unit, usable_N=usable_N)


def drop_unusable(data: Dataset, adjacency: str) -> Dataset:
    """PRIVATE. The data without the records of no use, which whoever made ``data`` has marked and filled.

    Under replace_one the filler stays, so that no other record moves: neighbors differ in one record, and the filler is
    one valid record in the place of another.
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
    """PRIVATE. The first record of every unit; under replace_one every record."""
    return select(private, np.unique(get_unit_ids(private, adjacency), return_index=True)[1])
