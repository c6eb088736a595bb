"""Number of threads that torch's operations get, and jobs that run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar, cast

import torch

from pate_torch.core.progress import Progress

T = TypeVar("T")


@contextmanager
def single_thread_mode(enabled: bool = True) -> Iterator[None]:
    """Run torch operations of this thread in it alone, shared out to no other, if ``enabled``.

    Small operations gain little from being shared out, and wait for each other a hundred times longer than they work
    once the machine has something else to do.
    """
    num_threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """The items, each made by a thread of its own while the one before it is used."""
    end_marker = object()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        next_item = pool.submit(next, items, end_marker)
        while (item := next_item.result()) is not end_marker:
            next_item = pool.submit(next, items, end_marker)
            yield cast(T, item)


def run_in_parallel(jobs: Sequence[Callable[[Progress], T]], device: torch.device, progress: Progress) -> list[T]:
    """Results of the jobs, in order; on a CPU each job has a thread of its own, elsewhere one follows the other.

    On a CPU a job's operations use no other thread, however many processors there are, so that the numbers do not
    depend on that. For jobs that take about as long as each other and spend their time in torch, which lets other
    threads go on. (Processes would have to be sent the points and to send back what was learnt.) The first error ends
    all of them.
    """
    counts: list[tuple[int, int] | None] = [None] * len(jobs)
    lock, stop_event = threading.Lock(), threading.Event()

    def make_progress(k: int) -> Progress:
        def report_progress(done: int, total: int) -> None:
            with lock:
                if stop_event.is_set():
                    raise RuntimeError("ended, as another job of the same kind failed")
                counts[k] = (done, total)
                known_counts = [count for count in counts if count is not None]
                max_total = max(job_total for _, job_total in known_counts)  # of one that has not begun
                progress(
                    sum(job_done for job_done, _ in known_counts),
                    sum(job_total for _, job_total in known_counts) + max_total * (len(jobs) - len(known_counts)),
                )

        return report_progress

    if device.type != "cpu":
        return [job(make_progress(k)) for k, job in enumerate(jobs)]
    workers = min(len(jobs), torch.get_num_threads())
    with single_thread_mode(), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(job, make_progress(k)) for k, job in enumerate(jobs)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:  # the one that failed first, not one that was ended by it
                future.result()
        finally:
            stop_event.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return [future.result() for future in futures]
