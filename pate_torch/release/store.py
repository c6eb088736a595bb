"""A release on disk: ``labels.csv`` (the answers) and ``release.json`` (its record: questions, method, price).

Everything here may be published, and is enough to train another student later at no cost. The files are written before
the ledger commits, each by an atomic rename: a release that can be read is charged. A release that is read back is
compared with the ledger, which holds what was charged for it and the hashes of its files: an edited record would report
a smaller epsilon, and edited answers were never released.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pate_torch.accounting import events
from pate_torch.core import checks, run_folders
from pate_torch.core.files import compute_file_digest, compute_tensor_digest, escape_spreadsheet_cell, write_atomically
from pate_torch.methods.base import FirstAnswers, ModelRelease
from pate_torch.methods.description import MethodDescription
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import NO_ANSWER, DataSpec, LinearModel, NoisyCounts, PointNames, PublicPool, Release
from pate_torch.students import store as student_store
from pate_torch.students.base import Student

SCHEMA_VERSION = 1
_GUIDE_FILE = "guide.safetensors"
FIRST_ANSWERS_FILE = "first_answers.json"
_ANSWER_FILES = {
    "labels_sha256": "labels.csv",
    "cells_sha256": "cells.csv",
    "scores_sha256": "scores.safetensors",
    "guide_sha256": _GUIDE_FILE,
    "first_answers_sha256": FIRST_ANSWERS_FILE,
}
"""The key of the SHA-256 in record and ledger -> the file of answers. Their release.json is written last."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WrittenRelease:
    """Releasable. A release in its folder, made in this session or found from an earlier one.

    Attributes:
        release: Questions and their answers, or a model.
        record: Content of ``release.json``.
        guide: Student of all rounds but the last, if the student that is published goes on from it.
    """

    release: Release | ModelRelease
    record: dict[str, Any]
    guide: Student | None = None

    @property
    def labels(self) -> Release:
        """The questions and their answers, of a release that is no model."""
        assert isinstance(self.release, Release)
        return self.release


def check_unused_folder(run: Path, reused_id: str | None = None) -> None:
    """Raise ValueError for a run's folder with another release: two releases make the claim of either incomplete.

    Args:
        run: The folder.
        reused_id: The release whose labels are used again, which may lie there from a run that was interrupted.
    """
    folder, folder_release_id = run / "release", None
    marker_files = ["summary.json", "release.json", "sanitised.json"]
    if reused_id is None:  # a student of labels that were released before was free
        marker_files.append("student.safetensors")
    if not any((folder / name).exists() for name in marker_files):
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        folder_release_id = json.loads((folder / "release.json").read_text())["release_id"]
    is_finished = (folder / "summary.json").exists() or (folder / "sanitised.json").exists()
    if is_finished or folder_release_id is None or folder_release_id != reused_id:
        fix = "Give this run a folder of its own: another PATE_RUN_ID or paths.run, or none."
        raise checks.error("paths.run", str(run), "holds a release already, which would lie under another's claim", fix)


def discard_incomplete(run: Path) -> None:
    """Remove the answers of a run that was killed before it wrote their release.json: no claim covers them."""
    folder = run / "release"
    if not (folder / "release.json").exists():
        for name in _ANSWER_FILES.values():
            (folder / name).unlink(missing_ok=True)


def select_digests(record: Mapping[str, Any]) -> dict[str, str]:
    """Select the SHA-256 of each file of answers, by its key in record and ledger."""
    return {name: record[name] for name in _ANSWER_FILES if name in record}


def list_answer_files(record: Mapping[str, Any]) -> tuple[str, ...]:
    """List the files of answers of this release."""
    return tuple(_ANSWER_FILES[name] for name in select_digests(record))


def load_method_description(record: Mapping[str, Any]) -> MethodDescription:
    """Load the description of the method from a record. Raises ValueError for a record that was edited."""
    try:
        return MethodDescription.from_dict(record["answered_by"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt_release_error(dict(record), f"was edited: its answered_by cannot be read ({error})") from error


def write(
    folder: Path,
    release: Release,
    facts: Mapping[str, Any],
    spec: DataSpec,
    guide: Student | None = None,
    names: PointNames | None = None,
) -> dict[str, Any]:
    """Write the release, and the student that guided it, into ``folder``; return the record as ``read`` does.

    Args:
        folder: The release folder.
        release: The questions and their answers.
        facts: Further content of the record.
        spec: Public facts about the data.
        guide: The student that guided the questions; None if there was none.
        names: Names of the public points for the last column; None if points are identified by their position alone.
    """
    run_folders.create_protected_folder(folder)
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
    answers = {"labels_sha256": _format_table(release, spec, names).encode()}
    if release.cell_RP is not None:
        answers["cells_sha256"] = _format_cells(release).encode()
    if release.score_RPC is not None:
        answers["scores_sha256"] = safetensors.torch.save(_pack_scores(release.score_RPC, release.model))
    for key, content in answers.items():
        record[key] = hashlib.sha256(content).hexdigest()
        write_atomically(folder / _ANSWER_FILES[key], content)
    if guide is not None:
        student_store.save(guide, folder / _GUIDE_FILE)
        record["guide_sha256"] = compute_file_digest(folder / _GUIDE_FILE)
    write_atomically(folder / "release.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def write_first_answers(folder: Path, first_answers: FirstAnswers) -> dict[str, str]:
    """Write the noisy answers of a first stage into ``folder``; return their SHA-256 for record and ledger."""
    run_folders.create_protected_folder(folder)
    content = json.dumps({"counts": first_answers.counts_C.tolist(), "sigma": first_answers.sigma}, allow_nan=False)
    write_atomically(folder / FIRST_ANSWERS_FILE, content + "\n")
    return {"first_answers_sha256": compute_file_digest(folder / FIRST_ANSWERS_FILE)}


def _pack_scores(score_RPC: Tensor, model: LinearModel | None) -> dict[str, Tensor]:
    """Pack the content of scores.safetensors: the logits of the public points, and the model of the last round."""
    tensors = {"score_RPC": score_RPC.contiguous()}
    if model is not None:
        tensors |= {"weight_DC": model.weight_DC.contiguous(), "bias_C": model.bias_C.contiguous()}
        tensors |= {"neighbors": torch.tensor([model.neighbors]), "radius": torch.tensor([model.radius])}
    return tensors


def _unpack_model(tensors: Mapping[str, Tensor]) -> LinearModel | None:
    """Read the model of ``_pack_scores``; None if the scores came without a model for other points."""
    if "weight_DC" not in tensors:
        return None
    return LinearModel(tensors["weight_DC"], tensors["bias_C"], int(tensors["neighbors"]), float(tensors["radius"]))


def _format_table(release: Release, spec: DataSpec, names: PointNames | None) -> str:
    columns: list[str] = []
    extra_cells_Q: list[list[Any]] = [[] for _ in release.query_Q]
    if release.noisy_counts is not None:
        columns = [f"votes_{c}" for c in range(spec.num_classes)]
        extra_cells_Q = release.noisy_counts.counts_QC.tolist()
    elif release.score_QC is not None:
        columns = [f"score_{c}" for c in range(spec.num_classes)]
        extra_cells_Q = [["" if math.isnan(score) else score for score in row] for row in release.score_QC.tolist()]
    if names is not None:
        columns = [*columns, names.kind]
        query_names = [escape_spreadsheet_cell(names.names[query]) for query in release.query_Q.tolist()]
        extra_cells_Q = [[*extra_cells, name] for extra_cells, name in zip(extra_cells_Q, query_names, strict=True)]
    class_names = {NO_ANSWER: "", **dict(enumerate(map(escape_spreadsheet_cell, spec.class_names)))}
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["query", "label", "class", *columns])
    for query, label, extra_cells in zip(
        release.query_Q.tolist(), release.label_Q.tolist(), extra_cells_Q, strict=True
    ):
        writer.writerow([query, label, class_names[label], *extra_cells])
    return table.getvalue()


def _format_cells(release: Release) -> str:
    """Format for each public point the question in whose cell it lies, round by round, as pool indices."""
    assert release.cell_RP is not None
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["point", *(f"round_{round_index}" for round_index in range(len(release.cell_RP)))])
    writer.writerows([point, *queries] for point, queries in enumerate(release.query_Q[release.cell_RP].T.tolist()))
    return table.getvalue()


def _parse_cells(text: str, query_Q: Tensor) -> Tensor:
    """Invert ``_format_cells``. Raises ValueError or KeyError for points out of order, or for unknown questions."""
    rows = [list(map(int, row)) for row in list(csv.reader(io.StringIO(text)))[1:]]
    if [row[0] for row in rows] != list(range(len(rows))):
        raise ValueError("cells.csv: points must be in order")
    row_by_query = {query: row for row, query in enumerate(query_Q.tolist())}
    return torch.tensor([[row_by_query[query] for query in row[1:]] for row in rows], dtype=torch.int64).T


def _read_columns(
    rows: list[dict[str, str]], kind: str, num_classes: int, value: Callable[[str], float]
) -> list[list[float]] | None:
    """Read the numbers of each class from columns such as ``votes_0``; None if there are none."""
    if not rows or f"{kind}_0" not in rows[0]:
        return None
    return [[value(row[f"{kind}_{c}"]) for c in range(num_classes)] for row in rows]


def find_release(root: Path, release_id: object) -> Path:
    """Find the folder of a finished release under ``root`` by its id; the newest one if students of it were added.

    Raises:
        ValueError: There is no such release.
    """
    valid_id = run_folders.check_hex_id("labels", release_id)
    runs_folder = run_folders.get_runs_folder(root)
    files = runs_folder.glob("*/*/*/release/release.json")
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # not readable: not this release
            record = json.loads(file.read_text())
            if isinstance(record, dict) and record.get("release_id") == valid_id:
                return file.parent
    fix = "Run it in the folder of the run that released it, or set PATE_HOME."
    raise checks.error("labels", release_id, f"no such release under {runs_folder.absolute()}", fix)


def read(
    root: Path, release_id: object, pool: PublicPool, spec: DataSpec, ledger: Ledger
) -> tuple[Release, dict[str, Any], Student | None]:
    """Read the release called ``release_id``, for this pool.

    Returns:
        The release, its record, and the student that guided it; None if there was none.

    Raises:
        ValueError: It is missing, damaged, of other points, or not what the ledger was charged for.
    """
    return read_folder(find_release(root, release_id), pool, spec, ledger)


def read_folder(
    folder: Path, pool: PublicPool, spec: DataSpec, ledger: Ledger
) -> tuple[Release, dict[str, Any], Student | None]:
    """Read the release in this folder, as ``read`` does."""
    try:
        record = json.loads((folder / "release.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'release.json'}: missing or damaged ({error}).") from error
    return _load_release(folder, record, pool, spec, ledger), record, _load_guide(folder, record)


def _load_guide(folder: Path, record: dict[str, Any]) -> Student | None:
    if "guide_sha256" not in record:
        return None
    path = folder / _GUIDE_FILE
    if not path.exists() or compute_file_digest(path) != record["guide_sha256"]:
        raise _corrupt_release_error(
            record, f"{_GUIDE_FILE} is not the one that was written", f"Restore the files of {folder}."
        )
    return student_store.load(path)


def _load_release(folder: Path, record: dict[str, Any], pool: PublicPool, spec: DataSpec, ledger: Ledger) -> Release:
    if record.get("schema_version") != SCHEMA_VERSION:
        raise _corrupt_release_error(record, f"has schema {record.get('schema_version')}, not {SCHEMA_VERSION}")
    if record.get("dataset") != spec.name or record.get("pool_sha256") != compute_tensor_digest(pool.x):
        raise _corrupt_release_error(
            record,
            f"was answered on other public points (data set {record.get('dataset')!r})",
            "Use the same dataset, seed and sizes as the run that released it.",
        )
    fix = f"Restore the files of {folder}, or move that folder away."
    try:
        text = (folder / "labels.csv").read_text(encoding="utf-8")
        rows = list(csv.DictReader(io.StringIO(text)))
        query_Q = torch.tensor([int(row["query"]) for row in rows], dtype=torch.int64)
        label_Q = torch.tensor([int(row["label"]) for row in rows], dtype=torch.int64)
        votes = _read_columns(rows, "votes", spec.num_classes, int)
        sigma = 0.0 if votes is None else checks.positive("sigma", record["parameters"]["sigma"])
        query_scores = _read_columns(rows, "score", spec.num_classes, lambda text: float(text or "nan"))
        cells = scores = None
        tensors: dict[str, Tensor] = {}
        if "cells_sha256" in record:
            cells = (folder / "cells.csv").read_text(encoding="utf-8")
        if "scores_sha256" in record:
            scores = (folder / "scores.safetensors").read_bytes()
            tensors = safetensors.torch.load(scores)
        release = Release(
            run_folders.check_hex_id("labels", record["release_id"]),
            query_Q,
            label_Q,
            events.from_json(json.dumps(record["incurred"])),
            events.from_json(json.dumps(record["planned"])),
            None if votes is None else NoisyCounts(torch.tensor(votes, dtype=torch.int64), sigma),
            None if query_scores is None else torch.tensor(query_scores, dtype=torch.float64),
            queries_per_round=tuple(map(int, record["queries_by_round"])),
            cell_RP=None if cells is None else _parse_cells(cells, query_Q),
            score_RPC=None if scores is None else tensors["score_RPC"],
            model=_unpack_model(tensors),
        )
        is_intact = hashlib.sha256(text.encode()).hexdigest() == record["labels_sha256"]
        if cells is not None and release.cell_RP is not None:
            is_intact &= hashlib.sha256(cells.encode()).hexdigest() == record["cells_sha256"]
            is_intact &= release.cell_RP.shape == (len(release.queries_per_round), len(pool))
        if scores is not None and release.score_RPC is not None:
            is_intact &= hashlib.sha256(scores).hexdigest() == record["scores_sha256"]
            is_intact &= release.score_RPC.shape == (len(release.queries_per_round), len(pool), spec.num_classes)
        if "first_answers_sha256" in record:
            is_intact &= compute_file_digest(folder / FIRST_ANSWERS_FILE) == record["first_answers_sha256"]
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise _corrupt_release_error(record, f"cannot be read ({type(error).__name__}: {error})", fix) from error
    rounds_add_up = sum(release.queries_per_round) == len(rows) and min(release.queries_per_round, default=0) >= 0
    if not is_intact or not rounds_add_up or not _is_consistent(query_Q, label_Q, len(pool), spec.num_classes, record):
        raise _corrupt_release_error(record, "labels.csv does not fit its release.json: it was edited", fix)
    _check_against_ledger(record, release, ledger, fix)
    return release


def _is_consistent(query_Q: Tensor, label_Q: Tensor, pool_size: int, num_classes: int, record: dict[str, Any]) -> bool:
    in_range = ((query_Q >= 0) & (query_Q < pool_size)).all() and (
        (label_Q >= NO_ANSWER) & (label_Q < num_classes)
    ).all()
    return bool(in_range) and len(torch.unique(query_Q)) == len(query_Q) == record.get("queries_asked")


def _check_against_ledger(record: dict[str, Any], release: Release, ledger: Ledger, fix: str) -> None:
    """Compare a record with the ledger: the price, the terms, the hashes, and whether the noise was secret."""
    account = next((candidate for candidate in ledger.list_accounts() if candidate.name == record["dataset"]), None)
    entries = () if account is None else ledger.read_entries(account.name)
    facts_by_kind = {entry.kind: entry.facts for entry in entries if entry.facts.get("reservation") == release.id}
    if account is None or "reserve" not in facts_by_kind:
        problem = f"was never charged to the ledger here ({ledger.path})"
        hint = "Bring back the ledger that lay beside it: it remembers what was released."
        raise _corrupt_release_error(record, problem, hint)
    claims = {
        "planned": (json.loads(events.to_json(release.reserved_events)), facts_by_kind["reserve"]["events"]),
        "private": (record.get("private"), not facts_by_kind["reserve"]["insecure"]),
        "mechanism": (record.get("mechanism"), facts_by_kind["reserve"]["mechanism"]),
        "delta": (record.get("delta"), account.delta),
        "adjacency": (record.get("adjacency"), account.adjacency),
        "unit": (record.get("unit"), account.unit),
    }
    if "commit" in facts_by_kind:  # a run killed before it committed stays charged at its worst
        claims["incurred"] = (json.loads(events.to_json(release.events)), facts_by_kind["commit"]["events"])
        claims["content"] = (select_digests(record), select_digests(facts_by_kind["commit"]))
    for name, (release_value, ledger_value) in claims.items():
        if release_value != ledger_value:
            raise _corrupt_release_error(record, f"was edited: its {name} is not what the ledger was charged for", fix)
    kinds = {"parameters": dict, "sensitivity": dict, "noise": str, "teachers_id": str, "num_teachers": int}
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise _corrupt_release_error(record, f"was edited: its {name} is missing", fix)
    load_method_description(record)


def _corrupt_release_error(record: dict[str, Any], problem: str, fix: str = "") -> ValueError:
    return checks.error("labels", record["release_id"], problem, fix)
