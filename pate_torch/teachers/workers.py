"""Worker processes that train teachers with one thread each, which is faster on a CPU than threads in one process.

A forked worker inherits the private records of the main process. Torch sends them to a spawned worker through shared
memory. Parameters and learning curves come back in shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from pate_torch.core.progress import do_nothing
from pate_torch.teachers.engine import TrainingTask, gather_chunk, train_stacked

_POLL_SECONDS = 0.1


def can_fork() -> bool:
    """Return whether a forked copy of this process can compute on one thread, like workers of torch's DataLoader.

    A copy lacks the threads of autograd, which exist if torch uses a GPU, and the threads of a process group.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available() and not torch.distributed.is_initialized()


def train_in_processes(
    task: TrainingTask,
    launches: list[range],
    num_workers: int,
    rows_K: dict[str, Tensor],
    report_share: Callable[[range, float], object] = do_nothing,
) -> Iterator[tuple[range, dict[str, Tensor]]]:
    """PRIVATE. Train launches in worker processes, and yield each launch with its results when it is finished.

    ``rows_K`` are tensors with the types and shapes of all results, [K, ...] each. ``report_share`` receives the
    teachers of a launch and the finished share of its steps.

    Raises:
        ChildProcessError: A worker died.
    """
    start_method = "fork" if can_fork() else "spawn"
    context = torch.multiprocessing.get_context(start_method)
    next_launch, messages = context.Value("i", 0), context.SimpleQueue()
    shared_rows_K = {}
    for name, rows in rows_K.items():
        if start_method == "fork":  # share_memory_ uses /dev/shm, which has 64 MB in a Docker container
            shared_rows_K[name] = torch.frombuffer(mmap.mmap(-1, rows.nbytes), dtype=rows.dtype).view(rows.shape)
        else:
            shared_rows_K[name] = torch.zeros_like(rows).share_memory_()
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        # A spawned worker would run the user's program again, which may charge an account, so the program is hidden.
        stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = types.ModuleType("__main__")
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads: see can_fork
        workers = torch.multiprocessing.start_processes(
            _run_worker,
            (task, launches, next_launch, messages, shared_rows_K),
            nprocs=min(num_workers, len(launches)),
            join=False,
            daemon=True,
            start_method=start_method,
        )
    try:
        is_finished = False
        while not is_finished:
            is_finished = workers.join(timeout=_POLL_SECONDS)
            while not messages.empty():
                number, share = messages.get()
                if share < 1:
                    report_share(launches[number], share)
                else:
                    teachers = slice(launches[number].start, launches[number].stop)
                    yield launches[number], {name: rows[teachers] for name, rows in shared_rows_K.items()}
    except (ProcessExitedException, ProcessRaisedException) as error:
        reason = str(error).strip().splitlines()[-1]
        advice = "Lower execution.workers, or set execution.backend=vectorized."
        raise ChildProcessError(f"teachers: a worker process died ({reason}). {advice}") from None
    finally:
        for process, error_file in zip(workers.processes, workers.error_files, strict=True):
            process.kill()
            process.join()
            Path(error_file).unlink(missing_ok=True)


def _run_worker(
    _worker: int, task: TrainingTask, launches: list[range], next_launch: Any, messages: Any, rows_K: dict[str, Tensor]
) -> None:
    """Train one launch after the other, until no launch is left or the main process has ended."""
    torch.set_num_threads(1)
    # On Linux the end of the main process sends this signal, which a program that nohup started would ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main_process = torch.multiprocessing.parent_process()

    def exit_if_orphaned() -> None:
        if main_process is None or os.getppid() != main_process.pid:
            os._exit(1)

    while True:
        exit_if_orphaned()
        with next_launch.get_lock():
            number = next_launch.value
            next_launch.value += 1
        if number >= len(launches):
            return

        def report_share(share: float, number: int = number) -> None:
            exit_if_orphaned()
            messages.put((number, share))

        teachers = launches[number]
        chunk = gather_chunk(task.private, task.shards, teachers)
        result = train_stacked(chunk, task.spec, task.recipe, task.seed, task.device, report_share)
        for name, value in (result.params | result.curves).items():
            rows_K[name][teachers.start : teachers.stop] = value
        report_share(1.0)
