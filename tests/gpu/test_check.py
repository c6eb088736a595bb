"""Each part of the GPU check passes on the simulated GPU, and a part that fails shows in the exit code."""

import json
import time

import pytest
import torch

from benchmarks.gpu import check, several_gpus
from benchmarks.gpu.check import FAILED, NOT_RUN, PARTS, PASSED, run_part
from benchmarks.gpu.findings import Finding, Setup

QUICK = ("environment", "several_gpus")


def run_check(tmp_path, part):
    """(exit code, the results as they were written)"""
    file = tmp_path / "found.json"
    return check.main(["--small", "--only", part, "--json", str(file)]), json.loads(file.read_text())


def test_all_parts_together_take_less_than_eight_minutes():
    assert sum(seconds for seconds, _ in PARTS.values()) < 8 * 60


@pytest.mark.parametrize(
    "part",
    [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow(reason="a part of the GPU check")) for p in PARTS],
)
def test_a_part_passes(part, tmp_path, capsys, simulated_gpu):
    code, found = run_check(tmp_path, part)
    [result] = found["parts"]
    assert code == 0 and found["passed"] and found["small"]
    shown = capsys.readouterr().out
    assert "FAILED" not in shown
    if part == "several_gpus":
        assert result["status"] == NOT_RUN and "there is one GPU" in shown and "0 of 1 parts run" in shown
        return
    assert result["status"] == PASSED and "1 of 1 parts run" in shown
    if part == "speed":  # seconds of a simulated GPU mean nothing
        assert len(result["findings"]) > 25 and all(finding["value"] > 0 for finding in result["findings"])
    else:
        assert any(finding["passed"] for finding in result["findings"])


def test_a_part_that_fails_is_exit_code_1(monkeypatch, capsys, tmp_path, simulated_gpu):
    sunless = {"environment": (5, lambda setup: iter([Finding("sun", "hidden", passed=False)]))}
    monkeypatch.setattr(check, "PARTS", sunless)
    code, found = run_check(tmp_path, "environment")
    assert code == 1 and not found["passed"]
    assert "hidden  FAILED" in capsys.readouterr().out


def test_a_wrong_argument_is_exit_code_2(capsys, tmp_path, simulated_gpu):
    assert check.main(["--json", str(tmp_path / "nowhere" / "found.json")]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        check.main(["--only", "nonsense"])
    assert stop.value.code == 2


def test_a_machine_without_a_gpu_is_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err


def test_an_error_in_a_part_is_one_of_its_findings(monkeypatch):
    def raise_error(setup):
        yield Finding("first", 1.0, passed=True)
        raise RuntimeError("a kernel died")

    monkeypatch.setitem(PARTS, "broken", (5, raise_error))
    result = run_part("broken", Setup(torch.device("cpu")))
    assert result["status"] == FAILED and result["findings"][-1]["value"] == "RuntimeError: a kernel died"


def test_a_part_ends_when_its_seconds_are_over(monkeypatch):
    def find_forever(setup):
        while True:
            time.sleep(0.01)
            yield Finding("again", 1.0)

    monkeypatch.setitem(PARTS, "endless", (0.05, find_forever))
    result = run_part("endless", Setup(torch.device("cpu")))
    assert result["status"] == PASSED and result["findings"][-1]["what"] == "ended early"
    assert len(result["findings"]) < 20


@pytest.mark.slow(reason="trains teachers in two processes")
def test_teachers_dealt_to_ranks_are_compared_with_those_of_one():
    found = list(several_gpus.compare_ranks("cpu", 2))
    assert [finding.passed for finding in found if finding.what == "votes"] == [True]
    assert all(finding.passed is not False for finding in found)
