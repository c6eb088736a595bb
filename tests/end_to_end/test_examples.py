"""The examples run as they stand, in an empty home, and leave a release that passes."""

import runpy
import sys

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from pate_verify.command import verify_release
from tests import ROOT

DRAWINGS = ROOT / "examples" / "drawings.py"
FILES = sorted(file for file in (ROOT / "examples").glob("*.py") if file != DRAWINGS)
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


@pytest.mark.slow(reason="draws thousands of images")
def test_the_drawings_are_a_folder_of_images_and_weights_of_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(DRAWINGS), str(tmp_path), "--steps=2"])
    runpy.run_path(str(DRAWINGS), run_name="__main__")
    parts = {part: ImageFolder(tmp_path / part) for part in ("private", "test")}
    assert {part: len(images) for part, images in parts.items()} == {"private": 2400, "test": 300}
    assert all(images.classes == list("ABCDEFGHIJ") for images in parts.values())
    public = list((tmp_path / "public").iterdir())
    files = [*public, *(tmp_path / part for images in parts.values() for part, _ in images.samples)]
    assert len(public) == 400 and len({file.read_bytes() for file in files}) == 3100  # no drawing is there twice
    weights = torch.load(tmp_path / "resnet18.pth", weights_only=True)
    resnet18(num_classes=len(weights["fc.bias"])).load_state_dict(weights)


def test_every_example_is_short_and_listed():
    listed = (ROOT / "examples" / "README.md").read_text()
    for file in [*FILES, DRAWINGS]:
        longest = 120 if file == DRAWINGS else 70
        assert f"[{file.name}]({file.name})" in listed and len(file.read_text().splitlines()) <= longest
    assert len(FILES) == 3
