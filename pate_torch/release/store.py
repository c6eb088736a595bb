"""Writes and reads a release: ``labels.csv`` (the answers) and ``release.json`` (the queries, the method, the cost).

All files may be published, and another student can be trained on the labels later at no privacy cost. Each file is
written by an atomic rename before the ledger commits. The ledger holds the events and the hashes of the files. ``read``
compares a release with the ledger, because an edited record could state a smaller epsilon.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pate_torch.accounting import events
from pate_torch.core import checks, files, run_folders
from pate_torch.methods.base import FirstAnswers, MethodDescription, ModelRelease
from pate_torch.privacy.ledger import Ledger, open_ledger
from pate_torch.privacy.records import NO_ANSWER, DataSpec, LinearModel, NoisyCounts, PointNames, PublicPool, Release
from pate_torch.privacy.whitening import Whitening
from pate_torch.students import store as student_store
from pate_torch.students.base import Student
from pate_torch.synthesis.model import TableModel
from pate_torch.teachers.store import TeacherStore

SCHEMA_VERSION = 1
ANSWER_FILES = {
    "labels_sha256": "labels.csv",
    "cells_sha256": "cells.csv",
    "scores_sha256": "scores.safetensors",
    "guide_sha256": "guide.safetensors",
    "first_answers_sha256": "first_answers.json",
}
"""Key of a SHA-256 in ``release.json`` and in the ledger -> file of answers."""
MODEL_FILE_NAME, TABLE_FILE_NAME, ROWS_FILE_NAME = "student.safetensors", "synthesizer.safetensors", "synthetic.csv"
_MODEL_FILES = {"student_sha256": MODEL_FILE_NAME, "synthesizer_sha256": TABLE_FILE_NAME}
"""Key of a SHA-256 in the ledger -> file of a model."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WrittenRelease:
    """Releasable. A release in its folder, made by this session or by an earlier one.

    Attributes:
        release: Queries and their answers, or a model.
        record: Content of ``release.json``.
        guide: Student of all rounds but the last; None if the published student does not start from it.
    """

    release: Release | ModelRelease
    record: dict[str, Any]
    guide: Student | None = None

    @property
    def labels(self) -> Release:
        """The queries and their answers. The release must not be a model."""
        assert isinstance(self.release, Release)
        return self.release


def check_unused_folder(run: Path, reused_id: str | None = None) -> None:
    """Raise ValueError if the folder of a run has a release, whose claim would not cover a second release.

    The release ``reused_id``, whose labels are reused, is allowed in the folder.
    """
    folder = run / "release"
    markers = ("summary.json", "release.json", *_MODEL_FILES.values())
    found = {name for name in markers if (folder / name).exists()}
    if reused_id is not None:
        found.discard("student.safetensors")  # a student of reused labels costs nothing
        if found == {"release.json"}:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                if json.loads((folder / "release.json").read_text())["release_id"] == reused_id:
                    return
    if found:
        fix = "Choose another folder: set another PATE_RUN_ID or paths.run, or neither."
        raise checks.error("paths.run", str(run), "holds a release already; a claim covers one release", fix)


def discard_incomplete(run: Path) -> None:
    """Remove the answers, which no claim covers, of a run that was killed before it wrote release.json or its model."""
    folder = run / "release"
    if not any((folder / name).exists() for name in ("release.json", *_MODEL_FILES.values())):
        for name in ANSWER_FILES.values():
            (folder / name).unlink(missing_ok=True)


def select_digests(record: Mapping[str, Any]) -> dict[str, str]:
    """Select the entries of a record that are hashes of files of answers."""
    return {name: record[name] for name in ANSWER_FILES if name in record}


def load_method_description(record: Mapping[str, Any]) -> MethodDescription:
    """Load the description of the method from a record. Raises ValueError if the record was edited."""
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
    """Write a release into its folder, and return the record that ``read`` will return.

    ``facts`` is further content of the record, ``guide`` the student that guided the choice of queries, and ``names``
    the names of the public points for the last column of labels.csv.
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
    answers = {"labels_sha256": _format_labels(release, spec, names).encode()}
    if release.cell_RP is not None:  # one row for each public point, with its query in each round
        header = ["point", *(f"round_{round_index}" for round_index in range(len(release.cell_RP)))]
        rows = enumerate(release.query_Q[release.cell_RP].T.tolist())
        answers["cells_sha256"] = _format_csv([header, *([point, *queries] for point, queries in rows)]).encode()
    if release.score_RPC is not None:
        tensors = {"score_RPC": release.score_RPC.contiguous()}
        if (model := release.model) is not None:
            tensors |= {"weight_DC": model.weight_DC.contiguous(), "bias_C": model.bias_C.contiguous()}
            tensors |= {"neighbors": torch.tensor([model.neighbors]), **model.whitening.to_tensors()}
        answers["scores_sha256"] = safetensors.torch.save(tensors)
    for key, content in answers.items():
        record[key] = hashlib.sha256(content).hexdigest()
        files.write_atomically(folder / ANSWER_FILES[key], content)
    if guide is not None:
        student_store.save(guide, folder / ANSWER_FILES["guide_sha256"])
        record["guide_sha256"] = files.compute_file_digest(folder / ANSWER_FILES["guide_sha256"])
    files.write_atomically(folder / "release.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def write_first_answers(folder: Path, first_answers: FirstAnswers) -> dict[str, str]:
    """Write the noisy answers of a first stage into ``folder``; return their SHA-256 for record and ledger."""
    run_folders.create_protected_folder(folder)
    facts = {"counts": first_answers.counts_C.tolist(), "sigma": first_answers.sigma, "outside": first_answers.outside}
    content = json.dumps(facts, allow_nan=False)
    files.write_atomically(folder / ANSWER_FILES["first_answers_sha256"], content + "\n")
    return {"first_answers_sha256": files.compute_file_digest(folder / ANSWER_FILES["first_answers_sha256"])}


def read_first_answers(folder: Path) -> FirstAnswers | None:
    """Read the noisy answers of a first stage, or return None if the release has none."""
    path = folder / ANSWER_FILES["first_answers_sha256"]
    if not path.exists():
        return None
    facts = json.loads(path.read_text())
    return FirstAnswers(torch.tensor(facts["counts"], dtype=torch.float64), facts["sigma"], facts["outside"])


def save_model(model: Student | TableModel, release: Path) -> dict[str, str]:
    """Write a model into its release folder, and return its hash for the ledger."""
    run_folders.create_protected_folder(release)
    if isinstance(model, TableModel):
        model.save(release / TABLE_FILE_NAME)
    else:
        student_store.save(model, release / MODEL_FILE_NAME)
    key = "synthesizer_sha256" if isinstance(model, TableModel) else "student_sha256"
    return {key: files.compute_file_digest(release / _MODEL_FILES[key])}


def _load_model(file: Path) -> Student | TableModel:
    return TableModel.load(file) if file.name == TABLE_FILE_NAME else student_store.load(file)


def _format_labels(release: Release, spec: DataSpec, names: PointNames | None) -> str:
    queries, labels = release.query_Q.tolist(), release.label_Q.tolist()
    class_names = {NO_ANSWER: "", **dict(enumerate(map(files.escape_spreadsheet_cell, spec.class_names)))}
    columns: dict[str, Sequence[Any]] = {"query": queries, "label": labels}
    columns["class"] = [class_names[label] for label in labels]
    if release.noisy_counts is not None:
        columns |= {f"votes_{c}": counts for c, counts in enumerate(release.noisy_counts.counts_QC.T.tolist())}
    elif release.score_QC is not None:
        for c, scores in enumerate(release.score_QC.T.tolist()):
            columns[f"score_{c}"] = ["" if math.isnan(score) else score for score in scores]
    if names is not None:
        columns[names.kind] = [files.escape_spreadsheet_cell(names.names[query]) for query in queries]
    return _format_csv([columns, *zip(*columns.values(), strict=True)])


def _format_csv(rows: Iterable[Iterable[Any]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    return table.getvalue()


def find_release(root: Path, release_id: object) -> Path:
    """Find the newest release folder under ``root`` with this id. Raises ValueError if there is none."""
    valid_id = run_folders.check_hex_id("labels", release_id)
    runs_folder = run_folders.get_runs_folder(root)
    records = runs_folder.glob("*/*/*/release/release.json")
    for file in sorted(records, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # an unreadable file is skipped
            record = json.loads(file.read_text())
            if isinstance(record, dict) and record.get("release_id") == valid_id:
                return file.parent
    fix = "Set PATE_HOME to the folder in which the release was made."
    raise checks.error("labels", release_id, f"no such release under {runs_folder.absolute()}", fix)


def read(folder: Path, pool: PublicPool, spec: DataSpec, ledger: Ledger) -> WrittenRelease:
    """Read the release in this folder, whose queries are points of this pool.

    Raises:
        ValueError: The release is missing or damaged, was made from other points, or disagrees with the ledger.
    """
    try:
        record = json.loads((folder / "release.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'release.json'}: missing or damaged ({error}).") from error
    if record.get("schema_version") != SCHEMA_VERSION:
        raise _corrupt_release_error(record, f"has schema {record.get('schema_version')}, not {SCHEMA_VERSION}")
    if record.get("dataset") != spec.name or record.get("pool_sha256") != files.compute_tensor_digest(pool.x):
        problem = f"has answers for other public points (data set {record.get('dataset')!r})"
        raise _corrupt_release_error(record, problem, "Use dataset, seed and sizes of the run that made the release.")
    fix = f"Restore the files of {folder}, or move this folder away."
    try:
        digests = {"labels_sha256": record["labels_sha256"], **select_digests(record)}
        sha_by_name = {ANSWER_FILES[key]: sha for key, sha in digests.items()}
        edited = [name for name, sha in sha_by_name.items() if files.compute_file_digest(folder / name) != sha]
        release = None if edited else _parse_release(folder, record, spec)
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise _corrupt_release_error(record, f"cannot be read ({type(error).__name__}: {error})", fix) from error
    if release is None or not _is_consistent(release, len(pool), spec.num_classes, record):
        problem = f"{' and '.join(edited) or 'labels.csv'} does not fit release.json: it was edited"
        raise _corrupt_release_error(record, problem, fix)
    _check_against_ledger(record, release, ledger, fix)
    guide = student_store.load(folder / ANSWER_FILES["guide_sha256"]) if "guide_sha256" in record else None
    return WrittenRelease(release=release, record=record, guide=guide)


def _parse_release(folder: Path, record: dict[str, Any], spec: DataSpec) -> Release:
    rows = list(csv.DictReader(io.StringIO((folder / "labels.csv").read_text(encoding="utf-8"))))

    def read_columns(kind: str, parse: Callable[[str], float]) -> list[list[float]] | None:
        if not rows or f"{kind}_0" not in rows[0]:
            return None
        return [[parse(row[f"{kind}_{c}"]) for c in range(spec.num_classes)] for row in rows]

    query_Q, label_Q = (torch.tensor([int(row[key]) for row in rows], dtype=torch.int64) for key in ("query", "label"))
    votes, query_scores = read_columns("votes", int), read_columns("score", lambda text: float(text or "nan"))
    sigma = 0.0 if votes is None else checks.positive("sigma", record["parameters"]["sigma"])
    cell_RP, tensors, model = None, dict[str, Tensor](), None
    if "cells_sha256" in record:
        cells = csv.reader(io.StringIO((folder / "cells.csv").read_text(encoding="utf-8")))
        row_by_query = {str(query): row for row, query in enumerate(query_Q.tolist())}
        cell_RP = torch.tensor([[row_by_query[query] for query in queries] for _, *queries in list(cells)[1:]]).T
    if "scores_sha256" in record:
        tensors = safetensors.torch.load((folder / "scores.safetensors").read_bytes())
        if "weight_DC" in tensors:
            whitening = Whitening.from_tensors(tensors)
            model = LinearModel(tensors["weight_DC"], tensors["bias_C"], whitening, int(tensors["neighbors"]))
    return Release(
        run_folders.check_hex_id("labels", record["release_id"]),
        query_Q,
        label_Q,
        events.from_json(json.dumps(record["incurred"])),
        events.from_json(json.dumps(record["planned"])),
        None if votes is None else NoisyCounts(torch.tensor(votes, dtype=torch.int64), sigma),
        None if query_scores is None else torch.tensor(query_scores, dtype=torch.float64),
        queries_per_round=tuple(map(int, record["queries_by_round"])),
        cell_RP=cell_RP,
        score_RPC=tensors.get("score_RPC"),
        model=model,
    )


def _is_consistent(release: Release, pool_size: int, num_classes: int, record: dict[str, Any]) -> bool:
    query_Q, label_Q, rounds = release.query_Q, release.label_Q, release.queries_per_round
    is_in_range = bool(((query_Q >= 0) & (query_Q < pool_size)).all())
    is_in_range &= bool(((label_Q >= NO_ANSWER) & (label_Q < num_classes)).all())
    shapes = (release.cell_RP, (len(rounds), pool_size)), (release.score_RPC, (len(rounds), pool_size, num_classes))
    return (
        is_in_range
        and len(torch.unique(query_Q)) == len(query_Q) == sum(rounds) == record.get("queries_asked")
        and min(rounds, default=0) >= 0
        and all(tensor is None or tensor.shape == shape for tensor, shape in shapes)
    )


def _check_against_ledger(record: dict[str, Any], release: Release, ledger: Ledger, fix: str) -> None:
    """Compare a record with the ledger: cost, terms, hashes, and whether the noise was secret."""
    account = next((candidate for candidate in ledger.list_accounts() if candidate.name == record["dataset"]), None)
    entries = () if account is None else ledger.read_entries(account.name)
    facts_by_kind = {entry.kind: entry.facts for entry in entries if entry.facts.get("reservation") == release.id}
    if account is None or "reserve" not in facts_by_kind:
        problem = f"was never charged to the ledger here ({ledger.place})"
        hint = "Restore the ledger that was charged for this release."
        raise _corrupt_release_error(record, problem, hint)
    claims = {
        "planned": (json.loads(events.to_json(release.reserved_events)), facts_by_kind["reserve"]["events"]),
        "private": (record.get("private"), not facts_by_kind["reserve"]["insecure"]),
        "mechanism": (record.get("mechanism"), facts_by_kind["reserve"]["mechanism"]),
        "delta": (record.get("delta"), account.delta),
        "adjacency": (record.get("adjacency"), account.adjacency),
        "unit": (record.get("unit"), account.unit),
    }
    if "commit" in facts_by_kind:  # without a commit, the run was killed and stays charged at its worst case
        claims["incurred"] = (json.loads(events.to_json(release.events)), facts_by_kind["commit"]["events"])
        claims["content"] = (select_digests(record), select_digests(facts_by_kind["commit"]))
    for name, (release_value, ledger_value) in claims.items():
        if release_value != ledger_value:
            raise _corrupt_release_error(record, f"was edited: its {name} differs from the ledger's entry", fix)
    kinds = {"parameters": dict, "sensitivity": dict, "noise": str, "teachers_id": str, "num_teachers": int}
    for name, kind in kinds.items():
        value = record.get(name)
        is_plain = kind is not dict or (
            isinstance(value, dict)
            and all(item is None or isinstance(item, str | bool | int | float) for item in value.values())
        )
        if not isinstance(value, kind) or not is_plain:
            raise _corrupt_release_error(record, f"was edited: its {name} is missing or malformed", fix)
    load_method_description(record)


def _corrupt_release_error(record: dict[str, Any], problem: str, fix: str = "") -> ValueError:
    return checks.error("labels", record["release_id"], problem, fix)


# ---- unfinished calls -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class UnfinishedCall:
    """PRIVATE. A call that can finish an earlier, interrupted call with the same settings and records at no charge.

    A call writes a note into the private store before it charges the account, and removes the note when the call ends.
    The name of the note is a keyed hash of the public configuration and the private records. Nothing that is published
    depends on a note. Files are reused only if the ledger has their hashes: answers that were drawn but not committed
    are never used, and their reservation stays spent.

    Attributes:
        store: Private store.
        account: Account that the call charges.
        facts: Public values that determine the release.
        fingerprint: Function that computes the keyed hash of the records, or of the votes.
    """

    store: TeacherStore
    account: str
    facts: Mapping[str, Any]
    fingerprint: Callable[[], str]

    @staticmethod
    def list_runs(store: TeacherStore, account: str) -> list[str]:
        """PRIVATE. List the folder names of the unfinished runs that charge this account."""
        folders = []
        for note in (store.folder / "unfinished").glob(f"{account}.*.json"):
            with contextlib.suppress(FileNotFoundError):  # a call that ends in another process removes its note
                folders.append(Path(json.loads(note.read_text())["folder"]).name)
        return folders

    def begin(self, folder: Path) -> None:
        """PRIVATE. Write the note that the call uses this run folder."""
        note_path = self._note_path
        with self.store.lock():  # otherwise another process, which removes unfinished files, could remove this one
            files.write_atomically(note_path, json.dumps({"folder": str(folder.absolute())}) + "\n")

    def end(self) -> None:
        """PRIVATE. Remove the note, so that a repeated call makes a new release."""
        self._note_path.unlink(missing_ok=True)

    def find(self) -> tuple[Path, dict[str, dict[str, Any]]] | None:
        """PRIVATE. Find the folder of the interrupted run, and its committed facts by reservation.

        Returns:
            None if no such call was interrupted, if another process is still running it, or if nothing was committed.
        """
        if not self.list_runs(self.store, self.account):
            return None
        try:
            folder = Path(json.loads(self._note_path.read_text())["folder"])
        except FileNotFoundError:
            return None
        with open_ledger(self.store.root, create=False) as ledger:
            entries = [entry for entry in ledger.read_entries(self.account) if "reservation" in entry.facts]
        own_ids = {e.facts["reservation"] for e in entries if e.kind == "reserve" and e.facts["run"] == folder.name}
        commits = [entry.facts for entry in entries if entry.kind == "commit" and "stopped" not in entry.facts]
        committed = {facts["reservation"]: facts for facts in commits if facts["reservation"] in own_ids}
        if not committed or not (folder / "release").is_dir():
            return None
        with run_folders.try_hold_lock(folder / run_folders.LOCK_FILE_NAME, "paths.run") as is_unlocked:
            if not is_unlocked:
                return None
            (folder / "release" / "summary.json").unlink(missing_ok=True)  # the finished run writes it
        return folder, committed

    def find_model(self) -> tuple[Path, ModelRelease] | None:
        """PRIVATE. Find the folder of the interrupted run and the model that one of its reservations committed."""
        folder, committed = self.find() or (Path(), {})
        for id_, (key, name) in itertools.product(committed, _MODEL_FILES.items()):
            file = folder / "release" / name
            if file.is_file() and committed[id_].get(key) == files.compute_file_digest(file):
                return folder, ModelRelease(id_, _load_model(file))
        return None

    @property
    def _note_path(self) -> Path:
        folder = files.create_private_folder(self.store.folder / "unfinished")
        text = json.dumps(dict(self.facts), sort_keys=True, default=repr)
        digest = self.store.compute_keyed_digest(text.encode(), self.fingerprint().encode())
        return folder / f"{self.account}.{digest}.json"
