"""Short names of boards: links that TensorBoard follows, one for each run, and none where there are no runs."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories
from torch.utils.tensorboard import SummaryWriter

from pate_torch.release.curves import Curves, link_run


def board(root, name, of="digits/gaussian"):
    folder = root / "runs" / of / name / "release" / "tensorboard"
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("x", 1.0)
    link_run(folder, root)
    return folder


def names(root):
    found = GetLogdirSubdirectories(str(root / "tensorboard"))
    return {folder.removeprefix(f"{root}/tensorboard/") for folder in found}


def test_every_run_has_a_short_name_that_leads_to_its_board(tmp_path):
    first, second = (board(tmp_path, f"2026-11-23_17-37-55-{n:06d}") for n in (433145, 1))
    board(tmp_path, "2026-11-23_17-38-02-000000_1")
    board(tmp_path, "night-1", of="digits/confident")
    assert names(tmp_path) == {
        *("digits/gaussian/1123-1737", "digits/gaussian/1123-1737.2", "digits/gaussian/1123-1738_1"),
        "digits/confident/night-1",
    }
    short = tmp_path / "tensorboard/digits/gaussian"
    assert (short / "1123-1737").resolve() == first and (short / "1123-1737.2").resolve() == second
    assert not (short / "1123-1737").readlink().is_absolute(), "the folder of all runs may be moved"


def test_a_run_that_goes_on_keeps_its_name(tmp_path):
    for _ in range(2):
        board(tmp_path, "2026-11-23_17-37-55-433145")
    assert names(tmp_path) == {"digits/gaussian/1123-1737"}


def test_a_root_may_be_named_from_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/runs/digits/gaussian/night-1/release/tensorboard")
    folder.mkdir(parents=True)
    link_run(folder.absolute(), Path("outputs"))
    assert Path("outputs/tensorboard/digits/gaussian/night-1").resolve() == folder.resolve()


def test_a_board_elsewhere_gets_no_link(tmp_path):
    link_run(tmp_path / "else" / "release" / "tensorboard", tmp_path)
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("points", [1, 2, 3])
def test_a_curve_begins_with_its_second_point(points, tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        curves = Curves(writer)
        for step in range(points):
            curves.log("loss", 1.0, step)
        assert curves.drawn_tags == ({"loss"} if points > 1 else set())
        assert curves.pop_single_values() == ({} if points > 1 else {"loss": 1.0})
