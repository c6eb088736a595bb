"""Each part of the GPU check passes on the simulated GPU, and a part that fails shows in the exit code."""

import json
import time

import pytest
import torch

from benchmarks.gpu import check, several_gpus
from benchmarks.gpu.check import NOT_RUN, PARTS, PASSED
from benchmarks.gpu.findings import Finding

QUICK = ("environment", "several_gpus")


def run_check(tmp_path, part):
    """(exit code, the results as they were written)"""
    file = tmp_path / "found.json"
    return check.main(["--small", "--only", part, "--json", str(file)]), json.loads(file.read_text())


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


def test_a_part_ends_when_its_seconds_are_over(monkeypatch):
    def find_forever(setup):
        while True:
            time.sleep(0.01)
            yield Finding("again", 1.0)

    monkeypatch.setitem(PARTS, "endless", (0.05, find_forever))
    result = check.run_part("endless", check.Setup(torch.device("cpu")))
    assert result["status"] == PASSED and result["findings"][-1]["what"] == "ended early"
    assert len(result["findings"]) < 20


def test_a_machine_without_a_gpu_is_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err


@pytest.mark.slow(reason="trains teachers in two processes")
def test_teachers_dealt_to_ranks_are_compared_with_those_of_one():
    found = list(several_gpus.compare_ranks("cpu", 2))
    assert [finding.passed for finding in found if finding.what == "votes"] == [True]
    assert all(finding.passed is not False for finding in found)
