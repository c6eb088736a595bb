"""Worker processes: the bits of this process, an error when one dies, and none that outlives its run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pate_torch.teachers import workers
from pate_torch.teachers.engine import TrainingTask
from pate_torch.teachers.training import train
from tests import ROOT
from tests.teachers.teacher_world import differing, even_shards, execution, recipe, records, spec

FOREVER = recipe(steps=10**6, augment=None)
SPAWNED = pytest.param(False, id="spawned", marks=pytest.mark.slow(reason="each worker imports torch anew"))


def train_forever() -> None:
    three = execution(backend="processes", workers=3)
    train(records(40), spec(), even_shards(8, 5), FOREVER, seed=0, execution=three)


@pytest.fixture(params=[pytest.param(True, id="forked"), SPAWNED])
def start(request, monkeypatch):
    """Both ways to start a worker, wherever the first one works."""
    if request.param and not workers.can_fork():
        pytest.skip("a copy of this process could not compute")
    monkeypatch.setattr(workers, "can_fork", lambda: request.param)


def test_workers_give_the_bits_of_this_process_and_report_before_a_launch_ends(start):
    """Also after this process has used threads and autograd, which a copy does not inherit alive."""
    torch.nn.Conv2d(1, 8, 3)(torch.randn(64, 1, 32, 32)).sum().backward()
    (private, shards), reported = (records(90), even_shards(10, 9)), []
    here, settings = train(private, spec(), shards, recipe(), seed=0, execution=execution()).params, {"seed": 0}
    for num_workers in (1, 2):
        settings |= {"execution": execution(backend="processes", workers=num_workers)}
        there = train(private, spec(), shards, recipe(), progress=lambda done, _: reported.append(done), **settings)
        assert differing(here, there.params) == set() and there.trained_K.all()
    one_worker = reported[: reported.index(10) + 1]
    assert one_worker == sorted(one_worker) and len(set(one_worker)) > 5


def test_a_dying_worker_is_a_clear_error(start):
    broken = recipe()
    object.__setattr__(broken, "network", "mlp")  # its options do not fit: the worker fails on building it
    task = TrainingTask(records(40), spec(), even_shards(8, 5), broken, 0, torch.device("cpu"))
    with pytest.raises(ChildProcessError, match=r"a worker process died \(ValueError.*vectorized"):
        list(workers.train_in_processes(task, [range(3), range(3, 6), range(6, 8)], 2, {}))


def test_a_killed_worker_is_a_clear_error_and_the_others_end(monkeypatch, start):
    started, start_processes = [], torch.multiprocessing.start_processes

    def start_and_kill_one(*arguments, **options):
        started.append(start_processes(*arguments, **options))
        started[0].processes[1].kill()
        return started[0]

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_and_kill_one)
    with pytest.raises(ChildProcessError, match="terminated with signal SIGKILL"):
        train_forever()
    assert len(started[0].processes) == 3 and not any(process.is_alive() for process in started[0].processes)


ORPHAN = """
import os, signal, torch
from pate_torch.teachers import workers
from tests.teachers.test_workers import train_forever

start_processes = torch.multiprocessing.start_processes

def start_and_die(*arguments, **options):
    print(*start_processes(*arguments, **options).pids(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

print("program", flush=True)
torch.multiprocessing.start_processes = start_and_die
workers.can_fork = lambda: {fork}
train_forever()
"""


@pytest.mark.slow(reason="kill run")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_no_worker_outlives_a_killed_run(start, tmp_path):
    program = tmp_path / "orphan.py"
    program.write_text(ORPHAN.format(fork=workers.can_fork()))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == -9, run.stderr
    program_run, *pids = run.stdout.split()
    assert program_run == "program" and len(pids) == 3, "a worker ran the program again"
    deadline = time.monotonic() + 120  # a worker that is still importing torch notices afterwards
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
