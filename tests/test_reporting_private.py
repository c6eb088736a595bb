"""The owner's side: folders others cannot open, figures that stay there, and what the private board shows."""

import json
import math
import os
import stat

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pate_torch.reporting.private import (
    OwnerSummary,
    PrivateBoard,
    gap_quantiles,
    make_private_folder,
    write_owner_summary,
)
from pate_torch.types import Votes

VOTES = Votes(torch.tensor([[8, 1, 1], [5, 5, 0], [4, 3, 3], [0, 0, 10]]), 10)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_private_folders_are_closed_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        assert mode(make_private_folder(tmp_path / "a")) == 0o700
        (tmp_path / "b").mkdir(mode=0o777)
        assert mode(make_private_folder(tmp_path / "b", "teachers")) == 0o700
    finally:
        os.umask(old)
    assert "PRIVATE" in (tmp_path / "a" / "README.txt").read_text()
    assert "ensemble" in (tmp_path / "b" / "README.txt").read_text()


def test_gap_quantiles_agree_with_numpy():
    gaps = [7, 0, 1, 10]
    found = gap_quantiles(VOTES)
    assert list(found) == ["0", "0.05", "0.25", "0.5", "0.75", "0.95", "1"]
    assert list(found.values()) == pytest.approx([np.quantile(gaps, float(q)) for q in found])


def test_owner_summary_has_its_keys_and_refuses_nan(tmp_path):
    summary = OwnerSummary(ensemble_accuracy=0.98, epsilon_pate2018=1.9, gap_quantiles=gap_quantiles(VOTES))
    write_owner_summary(summary, tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert set(read) >= {
        "ensemble_accuracy",
        "teacher_accuracy_mean",
        "epsilon_exact_data_dependent",
        "epsilon_pate2018",
        "gap_quantiles",
    }
    for field in ("ensemble_accuracy", "epsilon_pate2018", "epsilon_exact_data_dependent"):
        with pytest.raises(ValueError, match=field):
            OwnerSummary(**{field: math.nan})
    with pytest.raises(ValueError, match="gap_quantiles"):
        OwnerSummary(gap_quantiles={"0.5": math.nan})


def test_owner_lines_show_no_price():
    lines = OwnerSummary(ensemble_accuracy=0.98, epsilon_pate2018=1.9, nonprivate_accuracy=0.99).lines()
    assert [line.value for line in lines] == ["98.0 %", "99.0 %"]


def test_the_private_board_shows_teachers_and_votes(tmp_path):
    board = PrivateBoard(tmp_path / "tensorboard")
    board.log("teachers/loss_mean", 1.5, 3)
    board.losses(3, torch.tensor([1.0, 2.0, math.nan]))
    board.accuracies(torch.tensor([0.5, 0.75]))
    board.votes(VOTES, torch.tensor([True, False, True, True]))
    board.close()
    assert mode(tmp_path / "tensorboard") == 0o700
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert set(read.Tags()["scalars"]) == {"teachers/loss_mean", "votes/answered_share"}
    assert set(read.Tags()["histograms"]) == {"teachers/loss", "teachers/accuracy", "votes/gap", "votes/top"}
    assert [e.value for e in read.Scalars("votes/answered_share")] == pytest.approx([1, 1 / 2, 2 / 3, 3 / 4])
    assert read.Histograms("teachers/loss")[0].histogram_value.num == 2
