"""A user's own files: what their sources share, from the declared choices to the Dataset.

Nothing is learnt from private records: roles come from each unit's own id or position, class lists and statistics from
the public side (or are declared), and a private record that does not fit is dropped by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks, rng, texts
from pate_torch.data import locations, roles, units
from pate_torch.data.roles import PRIVATE, PUBLIC, TEST
from pate_torch.data.schema import TableSchema, normalize_class_name
from pate_torch.types import (
    CATEGORIES,
    CLASSES,
    FROM_OWNER,
    FROM_PUBLIC_POINTS,
    NORMALIZATION_CONSTANTS,
    NUMBER_OF_RECORDS,
    Dataset,
    DataSpec,
    Evaluation,
    PointNames,
    PrivateData,
    PublicPool,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Part:
    """PRIVATE. The records of one file or folder.

    Attributes:
        content: What it holds, in the form of its source.
        label: Their labels [N]; "" unknown.
        unit_id: Makes the names of their units, str [N].
    """

    content: Any
    label: Sequence[str]
    unit_id: Callable[[], np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Points:
    """PRIVATE. The points of all records, one file after another.

    Attributes:
        x: uint8 [N, Ch, H, W] or float32 [N, D].
        usable_N: bool [N]; a private record that cannot be used has a fixed filler as its point. None: all can be.
        why: The reason why others cannot, for the owner.
        standardize: Which features are centered and scaled by the pool's statistics (images always are).
        schema: How a table became these rows, as it may be published.
        declared: Columns whose categories the owner declared.
        resize: How images became these.
        text: The column whose texts these are.
        content: Hashes by which whoever holds public points without ids finds them, of their places among the records.
    """

    x: Tensor
    usable_N: np.ndarray | None = None
    why: str = ""
    standardize: bool | Sequence[bool] = False
    schema: TableSchema | None = None
    declared: Collection[str] = ()
    resize: str | None = None
    text: str | None = None
    content: Callable[[np.ndarray], list[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Records of an owner's own files; private, public and test by ``fractions`` of the units, or from other files.

    Attributes:
        name: Declared name.
        path: The main file or folder, which is private, from the working directory or the data root.
        public_path: A public file of public points, which may lack labels when there is a test file.
        test_path: A public file of test records. A role without a file is split off by ``fractions``.
        root: The data root.
        seed: Seed of the split, which goes by a keyed hash of each unit's own name.
        fractions: Private, public and test.
        group: What names the privacy unit (say, a user); None: a record is one.
        classes: All of them; None: those of the public side. Private records of another class are dropped.
        publish_split: The owner agrees that the public points are split off ``path``, and so become public: their
            categories, and a hash of the features of those that are asked, are released.
        publish_test: The owner agrees that figures on test records split off ``path`` become public.
        nominal_size: Publicly declared approximate number of private records.
        benchmark: Whether the records are public data: accuracies on the private side are then shown.

    Raises:
        ValueError: Names the file or key, what is allowed and the fix.
    """

    name: str
    path: str | None = None
    public_path: str | None = None
    test_path: str | None = None
    root: str | None = None
    seed: int = 0
    fractions: Sequence[float] = (0.8, 0.1, 0.1)
    group: str | None = None
    classes: Sequence[Any] | None = None
    publish_split: bool = False
    publish_test: bool = False
    nominal_size: int | None = None
    benchmark: bool = False

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        roles.check_fractions(self.fractions)
        for key in ("publish_split", "publish_test", "benchmark"):
            checks.boolean(f"dataset.{key}", getattr(self, key))
        if self.nominal_size is not None:
            checks.integer("dataset.nominal_size", self.nominal_size, low=1)
        checks.one_of("dataset.roles", self._way, ("hash", "position"))
        if self._way == "position" and not self._single:
            what = "goes with one file of single records, named by position"
            raise checks.error("dataset.roles", self._way, what, "Use dataset.roles=hash.")

    def _read(self, part: int, key: str, place: Path) -> Part:
        """The records of one file.

        Args:
            part: The role it was given for (PRIVATE: the main file).
            key: The setting that names it, for messages.
            place: Where it is.
        """
        raise NotImplementedError

    def _points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        """The points of the records of all files, of which those of ``_public`` may be looked at."""
        raise NotImplementedError

    @property
    def _way(self) -> str:
        """How roles are dealt: "hash" or "position"."""
        return "hash"

    @property
    def _single(self) -> bool:
        """One file of single records, which are named by nothing but their positions."""
        return not (self.public_path or self.test_path or self.group)

    @property
    def _unit_name(self) -> str:
        """What the privacy unit is."""
        return "record" if self.group is None else f"group:{self.group}"

    def _promise(self) -> tuple[tuple[str, ...], str]:
        """``Dataset.adjacencies`` and ``Dataset.advice``: the relations under which no other record moves.

        Where an id decides, a replaced row may take another role and change how many are private, unless the whole file
        is private. Where the position decides, a row less renames all later ones, which harms nobody only on a public
        benchmark.
        """
        if self._way == "position":
            advice = "Use partition=replace_one, or dataset.roles=hash."
            return (("add_remove", "replace_one") if self.benchmark else ("replace_one",)), advice
        if self.group is not None:
            return ("add_remove",), "Use partition=add_remove, which keeps all of a unit's records together."
        if self.public_path:
            return ("add_remove", "replace_one"), ""
        own = "the public records a file of their own (dataset.public_path)."
        return ("add_remove",), f"Use dataset.roles=position, or give {own}" if self._single else f"Give {own}"

    def _make_point_names(self, parts: dict[int, Part], points: Points, public: np.ndarray) -> PointNames | None:
        """By what whoever holds the public points finds them: of their places among the records, and of no others'."""
        source = None if self.public_path is None else Path(self.public_path).name
        return None if points.content is None else PointNames("content", tuple(points.content(public)), source)

    def _split(self) -> tuple[float, float]:
        """The shares of the main file that become (public points, test records); 0 where these come from elsewhere."""
        private, public, test = self.fractions
        public = 0.0 if self.public_path else public
        test = 0.0 if self.public_path or self.test_path else test
        whole = private + public + test
        return public / whole, test / whole

    def _shown(self, role_N: np.ndarray) -> np.ndarray:
        """Records that may be shown as they are: who agreed to figures on test records agreed to no more."""
        return np.isin(role_N, (PUBLIC, TEST) if self.benchmark or self._split()[1] == 0 else (PUBLIC,))

    def _public(self, role_N: np.ndarray) -> np.ndarray:
        """Records that may be looked at: they give classes, categories and widths, and figures are published."""
        return np.isin(role_N, (PUBLIC, TEST)) if self.publish_test else self._shown(role_N)

    @property
    def _agreed(self) -> bool:
        """Whether the public points are public: they came as such, or their owner agreed."""
        return bool(self.benchmark or self.publish_split or not self._split()[0])

    def _files(self) -> list[tuple[int, str, Path]]:
        """The role, the key and the place of every file there is.

        Raises:
            ValueError: One is missing, or private records would become public without a word.
        """
        keys = {PRIVATE: "path", PUBLIC: "public_path", TEST: "test_path"}
        there = [
            (part, f"dataset.{key}", locations.resolve_path(f"dataset.{key}", getattr(self, key), self.root))
            for part, key in keys.items()
            if getattr(self, key) or part == PRIVATE
        ]
        private = there[0][2].resolve()
        for part, key, place in there:
            if part != PRIVATE and {private, *private.parents} & {place.resolve()}:
                what = "is dataset.path, or a folder around it: every private record would be public"
                raise checks.error(key, str(place), what, "Name points of their own, or leave it out.")
        if not self._agreed:
            self._refuse_split()
        return there

    def _refuse_split(self) -> None:
        """Raise ValueError: a part of a private file would become public, and its owner has not said that it may."""
        public, test = self._split()
        who = "its records" if self.group is None else f"its units (dataset.group={self.group}), with all their records"
        kept = f" Of another {test:.0%}, the test records, only you see figures (dataset.publish_test)." if test else ""
        raise checks.error(
            "dataset.publish_split",
            False,
            f"about {public:.0%} of {who} in {self.path} would become public: a student learns from them as they "
            "are, class names, categories and hashes of theirs are released, and no epsilon covers them",
            "Give public records of their own (dataset.public_path=...), or agree by dataset.publish_split=true."
            + kept,
        )

    def _parts(self) -> dict[int, Part]:
        """The records of every file, by the role it was given for."""
        return {part: self._read(part, key, place) for part, key, place in self._files()}

    def load(self) -> Dataset:
        """Part the records by role; private ones of no use or of unknown class are marked and filled, one by one."""
        parts = self._parts()
        sizes = [len(part.label) for part in parts.values()]
        if self._way == "position":
            unit_id = units.make_position_ids(sizes[0])
            role_N = roles.assign_by_position(sizes[0], self.fractions, self.seed)
        else:
            unit_id = np.concatenate([part.unit_id() for part in parts.values()])
            role_N = roles.assign_by_hash(unit_id, np.repeat(list(parts), sizes), set(parts), self.fractions, self.seed)
        roles.check_parts(self.name, *np.bincount(role_N, minlength=3).tolist())
        points = self._points(parts, role_N)
        x = points.x
        label_N = np.array([normalize_class_name(value) for part in parts.values() for value in part.label], dtype=str)
        class_names = roles.build_class_list(self.classes, np.unique(label_N[self._public(role_N)]).tolist())
        code = {value: index for index, value in enumerate(class_names)}
        y_N = np.array([code.get(value, -1) for value in label_N.tolist()], dtype=np.int64)
        whole_N = np.ones(len(y_N), bool) if points.usable_N is None else points.usable_N
        usable_N = whole_N & (y_N >= 0)
        private = np.flatnonzero(role_N == PRIVATE)
        # Files are often sorted by class, and some strategies ask in the pool's order: shuffle, by public size alone.
        public = np.flatnonzero((role_N == PUBLIC) & whole_N)
        public = public[rng.make_numpy_generator(0, "pool", "order").permutation(len(public))]
        test = np.flatnonzero((role_N == TEST) & usable_N)
        roles.check_parts(self.name, int(usable_N[private].sum()), len(public), len(test))
        unknown = int(((role_N != PUBLIC) & whole_N & (y_N < 0)).sum())
        dropped = {points.why: int((~whole_N).sum()), "of no known class": unknown}
        private_x = x[private]  # a copy, so that the filler is in these alone
        filler = texts.encode_texts("filler", ["-"], private_x.shape[1])[0] if points.text else 0
        private_x[torch.from_numpy(~whole_N[private])] = filler
        pool_x = x[public]
        mean, std = roles.normalization(pool_x, points.standardize)
        labeled = bool((y_N[public] >= 0).all())
        adjacencies, advice = self._promise()
        schema = points.schema
        return Dataset(
            spec=DataSpec(
                name=self.name,
                num_classes=len(class_names),
                input_shape=tuple(x.shape[1:]),
                class_names=class_names,
                mean=mean,
                std=std,
                benchmark=self.benchmark,
                nominal_size=self.nominal_size,
                schema=schema,
                resize=points.resize,
                text=points.text,
            ),
            private=PrivateData(
                private_x,
                torch.from_numpy(np.where(usable_N, y_N, 0)[private]),
                unit_id[private],
                self._unit_name,
                usable_N=torch.from_numpy(usable_N[private]),
            ),
            pool=PublicPool(
                pool_x,
                0.0 if self.benchmark else self._split()[0],
                self._make_point_names(parts, points, public) if self._agreed else None,
            ),
            evaluation=Evaluation(
                x[test],
                torch.from_numpy(y_N[test]),
                torch.from_numpy(y_N[public]) if labeled else None,
                public=bool(self._public(np.array([TEST]))[0]),
            ),
            adjacencies=adjacencies,
            advice=advice,
            num_dropped_by_reason={why: count for why, count in dropped.items() if count},
            provenance={
                CLASSES: FROM_PUBLIC_POINTS if self.classes is None else FROM_OWNER,
                NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS,
                **({} if schema is None else {CATEGORIES: roles.get_categories_origin(schema, points.declared)}),
                **({} if self.nominal_size is None else {NUMBER_OF_RECORDS: FROM_OWNER}),
            },
        )


def content_ids(x_N: Tensor) -> list[str]:
    """A hash of each point's own numbers."""
    return [units.compute_content_id([point.numpy().tobytes()]) for point in x_N]
