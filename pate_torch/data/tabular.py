"""Tables of a user's own: CSV and Parquet, by pandas and pyarrow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from pate_torch import checks
from pate_torch.data import locations, roles, units
from pate_torch.types import Dataset

_MISSING = {"", "na", "n/a", "nan", "null", "none"}


@dataclass(frozen=True, kw_only=True)
class Csv:
    """Numeric columns, and one-hot columns of declared or public categories; one row a record.

    path: .csv (also .csv.gz, .tsv with ``separator``) or .parquet, from the working directory or the data root;
    public_path, test_path: files for these roles, the others being split off by ``fractions``. A public file may lack
    the label when there is a test file. roles: who is split off; "hash" (each unit's own id decides) or "position" (a
    seeded permutation of the rows' positions, which are the units' ids: for replace_one).
    label: the label's column. group: the column that names the privacy unit (say, a user); otherwise ``id`` names
    the record; otherwise a record is named by a hash of its own content, and equal records are one unit.
    features: the columns to use, or None for all but label, group, id and ``ignore``. categories: {column: [values]};
    a column without an entry is numeric if its public and test values all are, else takes the values these show. A
    private value outside the categories becomes all zeros. classes: as for categories; private records of another
    class are dropped. missing: what to do with records whose numeric features are empty or not finite: "error", or
    "drop" each by itself. Numeric features are centred and scaled by the public pool's statistics.

    x: float32 [N, D]. Raises ValueError naming the key, what is allowed and the fix.
    """

    name: str = "csv"
    path: str | None = None
    public_path: str | None = None
    test_path: str | None = None
    root: str | None = None
    seed: int = 0
    roles: str = "hash"
    fractions: Sequence[float] = (0.8, 0.1, 0.1)
    label: str = "label"
    group: str | None = None
    id: str | None = None
    features: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    categories: Mapping[str, Sequence[Any]] | None = None
    max_categories: int = 64
    classes: Sequence[Any] | None = None
    missing: str = "error"
    separator: str = ","
    nominal_size: int | None = None
    benchmark: bool = False

    def __post_init__(self) -> None:
        locations.check_name(self.name)
        roles.check_way(self.roles, single=self._single)
        roles.check_fractions(self.fractions)
        for key in ("features", "ignore"):
            if getattr(self, key) is not None:
                checks.items(f"dataset.{key}", getattr(self, key))
        if self.categories is not None:
            checks.mapping("dataset.categories", self.categories)
            for column, values in self.categories.items():
                checks.items(f"dataset.categories.{column}", values)
        if not isinstance(self.separator, str) or len(self.separator) != 1:
            raise checks.fail("dataset.separator", self.separator, "must be one character", "A tab is '\\t'.")
        checks.one_of("dataset.missing", self.missing, ("error", "drop"))
        checks.boolean("dataset.benchmark", self.benchmark)
        checks.integer("dataset.max_categories", self.max_categories, low=2)
        if self.nominal_size is not None:
            checks.integer("dataset.nominal_size", self.nominal_size, low=1)

    @property
    def _single(self) -> bool:
        """One file of single records without names."""
        return not (self.public_path or self.test_path or self.group or self.id)

    def load(self) -> Dataset:
        frames = self._frames()
        columns = self._columns(frames[roles.PRIVATE])
        if self.roles == "position":
            unit_id = units.positions(len(frames[roles.PRIVATE]))
            role_N = roles.by_position(len(unit_id), self.fractions, self.seed)
        else:
            unit_id = np.concatenate([self._units(frame, part == roles.PRIVATE) for part, frame in frames.items()])
            part_N = np.repeat(list(frames), [len(frame) for frame in frames.values()])
            role_N = roles.by_hash(unit_id, part_N, set(frames), self.fractions, self.seed)
        roles.check_parts(self.name, *np.bincount(role_N, minlength=3).tolist())
        frame = pd.concat([frame[[*columns, self.label]] for frame in frames.values()], ignore_index=True)
        x, numeric = self._encode(frame[columns], role_N != roles.PRIVATE)
        whole = np.isfinite(x).all(1)
        if not whole.all() and self.missing == "error":
            bad = [name for name in columns if name in numeric and not np.isfinite(x[:, numeric[name]]).all()]
            raise checks.fail(
                "dataset.missing",
                self.missing,
                f"stops at numeric columns with empty, NaN, infinite or non-numeric values: {', '.join(bad)}",
                "Clean them, drop such records one by one (dataset.missing=drop), or use dataset.ignore.",
            )
        kept = np.flatnonzero(whole)
        standardise = np.isin(np.arange(x.shape[1]), list(numeric.values())).tolist()
        records = roles.Records(
            x=torch.from_numpy(x[kept]),
            label=frame[self.label].to_numpy(dtype=object)[kept],
            unit_id=unit_id[kept],
            unit="record" if self.group is None else f"group:{self.group}",
            role_N=role_N[kept],
        )
        return roles.assemble(
            records,
            name=self.name,
            classes=self.classes,
            benchmark=self.benchmark,
            nominal_size=self.nominal_size,
            promised=roles.promise(
                self.roles,
                single=self._single,
                apart=bool(self.public_path),
                grouped=self.group is not None,
                benchmark=self.benchmark,
            ),
            standardise=standardise,
        )

    def _frames(self) -> dict[int, pd.DataFrame]:
        """Every file's rows as text, by the role it was given for (PRIVATE: the main file)."""
        given = {
            roles.PRIVATE: ("dataset.path", self.path),
            roles.PUBLIC: ("dataset.public_path", self.public_path),
            roles.TEST: ("dataset.test_path", self.test_path),
        }
        frames: dict[int, pd.DataFrame] = {}
        for part, (key, path) in given.items():
            if part != roles.PRIVATE and not path:
                continue
            frame = read_text(key, locations.existing(key, path, self.root), self.separator)
            if part == roles.PUBLIC and self.test_path and self.label not in frame:
                frame = frame.assign(**{self.label: ""})
            _require("dataset.label", self.label, frame)
            frames[part] = frame
        needed = set(self._columns(frames[roles.PRIVATE]))
        for part, frame in frames.items():
            if lacking := sorted(needed - set(frame.columns)):
                raise checks.fail(
                    given[part][0], given[part][1], f"lacks the feature columns {lacking} of dataset.path"
                )
        return frames

    def _columns(self, frame: pd.DataFrame) -> list[str]:
        special = {self.label, self.group, self.id, *self.ignore}
        for key, names in (
            ("features", self.features or ()),
            ("ignore", self.ignore),
            ("categories", self.categories or ()),
        ):
            for name in names:
                _require(f"dataset.{key}", name, frame)
        columns = [name for name in (self.features or frame.columns) if name not in special]
        if not columns:
            raise checks.fail("dataset.features", self.features, "leaves no feature column", f"Columns: {list(frame)}.")
        return columns

    def _units(self, frame: pd.DataFrame, private: bool) -> np.ndarray:
        """Unit ids, str [N]. Public and test files may lack the column: their records are then named by content."""
        key, column = ("dataset.id", self.id) if self.group is None else ("dataset.group", self.group)
        if column is not None and private:
            _require(key, column, frame)
        if column is not None and column in frame:
            if (frame[column].str.strip() == "").any():
                raise checks.fail(key, column, "has empty values", "Every record needs the name of its privacy unit.")
            return frame[column].to_numpy(dtype=str)
        rows = zip(*(frame[name].tolist() for name in frame.columns), strict=True)
        return np.array([units.content_id(value.encode() for value in row) for row in rows])

    def _encode(self, frame: pd.DataFrame, public_N: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
        """float32 [N, D], and where each numeric column stands in it."""
        blocks: list[np.ndarray] = []
        numeric: dict[str, int] = {}
        for name in frame.columns:
            text = frame[name].str.strip()
            values = self._categories(name, text[public_N])
            if values is None:
                numeric[name] = sum(block.shape[1] for block in blocks)
                # Value by value: a column-wise parser may read a number differently for its neighbours' sake.
                with np.errstate(over="ignore"):  # beyond float32 is infinite, which the caller refuses
                    blocks.append(np.array([_number(value) for value in text])[:, None].astype(np.float32))
            else:
                spelled = text.map(roles.class_name).to_numpy(dtype=object)
                blocks.append((spelled[:, None] == np.array(values, dtype=object)).astype(np.float32))
        return np.concatenate(blocks, axis=1), numeric

    def _categories(self, name: str, public: pd.Series) -> list[str] | None:
        """A column's categories, declared or read off the public side; None for a numeric column."""
        if self.categories and name in self.categories:
            return [roles.class_name(value) for value in self.categories[name]]
        shown = set(public.tolist()) - {""}
        if all(value.casefold() in _MISSING or not math.isnan(_number(value)) for value in shown):
            return None
        values = sorted({roles.class_name(value) for value in shown})
        if len(values) > self.max_categories:
            raise checks.fail(
                "dataset.max_categories",
                self.max_categories,
                f"is less than the {len(values)} different public values of column {name!r}",
                "Put the column in dataset.ignore, list its values in dataset.categories, or raise the limit.",
            )
        return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _require(key: str, column: str, frame: pd.DataFrame) -> None:
    if column not in frame.columns:
        checks.one_of(key, column, [str(name) for name in frame.columns])


def read_text(key: str, file: Path, separator: str) -> pd.DataFrame:
    """A table of strings ("" for null). Types guessed per column would let one record change every other's value."""
    try:
        if file.suffix in (".parquet", ".pq"):
            table = pq.read_table(file)
            # pandas stores an unnamed index as a column: a row's position, which is no feature and would rename others.
            names = [name for name in table.column_names if not re.fullmatch(r"__index_level_\d+__", name)]
            frame = pd.DataFrame({name: _text(name, table[name]) for name in names}, dtype=object)
        else:
            frame = pd.read_csv(file, sep=separator, dtype=str, keep_default_na=False, na_filter=False)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise checks.fail(
            key,
            str(file),
            f"is not a readable CSV or Parquet file ({type(error).__name__}: {error})",
            "A CSV file has a header line; set dataset.separator if it is not a comma.",
        ) from error
    if frame.empty:
        raise checks.fail(key, str(file), "has no rows")
    return frame


def _text(name: str, column: pa.ChunkedArray) -> list[str]:
    try:
        if pa.types.is_boolean(column.type):
            column = pc.if_else(column, "True", "False")  # as pandas writes them into a CSV file
        return pc.fill_null(column.cast(pa.string()), "").to_pylist()
    except pa.ArrowNotImplementedError as error:
        raise ValueError(f"column {name!r} of type {column.type} is no plain value") from error
