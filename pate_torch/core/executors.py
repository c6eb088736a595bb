"""Workers on one machine or many, which are started as a ``concurrent.futures.Executor``."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch.multiprocessing

from pate_torch.core import checks, ranks
from pate_torch.core.progress import do_nothing
from pate_torch.core.scheduling import WorkerLost

MIN_STEPS_FOR_FORK, MIN_STEPS_FOR_SPAWN = 600, 5000
"""Number of training steps above which processes save time. Spawned processes import torch anew."""
_DASK_SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # work whose worker was lost begins again in run_units
    **{f"distributed.worker.memory.{name}": False for name in ("target", "spill")},  # no memory is written to a disk
}


def can_fork() -> bool:
    """Return whether a forked copy of this process can compute on one thread, like workers of torch's DataLoader.

    A copy lacks the threads of autograd, which exist if torch uses a GPU, and the threads of a process group.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available() and not torch.distributed.is_initialized()


def _count_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks.get_world().local_size)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Processes of this machine with one thread each. Teachers are the same for any number of processes.

    Attributes:
        workers: Number of processes. 1, as on any GPU, to train in the main process. None to use one process for each
            core if processes save time.
        chunk: Number of teachers trained at once, at most 16 on a CPU. None to fit the network, batch and device.
    """

    workers: int | None = None
    chunk: int | None = None
    are_local: ClassVar[bool] = True  # whether the workers run on this machine, as processes that it can fork

    def __post_init__(self) -> None:
        checks.optional(checks.integer, "executor.workers", self.workers, low=1)
        checks.optional(checks.integer, "executor.chunk", self.chunk, low=1)

    def count_workers(self, device: torch.device, num_steps: int) -> int:
        """Return the number of workers for this number of training steps. 0 to train in the main process."""
        if not self.are_local:
            return self.workers or _count_cores()
        if device.type != "cpu" and (self.workers or 1) > 1:
            problem, fix = f"needs device=cpu, but device is {device}", "Use executor.workers=1."
            raise checks.error("executor.workers", self.workers, problem, fix)
        is_faster = num_steps > (MIN_STEPS_FOR_FORK if can_fork() else MIN_STEPS_FOR_SPAWN)
        num_workers = self.workers or (_count_cores() if is_faster else 1)
        return num_workers if num_workers > 1 and device.type == "cpu" and os.name == "posix" else 0

    def start(self, num_workers: int, folder: Path) -> Executor:
        """Start the workers, whose files lie in the private ``folder``."""
        return ProcessPool(num_workers, "fork" if can_fork() else "spawn", torch.set_num_threads, 1)


@dataclass(frozen=True, kw_only=True)
class Dask(Workers):
    """Workers of Dask, by default as many as this machine has cores. Set ``workers`` to the number in a cluster.

    Attributes:
        address: Address of a cluster's scheduler, such as "tcp://head:8786". None to start workers on this machine.
    """

    address: str | None = None
    are_local: ClassVar[bool] = False

    def start(self, num_workers: int, folder: Path) -> Executor:
        distributed = checks.import_optional("distributed", "dask", "executor", "dask")
        options = {} if self.address else {"n_workers": num_workers, "threads_per_worker": 1, "dashboard_address": None}
        with _hide_program(), checks.import_optional("dask", "dask", "executor", "dask").config.set(_DASK_SETTINGS):
            client = distributed.Client(self.address, **options)
        submit = functools.partial(client.submit, pure=False)
        return JobExecutor(num_workers, submit, distributed.KilledWorker, client.close)


@dataclass(frozen=True, kw_only=True)
class Submitit(Workers):
    """Jobs of Slurm, one for each group of teachers. ``workers`` of them run or wait at a time.

    Attributes:
        cluster: "slurm", or "local" for processes of this machine.
        parameters: Parameters of ``submitit.AutoExecutor``, such as ``{"slurm_partition": "gpu", "timeout_min": 60}``.
    """

    workers: int | None = 16
    cluster: str = "slurm"
    parameters: dict[str, Any] = field(default_factory=dict)
    are_local: ClassVar[bool] = False

    def start(self, num_workers: int, folder: Path) -> Executor:
        submitit = checks.import_optional("submitit", "slurm", "executor", "submitit")
        try:
            executor = submitit.AutoExecutor(folder / "jobs", cluster=self.cluster)
        except RuntimeError as error:
            problem, fix = "needs Slurm's command srun on this machine", "Use executor.cluster=local to try it here."
            raise checks.error("executor.cluster", self.cluster, problem, fix) from error
        executor.update_parameters(**self.parameters)
        return JobExecutor(num_workers, executor.submit, submitit.core.utils.UncompletedJobError)


class JobExecutor(ThreadPoolExecutor):
    """An executor whose threads wait for jobs. The exception ``loss`` of a job means that its worker was lost."""

    def __init__(self, num_workers: int, submit_job: Callable[..., Any], loss: Any, close: Any = do_nothing) -> None:
        super().__init__(num_workers)
        self.submit_job, self.loss, self.close, self.jobs = submit_job, loss, close, list[Any]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(self.submit_job(fn, *args, **kwargs))
        return super().submit(self._get_result, self.jobs[-1])

    def _get_result(self, job: Any) -> Any:
        try:
            return job.result()
        except self.loss as error:
            raise WorkerLost from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for job in self.jobs:
            job.cancel()
        self.close()
        super().shutdown(wait=False, cancel_futures=True)


class ProcessPool(ProcessPoolExecutor):
    """Processes that end with the main process, and never run the user's program again."""

    def __init__(self, num_workers: int, method: str, initializer: Callable[..., object], *arguments: Any) -> None:
        context = torch.multiprocessing.get_context(method)
        super().__init__(num_workers, context, _start_process, (os.getpid(), initializer, *arguments))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with _hide_program(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads: see can_fork
            return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for process in list((self._processes or {}).values()):
            process.kill()
        super().shutdown(wait, cancel_futures=cancel_futures)


def _start_process(main_pid: int, initializer: Callable[..., object], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops its workers

    def exit_with_main_process() -> None:
        while os.getppid() == main_pid:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=exit_with_main_process, daemon=True).start()
    initializer(*arguments)


@contextlib.contextmanager
def _hide_program() -> Iterator[None]:
    """Hide ``__main__``, because a spawned worker would run the user's program again, which may charge an account."""
    program, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program
