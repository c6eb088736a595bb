"""Stable names of privacy units, and the keyed hash that decides by name alone: roles, shards, order.

A decision made by a keyed hash of one unit's id is independent of every other record, so that adding or removing
a unit moves nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from pate_torch.core import rng
from pate_torch.types import PrivateData


def keyed_hash(unit_id: Iterable[str], seed: int, *purpose: str) -> np.ndarray:
    """BLAKE2b of every id under a key of (seed, purpose): uint64 [N, 2], two independent words each."""
    key = rng.derive(seed, *purpose).to_bytes(8, "big")
    keyed = hashlib.blake2b(key=key, digest_size=16)
    digests = bytearray()
    for name in unit_id:
        state = keyed.copy()  # a third faster than keying anew: the key's block is compressed once
        state.update(name.encode())
        digests += state.digest()
    return np.frombuffer(bytes(digests), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def positions(count: int) -> np.ndarray:
    """Unit ids of a benchmark: the position in the original file, as a string, str [count]."""
    return np.arange(count).astype(str)


def content_id(parts: Iterable[bytes]) -> str:
    """An id made of a record's own content, so that removing a record renames nobody. Equal records share it.

    Unkeyed, hence as private as the record: it stays in the private store.
    """
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))  # lengths keep ("ab", "c") and ("a", "bc") apart
        state.update(part)
    return state.hexdigest()


def unit_names(private: PrivateData, adjacency: str) -> np.ndarray:
    """PRIVATE. The unit each record belongs to, str [N]: its id, or under replace_one its position.

    There records are single and an id may be made of what is replaced: equal ids are then as many units.
    """
    return private.unit_id if adjacency == "add_remove" else positions(len(private))


def hold_out(
    private: PrivateData, share: float, adjacency: str, seed: int, purpose: str
) -> tuple[PrivateData, PrivateData]:
    """PRIVATE. (The rest, about ``share`` of the units), decided unit by unit: no record has a say in another's role.

    By the hash of a unit's name (``unit_names``).
    """
    held = keyed_hash(unit_names(private, adjacency).tolist(), seed, purpose)[:, 0] / 2.0**64 < share
    return take(private, np.flatnonzero(~held)), take(private, np.flatnonzero(held))


def take(private: PrivateData, index: np.ndarray) -> PrivateData:
    """PRIVATE. Some of the records, by integer indices."""
    rows = torch.from_numpy(index)
    return PrivateData(private.x[rows], private.y[rows], private.unit_id[index], private.unit)


def one_per_unit(private: PrivateData, adjacency: str) -> PrivateData:
    """PRIVATE. The first record of every unit; under replace_one every record."""
    return take(private, np.unique(unit_names(private, adjacency), return_index=True)[1])
