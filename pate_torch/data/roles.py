"""A user's own data: who is private, public or for testing, which classes there are, and the Dataset made of it.

Nothing is learnt from private records: roles come from each unit's own id or position, class lists and statistics from
the public side (or are declared), and a private record that does not fit is dropped by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks, rng, texts
from pate_torch.data import locations
from pate_torch.data.benchmark import channel_statistics
from pate_torch.data.schema import TableSchema, class_name, is_number
from pate_torch.data.units import keyed_hash
from pate_torch.types import (
    CATEGORIES,
    CLASSES,
    CONSTANTS,
    DECLARED,
    OF_PUBLIC_POINTS,
    PARTLY_DECLARED,
    SIZE,
    Dataset,
    DataSpec,
    Evaluation,
    PointNames,
    PrivateData,
    PublicPool,
)

PRIVATE, PUBLIC, TEST = 0, 1, 2


class Source(Protocol):
    """What the sources of an owner's own files have in common."""

    @property
    def name(self) -> str:
        """Declared name."""

    @property
    def path(self) -> str | None:
        """The main file or folder, which is private."""

    @property
    def public_path(self) -> str | None:
        """The public points' own file or folder."""

    @property
    def test_path(self) -> str | None:
        """The test records' own file or folder."""

    @property
    def root(self) -> str | None:
        """The data root."""

    @property
    def fractions(self) -> Sequence[float]:
        """Private, public and test."""

    @property
    def group(self) -> str | None:
        """What names the privacy unit; None: a record is one."""

    @property
    def classes(self) -> Sequence[Any] | None:
        """Declared classes; None: those of the public side."""

    @property
    def publish_split(self) -> bool:
        """Whether the owner agrees that public points are split off ``path``."""

    @property
    def publish_test(self) -> bool:
        """Whether the owner agrees that figures on test records split off ``path`` are published."""

    @property
    def benchmark(self) -> bool:
        """Whether the records are public data: accuracies on the private side are then shown."""

    @property
    def nominal_size(self) -> int | None:
        """Publicly declared approximate number of private records."""


def check(source: Source) -> None:
    """Refuse choices, of those that all sources share, that cannot be."""
    locations.check_name(source.name)
    check_fractions(source.fractions)
    for key in ("publish_split", "publish_test", "benchmark"):
        checks.boolean(f"dataset.{key}", getattr(source, key))
    if source.nominal_size is not None:
        checks.integer("dataset.nominal_size", source.nominal_size, low=1)


def files(source: Source) -> dict[int, tuple[str, Path]]:
    """The key and the place of every file (or folder) there is, by the role it was given for (PRIVATE: the main one).

    Raises:
        ValueError: One is missing, or private records would become public without a word.
    """
    given = {
        PRIVATE: ("dataset.path", source.path),
        PUBLIC: ("dataset.public_path", source.public_path),
        TEST: ("dataset.test_path", source.test_path),
    }
    there = {
        part: (key, locations.existing(key, path, source.root))
        for part, (key, path) in given.items()
        if path or part == PRIVATE
    }
    private = there[PRIVATE][1].resolve()
    for part, (key, place) in there.items():
        if part != PRIVATE and {private, *private.parents} & {place.resolve()}:
            what = "is dataset.path, or a folder around it: every private record would be public"
            raise checks.fail(key, str(place), what, "Name points of their own, or leave it out.")
    _refuse_unsaid(source)
    return there


def _split(source: Source) -> tuple[float, float]:
    """The shares of the main file that become (public points, test records); 0 where these come from elsewhere."""
    private, public, test = source.fractions
    public = 0.0 if source.public_path else public
    test = 0.0 if source.public_path or source.test_path else test
    whole = private + public + test
    return public / whole, test / whole


def public_roles(source: Source) -> tuple[int, ...]:
    """Roles whose records may be looked at: they give classes, categories and widths, and figures are published."""
    return (PUBLIC, TEST) if source.publish_test else shown_roles(source)


def shown_roles(source: Source) -> tuple[int, ...]:
    """Roles whose records may be shown as they are: who agreed to figures on test records agreed to no more."""
    return (PUBLIC, TEST) if source.benchmark or _split(source)[1] == 0 else (PUBLIC,)


def _agreed(source: Source) -> bool:
    """Whether the public points are public: they came as such, or their owner agreed."""
    return bool(source.benchmark or source.publish_split or not _split(source)[0])


def _refuse_unsaid(source: Source) -> None:
    """Raise ValueError where a part of a private file would become public, and its owner has not said that it may."""
    public, test = _split(source)
    if _agreed(source):
        return
    who = "its records" if source.group is None else f"its units (dataset.group={source.group}), with all their records"
    kept = "" if not test else f" Of another {test:.0%}, the test records, only you see figures (dataset.publish_test)."
    raise checks.fail(
        "dataset.publish_split",
        False,
        f"about {public:.0%} of {who} in {source.path} would become public: a student learns from them as they are, "
        "class names, categories and hashes of theirs are released, and no epsilon covers them",
        f"Give public records of their own (dataset.public_path=...), or agree by dataset.publish_split=true.{kept}",
    )


def check_fractions(fractions: Sequence[float]) -> None:
    """[private, public, test], each positive, summing to one."""
    numbers = [checks.positive("dataset.fractions", part) for part in checks.items("dataset.fractions", fractions)]
    if len(numbers) != 3 or not math.isclose(sum(numbers), 1, abs_tol=1e-9):
        raise checks.fail(
            "dataset.fractions", list(fractions), "must be three positive numbers [private, public, test] summing to 1"
        )


def by_hash(
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
    public_from = PUBLIC if PUBLIC in parts else PRIVATE
    test_from = TEST if TEST in parts else public_from
    source = np.array([PRIVATE, public_from, test_from])
    checks.integer("dataset.seed", seed, low=0)
    uniform_N = keyed_hash(unit_id.tolist(), seed, "role")[:, 0] / 2.0**64
    role_N = np.empty(len(unit_id), dtype=np.int64)
    for part in parts:
        weights = np.where(source == part, fractions, 0.0)
        edges = np.cumsum(weights) / weights.sum()
        here = part_N == part
        # The last role with any weight takes what rounding leaves above its edge.
        role_N[here] = np.minimum(np.searchsorted(edges, uniform_N[here], side="right"), np.flatnonzero(weights)[-1])
    return role_N


def by_position(count: int, fractions: Sequence[float], seed: int) -> np.ndarray:
    """Roles of a file's positions by a seeded permutation, int64 [count]: floor private, ceil public, rest test.

    These roundings give the sizes LZCW21 prints in Table 3 (8,124 records at 80/2/18: 6,499, 163 and 1,462).
    """
    checks.integer("dataset.seed", seed, low=0)
    private = math.floor(round(count * fractions[0], 6))
    public = math.ceil(round(count * fractions[1], 6))
    role = np.full(count, TEST)
    order = rng.numpy_stream(seed, "role", "position").permutation(count)
    role[order[:private]] = PRIVATE
    role[order[private : private + public]] = PUBLIC
    return role


def check_way(way: str, *, single: bool) -> None:
    """Refuse a way to deal roles that cannot be.

    Args:
        way: "hash" or "position".
        single: One file of single records, which are named by nothing but their positions.
    """
    checks.one_of("dataset.roles", way, ("hash", "position"))
    if way == "position" and not single:
        raise checks.fail(
            "dataset.roles", way, "goes with one file of single records, named by position", "Use dataset.roles=hash."
        )


def promise(way: str, *, single: bool, apart: bool, grouped: bool, benchmark: bool) -> tuple[tuple[str, ...], str]:
    """``Dataset.adjacencies`` and ``Dataset.advice`` of a table: the relations under which no other record moves.

    Where an id decides, a replaced row may take another role and change how many are private, unless the whole file is
    private. Where the position decides, a row less renames all later ones, which harms nobody only on a public
    benchmark.

    Args:
        way: "hash" or "position".
        single: As in ``check_way``.
        apart: Public records have a file of their own.
        grouped: Units of several records.
        benchmark: Whether the records are public data: accuracies on the private side are then shown.
    """
    if way == "position":
        advice = "Use partition=replace_one, or dataset.roles=hash."
        return (("add_remove", "replace_one") if benchmark else ("replace_one",)), advice
    if grouped:
        return ("add_remove",), "Use partition=add_remove, which keeps all of a unit's records together."
    if apart:
        return ("add_remove", "replace_one"), ""
    own = "the public records a file of their own (dataset.public_path)."
    return ("add_remove",), f"Use dataset.roles=position, or give {own}" if single else f"Give {own}"


def class_list(declared: Iterable[Any] | None, seen: Iterable[str]) -> tuple[str, ...]:
    """Declared classes, or those ``seen`` on the public side, sorted (numbers by value); at least two."""
    found = set(seen) - {""}
    if declared is None:
        numeric = all(is_number(name) for name in found)
        classes = tuple(sorted(found, key=float) if numeric else sorted(found))
        if len(classes) < 2:
            raise checks.fail(
                "dataset.classes",
                None,
                f"must be declared, because the public records show only {len(classes)} class(es): {classes}",
                "List all classes in dataset.classes, or raise the public fraction.",
            )
        return classes
    classes = tuple(class_name(value) for value in checks.items("dataset.classes", declared))
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise checks.fail("dataset.classes", list(classes), "must list at least two different classes")
    if unknown := sorted(found - set(classes)):
        raise checks.fail(
            "dataset.classes",
            list(classes),
            f"is too short: public records also have {unknown[:10]}",
            "Add these classes, or leave their records out of the public data.",
        )
    return classes


def feature_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per feature of public rows [Q, D]; deviation 1 where the pool is constant.

    A small deviation there would blow up private records that differ from the pool.
    """
    x = x.double()
    std = x.std(0, correction=0)
    return tuple(x.mean(0).tolist()), tuple(torch.where(std > 1e-8, std, 1.0).tolist())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Records:
    """PRIVATE. All records of a source before their roles part them.

    Attributes:
        x: uint8 [N, Ch, H, W] or float32 [N, D].
        label: str [N]; "" unknown.
        unit_id: str [N].
        unit: What the privacy unit is.
        role_N: int64 [N].
        usable_N: bool [N]; a private record that cannot be used has a fixed filler as its point. None: all can be.
        why: The reason why others cannot, for the owner.
    """

    x: Tensor
    label: np.ndarray
    unit_id: np.ndarray
    unit: str
    role_N: np.ndarray
    usable_N: np.ndarray | None = None
    why: str = ""


def origin_of_categories(schema: TableSchema, declared: Collection[str]) -> str:
    """Where the categories of a table come from, for the statement; ``declared``: columns whose were declared."""
    declared_columns = {column.name in declared for column in schema.columns if column.categories is not None}
    return {frozenset({True}): DECLARED, frozenset({False, True}): PARTLY_DECLARED}.get(
        frozenset(declared_columns), OF_PUBLIC_POINTS
    )


def assemble(
    records: Records,
    source: Source,
    *,
    promised: tuple[tuple[str, ...], str],
    standardize: bool | Sequence[bool] = False,
    schema: TableSchema | None = None,
    resize: str | None = None,
    text: str | None = None,
    names: Callable[[np.ndarray], PointNames] | None = None,
    declared: Collection[str] = (),
) -> Dataset:
    """Part the records by role; private ones of no use or of unknown class are marked and filled, one by one.

    Args:
        records: All of them.
        source: Its declared choices.
        promised: The data set's ``adjacencies`` and ``advice``.
        standardize: Which features are centered and scaled by the pool's statistics (images always are).
        schema: How a table became these rows, as it may be published.
        resize: How images became these.
        text: The column whose texts these are.
        names: By what whoever holds the public points finds them: of their places among the records, and of no others'.
        declared: Columns whose categories the owner declared.
    """
    label = np.array([class_name(value) for value in records.label.tolist()], dtype=str)
    looked_at = public_roles(source)
    class_names = class_list(source.classes, np.unique(label[np.isin(records.role_N, looked_at)]).tolist())
    code = {value: index for index, value in enumerate(class_names)}
    y_N = np.array([code.get(value, -1) for value in label.tolist()], dtype=np.int64)
    whole_N = np.ones(len(y_N), bool) if records.usable_N is None else records.usable_N
    usable_N = whole_N & (y_N >= 0)
    private = np.flatnonzero(records.role_N == PRIVATE)
    # Files are often sorted by class, and some strategies ask in the pool's order: shuffle, by its public size alone.
    public = np.flatnonzero((records.role_N == PUBLIC) & whole_N)
    public = public[rng.numpy_stream(0, "pool", "order").permutation(len(public))]
    test = np.flatnonzero((records.role_N == TEST) & usable_N)
    check_parts(source.name, int(usable_N[private].sum()), len(public), len(test))
    unknown = int(((records.role_N != PUBLIC) & whole_N & (y_N < 0)).sum())
    dropped = {records.why: int((~whole_N).sum()), "of no known class": unknown}
    private_x = records.x[private]  # a copy, so that the filler is in these alone
    private_x[torch.from_numpy(~whole_N[private])] = texts.pack("filler", ["-"], private_x.shape[1])[0] if text else 0
    pool_x = records.x[public]
    mean, std = _normalization(pool_x, standardize)
    labeled = bool((y_N[public] >= 0).all())
    adjacencies, advice = promised
    return Dataset(
        spec=DataSpec(
            name=source.name,
            num_classes=len(class_names),
            input_shape=tuple(records.x.shape[1:]),
            class_names=class_names,
            mean=mean,
            std=std,
            benchmark=source.benchmark,
            nominal_size=source.nominal_size,
            schema=schema,
            resize=resize,
            text=text,
        ),
        private=PrivateData(
            private_x,
            torch.from_numpy(np.where(usable_N, y_N, 0)[private]),
            records.unit_id[private],
            records.unit,
            usable_N=torch.from_numpy(usable_N[private]),
        ),
        pool=PublicPool(
            pool_x,
            0.0 if source.benchmark else _split(source)[0],
            None if names is None or not _agreed(source) else names(public),
        ),
        evaluation=Evaluation(
            records.x[test],
            torch.from_numpy(y_N[test]),
            torch.from_numpy(y_N[public]) if labeled else None,
            public=TEST in looked_at,
        ),
        adjacencies=adjacencies,
        advice=advice,
        dropped={why: count for why, count in dropped.items() if count},
        declared={
            CLASSES: OF_PUBLIC_POINTS if source.classes is None else DECLARED,
            CONSTANTS: OF_PUBLIC_POINTS,
            **({} if schema is None else {CATEGORIES: origin_of_categories(schema, declared)}),
            **({} if source.nominal_size is None else {SIZE: DECLARED}),
        },
    )


def check_parts(name: str, private: int, public: int, test: int) -> None:
    """Refuse a part without records."""
    for what, count in (("private", private), ("public", public), ("test", test)):
        if count == 0:
            raise checks.fail(
                "dataset.name",
                name,
                f"has no {what} records",
                "Check dataset.fractions and dataset.classes, and that the files hold labeled records.",
            )


def _normalization(pool_x: Tensor, standardize: bool | Sequence[bool]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if pool_x.dim() == 4:
        return channel_statistics(pool_x)
    if pool_x.dtype == torch.uint8:  # texts
        return (0.0,), (1.0,)
    width = pool_x.shape[1]
    chosen = [standardize] * width if isinstance(standardize, bool) else list(standardize)
    if not any(chosen):
        return (0.0,) * width, (1.0,) * width
    mean, std = feature_statistics(pool_x)
    kept = list(zip(chosen, mean, std, strict=True))
    return tuple(m if c else 0.0 for c, m, _ in kept), tuple(s if c else 1.0 for c, _, s in kept)
