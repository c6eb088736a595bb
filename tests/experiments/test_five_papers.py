"""The table over the five papers at a tiny size: goes on where it was stopped, charges what it says, shows refusals."""

import contextlib
import dataclasses
import io
import json
import math

import numpy as np
import pytest

from pate_torch.accounting import gdp
from pate_torch.config import Study
from pate_torch.data.libsvm import Libsvm
from pate_torch.data.partition import AddRemove, ReplaceOne
from pate_torch.experiments import five_papers
from pate_torch.experiments.five_papers import ROWS, Cell, FivePapers, read
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.queries.disagreement import Disagreement
from pate_torch.queries.random import Random
from pate_torch.students.logistic import Logistic
from pate_torch.teachers.training import TeacherRecipe
from tests.run_configs import run_config

QUICK = ("majority class", "no privacy: PSQ", "PSQ", "sparse vector, T = 1", "SSPP", "DP logistic regression")


@pytest.fixture
def source(tmp_path):
    """800 rows whose class is the sign of their first feature; a third are of the second class."""
    draw = np.random.default_rng(0)
    y = draw.random(800) < 1 / 3
    rows = [f"{int(c)} 1:{(2 * c - 1) * (0.5 + draw.random()):.3f} 2:{draw.normal():.3f}" for c in y]
    path = tmp_path / "signs.svm"
    path.write_text("\n".join(rows) + "\n")
    shares = (0.8, 0.1, 0.1)
    return Libsvm(
        name="signs", path=str(path), roles="position", fractions=shares, classes=(0, 1), num_features=2, benchmark=True
    )


@pytest.fixture
def plan(source, tmp_path):
    student = Logistic(ridge=1.0)
    return run_config(
        dataset=source,
        partition=ReplaceOne(),
        teacher=TeacherRecipe(network="logistic", steps=20, batch_size=8, learning_rate=0.1, backend="vectorised"),
        mechanism=Gaussian(sigma=1.0),
        query=Random(name="passive", shuffle=False),
        student=student,
        guide_student=student,
        root=tmp_path / "home",
        folder=tmp_path / "home" / "run",
        seed=0,
        num_teachers=1,
        num_queries=1,
        delta=1e-4,
        quiet=True,
    )


def study(source, **changes):
    given = {
        "tables": {"signs": {"dataset": source}},
        "passive": Random(name="passive", shuffle=False),
        "active": Disagreement(),
        "shard": 20,
    }
    return FivePapers(**{**given, "epsilons": (2.0,), "repeats": 2, "rows": QUICK, **changes})


def ran(study, plan):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        study.run(plan)
    return read(plan.root / "studies" / "five_papers.jsonl"), printed.getvalue()


def test_cells_are_charged_shown_and_not_measured_twice(source, plan, monkeypatch):
    one = study(source)
    assert isinstance(one, Study)
    cells, printed = ran(one, plan)
    assert len(cells) == 2 * len(QUICK) and len({(c.split, c.row, c.epsilon) for c in cells}) == len(cells)
    for cell in cells:
        free = ROWS[cell.row].free
        assert math.isinf(cell.epsilon) is free and (cell.spent == math.inf if free else 0 <= cell.spent <= 2.0)
    by = {c.row: c for c in cells if c.split == 0}
    assert by["PSQ"].spent == pytest.approx(2.0, rel=1e-6) and by["PSQ"].answered == 80
    sigma = five_papers.calibrated_sigma("exact", 80, 2.0, 1 / 640)
    assert gdp.epsilon(math.sqrt(2 * 80) / sigma, 1 / 640) == pytest.approx(by["PSQ"].spent)
    assert by["SSPP"].accuracy > 0.9 and by["DP logistic regression"].accuracy > 0.8
    assert by["sparse vector, T = 1"].accuracy is None and "num_teachers=32" in by["sparse vector, T = 1"].why
    assert "none" in printed and "signs (2 splits)" in printed
    assert (plan.folder / "five_papers.txt").read_text().strip() in printed

    # A line that was cut off is measured again, and nothing else is.
    file = plan.root / "studies" / "five_papers.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20] + "\n")
    measured = []
    right = FivePapers.measure
    monkeypatch.setattr(FivePapers, "measure", lambda *given: measured.append(given[2:]) or right(*given))
    again, _ = ran(one, plan)
    assert measured == [("DP logistic regression", 2.0)]
    assert {(c.split, c.row) for c in again} == {(c.split, c.row) for c in cells}


@pytest.mark.slow
def test_every_row_gives_a_model_or_says_why(source, plan):
    cells, _ = ran(study(source, rows=None, repeats=1, epsilons=(4.0,)), plan)
    assert {c.row for c in cells} == set(ROWS)
    for cell in cells:
        assert (cell.accuracy is None) == bool(cell.why)
        assert cell.accuracy is None or cell.spent <= 4.0 * (1 + 1e-9) or ROWS[cell.row].free


def test_the_table_shows_means_papers_figures_and_how_many_gave_a_model():
    place = {"dataset": "mushroom", "row": "PSQ", "epsilon": 0.5, "spent": 0.5}
    cells = [Cell(**place, split=i, accuracy=a) for i, a in enumerate((0.7, 0.8, None))]
    cells.append(Cell(dataset="mushroom", split=0, row="no privacy: PSQ", epsilon=math.inf, spent=math.inf, accuracy=1))
    shown = five_papers.text(cells, ["mushroom"])
    assert "mushroom (3 splits)" in shown
    assert f".7500±{1.96 * 0.05:.4f}".replace("0.", ".") + " 2/3" in shown and ".6416" in shown and ".9773" in shown


def test_it_refuses_what_is_not_public_and_other_neighbors(source, plan):
    with pytest.raises(ValueError, match="replace_one"):
        study(source).run(dataclasses.replace(plan, partition=AddRemove()))
    with pytest.raises(ValueError, match="not a public benchmark"):
        ran(study(dataclasses.replace(source, benchmark=False, publish_split=True)), plan)
    with pytest.raises(ValueError, match=r"study\.rows='PSK'"):
        study(source, rows=["PSK"])
    with pytest.raises(ValueError, match=r"study\.tables\.signs\.dataset"):
        study(source, tables={"signs": {}})


def test_a_cell_survives_its_file(tmp_path):
    cell = Cell(
        dataset="a", split=1, row="PSQ", epsilon=math.inf, spent=math.inf, answered=3, accuracy=0.5, balanced=0.4
    )
    (tmp_path / "cells.jsonl").write_text(json.dumps(five_papers._plain(dataclasses.asdict(cell))) + "\n")
    assert read(tmp_path / "cells.jsonl") == [cell] and read(tmp_path / "nothing.jsonl") == []
