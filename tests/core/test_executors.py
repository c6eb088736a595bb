"""Executors: processes that end with the main process, and workers of Dask and jobs of submitit that are repeated."""

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from pate_torch.core import executors, scheduling
from pate_torch.core.executors import Dask, Submitit, Workers
from pate_torch.core.scheduling import run_units
from tests import ROOT

CPU, UNITS = torch.device("cpu"), list(range(6))
needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")

START = partial(Workers(workers=2).start, folder=Path())


def work(unit):
    return unit, os.getpid(), torch.get_num_threads()


class KillOnce:
    """Work whose worker is killed at one unit, the first time, after another unit has begun."""

    def __init__(self, folder, victim):
        self.file, self.victim = folder / "killed", victim

    def __call__(self, unit):
        time.sleep(0.05)
        if unit == self.victim and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return unit


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow(reason="each worker imports torch anew"))])
def forks(request, monkeypatch):
    """Both ways to start a process, wherever the first one works."""
    if request.param and not executors.can_fork():
        pytest.skip("a copy of this process could not compute")
    monkeypatch.setattr(executors, "can_fork", lambda: request.param)


def test_processes_have_one_thread_and_are_other_processes(forks):
    results = dict(run_units(work, UNITS, START, 2))
    assert {unit: value for unit, (value, _, _) in results.items()} == {unit: unit for unit in UNITS}
    assert os.getpid() not in {pid for _, pid, _ in results.values()}
    assert {threads for _, _, threads in results.values()} == {1}


@pytest.mark.parametrize("victim", [0, 5])
def test_a_killed_process_costs_a_repetition(victim, tmp_path, forks, monkeypatch):
    monkeypatch.setattr(scheduling, "SLOW_FACTOR", math.inf)  # no copy of a slow unit, which could be faster
    lines = []
    units = run_units(KillOnce(tmp_path, victim), UNITS, START, 2, print_message=lines.append)
    assert sorted(unit for unit, _ in units) == UNITS
    assert len(lines) == 1 and (tmp_path / "killed").exists()


def test_processes_of_a_run_that_is_stopped_end(tmp_path, forks):
    units = run_units(work, range(100), START, 2)
    pids = {next(units)[1][1] for _ in range(4)}
    units.close()
    assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]


ORPHAN = """
import os, signal, time
from pate_torch.core import executors
from tests.core.test_executors import work

executors.can_fork = lambda: {fork}
print("program", flush=True)
pool = executors.Workers(workers=3).start(3, None)
pids = {{pool.submit(work, unit).result()[1] for unit in range(20)}}
pool.submit(time.sleep, 1000)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_proc
@pytest.mark.slow(reason="kill run")
def test_no_process_outlives_a_killed_run(forks, tmp_path):
    program = tmp_path / "orphan.py"
    program.write_text(ORPHAN.format(fork=executors.can_fork()))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"env": environment, "capture_output": True, "text": True, "check": False, "timeout": 300}
    run = subprocess.run([sys.executable, program], **options)
    assert run.returncode == -9, run.stderr
    program_run, *pids = run.stdout.split()
    assert program_run == "program" and pids and "program" not in pids, "a worker ran the program again"
    deadline = time.monotonic() + 60
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_processes_are_used_where_they_save_time():
    assert Workers(workers=1).count_workers(CPU, 10**9) == 0
    assert Workers(workers=3).count_workers(CPU, 1) == 3
    assert Workers().count_workers(CPU, 1) == 0
    assert Workers().count_workers(torch.device("cuda"), 10**9) == 0
    with pytest.raises(ValueError, match=r"executor\.workers=2: needs device=cpu, but device is cuda"):
        Workers(workers=2).count_workers(torch.device("cuda"), 1)


def test_settings_that_cannot_work_are_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"executor\.cluster='slurm': needs Slurm's command srun"):
        Submitit().start(1, Path("jobs"))
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"executor='dask': needs the package distributed.*pate-torch\[dask\]"):
        Dask().start(1, Path())


@pytest.mark.slow(reason="kill run, starts Dask")
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_of_dask_costs_a_repetition(tmp_path):
    lines = []
    start = partial(Dask(workers=2).start, folder=tmp_path)
    units = run_units(KillOnce(tmp_path, 2), UNITS, start, 2, print_message=lines.append)
    assert sorted(unit for unit, _ in units) == UNITS
    assert lines and (tmp_path / "killed").exists()


@pytest.mark.slow(reason="every job imports torch")
def test_a_killed_job_of_submitit_costs_a_repetition(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduling, "SLOW_FACTOR", math.inf)
    jobs = Submitit(workers=2, cluster="local", parameters={"timeout_min": 5})
    lines, start = [], partial(jobs.start, folder=tmp_path)
    units = run_units(KillOnce(tmp_path, 1), UNITS[:3], start, 2, print_message=lines.append)
    assert sorted(unit for unit, _ in units) == UNITS[:3]
    assert len(lines) == 1 and (tmp_path / "killed").exists()


@pytest.mark.slow(reason="starts Ray")
@pytest.mark.filterwarnings("ignore")
def test_the_adapter_for_ray_of_the_page_runs_units(tmp_path):
    ray = pytest.importorskip("ray")
    page, names = (ROOT / "docs" / "howto" / "machines.md").read_text(), {"__name__": "adapter"}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    try:
        units = run_units(work, UNITS, partial(names["Ray"](workers=2).start, folder=tmp_path), 2)
        results = dict(units)
        assert sorted(results) == UNITS and os.getpid() not in {pid for _, pid, _ in results.values()}
    finally:
        ray.shutdown()
