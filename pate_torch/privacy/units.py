"""Stable names of privacy units, and the keyed hash that decides by name alone: roles, shards, order.

A decision made by a keyed hash of one unit's id is independent of every other record, so that adding or removing
a unit moves nobody else.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from pate_torch.core import checks, rng, texts
from pate_torch.privacy.records import Dataset, PrivateRecords

_ID_KINDS: Final = {
    "boolean": (bool, np.bool_),
    "integer": (int, np.integer),
    "text": (str,),
    "date": (datetime.date, np.datetime64),
}
"""Types whose values are spelled in one way. A boolean is an integer of Python's, so it comes first."""
_MISSING_NAMES: Final = {"", "nan", "None", "NaT", "<NA>"}
"""The names of missing values: the last four are what ``str`` makes of them."""


def parse_unit_ids(key: str, column: Any, count: int) -> np.ndarray:
    """PRIVATE. The names of a column of ids, str [count]: the canonical text of each; what has none is refused.

    Floating-point ids are refused because one missing id turns a column of integers into them: the digits of long ids
    are then lost, and units merge. Several types are refused because 1 and "1" would be one unit.

    Args:
        key: The argument or setting that names the column, for messages; these say nothing of its values.
        column: A list, tuple, array, tensor or pandas Series of texts, integers, booleans or dates.
        count: Number of records.

    Raises:
        ValueError: Another length or type, several types, or a missing id.
    """
    kind = type(column).__name__
    is_flat = not hasattr(column, "ndim") or column.ndim == 1
    if isinstance(column, str) or not hasattr(column, "__len__") or not is_flat or len(column) != count:
        raise checks.error(key, kind, "must be one list, array or Series with one id for each record")
    is_native = isinstance(column, torch.Tensor) or (isinstance(column, np.ndarray) and column.dtype.kind == "U")
    values = column.tolist() if is_native else list(column)
    types = set(map(type, values))
    kinds = {_get_kind(value_type) for value_type in types}
    # Equal values of one type are spelled alike; of two types they may not be.
    name_by_value = {value: texts.to_canonical_text(value) for value in set(values)} if types == {str} else None
    names = [texts.to_canonical_text(value) if name_by_value is None else name_by_value[value] for value in values]
    if not _MISSING_NAMES.isdisjoint(names):
        fix = "Fill them in, or leave out these records, and read the column with dtype=str or, with pandas, as Int64."
        raise checks.error(key, kind, "has missing ids, and every record needs the name of its privacy unit", fix)
    if "" in kinds or len(kinds) > 1:
        message = "must hold ids of one type: texts, integers, booleans or dates. Floating-point numbers name no units"
        fix = "Give the ids as texts, or read their column anew with dtype=str or, with pandas, as Int64."
        raise checks.error(key, kind, message, fix)
    return np.array(names, dtype=str)


def compute_keyed_hash(unit_id: Iterable[str], seed: int, *purpose: str) -> np.ndarray:
    """BLAKE2b of every id under a key of (seed, purpose): uint64 [N, 2], two independent words each."""
    key = rng.derive_seed(seed, *purpose).to_bytes(8, "big")
    keyed_state = hashlib.blake2b(key=key, digest_size=16)
    digests = bytearray()
    for name in unit_id:
        state = keyed_state.copy()  # a third faster than keying anew: the key's block is compressed once
        state.update(name.encode(errors="surrogatepass"))
        digests += state.digest()
    return np.frombuffer(bytes(digests), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def _get_kind(value_type: type) -> str:
    """Which kind of ids a type's values are; "": no kind."""
    if issubclass(value_type, np.timedelta64):  # an integer to NumPy, and spelled by its column's unit
        return ""
    return next((kind for kind, types in _ID_KINDS.items() if issubclass(value_type, types)), "")


def make_position_ids(count: int) -> np.ndarray:
    """Unit ids of a benchmark: the position in the original file, as a string, str [count]."""
    return np.arange(count).astype(str)


def compute_content_id(parts: Iterable[bytes]) -> str:
    """An id made of a record's own content, so that removing a record renames nobody. Equal records share it.

    Unkeyed, hence as private as the record: it stays in the private store.
    """
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))  # lengths keep ("ab", "c") and ("a", "bc") apart
        state.update(part)
    return state.hexdigest()


def get_unit_ids(private: PrivateRecords, adjacency: str) -> np.ndarray:
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
