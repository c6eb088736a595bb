"""Tables whose rows name a label and a unit, and whose points are something else than columns: texts, vectors by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pate_torch.core import checks
from pate_torch.data import roles, tabular
from pate_torch.data.tabular import Table, num_rows, require_column
from pate_torch.types import Dataset, PointNames


@dataclass(frozen=True, kw_only=True)
class LabeledTable:
    """CSV or Parquet, one row a record. A subclass makes the points (``points``).

    Attributes:
        name: Declared name.
        path: .csv (also .csv.gz, .bz2, .xz; .tsv with ``separator``) or .parquet, from the working directory or the
            data root.
        public_path: A public file of public points, which may lack the label when there is a test file.
        test_path: A public file of test records. A role without a file is split off by ``fractions``.
        root: The data root.
        seed: Seed of the split, which goes by a keyed hash of each unit's own name.
        fractions: Private, public and test.
        label: The label's column.
        group: The column that names the privacy unit (say, a user).
        id: Otherwise the column that names the record; None: a record is named by a hash of its own content, and equal
            records are one unit.
        classes: All of them; None: those of the public side. Private records of another class are dropped.
        separator: Between values of a row.
        columns: Names of the columns of files without a header line; None: their first line has them.
        quotes: Whether quotation marks enclose values; else they are characters like others.
        publish_split: The owner agrees that the public points are split off ``path``, and so become public.
        publish_test: The owner agrees that figures on test records split off ``path`` become public.
        nominal_size: Publicly declared approximate number of private records.
        benchmark: Whether the records are public data: accuracies on the private side are then shown.

    Raises:
        ValueError: Names the key, what is allowed and the fix.
    """

    name: str
    path: str | None = None
    public_path: str | None = None
    test_path: str | None = None
    root: str | None = None
    seed: int = 0
    fractions: Sequence[float] = (0.8, 0.1, 0.1)
    label: str = "label"
    group: str | None = None
    id: str | None = None
    classes: Sequence[Any] | None = None
    separator: str = ","
    columns: Sequence[str] | None = None
    quotes: bool = True
    publish_split: bool = False
    publish_test: bool = False
    nominal_size: int | None = None
    benchmark: bool = False

    def __post_init__(self) -> None:
        roles.check(self)
        checks.boolean("dataset.quotes", self.quotes)
        if self.columns is not None:
            checks.items("dataset.columns", self.columns)
        if self.separator == "\\t":  # as a shell passes it on
            object.__setattr__(self, "separator", "\t")
        if not isinstance(self.separator, str) or len(self.separator) != 1:
            raise checks.fail("dataset.separator", self.separator, "must be one character", "A tab is '\\t'.")

    @property
    def needed(self) -> dict[str, str]:
        """Columns that every file must have, by their keys, beside the label."""
        raise NotImplementedError

    def points(self, table: Table, public_N: np.ndarray) -> tuple[Tensor, np.ndarray, str]:
        """The points of the needed columns, [N, ...]; which records have one, bool [N]; and why others have none.

        Args:
            table: The needed columns of all files.
            public_N: Records that may be looked at.
        """
        raise NotImplementedError

    def content(self, x_N: Tensor) -> list[str]:
        """By what whoever holds public points that have no ids finds them: a hash of each."""
        raise NotImplementedError

    @property
    def text(self) -> str | None:
        """The column of texts, where points are texts."""
        return None

    def load(self) -> Dataset:
        tables = self._tables()
        unit_id = np.concatenate(
            [tabular.unit_ids(self, table, part == roles.PRIVATE) for part, table in tables.items()]
        )
        part_N = np.repeat(list(tables), [num_rows(table) for table in tables.values()])
        role_N = roles.by_hash(unit_id, part_N, set(tables), self.fractions, self.seed)
        roles.check_parts(self.name, *np.bincount(role_N, minlength=3).tolist())
        label = np.array([value for table in tables.values() for value in table[self.label]], dtype=object)
        wanted = set(self.needed.values())
        table = {name: [value for part in tables.values() for value in part[name]] for name in wanted}
        x, has_N, why = self.points(table, np.isin(role_N, roles.public_roles(self)))
        records = roles.Records(
            x=x,
            label=label,
            unit_id=unit_id,
            unit="record" if self.group is None else f"group:{self.group}",
            role_N=role_N,
            usable_N=has_N,
            why=why,
        )
        return roles.assemble(
            records,
            self,
            promised=roles.promise(
                "hash",
                single=not (self.public_path or self.test_path or self.group or self.id),
                apart=bool(self.public_path),
                grouped=self.group is not None,
                benchmark=self.benchmark,
            ),
            text=self.text,
            names=self._names(tables, x),
        )

    def _tables(self) -> dict[int, Table]:
        """Every file's rows, by the role it was given for (PRIVATE: the main file)."""
        tables: dict[int, Table] = {}
        for part, (key, file) in roles.files(self).items():
            unit = tabular.unit_column(self)
            table = tabular.read_text(key, file, self.separator, columns=self.columns, quotes=self.quotes, unit=unit)
            if part == roles.PUBLIC and self.test_path and self.label not in table:
                table[self.label] = [""] * num_rows(table)
            for name, column in ({"dataset.label": self.label} | self.needed).items():
                require_column(name, column, table)
            tables[part] = table
        return tables

    def _names(self, tables: Mapping[int, Table], x: Tensor) -> Callable[[np.ndarray], PointNames]:
        """Public points by their own ids where their file has them, else by content."""

        def names(public: np.ndarray) -> PointNames:
            source = None if self.public_path is None else Path(self.public_path).name
            first = num_rows(tables[roles.PRIVATE])
            for column in (self.id, self.group):
                own = tables.get(roles.PUBLIC, {})
                if source is not None and column is not None and column in own:
                    named = tuple(own[column][row - first].strip() for row in public.tolist())
                    if len(set(named)) == len(named):  # a group may own several points
                        return PointNames("id", named, source, column)
            return PointNames("content", tuple(self.content(x[public])), source)

        return names
