"""A run killed, starved of disk or fed damaged files: it finishes later, or says why; it is never under-charged."""

import dataclasses
import json
import os
import pickle
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import GaussianEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.chain import LedgerError
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.release import store as release_store
from tests import ROOT, killed_runs
from tests.command_runs import TINY, ledger_entries, train
from tests.killed_runs import fork_server, half_written, lines, plan, readable, reservations, unsound


@pytest.fixture(scope="module")
def processes():
    """Children that start with torch imported: forks of a server that never ran anything."""
    return fork_server("tests.killed_runs")


def start(processes, function, *given):
    child = processes.Process(target=function, args=given)
    child.start()
    return child


def ended(*children) -> list[int]:
    """Their exit codes."""
    for child in children:
        child.join(300)
    return [child.exitcode for child in children]


def learnt(home: Path) -> dict[str, torch.Tensor]:
    """What no noise has touched: the teachers' weights and their votes."""
    (manifest,) = home.glob("teachers/[0-9a-f]*/manifest.json")  # a killed save may leave a hidden folder
    tensors = load_file(manifest.parent / "group_000000.safetensors")
    (votes,) = (manifest.parent / "votes").glob("*.safetensors")
    return {**tensors, **load_file(votes)}


@pytest.fixture(scope="module")
def undisturbed(processes, tmp_path_factory):
    """(what an uninterrupted run learnt, its number of steps)."""
    home = tmp_path_factory.mktemp("undisturbed")
    assert ended(start(processes, killed_runs.run, home, "only", None)) == [0]
    assert lines(home / "draws.txt") == ["1"]  # the noise is watched
    return learnt(home), int((home / "steps.txt").read_text())


def assert_charged(home: Path) -> None:
    """Whatever is readable was charged at least its cost, and no noise was drawn before a charge of its own."""
    draws = [int(line) for line in (home / "draws.txt").read_text().split()] if (home / "draws.txt").exists() else []
    assert all(charged >= number for number, charged in enumerate(draws, start=1))
    if not (home / "ledger.sqlite").exists():
        assert not readable(home)
        return
    with Ledger(home / "ledger.sqlite") as ledger:
        ledger.verify()
        found = readable(home)
        assert reservations(home) >= len({tuple(labels) for labels in found.values()})
        if found:
            asked = max(map(len, found.values()))
            cost = accounting.compute_guarantee(GNMax(sigma=2.0).privacy_events(asked), 1e-4).epsilon
            assert ledger.get_account("blobs").guarantee.epsilon >= cost * (1 - 1e-9)


def killed_then_run_again(processes, home, undisturbed, kill_at) -> None:
    """The first attempt is killed at this step; the second finishes, learns the same, and all is charged.

    Where the answers of the first are paid for and written down, the second finishes that release in its folder.
    """
    assert ended(start(processes, killed_runs.run, home, "first", kill_at))[0] in (-signal.SIGKILL, 0)
    assert_charged(home)
    assert ended(start(processes, killed_runs.run, home, "second", None)) == [0]
    assert_charged(home)
    here = learnt(home)
    assert here.keys() == undisturbed[0].keys()
    assert all(torch.equal(here[name], there) for name, there in undisturbed[0].items())
    file = max(home.glob("runs/blobs/gaussian/*/release/summary.json"), key=os.path.getmtime)
    summary = json.loads(file.read_text())
    assert summary["epsilon_charged"] >= summary["epsilon"] * (1 - 1e-9)
    with Ledger(home / "ledger.sqlite") as ledger:
        assert summary["epsilon_charged"] == ledger.get_account("blobs").guarantee.epsilon
        data = killed_runs.blobs().load()
        folder = release_store.find_release(home, summary["release_id"])
        release = release_store.read(folder, data.pool, data.spec, ledger).labels
    assert release.label_Q.tolist() in readable(home).values()


def test_a_run_killed_between_two_writes_goes_on(processes, tmp_path, undisturbed):
    """Here after the answers were written; the slow tests try every moment."""
    killed_then_run_again(processes, tmp_path, undisturbed, int(0.85 * undisturbed[1]))


@pytest.mark.slow(reason="fault injection: one run for each write")
@pytest.mark.parametrize("part", range(8))
def test_a_run_killed_between_any_two_writes_goes_on(processes, tmp_path, undisturbed, part):
    for step in range(part, undisturbed[1], 8):
        (tmp_path / str(step)).mkdir()
        killed_then_run_again(processes, tmp_path / str(step), undisturbed, step)


def test_a_run_killed_again_and_again_goes_on(processes, tmp_path, undisturbed):
    """Leftovers of several attempts: partial files, folders, checkpoints, a release without its commit."""
    for number, share in enumerate((0.5, 0.75, 0.9)):
        ended(start(processes, killed_runs.run, tmp_path, f"attempt{number}", int(share * undisturbed[1])))
        assert_charged(tmp_path)
    killed_then_run_again(processes, tmp_path, undisturbed, 10)


@pytest.mark.slow(reason="fault injection: killed commands")
def test_the_command_itself_killed_at_random_moments_goes_on(tmp_path):
    """``python train.py``, a new interpreter each time."""
    moments, environment = random.Random(1), {**os.environ, "PATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *TINY]

    def run(after: float | None = None) -> None:
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-3, stderr=-1, text=True) as child:
            if after is not None:
                time.sleep(after)
                child.kill()
            _, printed = child.communicate()
            assert after is not None or child.returncode == 0, printed

    began = time.monotonic()
    run()
    whole = time.monotonic() - began
    for attempt in range(10):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        run(moments.uniform(0.3, 1.0) * whole)
        labels = [file for file in tmp_path.rglob("labels.csv")]
        assert len(labels) <= ledger_entries(tmp_path).count("reserve"), attempt
        run()
        summaries = [json.loads(file.read_text()) for file in tmp_path.rglob("release/summary.json")]
        assert all(one["epsilon_charged"] >= one["epsilon"] for one in summaries)


def test_a_kill_after_the_draw_is_seen(tmp_path):
    (tmp_path / "draws.txt").write_text("1\n1\n")
    with pytest.raises(AssertionError):
        assert_charged(tmp_path)


# ---- every kind of run, killed ---------------------------------------------------------------------------------------

KILLS = {
    "ledger": 15,
    "labeler": 14,
    "label": 20,
    "train": 10,
    "rounds": 6,
    "api": 10,
    "reverse_knn": 6,
    "gradients": 6,
    "synthetic": 8,
}
"""Of each kind, how many must land."""


def killed_until_they_land(processes, home: Path, kind: str, kills: int) -> None:
    """Attempts one after another in one home, killed by turns between two writes and at random moments; then a whole
    one. After each, nothing under ``home`` is unsound; at the end nothing half written is left.
    """

    def attempt(number: int, kill_at: int | None = None):
        return start(processes, killed_runs.attempt, kind, home, number, kill_at)

    def soundly_ended(child) -> int:
        (code,) = ended(child)
        assert code in (0, -signal.SIGKILL) and unsound(home) == []
        return code

    assert soundly_ended(attempt(0)) == 0  # the longest: it trains teachers, and starts the server of processes
    steps, began = int((home / "steps.txt").read_text()), time.monotonic()
    assert soundly_ended(attempt(1)) == 0
    seconds, moments, landed, number = time.monotonic() - began, random.Random(kind), 0, 1
    while landed < kills:
        number += 1
        assert number <= 5 * kills, f"of {number} kills {landed} landed"
        child = attempt(number, moments.randrange(steps) if number % 2 else None)
        if number % 2 == 0:
            time.sleep(moments.uniform(0, seconds))
            child.kill()
        landed += soundly_ended(child) == -signal.SIGKILL
    assert soundly_ended(attempt(number + 1)) == 0
    assert half_written(home) == []
    print(f"{kind}: {landed} of {number - 1} kills landed, {steps} steps and {seconds:.1f} s a run")


@pytest.mark.slow(reason="fault injection: killed runs of every kind")
@pytest.mark.parametrize("kind", KILLS)
def test_runs_of_every_kind_killed_at_any_moment_keep_their_word(processes, tmp_path, kind):
    killed_until_they_land(processes, tmp_path, kind, KILLS[kind])


def test_the_check_of_killed_runs_sees_what_is_unsound(processes, tmp_path):
    assert ended(start(processes, killed_runs.attempt, "train", tmp_path, 0, None)) == [0]
    assert unsound(tmp_path) == []
    (record,) = tmp_path.glob("runs/*/*/*/release/release.json")
    text = record.read_text()
    edit_json(record, labels_sha256="0" * 64)
    assert [line.rpartition(": ")[2] for line in unsound(tmp_path)] == ["known to the ledger", "labels_sha256"]
    record.write_text(text)
    shutil.copytree(record.parent.parent, uncharged := record.parent.parent.with_name("uncharged"))
    assert unsound(tmp_path) == [f"{uncharged}: answers that nobody was charged for"]
    shutil.rmtree(uncharged)
    (tmp_path / "ledger.sqlite").unlink()
    assert unsound(tmp_path) == [str(record.with_name("labels.csv"))]


# ---- several at once -------------------------------------------------------------------------------------------------


def side_by_side(processes, home: Path, *given):
    return start(processes, killed_runs.side_by_side, home, *given)


def wait_for(condition, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def trained(home: Path) -> list[tuple[int, int]]:
    """(process, first teacher) of every chunk, in order."""
    return [tuple(map(int, line.split(":"))) for line in lines(home / "trained.txt")]


def test_runs_that_need_the_same_new_teachers_train_them_once(processes, tmp_path):
    first = side_by_side(processes, tmp_path, "first", 2.0, 0.6)
    wait_for(lambda: trained(tmp_path))
    others = [side_by_side(processes, tmp_path, name, sigma) for name, sigma in (("second", 2.5), ("third", 3.0))]
    assert ended(first, *others) == [0, 0, 0]
    assert trained(tmp_path) == [(first.pid, teacher) for teacher in range(8)]
    for name in ("second", "third"):
        waited, reused, *stages = (tmp_path / f"{name}.said").read_text().splitlines()
        assert re.match(rf"Waiting for process {first.pid} on \S+ since 2\S+, which trains", waited)
        assert reused.startswith("Reusing teachers") and not any("teachers" in line for line in stages)
    assert len(list(tmp_path.glob("runs/*/*/*/release/summary.json"))) == 3 == reservations(tmp_path)
    assert half_written(tmp_path) == [] and not list(tmp_path.glob("teachers/.partial-*"))


def test_whoever_waits_takes_over_from_a_killed_run(processes, tmp_path):
    first = side_by_side(processes, tmp_path, "first", 2.0, 1.5)
    wait_for(lambda: trained(tmp_path))
    others = [side_by_side(processes, tmp_path, name, sigma) for name, sigma in (("second", 2.5), ("third", 3.0))]
    wait_for(lambda: all((tmp_path / f"{name}.said").exists() for name in ("second", "third")))
    assert first.is_alive(), "the others came too late to wait"
    first.kill()
    assert ended(first, *others) == [-signal.SIGKILL, 0, 0]
    chunks = trained(tmp_path)
    by_first = sum(process == first.pid for process, _ in chunks)
    successor = {process for process, _ in chunks[by_first:]}
    assert 0 < by_first < 8 and len(successor) == 1 and successor < {child.pid for child in others}
    assert sorted({teacher for _, teacher in chunks}) == list(range(8)) and len(chunks) <= 9  # one may be torn
    assert len(list(tmp_path.glob("teachers/[0-9a-f]*/manifest.json"))) == 1
    assert half_written(tmp_path) == [str(tmp_path / "runs/blobs/gaussian/first/.lock")]


def test_a_folder_has_one_run_at_a_time(processes, tmp_path):
    """Four runs that begin at once in one folder, as batch jobs of one id do: one is charged and the others are not."""
    ready = processes.Barrier(4)
    runs = [side_by_side(processes, tmp_path, f"one+{number}", 2.0 + number, 0.1, ready) for number in range(4)]
    assert sorted(ended(*runs)) == [0, 2, 2, 2]
    for refusal in tmp_path.glob("*.refused"):
        assert re.search(r"paths\.run=.*(is being written by process|holds a release already)", refusal.read_text())
    assert reservations(tmp_path) == 1 and unsound(tmp_path) == []


def test_a_killed_run_is_given_its_folder_again(processes, tmp_path):
    """As torchrun starts a run again under its id."""
    first = side_by_side(processes, tmp_path, "one", 2.0, 0.2)
    wait_for(lambda: trained(tmp_path))
    first.kill()
    ended(first)
    assert ended(side_by_side(processes, tmp_path, "one", 2.0)) == [0] and reservations(tmp_path) == 1
    assert half_written(tmp_path) == []


# ---- full and closed disks -------------------------------------------------------------------------------------------


def fail(error):
    def failing(*_, **__):
        raise error

    return failing


@pytest.mark.parametrize(
    ("place", "charged"),
    [
        ("pate_torch.teachers.groups.save_file", 0),
        ("pate_torch.release.store.write", 1),
        ("pate_torch.session.write_release", 1),
    ],
)
def test_a_full_disk_is_told_in_one_line_and_the_ledger_is_whole(tmp_path, monkeypatch, place, charged):
    """Before the charge, between charge and commit, and after it; test_failing_disk tries every operation."""
    with monkeypatch.context() as full:
        full.setattr(place, fail(OSError(28, "No space left on device")))
        line = train(tmp_path, monkeypatch=full).error
    assert "No space left on device" in line and "Free some space" in line
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (account,) = ledger.verify()
        assert account.num_releases + account.num_open == charged
    outcome = train(tmp_path, monkeypatch=monkeypatch)
    assert outcome.code == 0, outcome.err
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (account,) = ledger.verify()
        # A release that was written down is found again; one that was not stays charged, beside the new one.
        lost = place == "pate_torch.release.store.write"
        assert (account.num_releases, account.num_open) == (1, int(lost))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 128 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs rights that this machine does not give")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_disk_that_is_really_full(small_disk, monkeypatch):
    line = train(small_disk / "home", monkeypatch=monkeypatch).error
    assert "No space left on device" in line or "disk" in line
    shutil.copy(small_disk / "home" / "ledger.sqlite", small_disk.parent / "ledger.sqlite")
    for log in (small_disk / "home").glob("ledger.sqlite-wal"):
        shutil.copy(log, small_disk.parent / log.name)
    with Ledger(small_disk.parent / "ledger.sqlite") as ledger:
        ledger.verify()


def test_a_disk_that_is_really_closed(small_disk, monkeypatch):
    """A read-only file system stops root, too, whom no mode stops."""
    home = small_disk / "home"
    home.mkdir()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    assert subprocess.run(remount, capture_output=True).returncode == 0
    line = train(home, monkeypatch=monkeypatch).error
    assert "Read-only file system" in line and "writable" in line
    assert list(home.iterdir()) == []


BROKEN = {
    "the ledger cannot be written": (Ledger, "reserve", fail(LedgerError("attempt to write a readonly database"))),
    "the accountant crashes": (PrivacyFilter, "compute_cost", fail(ArithmeticError("the accountant is broken"))),
    "the cost is no number": (GNMax, "privacy_events", lambda *_: (GaussianEvent(mu=float("nan"), count=5),)),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_run_that_cannot_be_charged_draws_and_releases_nothing(tmp_path, monkeypatch, fault):
    """Other implementations swallow the error (``except Exception: return -1``). NaN is no cost below the cap."""
    drawn, one = [], plan(tmp_path, "first")
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *a, **k: drawn.append(1))
    monkeypatch.setattr(*BROKEN[fault])
    with pytest.raises((LedgerError, ArithmeticError, ValueError)):
        pipeline.run(one)
    assert not drawn and not readable(tmp_path)


def test_a_crash_of_the_accountant_after_the_release_publishes_no_epsilon(tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr("pate_torch.release.builder.accounting.compute_guarantee", fail(ArithmeticError()))
        with pytest.raises(ArithmeticError):
            pipeline.run(plan(tmp_path, "first"))
    assert not (tmp_path / "runs/blobs/gaussian/first/release/summary.json").exists()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        cost = accounting.compute_guarantee(GNMax(sigma=2.0).privacy_events(5), 1e-4).epsilon
        assert ledger.get_account("blobs").guarantee.epsilon >= cost * (1 - 1e-9)


# ---- damaged, foreign and malicious files ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The home of a finished run, never touched: copied for each test."""
    home = tmp_path_factory.mktemp("original")
    pipeline.run(plan(home, "first"))
    return home


@pytest.fixture
def home(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "home"))


@pytest.fixture
def teachers(home) -> Path:
    """The folder of the stored teachers, whose name no release shows."""
    return next(home.glob("teachers/*/manifest.json")).parent


@pytest.fixture
def release(home) -> Path:
    return home / "runs/blobs/gaussian/first/release"


@pytest.fixture
def labels(release) -> str:
    return json.loads((release / "release.json").read_text())["release_id"]


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(home: Path, words: str, **changes) -> None:
    """The run is refused in one line, and the ledger has nothing new."""
    before = ledger_entries(home) if changes.pop("compare", True) else None
    with pytest.raises(ValueError, match=words) as error:
        pipeline.run(plan(home, "again", **changes))
    assert "\n" not in str(error.value)
    if before is not None:
        assert ledger_entries(home) == before
    assert not (home / "runs/blobs/gaussian/again/release/summary.json").exists()
    assert not Path("exploded").exists()


def teachers_refused(teachers: Path, words: str) -> None:
    refused(teachers.parents[1], words, teachers=teachers.name, mechanism=GNMax(sigma=3.0))


TENSORS = {
    "pickle": lambda file: file.write_bytes(pickle.dumps(Bomb())),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
    "huge header": lambda file: file.write_bytes(b"\xff" * 64),
}


def test_damaged_teachers_are_refused(teachers):
    """Their checksum differs, whatever the damage; tests/teachers/test_store.py has more of both."""
    TENSORS["pickle"](teachers / "group_000000.safetensors")
    teachers_refused(teachers, f"teachers {teachers.name}")


def test_damaged_votes_are_refused(teachers):
    """(A bit that turns one vote into another keeps no promise broken: the votes are the owner's own.)"""
    (votes,) = (teachers / "votes").glob("*.safetensors")
    counts, content = load_file(votes)["counts_QC"], votes.read_bytes()
    for damage in TENSORS.values():
        damage(votes)
        teachers_refused(teachers, votes.name)
        votes.write_bytes(content)
    counts[0, 0] += 1  # a teacher twice
    save_file({"counts_QC": counts}, votes)
    teachers_refused(teachers, "one teacher, one vote")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sha256": "0" * 64}, "not this ensemble's manifest"),
        ({"fingerprint": "../x"}, "fingerprint"),
        ({"dataset": "other"}, "dataset"),
        ({"partition": {"name": "replace_one"}}, "partition"),
        ({"ledger_head": "0" * 64}, "another privacy ledger"),
    ],
)
def test_a_manifest_that_does_not_fit_the_run_is_refused(changes, words, teachers):
    edit_json(teachers / "manifest.json", **changes)
    teachers_refused(teachers, words)


@pytest.mark.parametrize("name", ["../x", ".", "", "0123456789ABCDEF", "0123456789abcde\n", "a" * 17])
def test_an_id_that_is_a_path_is_refused(tmp_path, name):
    for key in ("teachers", "labels"):
        with pytest.raises(ValueError, match="16 hexadecimal"):
            plan(tmp_path, "again", **{key: name})


EDITS = {
    "delta": (0.5, "its delta"),
    "private": (False, "its private"),
    "adjacency": ("replace_one", "its adjacency"),
    "unit": ("group:x", "its unit"),
    "mechanism": ("confident", "its mechanism"),
    "planned": ([], "its planned"),
    "incurred": ([], "its incurred"),
    "schema_version": (2, "schema"),
    "queries_asked": (4, "edited"),
    "labels_sha256": ("0" * 64, "edited"),
    "pool_sha256": ("0" * 64, "other public points"),
    "dataset": ("other", "other public points"),
    "parameters": (None, "its parameters"),
    "sensitivity": (None, "its sensitivity"),
    "num_teachers": ("x", "its num_teachers"),
}


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_release_is_refused(home, key, labels, release):
    """A release is what its ledger was charged for, or nothing: a smaller epsilon must not be reported from it."""
    value, words = EDITS[key]
    edit_json(release / "release.json", **{key: value})
    refused(home, words, labels=labels)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "\n".join(text.splitlines()[:-1]) + "\n",
        lambda text: "",
        lambda text: text.splitlines()[0] + "\n0,1,1" * 5 + "\n",
    ],
)
def test_edited_labels_are_refused(home, edit, labels, release):
    file = release / "labels.csv"
    file.write_text(edit(file.read_text()))
    refused(home, "labels=", labels=labels)


def test_a_release_without_its_ledger_is_refused(home, labels):
    for file in home.glob("ledger.sqlite*"):
        file.unlink()
    refused(home, "does not exist", labels=labels)
    assert not (home / "ledger.sqlite").exists()
    pipeline.run(plan(home, "new", dataset=dataclasses.replace(killed_runs.blobs(), name="other")))  # makes a ledger
    refused(home, "never charged to the ledger here", labels=labels)


def execute(*statements: str):
    def change(file: Path) -> None:
        db = sqlite3.connect(file)
        for statement in statements:
            db.execute(statement)
        db.commit()
        db.close()

    return change


EDIT = "UPDATE entries SET body = replace(body, '\"scalar\":', '\"scalar\":0') WHERE seq = 3"
LEDGERS = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:5000]), "damaged|malformed"),
    "empty": (lambda file: file.write_bytes(b""), "is empty"),
    "text": (lambda file: file.write_text("not a ledger, but long enough to look like one"), "not a database"),
    "folder": (lambda file: (file.unlink(), file.mkdir()), "unable to open"),
    "newer": (execute("PRAGMA user_version = 99"), "newer version"),
    "edited": (execute("DROP TRIGGER no_update", EDIT), "damaged"),
}


@pytest.mark.parametrize("damage", LEDGERS)
def test_a_damaged_ledger_is_refused(home, damage, labels):
    change, words = LEDGERS[damage]
    for log in (*home.glob("ledger.sqlite-wal"), *home.glob("ledger.sqlite-shm")):
        log.unlink()
    change(home / "ledger.sqlite")
    for changes in ({}, {"labels": labels}, {"mechanism": GNMax(sigma=3.0)}):
        refused(home, words, compare=False, **changes)


def test_leftovers_of_other_versions_do_not_block(home):
    (home / "teachers" / ".0123456789abcdef").mkdir()
    (home / "teachers" / ".partial-0123456789abcdef").mkdir()
    (home / "teachers" / ("e" * 16)).mkdir()
    (home / "teachers" / "notes.txt").write_text("x")
    for name, text in (("a", "{"), ("b", "[]"), ("c", json.dumps({"release_id": 3})), ("d", "null")):
        folder = home / "runs" / "blobs" / "gaussian" / name / "release"
        folder.mkdir(parents=True)
        (folder / "release.json").write_text(text)
        (folder / ".labels.csv.partial").write_text("query,label")
    pipeline.run(plan(home, "again"))
    assert ledger_entries(home).count("reserve") == 2


def test_a_refused_run_leaves_a_home_as_it_was(tmp_path):
    data = killed_runs.blobs().load()
    one = plan(tmp_path / "home", "first", num_queries=31)
    with pytest.raises(ValueError, match="num_queries"):
        one.validate(DatasetFacts.from_dataset(data, one.partition))
    with pytest.raises(ValueError, match="num_queries"):
        pipeline.run(one)
    assert not (tmp_path / "home").exists()
