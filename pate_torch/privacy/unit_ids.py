"""Names of privacy units, and the keyed hash that decides by a name alone: roles, shards, order.

A name is a function of one record's own id, position or content, so that adding or removing a unit renames nobody; a
decision by the keyed hash of a name moves nobody else.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from pate_torch.core import checks, rng, texts

_ID_KINDS: Final = {
    "boolean": (bool, np.bool_),
    "integer": (int, np.integer),
    "text": (str,),
    "date": (datetime.date, np.datetime64),
}
"""Types whose values are spelled in one way. A boolean is an integer of Python's, so it comes first."""
_MISSING_NAMES: Final = {"", "nan", "None", "NaT", "<NA>"}
"""The names of missing values: the last four are what ``str`` makes of them."""


class UnitIds(np.ndarray):
    """PRIVATE. The name of each record's privacy unit, str [N], which the functions of this module alone make."""

    def __repr__(self) -> str:
        return "UnitIds(content withheld)"

    __str__ = __repr__


def concatenate_unit_ids(parts: Sequence[UnitIds]) -> UnitIds:
    """The names of several groups of records, one group after another."""
    return np.concatenate(parts).view(UnitIds)


def parse_unit_ids(key: str, column: Any, count: int) -> UnitIds:
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
    if isinstance(column, UnitIds) and len(column) == count:
        return column
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
    return np.array(names, dtype=str).view(UnitIds)


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


def make_position_ids(positions: int | np.ndarray) -> UnitIds:
    """Unit ids of records that stand for themselves: their positions, or 0..N-1, in the file that they come from."""
    return (np.arange(positions) if isinstance(positions, int) else positions).astype(str).view(UnitIds)


def make_content_ids(records: Iterable[Iterable[bytes]]) -> UnitIds:
    """Unit ids of records without names: a hash of each record's own content (``compute_content_id``)."""
    return np.array([compute_content_id(parts) for parts in records], dtype=str).view(UnitIds)


def compute_content_id(parts: Iterable[bytes]) -> str:
    """An id made of a record's own content, so that removing a record renames nobody. Equal records share it.

    Unkeyed, hence as private as the record: it stays in the private store.
    """
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))  # lengths keep ("ab", "c") and ("a", "bc") apart
        state.update(part)
    return state.hexdigest()
