"""Roles of records: private, public or test, each by its unit's id or by its position alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from pate_torch.core import checks, rng
from pate_torch.privacy.unit_ids import compute_keyed_hash

PRIVATE, PUBLIC, TEST = 0, 1, 2
"""Roles of records, and of the files that are given for a role."""


def assign_by_hash(
    unit_id: np.ndarray, file_N: np.ndarray, files: Collection[int], fractions: Sequence[float], seed: int
) -> np.ndarray:
    """Assign a role to each record by a keyed hash of its unit's id, int64 [N], regardless of other records.

    Roles without a file of their own are split off by ``fractions``: the public points off the main file, and the test
    records off the public file if there is one.

    Args:
        unit_id: Name of each record's unit, str [N].
        file_N: Role that each record's file was given for, int64 [N].
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
