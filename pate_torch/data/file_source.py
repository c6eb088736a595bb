"""Data sets in an owner's files: each record gets a role (private, public or test), a privacy unit and a class.

Guarantee: no private record influences how other records are read. The role of a record depends only on the id of its
unit or on its position. Classes and statistics are declared or come from public records. A private record that cannot
be used is dropped, and no other record changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.data import base
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.privacy import records, unit_ids
from pate_torch.privacy.records import Dataset, Evaluation, PointNames, PrivateRecords, PublicPool
from pate_torch.privacy.schema import is_number, make_key, normalize_class_name
from pate_torch.privacy.unit_ids import PRIVATE, PUBLIC, TEST, UnitIds

PATH_FIELDS = {PRIVATE: "path", PUBLIC: "public_path", TEST: "test_path"}
"""Field of ``FileSource`` with the path of each role's file."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FileRecords:
    """PRIVATE. The records of one file or folder.

    Attributes:
        content: Points as the source reads them: a table, a sparse matrix or a list of image paths.
        labels: Label of each record as text [N]. An unknown label is "".
        unit_ids: Id of the privacy unit of each record [N].
        point_names: Names [N] by which readers who hold the file identify its records, by the kind of name ("id" or
            "file") and the column of the ids, which is None for file names.
    """

    content: Any
    labels: Sequence[str]
    unit_ids: UnitIds
    point_names: Mapping[tuple[str, str | None], Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Points:
    """PRIVATE. The points of all records, one file after the other. Each point depends on one row or image alone.

    Attributes:
        gather: Function from indices [M] to points: images, uint8 [M, Ch, H, W]; texts, uint8 [M, L], with zeros for a
            missing text; or rows, float32 [M, D], with NaN for missing numbers. The function may read the points of
            these indices from a file, so that a large file need not be in memory as a whole.
        is_readable_N: Whether each point could be read, bool [N]. None if all points could be read.
        make_content_ids: Function from indices of public points [M] and these points to their content hashes [M], by
            which readers of a release identify points without ids. None if the content does not identify points.
        options: Further arguments of ``assemble_dataset``.
    """

    gather: Callable[[np.ndarray], Tensor]
    is_readable_N: np.ndarray | None = None
    make_content_ids: Callable[[np.ndarray, Tensor], list[str]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileSource(DatasetSource):
    """Records in an owner's files. Public points and test records without a separate file are split off the main file.

    Attributes:
        name: Declared name.
        path: Main file or folder, which is private, in the working directory or below the data root.
        public_path: Public file of public points. It may lack labels if there is a test file.
        test_path: Public file of test records.
        root: Folder of all data sets. None for the default of ``get_data_root``.
        seed: Seed of the split.
        roles: "hash" to split by a keyed hash of each unit's id. "position" to split one file of single records by a
            seeded permutation of the positions (for replace_one); the unit ids are then the positions.
        fractions: Fractions of private, public and test units.
        group: Privacy unit: a column of a table, "qid" in a LIBSVM file, or a regular expression on the names of image
            files. None if each record is a unit.
        classes: All classes. None for the classes of the public records. Private records of other classes are dropped.
        publish_split: Whether the owner agrees that public points are split off ``path`` and become public: the release
            holds the categories of these points, and a hash of the features of each queried point.
        publish_test: Whether the owner agrees that metrics on test records split off ``path`` become public.
        nominal_size: Publicly declared approximate number of private records.
        benchmark: Whether all records are public data, so that accuracies on private records may be shown.
    """

    name: str
    path: str | None = None
    public_path: str | None = None
    test_path: str | None = None
    root: str | None = None
    seed: int = 0
    roles: str = "hash"
    fractions: Sequence[float] = (0.8, 0.1, 0.1)
    group: str | None = None
    classes: Sequence[Any] | None = None
    publish_split: bool = False
    publish_test: bool = False
    nominal_size: int | None = None
    benchmark: bool = False

    def __post_init__(self) -> None:
        base.check_name(self.name)
        key = "dataset.fractions"
        fractions = [checks.positive(key, fraction) for fraction in checks.collection(key, self.fractions)]
        if len(fractions) != 3 or not math.isclose(sum(fractions), 1, abs_tol=1e-9):
            message = "must be three positive numbers [private, public, test] summing to 1"
            raise checks.error(key, list(self.fractions), message)
        for name in ("publish_split", "publish_test", "benchmark"):
            checks.boolean(f"dataset.{name}", getattr(self, name))
        checks.optional(checks.integer, "dataset.nominal_size", self.nominal_size, low=1)
        checks.one_of("dataset.roles", self.roles, ("hash", "position"))
        if self.roles == "position" and not self._has_unnamed_records:
            message = "needs one file of single records without an id or a group"
            raise checks.error("dataset.roles", self.roles, message, "Use dataset.roles=hash.")

    def declared_facts(self) -> SourceFacts:
        candidates = [] if self.path is None else base.list_candidate_paths(self.path, self.root)
        return SourceFacts(
            name=self.name,
            num_classes=None if self.classes is None else len(self.classes),
            num_private=self.nominal_size,
            is_benchmark=self.benchmark,
            paths=frozenset(candidate.resolve() for candidate in candidates),
            root=self.root,
        )

    def _read_file(self, role: int, key: str, path: Path) -> FileRecords:
        """Read the file or folder of a role. The main file is PRIVATE. Messages name the setting ``key``."""
        raise NotImplementedError

    def _build_points(self, files: dict[int, FileRecords], role_N: np.ndarray) -> Points:
        """Build the points of all records. A point depends on its record and on records of ``_public_roles`` alone."""
        raise NotImplementedError

    @property
    def _has_unnamed_records(self) -> bool:  # whether there is only one file, and its records have no id and no group
        return not (self.public_path or self.test_path or self.group)

    @property
    def _unit_name(self) -> str:
        return "record" if self.group is None else f"group:{self.group}"

    def _get_adjacency_terms(self) -> tuple[tuple[str, ...], str]:
        """Return the supported adjacencies, and advice for the others (``Dataset.adjacencies``, ``Dataset.advice``).

        If the id decides the role, a replaced row may get another role and change the number of private records, unless
        the whole file is private. If the position decides the role, a removed row changes the ids of all later rows,
        which is allowed only for benchmarks.
        """
        if self.roles == "position":
            advice = "Use partition=replace_one, or dataset.roles=hash."
            return (("add_remove", "replace_one") if self.benchmark else ("replace_one",)), advice
        if self.group is not None:
            return ("add_remove",), "Use partition=add_remove, which keeps all records of a unit together."
        if self.public_path:
            return ("add_remove", "replace_one"), ""
        advice = "Use dataset.roles=position, or put" if self._has_unnamed_records else "Put"
        return ("add_remove",), f"{advice} the public records into a separate file (dataset.public_path)."

    def _compute_split_shares(self) -> tuple[float, float]:
        private, public, test = self.fractions
        public = 0.0 if self.public_path else public
        test = 0.0 if self.public_path or self.test_path else test
        total = private + public + test
        return public / total, test / total

    @property
    def _releasable_roles(self) -> tuple[int, ...]:
        """Roles of the records whose values may be released. ``publish_test`` permits the release of metrics only."""
        return (PUBLIC, TEST) if self.benchmark or self._compute_split_shares()[1] == 0 else (PUBLIC,)

    @property
    def _public_roles(self) -> tuple[int, ...]:
        """Roles of the records from which classes and categories may be read."""
        return (PUBLIC, TEST) if self.publish_test else self._releasable_roles

    def _find_files(self) -> dict[int, tuple[str, Path]]:
        """Return {role: (setting, path)} of all files. Refuse files that would make private records public."""
        files = {
            role: (f"dataset.{name}", base.resolve_path(f"dataset.{name}", getattr(self, name), self.root))
            for role, name in PATH_FIELDS.items()
            if getattr(self, name) or role == PRIVATE
        }
        private_path = files[PRIVATE][1].resolve()
        for role, (key, path) in files.items():
            if role != PRIVATE and (path.samefile(private_path) or path.resolve() in private_path.parents):
                message = "is dataset.path, or a folder that contains it, so every private record would be public"
                raise checks.error(key, str(path), message, f"Set {key} to separate public data, or leave it out.")
        if self.benchmark or self.publish_split or self.public_path:
            return files
        public, test = self._compute_split_shares()
        units = f"units (dataset.group={self.group}), with all records of each unit,"
        subject = "records" if self.group is None else units
        message = f"about {public:.0%} of the {subject} in {self.path} would become public: the student is trained on "
        message += "these points, their class names, categories and hashes are released, and no epsilon covers them"
        fix = "Name a file of public records (dataset.public_path=...), or agree by dataset.publish_split=true."
        if test:
            fix += f" Another {test:.0%} become test records, whose metrics only you see (dataset.publish_test)."
        raise checks.error("dataset.publish_split", False, message, fix)

    def load(self) -> Dataset:
        files = {role: self._read_file(role, key, path) for role, (key, path) in self._find_files().items()}
        sizes, split = [len(file.labels) for file in files.values()], (self.fractions, self.seed)
        if self.roles == "position":
            unit_id, role_N = unit_ids.make_position_ids(sizes[0]), unit_ids.assign_by_position(sizes[0], *split)
        else:
            unit_id = unit_ids.concatenate_unit_ids([file.unit_ids for file in files.values()])
            role_N = unit_ids.assign_by_hash(unit_id, np.repeat(list(files), sizes), set(files), *split)
        self._check_role_sizes(np.bincount(role_N, minlength=3).tolist())
        points = self._build_points(files, role_N)
        class_names, y_N = self._encode_labels(files, role_N)
        private, public, test = (np.flatnonzero(role_N == role) for role in (PRIVATE, PUBLIC, TEST))
        private_records = PrivateRecords.from_rows(
            points.gather(private),
            y_N[private],
            unit_id[private],
            self._unit_name,
            num_classes=len(class_names),
            is_readable_N=None if points.is_readable_N is None else points.is_readable_N[private],
        )
        num_dropped = Counter(private_records.num_unusable_by_reason)
        # The pool is shuffled, because files are often sorted by class and some query strategies follow the order of
        # the pool. The permutation depends on the number of public points only. Public points need no labels.
        public, public_x = _gather_usable(points, public, torch.zeros_like(y_N), num_dropped, is_shuffled=True)
        test, test_x = _gather_usable(points, test, y_N, num_dropped)
        self._check_role_sizes([len(private), len(public), len(test)])
        pool_y = y_N[public] if bool((y_N[public] >= 0).all()) else None
        split_share = 0.0 if self.benchmark else self._compute_split_shares()[0]
        data = base.assemble_dataset(
            private_records,
            PublicPool(public_x, split_share, self._make_point_names(files, points, public, public_x)),
            Evaluation(test_x, y_N[test], pool_y, public=TEST in self._public_roles),
            class_names=class_names,
            classes_origin=records.FROM_PUBLIC_POINTS if self.classes is None else records.FROM_OWNER,
            name=self.name,
            benchmark=self.benchmark,
            nominal_size=self.nominal_size,
            **points.options,
        )
        adjacencies, advice = self._get_adjacency_terms()
        return replace(data, adjacencies=adjacencies, advice=advice, num_dropped_by_reason=dict(num_dropped))

    def _check_role_sizes(self, size_by_role: Sequence[int]) -> None:
        """Refuse a public role without records. No number of private records, or of private test records, is refused.

        The number of usable records depends on their values, and one record more must not change a refusal into a run.
        """
        for role in self._public_roles:
            if size_by_role[role] == 0:
                fix = "Check dataset.fractions and dataset.classes. Test records need labels."
                problem = f"has no {'test' if role == TEST else 'public'} records"
                raise checks.error("dataset.name", self.name, problem, fix)

    def _encode_labels(self, files: dict[int, FileRecords], role_N: np.ndarray) -> tuple[tuple[str, ...], Tensor]:
        """Return the class names, and the class of each record, int64 [N], with -1 for an unknown label."""
        labels = [label for file in files.values() for label in file.labels]
        key_by_label = {label: make_key(label) for label in set(labels)}
        public_rows = np.flatnonzero(np.isin(role_N, self._public_roles)).tolist()
        class_names = build_class_list(self.classes, {key_by_label[labels[row]] for row in public_rows})
        code_by_key = {make_key(value): code for code, value in enumerate(class_names)}
        return class_names, torch.tensor([code_by_key.get(key_by_label[label], -1) for label in labels])

    def _make_point_names(
        self, files: dict[int, FileRecords], points: Points, public: np.ndarray, public_x: Tensor
    ) -> PointNames | None:
        """Return names of the points at the indices ``public``: ids or paths in their file, or content hashes."""
        source = None
        if self.public_path is not None:
            source, rows = Path(self.public_path).name, (public - len(files[PRIVATE].labels)).tolist()
            for (kind, column), file_names in files[PUBLIC].point_names.items():
                names = tuple(file_names[row].strip() for row in rows)
                if len(set(names)) == len(names):  # the id of a group repeats if the group owns several points
                    return PointNames(kind, names, source, column)
        if points.make_content_ids is None:
            return None
        return PointNames("content", tuple(points.make_content_ids(public, public_x)), source)


def _gather_usable(
    points: Points, rows: np.ndarray, y_N: Tensor, num_dropped: Counter[str], *, is_shuffled: bool = False
) -> tuple[np.ndarray, Tensor]:
    """Return the indices and the points of the usable records among ``rows``, and count the others by reason."""
    order = rng.make_numpy_generator(0, "pool", "order").permutation(len(rows)) if is_shuffled else slice(None)
    x, y = points.gather(rows[order]), y_N[rows[order]]
    is_readable = None if points.is_readable_N is None else points.is_readable_N[rows[order]]
    unusable_by_reason = records.find_unusable_rows(x, y, is_readable_N=is_readable)
    if not unusable_by_reason:
        return rows[order], x
    num_dropped.update({reason: int(mask.sum()) for reason, mask in unusable_by_reason.items()})
    is_usable = ~records.find_any(len(y), unusable_by_reason.values()).numpy()
    return _gather_usable(points, np.sort(rows[order][is_usable]), y_N, num_dropped, is_shuffled=is_shuffled)


def build_class_list(declared_classes: Iterable[Any] | None, public_keys: Iterable[str]) -> tuple[str, ...]:
    """Return the declared classes, or the sorted keys of the public labels if None (``make_key``).

    The declared classes must include all public labels.
    """
    public_classes = set(public_keys) - {""}
    if declared_classes is None:
        is_numeric = all(is_number(name) for name in public_classes)
        classes = tuple(sorted(public_classes, key=float) if is_numeric else sorted(public_classes))
        if len(classes) < 2:
            message = f"must be declared, because the public records have only {len(classes)} class(es): {classes}"
            fix = "List all classes in dataset.classes, or raise the public fraction."
            raise checks.error("dataset.classes", None, message, fix)
        return classes
    classes = tuple(normalize_class_name(value) for value in checks.collection("dataset.classes", declared_classes))
    keys = set(map(make_key, classes))
    if len(classes) < 2 or len(keys) < len(classes):
        raise checks.error("dataset.classes", list(classes), "must list at least two different classes")
    if unknown_classes := sorted(public_classes - keys):
        message = f"lacks classes of public records: {unknown_classes[:10]}"
        fix = "Add these classes, or remove their records from the public data."
        raise checks.error("dataset.classes", list(classes), message, fix)
    return classes


def hash_points(x_N: Tensor) -> list[str]:
    """Compute the content id of each point."""
    return unit_ids.make_content_ids([point.numpy().tobytes()] for point in x_N).tolist()
