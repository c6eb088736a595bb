"""Scheduling of units of work over an executor whose workers may be slow or die."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from typing import Any, TypeVar

from pate_torch.core.progress import do_nothing

Unit = TypeVar("Unit", bound=Hashable)
Result = TypeVar("Result")

MAX_LOSSES, POLL_SECONDS = 3, 0.2  # losses of a unit that are tolerated, and time of a wait
SLOW_FACTOR = 1.5  # multiple of the median time from which a unit is slow


class WorkerLost(Exception):
    """The worker of a unit of work was lost. ``BrokenExecutor`` in its place means that all workers were lost."""


def run_units(
    function: Callable[[Unit], Result],
    units: Sequence[Unit],
    start: Callable[[int], Executor],
    num_workers: int,
    on_wait: Callable[[], object] = do_nothing,
    print_message: Callable[[str], object] = do_nothing,
    *,
    wait: Callable[..., Any] = futures.wait,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[tuple[Unit, Result], None, None]:
    """Yield each unit once with its result. Units start in order, so the longest should be the first.

    As many units as workers are outstanding. A unit whose worker was lost begins again; ChildProcessError is raised if
    this happens too often. When no unit waits, a slow unit runs a second time beside the first, and the later result is
    discarded. Simulations replace ``wait`` and ``clock``.
    """
    waiting, finished, num_losses, seconds = deque(units), set[Unit](), Counter[Unit](), list[float]()
    running: dict[Future[Result], tuple[Unit, float]] = {}
    executor = start(num_workers)

    def take_unit() -> Unit | None:
        return waiting.popleft() if waiting else _find_slow_unit(list(running.values()), finished, seconds, clock())

    try:
        while len(finished) < len(units):
            lost, is_broken = set[Unit](), False
            while len(running) < num_workers and not is_broken and (unit := take_unit()) is not None:
                try:
                    running[executor.submit(function, unit)] = unit, clock()
                except BrokenExecutor:
                    lost, is_broken = {unit}, True
            for future in wait(running, timeout=POLL_SECONDS, return_when=futures.FIRST_COMPLETED)[0]:
                unit, since = running.pop(future)
                try:
                    result = future.result()
                except (BrokenExecutor, CancelledError, WorkerLost) as error:
                    lost, is_broken = lost | {unit}, is_broken or isinstance(error, BrokenExecutor)
                    continue
                if unit not in finished:
                    finished.add(unit)
                    seconds.append(clock() - since)
                    yield unit, result
            on_wait()
            if is_broken:
                lost |= {unit for unit, _ in running.values()}
                running.clear()
                executor.shutdown(cancel_futures=True)
                executor = start(num_workers)
            again = lost - finished - {unit for unit, _ in running.values()}
            waiting.extendleft(unit for unit in reversed(units) if unit in again)
            num_losses.update(again)
            if max(num_losses.values(), default=0) > MAX_LOSSES:
                fix = "Use fewer workers if memory ran out, and start again; finished groups are kept."
                raise ChildProcessError(f"executor: the same work lost its worker {MAX_LOSSES + 1} times. {fix}")
            if lost:
                print_message(f"A worker was lost; its work begins again. {len(finished)} of {len(units)} are done.")
    finally:
        executor.shutdown(cancel_futures=True)


def _find_slow_unit(
    running: Sequence[tuple[Unit, float]], finished: set[Unit], seconds: Sequence[float], now: float
) -> Unit | None:
    """Find a unit that runs once and much longer than the median of the finished units, or return None.

    ``running`` holds the units that run and their starts, and ``seconds`` the durations of the finished units.
    """
    copies = Counter(unit for unit, _ in running if unit not in finished)
    latest_start = now - SLOW_FACTOR * statistics.median(seconds) if seconds else -math.inf
    return next((unit for unit, since in running if since < latest_start and copies[unit] == 1), None)
