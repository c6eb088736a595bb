"""The examples run as they stand, in an empty home, and leave a release that passes."""

import runpy
import sys

import pytest

from pate_torch.verify.command import verify_release
from tests import ROOT

FILES = sorted((ROOT / "examples").glob("*.py"))
QUICK, SLOW = "chest_xrays", pytest.mark.slow(reason="whole examples; one of them runs by default")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("file", [pytest.param(f, marks=() if f.stem == QUICK else SLOW, id=f.stem) for f in FILES])
def test_an_example_runs_and_its_release_passes(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(file)])
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as stop:
        assert not stop.code
    assert "%" in capsys.readouterr().out  # it says how good it is
    (release,) = tmp_path.glob("runs/*/*/*/release")
    assert all(check.is_ok for check in verify_release(release, tmp_path / "ledger.sqlite"))


def test_every_example_is_short_and_listed():
    listed = (ROOT / "examples" / "README.md").read_text()
    for file in FILES:
        assert f"[{file.name}]({file.name})" in listed and len(file.read_text().splitlines()) <= 70
    assert len(FILES) == 3
