"""Tiny runs of every kind, each in its own process, killed between any two of its writes, draws and charges."""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what the first vmap of a process would import: seconds, in every child
from safetensors import torch as safetensors_torch

from pate_torch import PATE, TabularSynthesizer, owner_metrics, pipeline, session
from pate_torch.accounting.events import from_json
from pate_torch.api.journal import Journal
from pate_torch.api.labeler import PrivateLabeler
from pate_torch.cli.main import main as pate
from pate_torch.config import RunConfig
from pate_torch.core.progress import Stages
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.chain import HashChain
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.sensitive import Votes
from pate_torch.queries.base import Margin, Random
from pate_torch.queries.clusters import Medoids
from pate_torch.release import store as release_store
from pate_torch.session import ReleaseSession
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.training import Supervised
from pate_torch.teachers import groups, training
from pate_torch.teachers.store import ID_PATTERN, TeacherStore
from pate_torch.teachers.training import TeacherRecipe
from tests import ROOT
from tests.run_configs import changed, run_config
from tests.tensor_data import Tensors
from tests.worlds import clouds

STUDENT = Supervised(network="logistic", steps=3, augment=None)
RECIPE = TeacherRecipe(network="logistic", steps=5, batch_size=4)


def blobs() -> Tensors:
    """Three clouds in the plane."""
    x, y = clouds(160, 0)
    pool = {"pool_x": x[100:130], "pool_y": y[100:130]}
    return Tensors(name="blobs", class_names=3, x=x[:100], y=y[:100], test_x=x[130:], test_y=y[130:], **pool)


def plan(home: Path, name: str, **changes: Any) -> RunConfig:
    """Eight teachers, five queries, a student of a few steps."""
    config = run_config(
        dataset=blobs(), partition=AddRemove(), teacher=RECIPE, mechanism=GNMax(sigma=2.0), query=Random(),
        student=STUDENT, guide_student=STUDENT, num_teachers=8, num_queries=5, delta=1e-4, opening_budget=50.0,
        root=home, folder=home / "runs" / "blobs" / "gaussian" / name, seed=0, baseline=False, quiet=True,
    )  # fmt: skip
    return changed(config, **changes)


class Steps:
    """Counts the moments of a run between which a kill could matter; kills at the one asked for."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at, self.count = kill_at, 0

    def __call__(self) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def around(self, *holders: tuple[Any, tuple[str, ...]]) -> None:
        """Count a moment before and one after every call of these methods of each holder."""
        for holder, names in holders:
            for name in names:
                setattr(holder, name, self._wrap(getattr(holder, name)))

    def _wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def stepped(*args: Any, **options: Any) -> Any:
            self()
            result = inner(*args, **options)
            self()
            return result

        return stepped


@contextlib.contextmanager
def counted_steps(home: Path, kill_at: int | None, *holders: tuple[Any, tuple[str, ...]]) -> Iterator[None]:
    """Count the writes and draws of this process, and what else is named; write their number at the end."""
    quietly()
    steps = Steps(kill_at)
    steps.around(
        (os, ("replace", "rename", "fsync", "link", "mkdir")),
        (Path, ("replace", "rename", "write_text", "chmod", "unlink")),
        (safetensors_torch, ("save_file",)),
        (release_store, ("write",)),
        (NoiseSource, ("draw_gaussian",)),
        *holders,
    )
    yield
    (home / "steps.txt").write_text(str(steps.count))


def watch_noise(home: Path) -> None:
    """Write down, before every draw, how many releases the ledger has charged by then."""
    inner = NoiseSource.draw_gaussian

    def watched(self: NoiseSource, *args: Any, **options: Any) -> Any:
        write_line(home / "draws.txt", reservations(home))
        return inner(self, *args, **options)

    NoiseSource.draw_gaussian = watched  # type: ignore[method-assign]


def write_line(file: Path, value: object) -> None:
    with file.open("a") as opened:
        opened.write(f"{value}\n")


def reservations(home: Path) -> int:
    """How many charges the file of the ledger holds, read past our own code."""
    with contextlib.closing(sqlite3.connect(home / "ledger.sqlite")) as db:
        query = "SELECT count(*) FROM entries WHERE json_extract(body, '$.kind') = 'reserve'"
        return int(db.execute(query).fetchone()[0])


def run(home: Path, name: str, kill_at: int | None) -> None:
    """The whole run; writes the number of its steps at the end."""
    watch_noise(home)
    with counted_steps(
        home,
        kill_at,
        (ReleaseSession, ("fit", "write_report")),
        (session, ("print_summary",)),
        (owner_metrics, ("compute_metrics", "complete_metrics", "save_file")),
        (PreparedLabeling, ("release",)),
        (Ledger, ("open_account", "reserve", "commit")),
        (GNMax, ("release",)),
    ):
        pipeline.run(plan(home, name))


def readable(home: Path) -> dict[str, list[int]]:
    """Every labels.csv under ``home`` by its run: what somebody could take away."""
    return {
        file.parts[-3]: [int(row["label"]) for row in csv.DictReader(file.read_text().splitlines())]
        for file in (home / "runs").glob("*/*/*/release/labels.csv")
    }


def quietly() -> None:
    """One thread, and nothing on standard output."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


# ---- every kind of run ----------------------------------------------------------------------------------------------

CAP = 1e4
"""An account's, which no number of attempts reaches."""

ASKED = (6, 5)
"""Queries of a labeler's attempt, and of a block of its."""


def _pipeline(home: Path, number: int, **changes: Any) -> None:
    """Every second attempt finds the teachers of the one before; none finds its answers."""
    settings = {"seed": number // 2, "mechanism": GNMax(sigma=2.0 + number / 64), "opening_budget": CAP}
    pipeline.run(plan(home, f"run{number}", **(settings | changes)))


def _rounds(home: Path, number: int) -> None:
    _pipeline(home, number, query=Margin(rounds=2))


SELF_TRAINING = SelfTraining(first_student=STUDENT, later_students=STUDENT, num_generations=1)


def _reverse_knn(home: Path, number: int) -> None:
    mechanism = Histogram(sigma=3.0 + number / 64, adjacency="add_remove")
    _pipeline(home, number, method=partial(ReverseKnn), mechanism=mechanism, query=Medoids(), student=SELF_TRAINING)


def _gradients(home: Path, number: int) -> None:
    mechanism = GradientDescent(sigma=9.0 + number / 64, adjacency="add_remove")
    _pipeline(home, number, method=partial(GradientMethod, size=100), mechanism=mechanism, student=SELF_TRAINING)


def _label(home: Path, number: int) -> None:
    os.environ["PATE_HOME"] = str(home)
    votes = home / "votes.npy"
    if not votes.exists():
        np.save(votes, np.random.default_rng(0).integers(0, 3, (40, 60)))
    settings = ["num_classes=3", "dataset.name=brought", "num_queries=10", "privacy.delta=1e-6", "quiet=true"]
    noise = [f"mechanism.sigma={30 + number / 64}", f"privacy.opening_budget={CAP}"]
    assert pate(["label", f"votes={votes}", *settings, *noise]) == 0


def _api(home: Path, number: int) -> None:
    data = blobs()
    one = PATE(
        "clouds", classes=3, num_teachers=8, mechanism=GNMax(sigma=2.0 + number / 64), delta=1e-4, budget_epsilon=CAP,
        home=home, teacher=RECIPE, seed=number // 2,
    )  # fmt: skip
    one.fit_teachers(data.x, data.y).label(data.pool_x, num_queries=5)
    one.fit_student("supervised", network="logistic", steps=3, augment=None)
    one.report(data.test_x, data.test_y)


def synthesize(home: Path, number: int = 0, *, allow_refit: bool = True) -> None:
    """Make a synthetic table, with a round of votes. Every call is the same."""
    draw = np.random.default_rng(0)
    age, ill = draw.integers(0, 100, 300), draw.integers(0, 2, 300)
    columns = {name: {"type": "boolean"} for name in ("ill", "fever")}
    columns["age"] = {"type": "integer", "low": 0, "high": 100, "bins": 2}
    TabularSynthesizer(
        8.0, account="clinic", target="ill", schema={"columns": columns}, rounds=1, home=home, cap=CAP, verbose=False,
        allow_refit=allow_refit,
    ).fit({"age": age, "ill": ill, "fever": (age > 50) ^ (ill == 1)})  # fmt: skip


def _labeler(home: Path, number: int) -> None:
    """Asks some queries; notes each answer it was given."""

    def votes(x: torch.Tensor) -> Votes:
        high = (x[:, 0] > 0).long()
        return Votes(torch.stack([(1 - high) * 100, high * 100], 1), 100)

    spec = DataSpec(name="line", num_classes=2, input_shape=(1,), class_names=("a", "b"), mean=(0.0,), std=(1.0,))
    asked, block = ASKED
    mechanism = GNMax(sigma=10.0)
    with Ledger(home / "ledger.sqlite") as ledger:
        _open(ledger, "line", mechanism.privacy_events(block, block))
        budget = Budget.from_account(ledger, "line", run="labeler")
        with PrivateLabeler(
            votes, mechanism=mechanism, budget=budget, journal=home / "answers.jsonl", num_queries=block, spec=spec
        ) as labeler:
            for turn in range(asked):
                labeler.answer(torch.tensor([float(number * asked + turn)]))
                write_line(home / "given.txt", 1)


def _ledger(home: Path, number: int) -> None:
    """Charges alone; notes each reservation before it would draw."""
    planned = GNMax(sigma=30.0).privacy_events(5)
    with Ledger(home / "ledger.sqlite") as ledger:
        _open(ledger, "a", planned)
        for _ in range(4):
            reservation = ledger.reserve("a", planned, fingerprint="", mechanism="gaussian", run=f"run{number}")
            write_line(home / "reserved.txt", reservation.id)
            ledger.record(reservation, planned)
            ledger.commit(reservation, planned)
        ledger.backup(home / f"backup{number}.sqlite")


def _open(ledger: Ledger, name: str, planned: Any) -> None:
    terms = {"budget_epsilon": CAP, "delta": 1e-5, "adjacency": "replace_one", "unit": "record"}
    ledger.open_account(name, **terms, planned_events=planned)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "ledger": _ledger,
    "labeler": _labeler,
    "label": _label,
    "train": _pipeline,
    "rounds": _rounds,
    "api": _api,
    "reverse_knn": _reverse_knn,
    "gradients": _gradients,
    "synthetic": synthesize,
}


def synthesize_once(home: Path, kill_at: int | None) -> None:
    """Make the only synthetic table of an account, or finish it; write the number of the steps at the end."""
    attempt(partial(synthesize, allow_refit=False), home, 0, kill_at)


def attempt(kind: str | Callable[[Path, int], None], home: Path, number: int, kill_at: int | None) -> None:
    """One run of its kind; writes the number of its steps at the end."""
    training.GROUP_TEACHERS = 4  # in this process: eight teachers are two groups
    with counted_steps(
        home,
        kill_at,
        (Ledger, ("open_account", "reserve", "record", "resume", "commit")),
        (HashChain, ("append",)),
        (Journal, ("append",)),
    ):
        (KINDS[kind] if isinstance(kind, str) else kind)(home, number)


def unsound(home: Path) -> list[str]:
    """What is wrong under ``home``, whatever was killed there: nothing is public that was not charged, nothing torn."""
    if not (home / "ledger.sqlite").exists():
        return [str(file) for file in home.rglob("labels.csv")]
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        ledger.verify()
        entries = ledger.read_entries()
    reserved = {entry.facts["reservation"]: entry.facts for entry in entries if entry.kind == "reserve"}
    committed = {entry.facts["reservation"]: entry.facts for entry in entries if entry.kind == "commit"}
    charged_runs = {facts["run"] for facts in reserved.values()}
    found = []
    for folder in (home / "runs").glob("*/*/*"):
        answers = [file for file in (folder / "release").glob("*") if file.suffix in (".csv", ".safetensors")]
        if answers and folder.name not in charged_runs:
            found.append(f"{folder}: answers that nobody was charged for")
        record_file = folder / "release" / "release.json"
        if record_file.exists():
            found += _wrong_record(json.loads(record_file.read_text()), folder / "release", reserved, committed)
    store = TeacherStore(home)
    for folder in store.folder.glob("*"):
        if ID_PATTERN.fullmatch(folder.name):
            store.load(folder.name)  # raises where it is not whole
    if (home / "reserved.txt").exists():
        found += [f"{one}: drawn and not reserved" for one in lines(home / "reserved.txt") if one not in reserved]
    if (home / "answers.jsonl").exists():
        kept = [json.loads(line) for line in (home / "answers.jsonl").read_bytes().splitlines() if line.endswith(b"}")]
        answers = sum(len(line["labels"]) for line in kept if line.get("kind") == "answers")
        paid = [(committed.get(one) or facts)["events"] for one, facts in reserved.items()]
        charges = sum(event.count for events in paid for event in from_json(json.dumps(events)))
        if not len(lines(home / "given.txt")) <= answers <= charges:
            found.append(f"{len(lines(home / 'given.txt'))} given, {answers} kept, {charges} charged")
    return found


def _wrong_record(
    record: dict[str, Any], folder: Path, reserved: dict[str, Any], committed: dict[str, Any]
) -> list[str]:
    identity = record["release_id"]
    if identity not in reserved:
        return [f"{folder}: was never reserved"]
    checks = {
        "planned": record["planned"] == reserved[identity]["events"],
        "incurred": identity not in committed or record["incurred"] == committed[identity]["events"],
        "known to the ledger": identity not in committed
        or release_store.select_digests(record) == release_store.select_digests(committed[identity]),
    }
    for name, digest in release_store.select_digests(record).items():
        (file,) = folder.glob(f"{name.removesuffix('_sha256')}.*")
        checks[name] = hashlib.sha256(file.read_bytes()).hexdigest() == digest
    return [f"{folder}: {name}" for name, holds in checks.items() if not holds]


def lines(file: Path) -> list[str]:
    """Whole lines of a file; none where there is no file."""
    return file.read_text().split() if file.exists() else []


def half_written(home: Path) -> list[str]:
    """Temporary files and folders of runs and teachers."""
    temporary = re.compile(r"\.(tmp\w{6}|.+\.partial|.+\.[0-9a-f]{12}|[0-9a-f]{16}|.*lock)")
    places = [home / "runs", home / "teachers"]
    return [str(path) for place in places for path in place.rglob(".*") if temporary.fullmatch(path.name)]


# ---- several at once ------------------------------------------------------------------------------------------------


def side_by_side(home: Path, name: str, sigma: float, seconds: float = 0.0, ready: Any = None) -> None:
    """A run of the same eight teachers, one a group, each so many seconds longer; notes who trained which."""
    quietly()
    training.GROUP_TEACHERS = 1
    write = groups._write

    def write_slowly(file: Path, tensors: dict[str, torch.Tensor]) -> None:
        kind, start, _ = file.name.split("_")
        time.sleep(seconds if kind == "teachers" else 0)
        write(file, tensors)
        if kind == "teachers":
            write_line(home / "trained.txt", f"{os.getpid()}:{int(start)}")

    def say(self: Stages, line: str) -> None:
        write_line(home / f"{name}.said", line)

    groups._write, Stages.print_message = write_slowly, say  # type: ignore[method-assign]
    one = plan(home, name.partition("+")[0], mechanism=GNMax(sigma=sigma))
    if ready is not None:
        ready.wait()
    try:
        pipeline.run(one)
    except ValueError as error:
        (home / f"{name}.refused").write_text(str(error))
        sys.exit(2)


def fork_server(module: str) -> Any:
    """Where children come from that start with a module of the tests imported, and never ran anything."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context
