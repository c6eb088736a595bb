"""Keys of a site: files that only their owner can read, keys that are used once, and clear refusals."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from pate_torch.sites.keys import DEFAULT_NUM_SLOTS, SiteState, load_joiner_key, read_key_file


def test_new_keys_have_a_signed_public_half_and_a_private_file_and_are_made_once(tmp_path):
    state = SiteState.create(tmp_path / "site", "Anna Hospital")
    keys = read_key_file(state.key_file, "anna.key")
    assert keys.site == "Anna Hospital" and len(set(keys.slot_keys)) == DEFAULT_NUM_SLOTS == 16
    assert len(state.key_file) < 4000
    path = tmp_path / "site" / "secrets.json"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    stored = json.loads(path.read_text())
    private_keys = [stored["signing_key"], stored["kem_seed"], *stored["slot_keys"].values()]
    assert not any(bytes.fromhex(key) in state.key_file or key.encode() in state.key_file for key in private_keys)
    assert len(set(private_keys)) == 18
    before = state.key_file
    with pytest.raises(ValueError, match="has keys already"):
        SiteState.create(tmp_path / "site", "A")
    assert SiteState(tmp_path / "site").key_file == before


def test_a_folder_that_others_can_read_or_write_is_refused(tmp_path):
    state, other = SiteState.create(tmp_path / "a", "A"), SiteState.create(tmp_path / "b", "A")
    original = (tmp_path / "a" / "key file.pate").read_bytes()
    (tmp_path / "a" / "key file.pate").write_bytes(other.key_file)
    with pytest.raises(ValueError, match=r"'key file\.pate' is missing or was altered"):
        _ = state.key_file
    (tmp_path / "a" / "key file.pate").write_bytes(original)
    (tmp_path / "a" / "secrets.json").chmod(0o640)
    with pytest.raises(ValueError, match=r"its keys can be read by other users. Run chmod 600"):
        _ = state.key_file


def test_a_damaged_or_missing_file_of_keys(tmp_path):
    with pytest.raises(ValueError, match=r"has no keys of a site. Run `pate site init` first"):
        _ = SiteState(tmp_path).key_file
    SiteState.create(tmp_path / "a", "A")
    for content in ("", "{", "[]", "{}", '{"site": "A", "colour": "red"}'):
        (tmp_path / "a" / "secrets.json").write_text(content)
        with pytest.raises(ValueError, match="its file of keys is damaged"):
            _ = SiteState(tmp_path / "a").key_file


@pytest.mark.parametrize("name", ["", " A", "A\n", "a" * 201, "U\u0308", "\x1b[2J"])
def test_names_are_printable_and_have_one_form(tmp_path, name):
    with pytest.raises(ValueError, match=r"site=.*must be a name"):
        SiteState.create(tmp_path, name)
    assert not (tmp_path / "secrets.json").exists()


def test_a_damaged_or_missing_key_of_the_joiner(tmp_path):
    (tmp_path / "short").write_text("00")
    for name in ("short", "none"):
        with pytest.raises(ValueError, match="is missing or is not the key of a joiner"):
            load_joiner_key(tmp_path / name)


def test_keys_of_a_process_that_died_while_it_saved_are_erased(tmp_path):
    """The copy that such a process leaves has keys of slots that later answers erase."""
    state = SiteState.create(tmp_path / "a", "A", 3)
    with state.open() as secrets:
        old_key = secrets.slot_keys["0"]

    def save_and_die() -> None:
        Path.replace = lambda *paths: os._exit(0)
        with state.open() as secrets:
            state.save(secrets)

    process = multiprocessing.get_context("fork").Process(target=save_and_die)
    process.start()
    process.join(60)
    (copy,) = (tmp_path / "a").glob(".secrets.json.*")
    assert old_key in copy.read_text()
    with state.open() as secrets:
        del secrets.slot_keys["0"]
        state.save(secrets)
    files = [path for path in (tmp_path / "a").iterdir() if path.is_file()]
    assert len(files) > 2 and not any(old_key.encode() in path.read_bytes() for path in files)
