"""``owner.yaml``: what only the owner of the data can say of them, for the privacy statement.

It lies beside the ledger, one entry an account. What it says is published as it stands, in every release of the account
from then on; what it leaves out is shown as missing.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pate_torch.core import checks
from pate_torch.release.report import OwnerFacts

OWNER_FILE = "owner.yaml"


def read(root: Path, account: str) -> OwnerFacts:
    """What the file under ``root`` says of an account; nothing where there is no file, or no entry.

    Raises:
        ValueError: It cannot be read, or has a key or a value that means nothing here.
    """
    file = root / OWNER_FILE
    if not file.exists():
        return OwnerFacts()
    try:
        accounts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise checks.error("owner", str(file), f"cannot be read ({' '.join(str(error).split())})") from error
    entry = checks.mapping(str(file), {} if accounts is None else accounts).get(account, {})
    try:
        content = {
            key: _to_plain_text(value)
            for key, value in checks.mapping(account, entry, dataclasses.fields(OwnerFacts)).items()
        }
        return OwnerFacts(
            **{**content, "pool": checks.mapping("pool", content.get("pool", {})), "audit": _load_audit(root, content)}
        )
    except ValueError as error:
        raise ValueError(f"{file}: {checks.prefix_error_key(account, error)}") from error


def _to_plain_text(value: Any) -> Any:
    """YAML reads 2026-11-23 as a date and 2026 as a number: both are meant as they are written."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain_text(item) for key, item in value.items()}
    return str(value) if isinstance(value, datetime.date | int | float) and not isinstance(value, bool) else value


def _load_audit(root: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The result of an audit, from the file that is named; nothing where none is."""
    if content.get("audit") is None:
        return {}
    file = root / checks.nonempty_string("audit", content["audit"])
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        return {key: _freeze(result[key]) for key in AUDIT_KEYS}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fix = "Write it with: pate audit mechanism=<name> --output audit.json"
        raise checks.error(
            "audit", str(file), f"is no result of an audit ({type(error).__name__}: {error})", fix
        ) from error


AUDIT_KEYS = (
    "mechanism",
    "audited",
    "version",
    "claimed",
    "proven",
    "delta",
    "confidence",
    "runs",
    "queries",
    "faults",
    "sound",
)
"""What the statement says of an audit."""


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
