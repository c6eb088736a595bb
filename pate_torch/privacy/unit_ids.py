"""Names of privacy units, and keyed hashes of these names, which make each record private, public or a test record.

A name is a function of the id, the position or the content of one record. Adding or removing a unit therefore renames
no other unit, and a decision by the keyed hash of a name (a role, a shard, an order) affects no other unit.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
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
"""Types of ids, by kind. Equal ids of one kind have equal texts. Booleans come first: bool is a subclass of int."""
_FLOAT_PATTERN: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+(e[+-]?[0-9]+)?|e[+-]?[0-9]+)")
"""Texts of floating-point numbers: a file may hold the ids as pandas wrote a column of floats."""
_INTEGER_PATTERN: Final = re.compile(r"([+-]?)0*([0-9]+)")
_MISSING_NAMES: Final = {"", "nan", "None", "NaT", "<NA>"}
"""Names that stand for a missing id. The last four are the output of ``str`` for missing values."""


class UnitIds(np.ndarray):
    """PRIVATE. Names of the privacy units of the records, str [N]. Only functions of this module make this array."""

    def __repr__(self) -> str:
        return "UnitIds(content withheld)"

    __str__ = __repr__


def concatenate_unit_ids(parts: Sequence[UnitIds]) -> UnitIds:
    """Concatenate the names of several groups of records."""
    return np.concatenate(parts).view(UnitIds)


def name_unit(groups: Any) -> str:
    """Name the kind of the privacy unit of an estimator: "group:" and the name of ``groups``, or "record" for None."""
    return "record" if groups is None else f"group:{getattr(groups, 'name', None) or 'group'}"


def parse_unit_ids(key: str, column: Any, count: int) -> UnitIds:
    """PRIVATE. Read the names of privacy units from a column of ids, str [count]: each by ``format_unit_id``.

    Floating-point ids are refused: one missing id turns a column of integers into floats, which drops digits of long
    ids and merges units. A column of several types is refused, because 1 and "1" would become one unit.

    Args:
        key: Name of the argument or setting that holds the column, for error messages, which quote no id.
        column: List, tuple, array, tensor or pandas Series of texts, integers, booleans or dates.
        count: Number of records.

    Raises:
        ValueError: The column has another length, another type or several types, or an id is missing.
    """
    if isinstance(column, UnitIds) and len(column) == count:
        return column
    kind = type(column).__name__
    is_flat = not hasattr(column, "ndim") or column.ndim == 1
    if isinstance(column, str) or not hasattr(column, "__len__") or not is_flat or len(column) != count:
        size = f" of {len(column)} ids" if is_flat and hasattr(column, "__len__") else ""
        problem = f"must be one list, array or Series with one id for each of the {count} records"
        raise checks.error(key, f"{kind}{size}", problem)
    is_native = isinstance(column, torch.Tensor) or (isinstance(column, np.ndarray) and column.dtype.kind == "U")
    values = column.tolist() if is_native else list(column)
    types = set(map(type, values))
    kinds = {_get_kind(value_type) for value_type in types}
    # Equal texts are converted once. Values of other types may be no keys of a dictionary.
    name_by_value = {value: format_unit_id(value) for value in set(values)} if types == {str} else None
    names = [format_unit_id(value) if name_by_value is None else name_by_value[value] for value in values]
    if not _MISSING_NAMES.isdisjoint(names):
        fix = "Fill them in, or leave out these records, and read the column with dtype=str or, with pandas, as Int64."
        raise checks.error(key, kind, "has missing ids, and every record needs the name of its privacy unit", fix)
    if "" in kinds or len(kinds) > 1 or any(map(_FLOAT_PATTERN.fullmatch, names)):
        message = "must hold ids of one type: texts, integers, booleans or dates. Floating-point numbers name no units"
        fix = "Give the ids as texts, or read their column anew with dtype=str or, with pandas, as Int64."
        raise checks.error(key, kind, message, fix)
    return np.array(names, dtype=str).view(UnitIds)


def format_unit_id(value: Any) -> str:
    """Format an id by its value, so that one odd id, which changes the type of the column, renames no other unit.

    The canonical text, and for integers without a plus sign and without leading zeros: software reads a column of 007
    and 008 as integers, unless one id is a word. A boolean has the name of the integer. Units that merge are one unit.
    """
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    text = texts.to_canonical_text(value)
    if (integer := _INTEGER_PATTERN.fullmatch(text)) is None:
        return texts.replace_boolean(text)
    sign, digits = integer.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def _get_kind(value_type: type) -> str:
    """Return the kind of id for values of this type, or "" if such values are refused as ids."""
    if issubclass(value_type, np.timedelta64):  # a subclass of np.integer, whose text depends on the column's unit
        return ""
    return next((kind for kind, types in _ID_KINDS.items() if issubclass(value_type, types)), "")


def make_position_ids(positions: int | np.ndarray) -> UnitIds:
    """Make the names of records that are identified by position. An integer N stands for the positions 0..N-1."""
    return (np.arange(positions) if isinstance(positions, int) else positions).astype(str).view(UnitIds)


def make_content_ids(records: Iterable[Iterable[bytes]]) -> UnitIds:
    """Make the names of records without ids by ``compute_content_id``."""
    return np.array([compute_content_id(parts) for parts in records], dtype=str).view(UnitIds)


def make_row_ids(blocks: Iterable[Iterable[Any]]) -> UnitIds:
    """Make the names of the rows of blocks, each as by ``compute_content_id``. A block is Arrow arrays of texts."""
    import pyarrow as pa  # imported here, because PATEClassifier reads no files
    import pyarrow.compute as pc

    digests = list[str]()
    for columns in blocks:
        parts = []
        for column in columns:
            lengths = pa.py_buffer(pc.binary_length(column).to_numpy().astype(">u8"))
            length_N = pa.Array.from_buffers(pa.binary(8), len(column), [None, lengths])
            parts += [length_N.cast(pa.binary()), column.cast(pa.binary())]
        rows = pc.binary_join_element_wise(*parts, b"").to_pylist()
        digests += [hashlib.blake2b(row, digest_size=16).hexdigest() for row in rows]
    return np.array(digests, dtype=str).view(UnitIds)


def number_copies(names: UnitIds) -> UnitIds:
    """Give equal records names of their own: the second copy of a record is named "<name> 2", and so on.

    Copies must be equal in all that is computed from them. Adding or removing a copy then adds or removes the last name
    and renames no other unit.
    """
    counts, numbered = Counter[str](), list[str]()
    for name in names.tolist():
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return np.array(numbered, dtype=str).view(UnitIds)


def compute_content_id(parts: Iterable[bytes]) -> str:
    """Compute an id from the content of one record. Equal records have equal ids.

    The hash has no key, so the id of a private record is as private as the record and must stay in the private store.
    """
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    content = b"".join([len(part).to_bytes(8, "big") + part for part in parts])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def compute_keyed_hash(unit_id: Iterable[str], seed: int, *purpose: str) -> np.ndarray:
    """Compute BLAKE2b of each name under a key of (seed, purpose): two independent words a name, uint64 [N, 2]."""
    key = rng.derive_seed(seed, *purpose).to_bytes(8, "big")
    keyed_state = hashlib.blake2b(key=key, digest_size=16)
    digests = bytearray()
    for name in unit_id:
        state = keyed_state.copy()  # a third faster than a new state, because the key is compressed once
        state.update(name.encode(errors="surrogatepass"))
        digests += state.digest()
    return np.frombuffer(bytes(digests), dtype=">u8").astype(np.uint64).reshape(-1, 2)


PRIVATE, PUBLIC, TEST = 0, 1, 2
"""Roles of records and of files."""


def assign_by_hash(
    unit_id: np.ndarray, file_N: np.ndarray, files: Collection[int], fractions: Sequence[float], seed: int
) -> np.ndarray:
    """Assign a role to each record by a keyed hash of its unit's id, int64 [N], regardless of other records.

    Roles without a file are split off another file by ``fractions``: public points off the private file, and test
    records off the public file, or off the private file if no public file is given.

    Args:
        unit_id: Name of each record's unit, str [N].
        file_N: Role of the file that holds each record, int64 [N].
        files: Roles that have a file.
        fractions: Fractions of private, public and test units.
        seed: Key of the hash.
    """
    public_source = PUBLIC if PUBLIC in files else PRIVATE
    test_source = TEST if TEST in files else public_source
    source = np.array([PRIVATE, public_source, test_source])
    checks.integer("dataset.seed", seed, low=0)
    uniform_N = compute_keyed_hash(unit_id.tolist(), seed, "role")[:, 0] / 2.0**64
    role_N = np.empty(len(unit_id), dtype=np.int64)
    for file in files:
        weights = np.where(source == file, fractions, 0.0)
        edges = np.cumsum(weights) / weights.sum()
        in_file_N = file_N == file
        # The last role with any weight takes what rounding leaves above its edge.
        last_role = np.flatnonzero(weights)[-1]
        role_N[in_file_N] = np.minimum(np.searchsorted(edges, uniform_N[in_file_N], side="right"), last_role)
    return role_N


def assign_by_position(count: int, fractions: Sequence[float], seed: int) -> np.ndarray:
    """Assign a role to each position of a file by a seeded permutation, int64 [count].

    The private size is rounded down, the public size up, and the rest are test records. These roundings give the sizes
    of LZCW21, Table 3 (8,124 records at 80/2/18: 6,499, 163 and 1,462).
    """
    checks.integer("dataset.seed", seed, low=0)
    private = math.floor(round(count * fractions[0], 6))
    public = math.ceil(round(count * fractions[1], 6))
    role_N = np.full(count, TEST)
    order = rng.make_numpy_generator(seed, "role", "position").permutation(count)
    role_N[order[:private]] = PRIVATE
    role_N[order[private : private + public]] = PUBLIC
    return role_N
