"""A release on disk: ``release.json`` (what was asked, of whom, at what price) beside ``labels.csv`` (the answers).

Everything here is releasable, and enough to train another student later at no cost. Both files are written before
the ledger commits, each by an atomic rename: a release that is readable is charged. What is read back is held against
the ledger, which says what was charged for it, and what it was: an edited record would report a smaller epsilon, and
edited answers none that was ever given.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pate_torch.accounting import events
from pate_torch.core import checks, run_folders
from pate_torch.core.files import compute_file_digest, compute_tensor_digest, escape_spreadsheet_cell, write_atomically
from pate_torch.ledger import Ledger
from pate_torch.methods.description import MethodDescription
from pate_torch.protocols import Student
from pate_torch.students import store as student_store
from pate_torch.types import NO_ANSWER, DataSpec, LinearModel, NoisyCounts, PointNames, PublicPool, Release

SCHEMA_VERSION = 1
_GUIDE = "guide.safetensors"
_ANSWERS = {
    "labels_sha256": "labels.csv",
    "cells_sha256": "cells.csv",
    "scores_sha256": "scores.safetensors",
    "guide_sha256": _GUIDE,
}
"""The files of answers, by the name under which record and ledger hold their SHA-256.

They are nothing without their release.json, which is written last.
"""


def refuse_used_folder(run: Path, reused: str | None = None) -> None:
    """Refuse a run's folder that holds another release: the run's claim would not cover what lies there.

    Args:
        run: The folder.
        reused: The release whose labels are used again, which may lie there from a run that was interrupted.

    Raises:
        ValueError: It does.
    """
    folder, mine = run / "release", None
    signs = ["summary.json", "release.json", "sanitised.json"]
    if reused is None:  # else a student of labels that were released before: it was free
        signs.append("student.safetensors")
    if not any((folder / name).exists() for name in signs):
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        mine = json.loads((folder / "release.json").read_text())["release_id"]
    finished = (folder / "summary.json").exists() or (folder / "sanitised.json").exists()
    if finished or mine is None or mine != reused:
        fix = "Give this run a folder of its own: another PATE_RUN_ID or paths.run, or none."
        raise checks.error("paths.run", str(run), "holds a release already, which would lie under another's claim", fix)


def discard_torn(run: Path) -> None:
    """Remove the answers of a run that was killed before it wrote down what they are: no claim ever covers them."""
    folder = run / "release"
    if not (folder / "release.json").exists():
        for name in _ANSWERS.values():
            (folder / name).unlink(missing_ok=True)


def digests(record: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each file of answers, by the name under which record and ledger hold it."""
    return {name: record[name] for name in _ANSWERS if name in record}


def answer_files(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The files of answers of this release."""
    return tuple(_ANSWERS[name] for name in digests(record))


def answered_by(record: Mapping[str, Any]) -> MethodDescription:
    """Who answered, in the words that the record holds.

    Raises:
        ValueError: It was edited.
    """
    try:
        return MethodDescription.from_dict(record["answered_by"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _bad(dict(record), f"was edited: its answered_by cannot be read ({error})") from error


def write(
    folder: Path,
    release: Release,
    facts: Mapping[str, Any],
    spec: DataSpec,
    guide: Student | None = None,
    names: PointNames | None = None,
) -> dict[str, Any]:
    """Write the release, and the student that guided it, into ``folder``; returns the record as ``read`` will.

    Args:
        folder: Where it goes.
        release: What was asked and answered.
        facts: What its record says beside.
        spec: Public facts about the data.
        guide: The student that guided it.
        names: The public points' own names, in the last column; None: positions are all that is told.
    """
    run_folders.make_folders(folder)
    record = {
        "schema_version": SCHEMA_VERSION,
        "release_id": release.id,
        **facts,
        **({} if names is None else {"points": names.describe()}),
        "planned": json.loads(events.to_json(release.reserved_events)),
        "incurred": json.loads(events.to_json(release.events)),
        "queries_asked": len(release.query_Q),
        "queries_answered": int(release.answered_Q.sum()),
        "queries_by_round": list(release.queries_per_round or (len(release.query_Q),)),
    }
    answers = {"labels_sha256": _table(release, spec, names).encode()}
    if release.cell_RP is not None:
        answers["cells_sha256"] = _cells(release).encode()
    if release.score_RPC is not None:
        answers["scores_sha256"] = safetensors.torch.save(_scores(release.score_RPC, release.model))
    for key, content in answers.items():
        record[key] = hashlib.sha256(content).hexdigest()
        write_atomically(folder / _ANSWERS[key], content)
    if guide is not None:
        student_store.save(guide, folder / _GUIDE)
        record["guide_sha256"] = compute_file_digest(folder / _GUIDE)
    write_atomically(folder / "release.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def _scores(score_RPC: Tensor, model: LinearModel | None) -> dict[str, Tensor]:
    """What scores.safetensors holds: the logits of the public points, and the model behind the last round's."""
    held = {"score_RPC": score_RPC.contiguous()}
    if model is not None:
        held |= {"weight_DC": model.weight_DC.contiguous(), "bias_C": model.bias_C.contiguous()}
        held |= {"neighbors": torch.tensor([model.neighbors]), "radius": torch.tensor([model.radius])}
    return held


def _model(held: Mapping[str, Tensor]) -> LinearModel | None:
    """Inverse of ``_scores``; None: the scores came without a model for other points."""
    if "weight_DC" not in held:
        return None
    return LinearModel(held["weight_DC"], held["bias_C"], int(held["neighbors"]), float(held["radius"]))


def _table(release: Release, spec: DataSpec, names: PointNames | None) -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    beside: list[list[Any]] = [[] for _ in release.query_Q]
    columns: list[str] = []
    if release.noisy_counts is not None:
        columns, beside = [f"votes_{c}" for c in range(spec.num_classes)], release.noisy_counts.counts_QC.tolist()
    elif release.score_QC is not None:
        columns = [f"score_{c}" for c in range(spec.num_classes)]
        beside = [["" if math.isnan(score) else score for score in row] for row in release.score_QC.tolist()]
    if names is not None:
        columns = [*columns, names.kind]
        shown = [escape_spreadsheet_cell(names.names[query]) for query in release.query_Q.tolist()]
        beside = [[*more, name] for more, name in zip(beside, shown, strict=True)]
    writer.writerow(["query", "label", "class", *columns])
    for query, label, more in zip(release.query_Q.tolist(), release.label_Q.tolist(), beside, strict=True):
        writer.writerow(
            [query, label, "" if label == NO_ANSWER else escape_spreadsheet_cell(spec.class_names[label]), *more]
        )
    return table.getvalue()


def _cells(release: Release) -> str:
    """For each public point the question in whose cell it lies, round by round, as pool indices."""
    assert release.cell_RP is not None
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["point", *(f"round_{turn}" for turn in range(len(release.cell_RP)))])
    writer.writerows([point, *asked] for point, asked in enumerate(release.query_Q[release.cell_RP].T.tolist()))
    return table.getvalue()


def _cell_RP(text: str, query_Q: Tensor) -> Tensor:
    """Inverse of ``_cells``. Raises ValueError or KeyError for points out of order, or what was not asked."""
    rows = [list(map(int, row)) for row in list(csv.reader(io.StringIO(text)))[1:]]
    if [row[0] for row in rows] != list(range(len(rows))):
        raise ValueError("cells.csv: points must be in order")
    place = {query: row for row, query in enumerate(query_Q.tolist())}
    return torch.tensor([[place[query] for query in row[1:]] for row in rows], dtype=torch.int64).T


def _columns(
    rows: list[dict[str, str]], kind: str, num_classes: int, value: Callable[[str], float]
) -> list[list[float]] | None:
    """The numbers of each class beside the answers, of columns such as ``votes_0``; None: there are none."""
    if not rows or f"{kind}_0" not in rows[0]:
        return None
    return [[value(row[f"{kind}_{c}"]) for c in range(num_classes)] for row in rows]


def read(
    root: Path, release_id: object, pool: PublicPool, spec: DataSpec, ledger: Ledger
) -> tuple[Release, dict[str, Any], Student | None]:
    """Read the release called ``release_id``, for this pool.

    Returns:
        The release, its record, and the student that guided it, if it was kept.

    Raises:
        ValueError: It is missing, damaged, foreign, or not what the ledger was charged for.
    """
    return read_folder(run_folders.find_release(root, release_id)[0], pool, spec, ledger)


def read_folder(
    folder: Path, pool: PublicPool, spec: DataSpec, ledger: Ledger
) -> tuple[Release, dict[str, Any], Student | None]:
    """Read the release in this folder, as ``read`` does."""
    try:
        record = json.loads((folder / "release.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'release.json'}: missing or damaged ({error}).") from error
    return _read(folder, record, pool, spec, ledger), record, _guide(folder, record)


def _guide(folder: Path, record: dict[str, Any]) -> Student | None:
    if "guide_sha256" not in record:
        return None
    path = folder / _GUIDE
    if not path.exists() or compute_file_digest(path) != record["guide_sha256"]:
        raise _bad(record, f"{_GUIDE} is not the one that was written", f"Restore the files of {folder}.")
    return student_store.load(path)


def _read(folder: Path, record: dict[str, Any], pool: PublicPool, spec: DataSpec, ledger: Ledger) -> Release:
    if record.get("schema_version") != SCHEMA_VERSION:
        raise _bad(record, f"has schema {record.get('schema_version')}, not {SCHEMA_VERSION}")
    if record.get("dataset") != spec.name or record.get("pool_sha256") != compute_tensor_digest(pool.x):
        raise _bad(
            record,
            f"was answered on other public points (data set {record.get('dataset')!r})",
            "Use the same dataset, seed and sizes as the run that released it.",
        )
    restore = f"Restore the files of {folder}, or move that folder away."
    try:
        text = (folder / "labels.csv").read_text(encoding="utf-8")
        rows = list(csv.DictReader(io.StringIO(text)))
        query_Q = torch.tensor([int(row["query"]) for row in rows], dtype=torch.int64)
        label_Q = torch.tensor([int(row["label"]) for row in rows], dtype=torch.int64)
        votes = _columns(rows, "votes", spec.num_classes, int)
        sigma = 0.0 if votes is None else checks.positive("sigma", record["parameters"]["sigma"])
        beside = _columns(rows, "score", spec.num_classes, lambda text: float(text or "nan"))
        cells = scores = None
        held: dict[str, Tensor] = {}
        if "cells_sha256" in record:
            cells = (folder / "cells.csv").read_text(encoding="utf-8")
        if "scores_sha256" in record:
            scores = (folder / "scores.safetensors").read_bytes()
            held = safetensors.torch.load(scores)
        release = Release(
            run_folders.check_id("labels", record["release_id"]),
            query_Q,
            label_Q,
            events.from_json(json.dumps(record["incurred"])),
            events.from_json(json.dumps(record["planned"])),
            None if votes is None else NoisyCounts(torch.tensor(votes, dtype=torch.int64), sigma),
            None if beside is None else torch.tensor(beside, dtype=torch.float64),
            queries_per_round=tuple(map(int, record["queries_by_round"])),
            cell_RP=None if cells is None else _cell_RP(cells, query_Q),
            score_RPC=None if scores is None else held["score_RPC"],
            model=_model(held),
        )
        whole = hashlib.sha256(text.encode()).hexdigest() == record["labels_sha256"]
        if cells is not None and release.cell_RP is not None:
            whole &= hashlib.sha256(cells.encode()).hexdigest() == record["cells_sha256"]
            whole &= release.cell_RP.shape == (len(release.queries_per_round), len(pool))
        if scores is not None and release.score_RPC is not None:
            whole &= hashlib.sha256(scores).hexdigest() == record["scores_sha256"]
            whole &= release.score_RPC.shape == (len(release.queries_per_round), len(pool), spec.num_classes)
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise _bad(record, f"cannot be read ({type(error).__name__}: {error})", restore) from error
    adds_up = sum(release.queries_per_round) == len(rows) and min(release.queries_per_round, default=0) >= 0
    if not whole or not adds_up or not _fits(query_Q, label_Q, len(pool), spec.num_classes, record):
        raise _bad(record, "labels.csv does not fit its release.json: it was edited", restore)
    _check_charged(record, release, ledger, restore)
    return release


def _fits(query_Q: Tensor, label_Q: Tensor, pool: int, num_classes: int, record: dict[str, Any]) -> bool:
    inside = ((query_Q >= 0) & (query_Q < pool)).all() and ((label_Q >= NO_ANSWER) & (label_Q < num_classes)).all()
    return bool(inside) and len(torch.unique(query_Q)) == len(query_Q) == record.get("queries_asked")


def _check_charged(record: dict[str, Any], release: Release, ledger: Ledger, restore: str) -> None:
    """Hold a record against the ledger's own: the price, the terms and whether the noise was secret."""
    account = next((one for one in ledger.list_accounts() if one.name == record["dataset"]), None)
    made = (
        []
        if account is None
        else [entry for entry in ledger.read_entries(account.name) if entry.facts.get("reservation") == release.id]
    )
    charged = {entry.kind: entry.facts for entry in made}
    if account is None or "reserve" not in charged:
        raise _bad(
            record,
            f"was never charged to the ledger here ({ledger.path})",
            "Bring back the ledger that lay beside it: it remembers what was released.",
        )
    said = {
        "planned": (json.loads(events.to_json(release.reserved_events)), charged["reserve"]["events"]),
        "private": (record.get("private"), not charged["reserve"]["insecure"]),
        "mechanism": (record.get("mechanism"), charged["reserve"]["mechanism"]),
        "delta": (record.get("delta"), account.delta),
        "adjacency": (record.get("adjacency"), account.adjacency),
        "unit": (record.get("unit"), account.unit),
    }
    if "commit" in charged:  # a run killed before it committed stays charged at its worst
        said["incurred"] = (json.loads(events.to_json(release.events)), charged["commit"]["events"])
        said["content"] = (digests(record), digests(charged["commit"]))
    for name, (here, there) in said.items():
        if here != there:
            raise _bad(record, f"was edited: its {name} is not what the ledger was charged for", restore)
    kinds = {"parameters": dict, "sensitivity": dict, "noise": str, "teachers_id": str, "num_teachers": int}
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise _bad(record, f"was edited: its {name} is missing", restore)
    answered_by(record)


def _bad(record: dict[str, Any], what: str, fix: str = "") -> ValueError:
    return checks.error("labels", record["release_id"], what, fix)
