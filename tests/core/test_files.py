"""Files are written whole, never through a link and for nobody else to write; names are escaped."""

import os

import pytest

from pate_torch.core.files import atomic_replacement, escape_control_chars, escape_spreadsheet_cell, write_atomically
from pate_torch.core.run_folders import create_protected_folder


@pytest.mark.parametrize("planted", [".out.csv.partial", f".out.csv.{'0' * 12}"])
def test_no_file_is_written_through_a_link(planted, tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 12)
    victim, out = tmp_path / "victim", tmp_path / "out.csv"
    victim.write_text("mine")
    for link in (out, tmp_path / planted):
        link.symlink_to(victim)
    if planted.endswith("0"):  # somebody guessed the name of the temporary file
        with pytest.raises(FileExistsError):
            write_atomically(out, "theirs")
    else:
        write_atomically(out, "theirs")
        assert out.read_text() == "theirs" and not out.is_symlink()
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


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_no_umask_lets_others_write(tmp_path, umask):
    before = os.umask(umask)
    try:
        create_protected_folder(tmp_path / "runs" / "a" / "b")
        write_atomically(tmp_path / "runs" / "a" / "b" / "c", "x")
    finally:
        os.umask(before)
    assert not any(place.stat().st_mode & 0o022 for place in (tmp_path / "runs", *(tmp_path / "runs").rglob("*")))


@pytest.mark.parametrize(
    ("text", "cell"),
    [("=1\x1b", "'=1\\x1b"), ("a\x1b[2Jb\n", "a\\x1b[2Jb\\n"), ("-1.5", "-1.5"), ("-inf", "'-inf"), ("a", "a")],
)
def test_control_characters_and_formulas_are_escaped(text, cell):
    assert escape_spreadsheet_cell(text) == cell and escape_control_chars(text) == cell.removeprefix("'")
