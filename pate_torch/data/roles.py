"""Roles of a user's own records, the classes that they have, and the constants of their public points."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from pate_torch.core import checks, rng
from pate_torch.privacy.records import FROM_OWNER, FROM_OWNER_AND_PUBLIC_POINTS, FROM_PUBLIC_POINTS
from pate_torch.privacy.schema import TableSchema, is_number, normalize_class_name
from pate_torch.privacy.unit_ids import compute_keyed_hash

PRIVATE, PUBLIC, TEST = 0, 1, 2


def check_fractions(fractions: Sequence[float]) -> None:
    """[private, public, test], each positive, summing to one."""
    numbers = [checks.positive("dataset.fractions", part) for part in checks.collection("dataset.fractions", fractions)]
    if len(numbers) != 3 or not math.isclose(sum(numbers), 1, abs_tol=1e-9):
        raise checks.error(
            "dataset.fractions", list(fractions), "must be three positive numbers [private, public, test] summing to 1"
        )


def assign_by_hash(
    unit_id: np.ndarray, part_N: np.ndarray, parts: set[int], fractions: Sequence[float], seed: int
) -> np.ndarray:
    """A role for every record, int64 [N], from a keyed hash of its unit's id: no other record has a say.

    Roles without a file of their own are split off from the file before, by ``fractions``.

    Args:
        unit_id: Name of each record's unit, str [N].
        part_N: Which file a record came from (PRIVATE: the main one, PUBLIC or TEST: a file given for that role).
        parts: The files there are.
        fractions: Private, public and test.
        seed: Key of the hash.
    """
    public_source = PUBLIC if PUBLIC in parts else PRIVATE
    test_source = TEST if TEST in parts else public_source
    source = np.array([PRIVATE, public_source, test_source])
    checks.integer("dataset.seed", seed, low=0)
    uniform_N = compute_keyed_hash(unit_id.tolist(), seed, "role")[:, 0] / 2.0**64
    role_N = np.empty(len(unit_id), dtype=np.int64)
    for part in parts:
        weights = np.where(source == part, fractions, 0.0)
        edges = np.cumsum(weights) / weights.sum()
        in_part_N = part_N == part
        # The last role with any weight takes what rounding leaves above its edge.
        role_N[in_part_N] = np.minimum(
            np.searchsorted(edges, uniform_N[in_part_N], side="right"), np.flatnonzero(weights)[-1]
        )
    return role_N


def assign_by_position(count: int, fractions: Sequence[float], seed: int) -> np.ndarray:
    """Roles of a file's positions by a seeded permutation, int64 [count]: floor private, ceil public, rest test.

    These roundings give the sizes LZCW21 prints in Table 3 (8,124 records at 80/2/18: 6,499, 163 and 1,462).
    """
    checks.integer("dataset.seed", seed, low=0)
    private = math.floor(round(count * fractions[0], 6))
    public = math.ceil(round(count * fractions[1], 6))
    role = np.full(count, TEST)
    order = rng.make_numpy_generator(seed, "role", "position").permutation(count)
    role[order[:private]] = PRIVATE
    role[order[private : private + public]] = PUBLIC
    return role


def build_class_list(declared_classes: Iterable[Any] | None, public_labels: Iterable[str]) -> tuple[str, ...]:
    """Declared classes, or those ``public_labels`` on the public side, sorted (numbers by value); at least two."""
    public_classes = set(public_labels) - {""}
    if declared_classes is None:
        numeric = all(is_number(name) for name in public_classes)
        classes = tuple(sorted(public_classes, key=float) if numeric else sorted(public_classes))
        if len(classes) < 2:
            raise checks.error(
                "dataset.classes",
                None,
                f"must be declared, because the public records show only {len(classes)} class(es): {classes}",
                "List all classes in dataset.classes, or raise the public fraction.",
            )
        return classes
    classes = tuple(normalize_class_name(value) for value in checks.collection("dataset.classes", declared_classes))
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise checks.error("dataset.classes", list(classes), "must list at least two different classes")
    if unknown := sorted(public_classes - set(classes)):
        raise checks.error(
            "dataset.classes",
            list(classes),
            f"is too short: public records also have {unknown[:10]}",
            "Add these classes, or leave their records out of the public data.",
        )
    return classes


def get_categories_origin(schema: TableSchema, owner_columns: Collection[str]) -> str:
    """Where the categories of a table come from, for the statement; ``owner_columns``: columns whose were declared."""
    declared_columns = {column.name in owner_columns for column in schema.columns if column.categories is not None}
    return {frozenset({True}): FROM_OWNER, frozenset({False, True}): FROM_OWNER_AND_PUBLIC_POINTS}.get(
        frozenset(declared_columns), FROM_PUBLIC_POINTS
    )


def check_parts(name: str, private: int, public: int, test: int) -> None:
    """Refuse a part without records."""
    for part, count in (("private", private), ("public", public), ("test", test)):
        if count == 0:
            raise checks.error(
                "dataset.name",
                name,
                f"has no {part} records",
                "Check dataset.fractions and dataset.classes, and that the files hold labeled records.",
            )
