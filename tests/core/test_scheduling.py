"""The scheduler with real and with simulated workers: each unit once, and nearly as fast as can be."""

import heapq
import itertools
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor

import pytest

from pate_torch.core.scheduling import MAX_LOSSES, WorkerLost, run_units
from pate_torch.teachers.training import split_groups


class Simulation(Executor):
    """Workers with a virtual clock. A worker takes 1 / speed seconds for each teacher of a group, and may die."""

    def __init__(self, speeds, deaths=()):
        self.now, self.number, self.busy_seconds = 0.0, itertools.count(), 0.0
        self.speed_by_worker, self.death_by_worker = dict(enumerate(speeds)), dict(deaths)
        self.free, self.waiting, self.events = list(self.speed_by_worker), [], []

    def start(self, _):
        return self

    def submit(self, fn, unit):
        future = Future()
        self.waiting.append((future, unit))
        self.assign()
        return future

    def assign(self):
        self.free = [worker for worker in self.free if self.now < self.death_by_worker.get(worker, 1e99)]
        while self.waiting and self.free:
            worker, (future, unit) = self.free.pop(0), self.waiting.pop(0)
            end = self.now + len(unit) / self.speed_by_worker[worker]
            death = self.death_by_worker.get(worker, 1e99)
            self.busy_seconds += min(end, death) - self.now
            heapq.heappush(self.events, (min(end, death), next(self.number), future, worker, end < death))

    def wait(self, futures, timeout, return_when):
        limit = self.now + timeout
        if not self.events or self.events[0][0] > limit:
            self.now = limit
            return set(), futures
        self.now, _, future, worker, is_done = heapq.heappop(self.events)
        if is_done:
            self.free.append(worker)
            future.set_result(self.now)
        else:
            future.set_exception(WorkerLost())
        self.assign()
        return {future} & futures.keys(), futures

    def run(self, units):
        num_workers, lines = len(self.speed_by_worker), []
        options = {"print_message": lines.append, "wait": self.wait, "clock": lambda: self.now}
        done = [unit for unit, _ in run_units(len, units, self.start, num_workers, **options)]
        assert sorted(done, key=lambda unit: unit.start) == list(units)
        return self.now, lines

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


def test_slow_and_dead_workers_cost_at_most_five_percent():
    """2,000 groups on 16 workers of which one is half as fast; two die in the first and in the second half."""
    deaths = {5: 40.5, 6: 110.25}
    simulation = Simulation([0.5] + [1.0] * 15, deaths)
    seconds, lines = simulation.run([range(k, k + 1) for k in range(2000)])
    optimum = (2000 - sum(deaths.values())) / 13.5
    assert optimum < seconds < 1.05 * optimum
    assert len(lines) == 2 and all("A worker was lost" in line for line in lines)


def test_a_slow_worker_does_not_decide_the_end_and_small_groups_keep_all_workers_busy():
    seconds, lines = Simulation([0.05] + [1.0] * 7).run([range(k, k + 1) for k in range(80)])
    assert seconds <= 80 / 7 + 1 + 1.5 + 1 and not lines
    groups = split_groups(50, 8, 16)
    seconds, _ = Simulation([1.0] * 8).run(groups)
    assert 50 / (8 * seconds) >= 0.85
    assert 50 / (8 * Simulation([1.0] * 8).run(split_groups(50, 1, 16))[0]) < 0.4  # groups of sixteen


def test_a_unit_is_yielded_once_though_it_ran_twice():
    simulation = Simulation([0.1, 1.0, 1.0])
    waiting = [range(k, k + 1) for k in range(9)]
    units = run_units(len, waiting, simulation.start, 3, wait=simulation.wait, clock=lambda: simulation.now)
    done = [unit for unit, _ in units]
    assert len(done) == len(set(done)) == 9
    assert simulation.busy_seconds > 8 + 10 - 1e-9  # the slow one's group ran beside itself
    assert simulation.now < 9


def test_work_that_always_loses_its_worker_ends_the_run():
    calls = []

    def fail(unit):
        calls.append(unit)
        raise WorkerLost

    with pytest.raises(ChildProcessError, match=r"lost its worker 4 times.*fewer workers"):
        list(run_units(fail, [1], ThreadPoolExecutor, 2))
    assert len(calls) == MAX_LOSSES + 1


def test_an_error_of_the_work_ends_the_run_at_once():
    with pytest.raises(ZeroDivisionError):
        list(run_units(lambda unit: 1 // unit, [1, 0, 2], ThreadPoolExecutor, 1))


def test_workers_are_started_again_after_all_were_lost():
    started, lines = [], []

    class Breaking(ThreadPoolExecutor):
        def submit(self, fn, *args):
            if len(started) == 1 and args == (2,):
                raise BrokenExecutor
            return super().submit(fn, *args)

    def start(num_workers):
        started.append(Breaking(num_workers))
        return started[-1]

    results = dict(run_units(lambda unit: unit * unit, [0, 1, 2, 3], start, 1, print_message=lines.append))
    assert results == {0: 0, 1: 1, 2: 4, 3: 9} and len(started) == 2
    assert lines == ["A worker was lost; its work begins again. 2 of 4 are done."]
