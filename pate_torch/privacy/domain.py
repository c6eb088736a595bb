"""The domain of a table: the columns, their types and their codes, by which rows are counted.

A domain is declared, or read off public rows, and never depends on private rows. The code of a cell is a function of
this cell and of the domain. Code 0 of every column means "missing": an empty cell, or one that cannot be read. A column
of categories has the code 1, "other", for every value that is not listed.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pate_torch.core import checks
from pate_torch.privacy.schema import (
    MAX_CATEGORIES,
    factorize,
    is_missing,
    make_key,
    map_distinct,
    normalize_class_name,
    parse_numbers,
    to_text_columns,
)

KINDS: Final = ("category", "boolean", "integer", "real", "date")
OTHER: Final = "other"
"""Text of a value that is not listed."""
NUM_BINS: Final = 16
"""Number of bins of a column of numbers, unless another one is declared."""
_BOOLEANS = {"1": "1", "yes": "1", "0": "0", "no": "0"}
_EPOCH = datetime.date(1970, 1, 1).toordinal()


@dataclass(frozen=True, kw_only=True)
class DomainColumn:
    """One column of a table.

    Attributes:
        kind: One of ``KINDS``.
        values: Categories in order. Empty for other kinds.
        edges: Limits of the bins in increasing order; a value in [edge, next edge) has the bin's code, and values
            outside the range those of the first and last bin. Dates are days since 1970-01-01. Empty for categories.
    """

    name: str
    kind: str
    values: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        key = f"columns.{checks.nonempty_string('columns', self.name)}"
        checks.one_of(f"{key}.type", self.kind, KINDS)
        names = {*self.values, "", OTHER}
        if self.kind == "category" and (not self.values or len(names) < len(self.values) + 2):
            raise checks.error(f"{key}.values", self.values, f"must list different categories, without {OTHER!r}")
        if self.is_number and (len(self.edges) < 2 or any(b <= a for a, b in zip(self.edges, self.edges[1:]))):  # noqa: B905
            raise checks.error(f"{key}.edges", self.edges, "must be two or more increasing numbers")
        if self.kind in ("integer", "date") and any(edge % 1 for edge in self.edges):
            raise checks.error(f"{key}.edges", self.edges, "must be whole numbers, so that every bin holds one")

    @property
    def is_number(self) -> bool:
        """Whether the values of the column are numbers or dates, which lie in bins."""
        return self.kind in ("integer", "real", "date")

    @property
    def names(self) -> tuple[str, ...]:
        """Text of each code, for reports."""
        if self.kind == "boolean":
            return ("", "false", "true")
        if not self.is_number:
            return ("", OTHER, *self.values)
        pairs = zip(self.edges[:-1], self.edges[1:], strict=True)
        return ("", *(f"{self._format(low)} to {self._format(high)}" for low, high in pairs))

    @property
    def size(self) -> int:
        """Number of codes."""
        return len(self.edges) if self.is_number else len(self.names)

    def encode(self, text: Any) -> np.ndarray:
        """PRIVATE. Compute the code of each cell of a column of texts, int64 [N]."""
        if not self.is_number:
            code_by_key = {make_key(value): code for code, value in enumerate(self.names) if code}
            return map_distinct(text, lambda value: self._encode_category(value, code_by_key), np.int64)
        number_N = map_distinct(text, _parse_date, np.float64) if self.kind == "date" else parse_numbers(text)
        code_N = np.searchsorted(np.array(self.edges[1:-1]), number_N, side="right") + 1
        return np.where(np.isfinite(number_N), code_N, 0).astype(np.int64)

    def decode(self, code_N: np.ndarray, random: np.random.Generator) -> list[Any]:
        """Turn codes into cells. A number is drawn uniformly from its bin, and a missing cell is None."""
        if not self.is_number:
            cells: list[Any] = [None, *self.names[1:]]
            return [cells[code] for code in code_N.tolist()]
        edge_E, bin_N = np.array(self.edges), np.maximum(code_N - 1, 0)
        low_N, high_N = edge_E[bin_N], edge_E[bin_N + 1]
        if self.kind == "real":
            digits = max(0, 3 - math.floor(math.log10(edge_E[-1] - edge_E[0])))
            exact_N = np.minimum(random.uniform(low_N, high_N), np.nextafter(high_N, low_N))
            number_N = np.round(exact_N, digits)
            number_N = np.where((low_N <= number_N) & (number_N < high_N), number_N, exact_N)
        else:  # the integers of [low, high), and of the last bin [low, high]
            first_N, last_N = np.ceil(low_N), np.where(bin_N == len(edge_E) - 2, np.floor(high_N), np.ceil(high_N) - 1)
            number_N = first_N + np.floor(random.random(len(code_N)) * np.maximum(1, last_N - first_N + 1))
        return [None if code == 0 else self._format(number) for code, number in zip(code_N, number_N, strict=True)]

    @staticmethod
    def _encode_category(value: str, code_by_key: Mapping[str, int]) -> int:
        key = make_key(value)
        if OTHER not in code_by_key:  # a boolean
            return code_by_key.get(_BOOLEANS.get(key.casefold(), ""), 0)
        return code_by_key.get(key, 0 if is_missing(key) else code_by_key[OTHER])

    def _format(self, number: float) -> Any:
        if self.kind == "date":
            return datetime.date.fromordinal(int(number) + _EPOCH).isoformat()
        return int(number) if self.kind == "integer" and float(number).is_integer() else float(number)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and YAML, which ``TableDomain.from_dict`` reads."""
        edges = [self._format(edge) for edge in self.edges]
        facts = {"values": list(self.values)} if self.values else {"edges": edges} if edges else {}
        return {"type": self.kind, **facts}


@dataclass(frozen=True, kw_only=True)
class TableDomain:
    """Releasable. The columns of a table with their codes.

    Attributes:
        target: Name of the column whose relations with pairs of other columns are kept. None if there is none.
        source: Whether the domain was "declared" or "read off public rows".
    """

    columns: tuple[DomainColumn, ...]
    target: str | None = None
    source: str = field(default="declared", compare=False)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(names) < 2 or len(set(names)) < len(names):
            raise checks.error("columns", names, "must be two or more columns with different names")
        if self.target is not None:
            checks.one_of("target", self.target, names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes of each column."""
        return tuple(column.size for column in self.columns)

    @property
    def target_index(self) -> int | None:
        """Position of the target among the columns. None if there is no target."""
        return None if self.target is None else [column.name for column in self.columns].index(self.target)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> TableDomain:
        """Read a declared schema.

        The key ``columns`` maps the name of each column to its ``type`` and, for a category, its ``values``; for a
        number or a date ``low``, ``high`` and ``bins``, or the ``edges`` of the bins. ``target`` names the target.

        Raises:
            ValueError: A key is missing, unknown or of a wrong type.
        """
        facts = checks.mapping("schema", facts)
        for key in facts.keys() - {"columns", "target", "source"}:
            raise checks.error("schema", key, "is no key of a schema", "The keys are columns and target.")
        columns = checks.mapping("schema.columns", facts.get("columns"))
        target, source = facts.get("target"), facts.get("source", "declared")
        return cls(columns=tuple(_parse_column(n, c) for n, c in columns.items()), target=target, source=source)

    @classmethod
    def from_public(cls, public: Any, *, target: str | None = None) -> TableDomain:
        """Read a domain off PUBLIC rows: types, categories, and quantiles as the limits of ``NUM_BINS`` bins.

        Raises:
            ValueError: A column has no values, or more than ``MAX_CATEGORIES`` categories.
        """
        table = to_text_columns(public)
        columns = tuple(_infer_column(name, text) for name, text in table.items())
        return cls(columns=columns, target=target, source="read off public rows")

    def encode(self, table: Any) -> np.ndarray:
        """PRIVATE. Compute the codes of all rows, int64 [N, J]. Columns that the domain does not have are ignored."""
        text_by_column = to_text_columns(table, [column.name for column in self.columns], array=False)
        return np.stack([column.encode(text_by_column[column.name]) for column in self.columns], 1)

    def decode(self, codes_NJ: np.ndarray, random: np.random.Generator) -> dict[str, list[Any]]:
        """Turn rows of codes into a table, {column: cells}."""
        pairs = zip(self.columns, codes_NJ.T, strict=True)
        return {column.name: column.decode(code_N, random) for column, code_N in pairs}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and YAML, which ``from_dict`` reads."""
        columns = {column.name: column.to_dict() for column in self.columns}
        return {"columns": columns, **({} if self.target is None else {"target": self.target}), "source": self.source}


def _parse_column(name: str, facts: Any) -> DomainColumn:
    key = f"schema.columns.{name}"
    facts = dict(checks.mapping(key, facts))
    kind = checks.one_of(f"{key}.type", facts.pop("type", None), KINDS)
    is_number = kind in ("integer", "real", "date")
    allowed = {"category": {"values"}, "boolean": set()}.get(kind, {"low", "high", "bins", "edges"})
    for extra in facts.keys() - allowed:
        problem = f"has no meaning for type={kind}"
        raise checks.error(
            f"{key}.{extra}", facts[extra], problem, f"Use {', '.join(sorted(allowed)) or 'type alone'}."
        )
    if not is_number:
        given = checks.collection(f"{key}.values", facts.get("values", ()))
        if any(isinstance(value, bool) for value in given):  # YAML reads the words yes, no, on and off as these
            problem, fix = "must be texts or numbers", 'Write words such as "yes" and "no" in quotation marks.'
            raise checks.error(f"{key}.values", list(given), problem, fix)
        values = tuple(value for value in map(normalize_class_name, given) if value != OTHER)
        return DomainColumn(name=name, kind=kind, values=values)
    if "edges" in facts:
        edges = [_parse_limit(f"{key}.edges", edge, kind) for edge in checks.collection(f"{key}.edges", facts["edges"])]
        return DomainColumn(name=name, kind=kind, edges=tuple(edges))
    low, high = (_parse_limit(f"{key}.{end}", facts.get(end), kind) for end in ("low", "high"))
    bins = checks.integer(f"{key}.bins", facts.get("bins", NUM_BINS), low=1)
    if not low < high:
        raise checks.error(f"{key}.high", facts.get("high"), f"must be larger than low={facts.get('low')}")
    edges = np.linspace(low, high, bins + 1).tolist()
    if kind != "real":  # whole numbers, so that every bin holds one
        edges = sorted({*(math.ceil(edge) for edge in edges[:-1]), math.ceil(high)})
    return DomainColumn(name=name, kind=kind, edges=tuple(map(float, edges)))


def _parse_limit(key: str, value: Any, kind: str) -> float:
    if kind != "date":
        return checks.number(key, value)
    number = _parse_date(str(value))
    if math.isnan(number):
        raise checks.error(key, value, "must be a date such as 2024-12-31")
    return number


def _parse_date(text: str) -> float:
    """Parse a date in ISO format as days since 1970-01-01; NaN if it is none."""
    try:
        return float(datetime.date.fromisoformat(text[:10]).toordinal() - _EPOCH)
    except ValueError:
        return math.nan


def _infer_column(name: str, text: Any) -> DomainColumn:
    """Infer the type and the codes of a column of PUBLIC texts."""
    present = [value for value in factorize(text)[0] if not is_missing(value)]
    if not present:
        raise checks.error(f"public.{name}", "", "has no values", "Declare the column in a schema, or leave it out.")
    numbers = parse_numbers(present)
    if np.isnan(numbers).all() and np.isfinite(list(map(_parse_date, present))).all():
        day_P = map_distinct(text, _parse_date, np.float64)
        return DomainColumn(name=name, kind="date", edges=_make_quantiles(day_P, is_whole=True))
    if np.isfinite(numbers).all():
        is_whole = bool((numbers % 1 == 0).all())
        if len(set(numbers)) > (NUM_BINS if is_whole else 1):
            edges = _make_quantiles(parse_numbers(text), is_whole=is_whole)
            return DomainColumn(name=name, kind="integer" if is_whole else "real", edges=edges)
    values = sorted(set(map(make_key, present)) - {OTHER})
    if len(values) > MAX_CATEGORIES:
        problem = f"has {len(values)} different values, more than {MAX_CATEGORIES}"
        raise checks.error(f"public.{name}", values[0], problem, "Declare the column in a schema, or leave it out.")
    return DomainColumn(name=name, kind="category", values=tuple(values))


def _make_quantiles(number_P: np.ndarray, *, is_whole: bool) -> tuple[float, ...]:
    """Make increasing limits of bins with about equally many PUBLIC numbers. The last bin includes its upper limit."""
    finite_P = number_P[np.isfinite(number_P)]
    edges = np.quantile(finite_P, np.linspace(0, 1, NUM_BINS + 1))
    edges = np.unique(np.floor(edges) if is_whole else edges)
    return tuple(edges.tolist()) if len(edges) > 1 else (float(edges[0]), float(edges[0]) + 1)
