"""Files written whole or not at all, never through a link, never for others to write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pate_torch.core.files import atomic_replacement, escape_control_chars, escape_spreadsheet_cell, write_atomically
from pate_torch.core.run_folders import (
    create_protected_folder,
    get_home_folder,
    get_runs_folder,
    get_user_store,
    make_unique_run_id,
)
from pate_torch.privacy.ledger import Ledger
from tests import ROOT


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out.csv").symlink_to(victim)
    (tmp_path / ".out.csv.partial").symlink_to(victim)
    write_atomically(tmp_path / "out.csv", "theirs")
    assert victim.read_text() == "mine" and (tmp_path / "out.csv").read_text() == "theirs"
    assert not (tmp_path / "out.csv").is_symlink()


def test_a_planted_temporary_name_is_refused(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 12)
    (tmp_path / f".out.csv.{'0' * 12}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "out.csv", "theirs")
    assert victim.read_text() == "mine"


def test_file_and_folder_reach_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: calls.append(os.path.isdir(f"/proc/self/fd/{handle}")) or fsync(handle)
    )
    monkeypatch.setattr("pathlib.Path.replace", lambda self, to: calls.append("rename") or replace(self, to))
    with atomic_replacement(tmp_path / "a") as temporary:
        temporary.write_text("a")
    assert calls == [False, "rename", True]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_no_umask_lets_others_write(tmp_path, umask):
    before = os.umask(umask)
    try:
        create_protected_folder(tmp_path / "runs" / "a" / "b")
        write_atomically(tmp_path / "runs" / "a" / "b" / "c", "x")
    finally:
        os.umask(before)
    assert not any(place.stat().st_mode & 0o022 for place in (tmp_path / "runs").rglob("*"))
    assert not (tmp_path / "runs").stat().st_mode & 0o022


def test_what_killed_processes_left_of_a_new_ledger_is_swept_an_hour_later(tmp_path):
    old, new = (tmp_path / f".ledger.sqlite.{digit * 16}" for digit in "ab")
    for file in (old, Path(f"{old}-wal"), new):
        file.touch()
    os.utime(old, times=(0, 0))
    os.utime(f"{old}-wal", times=(0, 0))
    Ledger(tmp_path / "ledger.sqlite").close()
    assert [file.name for file in tmp_path.glob(".*")] == [new.name]


def test_two_calls_in_one_microsecond_have_two_names():
    assert len({make_unique_run_id() for _ in range(50)}) == 50


def test_control_characters_are_written_out():
    assert (
        escape_control_chars("a\x1b[2Jb\x07\n") == "a\\x1b[2Jb\\x07\\n"
        and escape_spreadsheet_cell("=1\x1b") == "'=1\\x1b"
    )


def test_the_store_of_a_user_holds_no_runs(monkeypatch, tmp_path):
    monkeypatch.delenv("PATE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert get_home_folder() == str(get_user_store()) == str(tmp_path / "pate_torch")
    assert str(get_runs_folder(get_user_store())) == "outputs/runs" and get_runs_folder(tmp_path) == tmp_path / "runs"
    monkeypatch.setenv("PATE_HOME", "elsewhere")
    assert get_home_folder() == "elsewhere" and get_home_folder("here") == "here"


@pytest.mark.parametrize("redirection", [">&-", "| head -c 0"])
def test_a_closed_output_ends_without_a_traceback(redirection):
    command = f"{sys.executable} -m pate_torch --help {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_in_one_line(monkeypatch, capsys):
    from pate_torch.cli import main

    def interrupt():
        raise KeyboardInterrupt

    assert main.run_command(interrupt) == 130
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "stays charged" in said
