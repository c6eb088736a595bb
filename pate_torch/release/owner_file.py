"""The statements that only the owner of the data can make, read from ``owner.yaml`` beside the ledger.

The file has one entry for each account. Every release of the account publishes this entry unchanged, and lists the keys
that the entry does not have as missing.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from pate_torch.core import checks

OWNER_FILE = "owner.yaml"

AUDIT_KEYS = (
    *("mechanism", "audited", "version", "claimed", "proven", "delta", "confidence", "runs", "queries", "faults"),
    "sound",
)
"""The keys of an audit's result that the statement shows."""

TUNING_METHODS = {
    "public": "on public data, or a public stand-in",
    "charged": "by private records, and charged to the account",
    "none": "fixed before anybody saw a result",
}
"""Way in which the parameters of a release were chosen -> description."""


class PicklableFacts:
    """Base class of dataclasses that make their mappings read-only; pickle stores dictionaries instead."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, MappingProxyType(dict(value)))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return functools.partial(type(self), **plain), ()


@dataclass(frozen=True, kw_only=True)
class OwnerFacts(PicklableFacts):
    """The statements of the owner about the data. A field is None if the owner does not state it.

    Attributes:
        contact: Person or office that answers questions.
        collection: How, where and when the records were collected.
        consent: Legal basis on which the records are used.
        access: Who can reach the records, and how they are secured.
        retention: How long records, teachers and votes are kept.
        period: Time for which the account's cap holds.
        renewal: Treatment of the cap after the period.
        tuning: Way in which the parameters were chosen, a key of ``TUNING_METHODS``.
        pool: Name, license (key ``licence``) and source of the public points.
        audit: Result of an audit of the mechanism, as ``pate audit --output`` writes it.
    """

    contact: str | None = None
    collection: str | None = None
    consent: str | None = None
    access: str | None = None
    retention: str | None = None
    period: str | None = None
    renewal: str | None = None
    tuning: str | None = None
    pool: Mapping[str, str] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in fields(self):
            if not isinstance(value := getattr(self, item.name), Mapping):
                checks.optional(checks.nonempty_string, item.name, value)
        checks.optional(checks.one_of, "tuning", self.tuning, TUNING_METHODS)
        for key, value in self.pool.items():
            checks.nonempty_string(f"pool.{checks.one_of('pool key', key, ('name', 'licence', 'source'))}", value)


def read(root: Path, account: str) -> OwnerFacts:
    """Read the entry of an account in the file under ``root``; empty facts if there is no file or no entry.

    Raises:
        ValueError: The file cannot be read, or has an unknown key or an invalid value.
    """
    file = root / OWNER_FILE
    if not file.exists():
        return OwnerFacts()
    import yaml  # few runs have this file

    try:
        accounts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise checks.error("owner", str(file), f"cannot be read ({' '.join(str(error).split())})") from error
    entry = checks.mapping(str(file), {} if accounts is None else accounts).get(account, {})
    try:
        content = {k: _to_plain_text(v) for k, v in checks.mapping(account, entry, fields(OwnerFacts)).items()}
        pool = checks.mapping("pool", content.get("pool", {}))
        return OwnerFacts(**{**content, "pool": pool, "audit": _load_audit(root, content.get("audit"))})
    except ValueError as error:
        raise ValueError(f"{file}: {checks.prefix_error_key(account, error)}") from error


def _to_plain_text(value: Any) -> Any:
    """Convert dates and numbers that YAML has parsed, such as 2026-11-23 or 2026, back to text."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain_text(item) for key, item in value.items()}
    return str(value) if isinstance(value, datetime.date | int | float) and not isinstance(value, bool) else value


def _load_audit(root: Path, name: Any) -> dict[str, Any]:
    if name is None:
        return {}
    file = root / checks.nonempty_string("audit", name)
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        return {key: tuple(v) if isinstance(v := result[key], list) else v for key in AUDIT_KEYS}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"is no result of an audit ({type(error).__name__}: {error})"
        fix = "Write it with: pate audit mechanism=<name> --output audit.json"
        raise checks.error("audit", str(file), problem, fix) from error
