"""The check itself: each part passes on the pretend GPU, and a part that fails shows in the exit code."""

import json
import time

import pytest
import torch

from pate_torch.gpu_check import command, parts, runs
from pate_torch.gpu_check.command import PARTS
from pate_torch.gpu_check.parts import FAILED, NOT_RUN, PASSED, Bench, Finding, Part
from pate_torch.gpu_check.speed import speed
from tests.gpu_check.device_worlds import CUDA

CHECKED = [part for part in PARTS if part.name not in ("speed", "several_gpus")]
QUICK = ("facts", "memory")
each_checked = pytest.mark.parametrize(
    "part", [pytest.param(p, marks=[] if p.name in QUICK else [pytest.mark.slow], id=p.name) for p in CHECKED]
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Also where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_all_parts_together_take_less_than_eight_minutes():
    assert sum(part.seconds for part in PARTS) < 8 * 60


@each_checked
def test_a_part_passes(part, tmp_path, capsys):
    assert command.main(["--only", part.name, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    [result] = found["parts"]
    assert found["passed"] and found["device"] == "pretend" and result["status"] == PASSED
    assert any(finding["passed"] for finding in result["findings"])
    shown = capsys.readouterr().out
    assert "FAILED" not in shown and "1 of 1 parts run on a pretend GPU" in shown


def test_a_part_that_fails_is_exit_code_1(monkeypatch, capsys):
    cloudy = Part("facts", "", 5, lambda bench: iter([Finding("sun", "hidden", passed=False)]))
    monkeypatch.setattr(command, "PARTS", (cloudy,))
    assert command.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_what_cannot_run_here_says_why(capsys, tmp_path):
    assert command.main(["--only", "speed", "several_gpus", "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "a pretend GPU has no speed" in shown and "0 of 2 parts run" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert [result["status"] for result in found["parts"]] == [NOT_RUN, NOT_RUN]


def test_a_wrong_argument_is_exit_code_2(capsys, tmp_path):
    assert command.main(["--json", str(tmp_path / "nowhere" / "found.json")]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        command.main(["--only", "nonsense"])
    assert stop.value.code == 2


def test_an_error_in_a_part_is_its_own():
    def broken(bench):
        yield Finding("first", 1.0, passed=True)
        raise RuntimeError("a kernel died")

    result = parts.run(Part("broken", "", 5, broken), Bench(torch.device("cpu")))
    assert result.status == FAILED and result.findings[-1].found == "RuntimeError: a kernel died"


def test_a_part_ends_when_its_seconds_are_over():
    def endless(bench):
        while True:
            time.sleep(0.01)
            yield Finding("again", 1.0)

    result = parts.run(Part("endless", "", 0.05, endless), Bench(torch.device("cpu")))
    assert result.status == PASSED and result.findings[-1].what == "ended early"
    assert len(result.findings) < 20


@pytest.mark.slow
def test_what_is_timed_runs_on_the_card(card):
    """Its seconds mean nothing there."""
    found = list(speed(Bench(CUDA, toy=True)))
    assert len(found) > 25 and all(finding.found > 0 for finding in found)


@pytest.mark.slow
def test_teachers_dealt_to_ranks_are_compared_with_those_of_one():
    found = list(runs.dealt("cpu", 2))
    assert [finding.passed for finding in found if finding.what == "votes"] == [True]
    assert all(finding.passed is not False for finding in found)
