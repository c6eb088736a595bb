"""Places that one process holds at a time: who has it, who comes next, what is swept; without locks nothing runs."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import pytest

from pate_torch.core import locks, run_folders
from pate_torch.teachers.store import CHECKPOINT_MAX_AGE_SECONDS, TeacherStore


def refuse(holder):
    raise ValueError(holder)


def hold_for_ever(path, ready):
    with locks.hold(path, "place", on_wait=refuse):
        ready.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds ``place``."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=hold_for_ever, args=(tmp_path / "place", ready))
    child.start()
    assert ready.wait(120)
    yield child
    child.kill()
    child.join()


def test_a_place_is_held_by_one_and_free_afterwards(tmp_path):
    place = tmp_path / "place"
    for _ in range(2):
        with locks.hold(place, "place", on_wait=refuse):
            with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* since 2"):
                locks.hold(place, "place", on_wait=refuse).__enter__()
            with locks.try_hold(place, "place") as mine:
                assert not mine
        assert not place.exists()


def test_a_place_is_held_by_one_process_until_it_is_killed(tmp_path, holder):
    place = tmp_path / "place"
    with pytest.raises(ValueError, match=f"process {holder.pid} "):
        locks.hold(place, "place", on_wait=refuse).__enter__()
    heard, killer = [], threading.Timer(0.3, holder.kill)
    killer.start()
    with locks.hold(place, "place", on_wait=heard.append):
        holder.join(60)
        assert holder.exitcode == -signal.SIGKILL
    assert len(heard) == 1 and str(holder.pid) in heard[0]


def test_those_who_wait_come_one_at_a_time(tmp_path):
    place, inside, most = tmp_path / "place", [], []

    def enter():
        for _ in range(20):
            with locks.hold(place, "place", on_wait=lambda _: None):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 160 and max(most) == 1


def test_a_forked_child_holds_nothing(tmp_path):
    """Else workers that outlive a killed run would keep the next one waiting."""
    place = tmp_path / "place"
    context = multiprocessing.get_context("fork")
    with locks.hold(place, "place", on_wait=refuse):
        child = context.Process(target=time.sleep, args=(600,))
        child.start()
    try:
        with locks.hold(place, "place", on_wait=refuse):
            pass
    finally:
        child.kill()
        child.join()


def test_what_a_fork_leaves_behind_does_not_free_the_place(tmp_path):
    place = tmp_path / "place"
    with locks.hold(place, "place", on_wait=refuse):
        child = os.fork()
        if child == 0:
            try:
                raise SystemExit  # unwinds the child's copy of the with
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with locks.try_hold(place, "place") as mine:
            assert not mine and place.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=rf"place=.*cannot be locked \({os.strerror(code)}\).*local disk"):
        locks.hold(tmp_path / "place", "place", on_wait=refuse).__enter__()


def test_a_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    with pytest.raises(ValueError, match="no flock"):
        TeacherStore(tmp_path).record_charge("digits", None, "0" * 64)


# ---- what is swept --------------------------------------------------------------------------------------------------


def test_what_a_killed_run_left_half_written_is_swept_and_nothing_else(tmp_path):
    dead, living, finished = (tmp_path / "runs" / "digits" / "gaussian" / name for name in ("dead", "living", "done"))
    half, whole = (".labels.csv.partial", ".tmpAbC123", ".votes.safetensors.0123456789ab"), ("labels.csv", ".hydra")
    for run in (dead, living, finished):
        (run / "release").mkdir(parents=True)
        for name in (*half, *whole):
            (run / "release" / name).write_text("")
    (dead / ".lock").write_text('[1, "there", "then"]')
    with run_folders.hold(living):
        assert sorted(path.name for path in (living / "release").iterdir()) == sorted(whole)
        (living / "release" / ".labels.csv.partial").write_text("")
        run_folders.remove_killed_run_files(tmp_path)
        assert (living / "release" / ".labels.csv.partial").exists()
    assert sorted(path.name for path in (dead / "release").iterdir()) == sorted(whole)
    assert not (dead / ".lock").exists() and not (living / ".lock").exists()


def test_a_claim_that_came_to_nothing_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), run_folders.hold(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


def partial(store, name, age=0.0):
    folder = store.folder / f".partial-{name}"
    folder.mkdir(parents=True)
    for file in ("chunk_00000.safetensors", ".chunk_00001.safetensors.0123456789ab", ".tmpAbC123"):
        (folder / file).write_text("")
        os.utime(folder / file, (time.time() - age,) * 2)
    os.utime(folder, (time.time() - age,) * 2)
    return folder


def test_abandoned_checkpoints_are_swept_and_those_of_the_living_are_not(tmp_path):
    store = TeacherStore(tmp_path)
    fresh, old, living = (
        partial(store, "a" * 16),
        partial(store, "b" * 16, CHECKPOINT_MAX_AGE_SECONDS),
        partial(store, "c" * 16, 1e8),
    )
    (store.folder / f".partial-{'d' * 16}.lock").write_text("")
    with locks.hold(living.with_name(f"{living.name}.lock"), "place", on_wait=refuse):
        store.sweep()
        assert len(list(living.iterdir())) == 3
    assert [path.name for path in fresh.iterdir()] == ["chunk_00000.safetensors"]
    assert not old.exists()
    assert sorted(path.name for path in store.folder.glob(".*lock")) == []


def test_half_written_files_of_the_store_are_swept(tmp_path):
    store = TeacherStore(tmp_path)
    store.record_charge("digits", None, "0" * 64)
    ensemble, unfinished = store.folder / ("a" * 16), store.folder / ("." + "b" * 16)
    for folder in (ensemble / "votes", unfinished / "votes"):
        folder.mkdir(parents=True)
        (folder / ".tmpAbC123").write_text("")
    (unfinished / "ensemble.safetensors").write_text("")
    (ensemble / ".manifest.json.0123456789ab").write_text("")
    key = store.compute_keyed_digest(b"x")
    (store.folder / ".fingerprint_key.0123456789ab").write_text("")
    with store.lock(), pytest.raises(ValueError):
        locks.hold(
            store.folder / ".lock", "place", on_wait=refuse
        ).__enter__()  # a sweep would wait for what is written
    store.sweep()
    names = {str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.name != "README"}
    assert names == {".fingerprint_key", "accounts", "accounts/digits.json", "a" * 16, f"{'a' * 16}/votes"}
    assert store.compute_keyed_digest(b"x") == key
