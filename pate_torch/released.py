"""A release on disk: ``release.json`` (what was asked, of whom, at what price) beside ``labels.csv`` (the answers).

Everything here is releasable, and enough to train another student later at no cost. Both files are written before
the ledger commits, each by an atomic rename: a release that is readable is charged.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pate_torch import checks, runs
from pate_torch.accounting import events
from pate_torch.types import NO_ANSWER, DataSpec, PublicPool, Release

SCHEMA_VERSION = 1


def digest(pool: PublicPool) -> str:
    """SHA-256 of the public points: a release's indices mean nothing for another pool."""
    content = pool.x.contiguous()
    header = json.dumps([str(content.dtype), list(content.shape)]).encode()
    return hashlib.sha256(header + content.cpu().numpy().tobytes()).hexdigest()


def key(facts: Mapping[str, Any]) -> str:
    """What makes two releases the same: questions, mechanism and teachers. Public facts only."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def write(folder: Path, release: Release, facts: Mapping[str, Any], spec: DataSpec) -> dict[str, Any]:
    """Write the release into ``folder``; returns the record as ``read`` will."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema_version": SCHEMA_VERSION,
        "release_id": release.id,
        **facts,
        "planned": json.loads(events.to_json(release.planned)),
        "incurred": json.loads(events.to_json(release.events)),
        "queries_asked": len(release.query_Q),
        "queries_answered": int(release.answered_Q.sum()),
    }
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["query", "label", "class"])
    for query, label in zip(release.query_Q.tolist(), release.label_Q.tolist(), strict=True):
        writer.writerow([query, label, "" if label == NO_ANSWER else spec.class_names[label]])
    replace(folder / "labels.csv", table.getvalue())
    replace(folder / "release.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def read(root: Path, release_id: object, pool: PublicPool, spec: DataSpec) -> tuple[Release, dict[str, Any]]:
    """The release called ``release_id``, for this pool. Raises ValueError when it is missing, damaged or foreign."""
    folder, record = runs.find_release(root, release_id)
    return _read(folder, record, pool, spec), record


def find_same(
    root: Path, same: str, pool: PublicPool, spec: DataSpec
) -> tuple[Release, dict[str, Any]] | None:
    """A release with the same key, if there is one: the same questions need not be paid for twice."""
    for folder, record in runs.releases(root):
        if record.get("key") == same and record.get("private") is True:
            return _read(folder, record, pool, spec), record
    return None


def _read(folder: Path, record: dict[str, Any], pool: PublicPool, spec: DataSpec) -> Release:
    where = folder / "labels.csv"
    if record.get("schema_version") != SCHEMA_VERSION:
        raise checks.fail(
            "labels", record["release_id"], f"has schema {record.get('schema_version')}, not {SCHEMA_VERSION}"
        )
    if record.get("dataset") != spec.name or record.get("pool_sha256") != digest(pool):
        raise checks.fail(
            "labels",
            record["release_id"],
            f"was answered on other public points (data set {record.get('dataset')!r})",
            "Use the same dataset, seed and sizes as the run that released it.",
        )
    try:
        rows = list(csv.DictReader(io.StringIO(where.read_text(encoding="utf-8"))))
        query_Q = torch.tensor([int(row["query"]) for row in rows], dtype=torch.int64)
        label_Q = torch.tensor([int(row["label"]) for row in rows], dtype=torch.int64)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise checks.fail("labels", record["release_id"], f"{where} is missing or damaged ({error})") from error
    _check_rows(query_Q, label_Q, len(pool), spec.num_classes, record)
    incurred = events.from_json(json.dumps(record["incurred"]))
    planned = events.from_json(json.dumps(record["planned"]))
    return Release(record["release_id"], query_Q, label_Q, incurred, planned)


def _check_rows(query_Q: Tensor, label_Q: Tensor, pool: int, num_classes: int, record: dict[str, Any]) -> None:
    inside = ((query_Q >= 0) & (query_Q < pool)).all() and ((label_Q >= NO_ANSWER) & (label_Q < num_classes)).all()
    if not bool(inside) or len(torch.unique(query_Q)) < len(query_Q) or len(query_Q) != record["queries_asked"]:
        raise checks.fail("labels", record["release_id"], "labels.csv does not fit its release.json: it was edited")


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
