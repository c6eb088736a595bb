"""The table over the five papers at a tiny size: goes on where it was stopped, charges what it says, shows refusals."""

import contextlib
import dataclasses
import io
import math
import re

import pytest
from omegaconf import OmegaConf

from benchmarks.replications.five_papers import ROWS, FivePapers, read_cells
from benchmarks.replications.splits import compute_sigma
from pate_torch.accounting import gdp
from pate_torch.config import Study
from pate_torch.privacy.partition import AddRemove
from pate_torch.students.linear import Logistic
from tests import ROOT
from tests.benchmarks.split_worlds import ASKED, plan_of, write_signs

QUICK = ("majority class", "no privacy: PSQ", "PSQ", "sparse vector, T = 1", "SSPP", "DP logistic regression")


REPLICATION = pytest.mark.slow(reason="replication of five papers: every row trains a model")


@pytest.fixture
def source(tmp_path):
    return write_signs(tmp_path, 800)


@pytest.fixture
def plan(source, tmp_path):
    return plan_of(source, tmp_path / "home", Logistic(ridge=1.0))


def study(source, **changes):
    given = {"tables": {"signs": {"dataset": source}}, **ASKED, "shard": 20, "epsilons": (2.0,), "repeats": 2}
    return FivePapers(**{**given, "rows": QUICK, **changes})


def ran(study, plan):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        study.run(plan)
    return read_cells(plan.root / "studies" / "five_papers.jsonl"), printed.getvalue()


@REPLICATION
def test_cells_are_charged_shown_and_not_measured_twice(source, plan, monkeypatch):
    one = study(source)
    assert isinstance(one, Study)
    cells, printed = ran(one, plan)
    assert len(cells) == 2 * len(QUICK) and len({(c.split, c.method, c.epsilon) for c in cells}) == len(cells)
    for cell in cells:
        free = ROWS[cell.method].free
        assert math.isinf(cell.epsilon) is free and (cell.spent == math.inf if free else 0 <= cell.spent <= 2.0)
    by = {c.method: c for c in cells if c.split == 0}
    assert by["PSQ"].spent == pytest.approx(2.0, rel=1e-6) and by["PSQ"].answered == 80
    sigma = compute_sigma(80, 2.0, 1 / 640)
    assert gdp.compute_epsilon(math.sqrt(2 * 80) / sigma, 1 / 640) == pytest.approx(by["PSQ"].spent)
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
    assert {(c.split, c.method) for c in again} == {(c.split, c.method) for c in cells}


@REPLICATION
def test_every_row_gives_a_model_or_says_why(source, plan):
    cells, _ = ran(study(source, rows=None, repeats=1, epsilons=(4.0,)), plan)
    assert {c.method for c in cells} == set(ROWS)
    for cell in cells:
        assert (cell.accuracy is None) == bool(cell.why)
        assert cell.accuracy is None or cell.spent <= 4.0 * (1 + 1e-9) or ROWS[cell.method].free


def test_every_missing_file_is_named_before_anything_is_computed(source, plan, monkeypatch):
    monkeypatch.setattr(FivePapers, "measure", lambda *given: pytest.fail("a cell was measured"))
    lost = dataclasses.replace(source, path="keel/lost.svm")
    tables = {
        "first": {"dataset": source},
        "second": {"dataset": lost, "command": "python write_second.py"},
        "third": {"dataset": dataclasses.replace(source, path="keel/gone.svm")},
    }
    with pytest.raises(ValueError, match=r"dataset\.path") as refused:
        study(source, tables=tables).run(plan)
    said = str(refused.value)
    assert "study.tables.second" in said and "keel/lost.svm" in said and "python write_second.py" in said
    assert "study.tables.third" in said and "keel/gone.svm" in said and "study.tables.first" not in said


def test_the_experiment_names_what_writes_the_table_of_no_package():
    conf = OmegaConf.load(ROOT / "benchmarks" / "conf" / "experiment" / "five_papers.yaml")
    command = conf.study.tables.magic.command
    (script,) = re.findall(r"python (\S+\.py) data/" + re.escape(conf.study.tables.magic.dataset.path), command)
    assert script == "benchmarks/keel_magic.py" and (ROOT / script).exists()


def test_it_refuses_what_is_not_public_and_other_neighbors(source, plan):
    with pytest.raises(ValueError, match="replace_one"):
        study(source).run(dataclasses.replace(plan, partition=AddRemove()))
    with pytest.raises(ValueError, match="not a public benchmark"):
        ran(study(dataclasses.replace(source, benchmark=False, publish_split=True)), plan)
