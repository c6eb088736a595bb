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

from pate_torch.core import checks, rng
from pate_torch.data import locations, roles
from pate_torch.data.base import DatasetSource, SourceFacts, assemble_dataset
from pate_torch.data.roles import PRIVATE, PUBLIC, TEST
from pate_torch.privacy.records import (
    CATEGORIES,
    CLASSES,
    FROM_PUBLIC_POINTS,
    UNKNOWN_CLASS,
    Dataset,
    Evaluation,
    PointNames,
    PrivateRecords,
    PublicPool,
    find_any,
    find_unusable_rows,
)
from pate_torch.privacy.schema import TableSchema, normalize_class_name
from pate_torch.privacy.unit_ids import UnitIds, concatenate_unit_ids, make_content_ids, make_position_ids


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Part:
    """PRIVATE. The records of one file or folder.

    Attributes:
        content: What it holds, in the form of its source.
        label: Their labels [N]; "" unknown.
        make_unit_ids: Makes the names of their units [N].
    """

    content: Any
    label: Sequence[str]
    make_unit_ids: Callable[[], UnitIds]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Points:
    """PRIVATE. The points of all records, one file after another, each read from its own row or file alone.

    Attributes:
        x: uint8 [N, Ch, H, W], texts as uint8 [N, L] (zeros for none) or float32 [N, D] (NaN for what is missing).
        is_readable_N: Whether a point could be read, bool [N]; None: all could.
        standardize: Which features are centered and scaled by the pool's statistics (images always are).
        schema: How a table became these rows, as it may be published.
        owner_columns: Columns whose categories the owner declared.
        resize: How images became these.
        text: The column whose texts these are.
        make_content_ids: Hashes by which whoever holds public points without ids finds them, of their indices among the
            records.
    """

    x: Tensor
    is_readable_N: np.ndarray | None = None
    standardize: bool | Sequence[bool] = False
    schema: TableSchema | None = None
    owner_columns: Collection[str] = ()
    resize: str | None = None
    text: str | None = None
    make_content_ids: Callable[[np.ndarray], list[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class FileSource(DatasetSource):
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
        checks.one_of("dataset.roles", self._role_assignment, ("hash", "position"))
        if self._role_assignment == "position" and not self._has_unnamed_records:
            message = "goes with one file of single records, named by position"
            raise checks.error("dataset.roles", self._role_assignment, message, "Use dataset.roles=hash.")

    def declared_facts(self) -> SourceFacts:
        path = None if self.path is None else Path(self.path).expanduser()
        candidates = () if path is None else (path, locations.get_data_root(self.root) / path)
        return SourceFacts(
            name=self.name,
            num_classes=None if self.classes is None else len(self.classes),
            num_private=self.nominal_size,
            is_benchmark=self.benchmark,
            paths=frozenset(candidate.resolve() for candidate in candidates),
            root=self.root,
        )

    def _read_part(self, role: int, key: str, path: Path) -> Part:
        """The records of one file.

        Args:
            role: The role it was given for (PRIVATE: the main file).
            key: The setting that names it, for messages.
            path: The file or folder.
        """
        raise NotImplementedError

    def _build_points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        """The points of the records of all files, of which those of ``_is_public`` may be looked at."""
        raise NotImplementedError

    @property
    def _role_assignment(self) -> str:
        """How roles are dealt: "hash" or "position"."""
        return "hash"

    @property
    def _has_unnamed_records(self) -> bool:
        """Whether there is one file of single records, which are named by nothing but their positions."""
        return not (self.public_path or self.test_path or self.group)

    @property
    def _unit_name(self) -> str:
        """What the privacy unit is."""
        return "record" if self.group is None else f"group:{self.group}"

    def _get_adjacency_terms(self) -> tuple[tuple[str, ...], str]:
        """``Dataset.adjacencies`` and ``Dataset.advice``: the relations under which no other record moves.

        Where an id decides, a replaced row may take another role and change how many are private, unless the whole file
        is private. Where the position decides, a row less renames all later ones, which harms nobody only on a public
        benchmark.
        """
        if self._role_assignment == "position":
            advice = "Use partition=replace_one, or dataset.roles=hash."
            return (("add_remove", "replace_one") if self.benchmark else ("replace_one",)), advice
        if self.group is not None:
            return ("add_remove",), "Use partition=add_remove, which keeps all of a unit's records together."
        if self.public_path:
            return ("add_remove", "replace_one"), ""
        advice = "Use dataset.roles=position, or give" if self._has_unnamed_records else "Give"
        return ("add_remove",), f"{advice} the public records a file of their own (dataset.public_path)."

    def _make_point_names(self, parts: dict[int, Part], points: Points, public: np.ndarray) -> PointNames | None:
        """By what whoever holds the public points finds them: of their indices among the records, and of no others'."""
        source = None if self.public_path is None else Path(self.public_path).name
        if points.make_content_ids is None:
            return None
        return PointNames("content", tuple(points.make_content_ids(public)), source)

    def _compute_split_shares(self) -> tuple[float, float]:
        """The shares of the main file that become (public points, test records); 0 where these come from elsewhere."""
        private, public, test = self.fractions
        public = 0.0 if self.public_path else public
        test = 0.0 if self.public_path or self.test_path else test
        total = private + public + test
        return public / total, test / total

    def _is_releasable(self, role_N: np.ndarray) -> np.ndarray:
        """Which records may be shown as they are: who agreed to figures on test records agreed to no more."""
        return np.isin(role_N, (PUBLIC, TEST) if self.benchmark or self._compute_split_shares()[1] == 0 else (PUBLIC,))

    def _is_public(self, role_N: np.ndarray) -> np.ndarray:
        """Which records may be looked at: they give classes, categories and widths, and figures are published."""
        return np.isin(role_N, (PUBLIC, TEST)) if self.publish_test else self._is_releasable(role_N)

    @property
    def _is_pool_public(self) -> bool:
        """Whether the public points are public: they came as such, or their owner agreed."""
        return bool(self.benchmark or self.publish_split or not self._compute_split_shares()[0])

    def _list_files(self) -> list[tuple[int, str, Path]]:
        """The role, the key and the path of every file there is.

        Raises:
            ValueError: One is missing, or private records would become public without a word.
        """
        keys = {PRIVATE: "path", PUBLIC: "public_path", TEST: "test_path"}
        files = [
            (role, f"dataset.{key}", locations.resolve_path(f"dataset.{key}", getattr(self, key), self.root))
            for role, key in keys.items()
            if getattr(self, key) or role == PRIVATE
        ]
        private_path = files[0][2].resolve()
        for role, key, path in files:
            if role != PRIVATE and {private_path, *private_path.parents} & {path.resolve()}:
                message = "is dataset.path, or a folder around it: every private record would be public"
                raise checks.error(key, str(path), message, "Name points of their own, or leave it out.")
        if not self._is_pool_public:
            raise self._unpublished_split_error()
        return files

    def _unpublished_split_error(self) -> ValueError:
        """The error of a private file of which a part would become public: its owner has not said that it may."""
        public, test = self._compute_split_shares()
        subject = (
            "its records" if self.group is None else f"its units (dataset.group={self.group}), with all their records"
        )
        hint = f" Of another {test:.0%}, the test records, only you see figures (dataset.publish_test)." if test else ""
        return checks.error(
            "dataset.publish_split",
            False,
            f"about {public:.0%} of {subject} in {self.path} would become public: a student learns from them as they "
            "are, class names, categories and hashes of theirs are released, and no epsilon covers them",
            "Give public records of their own (dataset.public_path=...), or agree by dataset.publish_split=true."
            + hint,
        )

    def _read_parts(self) -> dict[int, Part]:
        """The records of every file, by the role it was given for."""
        return {role: self._read_part(role, key, path) for role, key, path in self._list_files()}

    def load(self) -> Dataset:
        """Part the records by role: each by its own unit's name or position."""
        parts = self._read_parts()
        sizes = [len(part.label) for part in parts.values()]
        if self._role_assignment == "position":
            unit_id = make_position_ids(sizes[0])
            role_N = roles.assign_by_position(sizes[0], self.fractions, self.seed)
        else:
            unit_id = concatenate_unit_ids([part.make_unit_ids() for part in parts.values()])
            role_N = roles.assign_by_hash(unit_id, np.repeat(list(parts), sizes), set(parts), self.fractions, self.seed)
        roles.check_parts(self.name, *np.bincount(role_N, minlength=3).tolist())
        points = self._build_points(parts, role_N)
        x = points.x
        class_names, y_N = self._encode_labels(parts, role_N)
        unusable_by_reason = find_unusable_rows(x, y_N, len(class_names), points.is_readable_N)
        unknown_N = unusable_by_reason.pop(UNKNOWN_CLASS, find_any(len(x), [])).numpy()
        has_point_N = ~find_any(len(x), unusable_by_reason.values()).numpy()
        private = np.flatnonzero(role_N == PRIVATE)
        # Files are often sorted by class, and some strategies ask in the pool's order: shuffle, by public size alone.
        public = np.flatnonzero((role_N == PUBLIC) & has_point_N)
        public = public[rng.make_numpy_generator(0, "pool", "order").permutation(len(public))]
        test = np.flatnonzero((role_N == TEST) & has_point_N & ~unknown_N)
        num_usable = int((has_point_N & ~unknown_N)[private].sum())
        roles.check_parts(self.name, num_usable, len(public), len(test))
        counts = {reason: int(rows_N.sum()) for reason, rows_N in unusable_by_reason.items()}
        counts[UNKNOWN_CLASS] = int(unknown_N[role_N != PUBLIC].sum())
        adjacencies, advice = self._get_adjacency_terms()
        provenance = {CLASSES: FROM_PUBLIC_POINTS} if self.classes is None else {}
        if points.schema is not None:
            provenance[CATEGORIES] = roles.get_categories_origin(points.schema, points.owner_columns)
        records = PrivateRecords.from_rows(
            x[private],
            y_N[private],
            unit_id[private],
            self._unit_name,
            num_classes=len(class_names),
            is_readable_N=None if points.is_readable_N is None else points.is_readable_N[private],
        )
        point_names = self._make_point_names(parts, points, public) if self._is_pool_public else None
        pool_y = y_N[public] if bool((y_N[public] >= 0).all()) else None
        is_test_public = bool(self._is_public(np.array([TEST]))[0])
        return assemble_dataset(
            records,
            PublicPool(x[public], 0.0 if self.benchmark else self._compute_split_shares()[0], point_names),
            Evaluation(x[test], y_N[test], pool_y, public=is_test_public),
            class_names=class_names,
            standardize=points.standardize,
            dataset_facts={
                "adjacencies": adjacencies,
                "advice": advice,
                "num_dropped_by_reason": {reason: count for reason, count in counts.items() if count},
                "provenance": provenance,
            },
            name=self.name,
            benchmark=self.benchmark,
            nominal_size=self.nominal_size,
            schema=points.schema,
            resize=points.resize,
            text=points.text,
        )

    def _encode_labels(self, parts: dict[int, Part], role_N: np.ndarray) -> tuple[tuple[str, ...], Tensor]:
        """The classes, which public labels show or the owner declared, and each record's [N]; -1 where it is none."""
        labels = [normalize_class_name(value) for part in parts.values() for value in part.label]
        public_labels = {labels[row] for row in np.flatnonzero(self._is_public(role_N)).tolist()}
        class_names = roles.build_class_list(self.classes, public_labels)
        code_by_class = {value: code for code, value in enumerate(class_names)}
        return class_names, torch.tensor([code_by_class.get(value, -1) for value in labels])


def hash_points(x_N: Tensor) -> list[str]:
    """A hash of each point's own numbers."""
    return make_content_ids([point.numpy().tobytes()] for point in x_N).tolist()
