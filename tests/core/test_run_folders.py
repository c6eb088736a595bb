"""Runs have folders of their own, locks have one holder, and what killed processes left unfinished is removed."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pate_torch import PATE, PATEClassifier, TabularSynthesizer
from pate_torch.core import run_folders
from pate_torch.core.run_folders import get_home_folder, get_runs_folder, get_user_store, hold_lock, try_hold_lock
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.ledger import Ledger, open_ledger
from pate_torch.teachers.store import CHECKPOINT_MAX_AGE_SECONDS, TeacherStore


def test_the_store_of_a_user_holds_no_runs(monkeypatch, tmp_path):
    assert len({run_folders.make_unique_run_id() for _ in range(50)}) == 50
    monkeypatch.delenv("PATE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert get_home_folder() == str(get_user_store()) == str(tmp_path / "pate_torch")
    assert str(get_runs_folder(get_user_store())) == "outputs/runs" and get_runs_folder(tmp_path) == tmp_path / "runs"
    monkeypatch.setenv("PATE_HOME", "/elsewhere")
    assert get_home_folder() == "/elsewhere" and get_home_folder("/here") == "/here"


def make_synthesizer(home):
    return TabularSynthesizer(1, account="a", public={"a": ["x", "y"], "b": ["u", "v"]}, home=home)


RELATIVE_HOME = {
    "PATE": lambda home: PATE("a", classes=2, num_teachers=2, mechanism=GNMax(sigma=9.0), delta=1e-5, home=home),
    "PATEClassifier": lambda home: PATEClassifier(1, account="a", classes=[0, 1], home=home).fit(
        [[0.0]], [0], public=[[0.0]]
    ),
    "TabularSynthesizer": lambda home: make_synthesizer(home).fit({"a": ["x"], "b": ["u"]}),
    "ledger": lambda home: open_ledger(home and Path(home)),
}


@pytest.mark.parametrize("door", RELATIVE_HOME)
@pytest.mark.parametrize(("variable", "home", "key"), [("/store", "one", "home"), ("one", None, "PATE_HOME")])
def test_a_relative_home_is_refused(door, variable, home, key, tmp_path, monkeypatch):
    """Each working directory would have a ledger, and a budget, of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATE_HOME", variable)
    with pytest.raises(ValueError, match=rf"^{key}='one': must be an absolute path.* write {tmp_path}/one\.$"):
        RELATIVE_HOME[door](home)
    assert not list(tmp_path.iterdir())


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), run_folders.hold_run_folder(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


def refuse(holder):
    raise ValueError(holder)


def hold_for_ever(path, ready):
    with hold_lock(path, "place", on_wait=refuse):
        ready.set()
        time.sleep(600)


def test_a_lock_has_one_holder_and_its_file_goes_with_it(tmp_path):
    path = tmp_path / "place"
    for _ in range(2):
        with hold_lock(path, "place", on_wait=refuse):
            with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* since 2"):
                hold_lock(path, "place", on_wait=refuse).__enter__()
            with try_hold_lock(path, "place") as is_held:
                assert not is_held
        assert not path.exists()


def test_a_lock_is_held_until_its_process_is_killed(tmp_path):
    path = tmp_path / "place"
    context = multiprocessing.get_context("fork")  # no fresh interpreter has to import torch
    ready = context.Event()
    holder = context.Process(target=hold_for_ever, args=(path, ready))
    holder.start()
    try:
        assert ready.wait(120)
        with pytest.raises(ValueError, match=f"process {holder.pid} "):
            hold_lock(path, "place", on_wait=refuse).__enter__()
        messages, killer = [], threading.Timer(0.3, holder.kill)
        killer.start()
        with hold_lock(path, "place", on_wait=messages.append):
            holder.join(60)
            assert holder.exitcode == -signal.SIGKILL
        assert len(messages) == 1 and str(holder.pid) in messages[0]
    finally:
        holder.kill()
        holder.join()


def test_those_who_wait_come_one_at_a_time(tmp_path):
    inside, most = [], []

    def enter(_):
        for _ in range(5):
            with hold_lock(tmp_path / "place", "place", on_wait=lambda _: None):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))
    assert most == [1] * 20


def test_a_forked_child_neither_holds_nor_releases_a_lock(tmp_path):
    """Else workers that outlive a killed run would keep the next one waiting."""
    path = tmp_path / "place"
    context = multiprocessing.get_context("fork")
    with hold_lock(path, "place", on_wait=refuse):
        sleeper = context.Process(target=time.sleep, args=(600,))
        sleeper.start()
        child = os.fork()
        if child == 0:
            try:
                raise SystemExit  # unwinds the child's copy of the with statement
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with try_hold_lock(path, "place") as is_held:
            assert not is_held and path.exists()
    try:
        with try_hold_lock(path, "place") as is_held:
            assert is_held
    finally:
        sleeper.kill()
        sleeper.join()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_or_a_system_without_locks_is_refused(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=rf"place=.*cannot be locked \({os.strerror(code)}\).*local disk"):
        hold_lock(tmp_path / "place", "place", on_wait=refuse).__enter__()
    with pytest.raises(ValueError, match="cannot be locked"):
        TeacherStore(tmp_path).record_charge("digits", None, "0" * 64)


def test_unfinished_files_of_a_killed_run_are_removed_and_nothing_else(tmp_path):
    dead, living, finished = (tmp_path / "runs" / "digits" / "gaussian" / name for name in ("dead", "living", "done"))
    half, whole = (".labels.csv.0123456789ab", ".tmpAbC123"), ("labels.csv", ".hydra")
    for run in (dead, living, finished):
        (run / "release").mkdir(parents=True)
        for name in (*half, *whole):
            (run / "release" / name).write_text("")
    (dead / ".lock").write_text('[1, "there", "then"]')
    with run_folders.hold_run_folder(living):
        assert sorted(path.name for path in (living / "release").iterdir()) == sorted(whole)
        (living / "release" / ".labels.csv.0123456789ab").write_text("")
        run_folders.remove_killed_run_files(tmp_path)
        assert (living / "release" / ".labels.csv.0123456789ab").exists()
    assert sorted(path.name for path in (dead / "release").iterdir()) == sorted(whole)
    assert not (dead / ".lock").exists() and not (living / ".lock").exists()


def test_unfinished_files_of_a_new_ledger_are_removed_an_hour_later(tmp_path):
    old, new = (tmp_path / f".ledger.sqlite.{digit * 16}" for digit in "ab")
    for file in (old, Path(f"{old}-wal"), new):
        file.touch()
    os.utime(old, times=(0, 0))
    os.utime(f"{old}-wal", times=(0, 0))
    Ledger(tmp_path / "ledger.sqlite").close()
    assert [file.name for file in tmp_path.glob(".*")] == [new.name]


def write_partial_checkpoints(store, letter, age):
    folder = store.folder / f".partial-{letter * 16}"
    folder.mkdir(parents=True)
    names = ("teachers_00000.safetensors", ".teachers_00001.safetensors.0123456789ab", ".tmpAbC123")
    for path in (*(folder / name for name in names), folder):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    return folder


def test_abandoned_checkpoints_are_removed_and_those_of_the_living_are_not(tmp_path):
    store = TeacherStore(tmp_path)
    ages = {"a": 0.0, "b": CHECKPOINT_MAX_AGE_SECONDS, "c": 1e8}
    fresh, old, living = (write_partial_checkpoints(store, letter, age) for letter, age in ages.items())
    (store.folder / f".partial-{'d' * 16}.lock").touch()
    with hold_lock(living.with_name(f"{living.name}.lock"), "place", on_wait=refuse):
        store.sweep()
        assert len(list(living.iterdir())) == 3
    assert [path.name for path in fresh.iterdir()] == ["teachers_00000.safetensors"] and not old.exists()
    assert not list(store.folder.glob(".*lock"))


def test_unfinished_files_of_the_store_are_removed(tmp_path):
    store = TeacherStore(tmp_path)
    store.record_charge("digits", None, "0" * 64)
    key = store.compute_keyed_digest(b"x")
    unfinished = (".bbbbbbbbbbbbbbbb/group_000000.safetensors", ".bbbbbbbbbbbbbbbb/votes/.tmpAbC123",
                  "aaaaaaaaaaaaaaaa/votes/.tmpAbC123", "aaaaaaaaaaaaaaaa/.manifest.json.0123456789ab",
                  ".fingerprint_key.0123456789ab")  # fmt: skip
    for name in unfinished:
        (store.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (store.folder / name).touch()
    with store.lock(), try_hold_lock(store.folder / ".lock", "place") as is_held:
        assert not is_held, "a sweep waits for what is being written"
    store.sweep()
    names = {str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.name != "README"}
    assert names == {".fingerprint_key", "accounts", "accounts/digits.json", "a" * 16, f"{'a' * 16}/votes"}
    assert store.compute_keyed_digest(b"x") == key


def test_an_id_is_never_read_as_a_number_by_the_command_line():
    parser = OverridesParser.create()
    ids = {run_folders.make_hex_id() for _ in range(300)}
    assert len(ids) == 300 and {parser.parse_override(f"k={id_}").value() for id_ in ids} == ids
    assert {run_folders.check_hex_id("teachers", id_) for id_ in ids} == ids
    assert not isinstance(parser.parse_override("k=5882e74772114871").value(), str)  # what must not be drawn
