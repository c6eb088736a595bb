"""Jobs side by side: in order, on one thread each, ended together."""

import ast
import threading
import time

import pytest
import torch

from pate_torch.core.parallel import prefetch, run_in_parallel, single_thread_mode
from tests import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_what_each_gives_is_in_order_whoever_ends_first(four_threads):
    def job(k):
        def run(progress):
            time.sleep(0.02 * (3 - k))
            return k, torch.get_num_threads(), threading.get_ident()

        return run

    given = run_in_parallel([job(k) for k in range(3)], CPU, lambda *_: None)
    assert [k for k, _, _ in given] == [0, 1, 2]
    assert {threads for _, threads, _ in given} == {1}
    assert len({name for *_, name in given}) == 3 and torch.get_num_threads() == 4


def test_no_more_run_at_a_time_than_torch_has_threads():
    running, most, lock = [0], [0], threading.Lock()

    def job(progress):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    with single_thread_mode():
        run_in_parallel([job] * 4, CPU, lambda *_: None)
    assert most[0] == 1


def test_the_next_is_made_while_one_is_used(four_threads):
    made, threads = [], set()

    def items():
        for k in range(4):
            threads.add((threading.get_ident(), torch.get_num_threads()))
            made.append(k)
            yield k

    for k in prefetch(items()):
        until = time.monotonic() + 10
        while len(made) < min(k + 2, 4):
            assert time.monotonic() < until, "the next is never made"
            time.sleep(0.001)
        assert len(made) <= k + 2  # and no more than the next
    ((thread, alone),) = threads
    assert thread != threading.get_ident() and alone == 1 and torch.get_num_threads() == 4


def test_what_is_made_ahead_ends_with_its_error_or_its_user():
    def items():
        yield 1
        raise ValueError("no second")

    coming = prefetch(items())
    assert next(coming) == 1
    with pytest.raises(ValueError, match="no second"):
        next(coming)
    before = threading.active_count()
    abandoned = prefetch(iter(range(5)))
    next(abandoned)
    abandoned.close()
    assert threading.active_count() == before


class Busy:
    """Notes how many work at a time, and on how many of torch's threads each."""

    def __init__(self):
        self.lock, self.now, self.most, self.threads = threading.Lock(), 0, 0, set()

    def work(self, *_):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now * torch.get_num_threads())
            self.threads.add(torch.get_num_threads())
        time.sleep(0.01)
        with self.lock:
            self.now -= 1
        return 1


def test_jobs_within_jobs_work_on_no_more_threads_than_torch_has(four_threads):
    busy = Busy()

    def job(progress):
        run_in_parallel([busy.work] * 5, CPU, lambda *_: None)

    run_in_parallel([job] * 5, CPU, lambda *_: None)
    assert busy.threads == {1} and 2 <= busy.most <= 4 and torch.get_num_threads() == 4


def test_python_s_threads_never_multiply_torch_s():
    """Each thread of a pool keeps torch to itself."""
    calls = [
        (file.name, node)
        for file in (ROOT / "pate_torch").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ThreadPoolExecutor")
    ]
    assert len(calls) >= 3
    for name, call in calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("initializer") == "torch.set_num_threads" and given.get("initargs") == "(1,)", name


def test_progress_is_of_all_of_them_and_never_goes_back(four_threads):
    seen = []

    def job(progress):
        for step in range(50):
            progress(step + 1, 50)

    run_in_parallel([job] * 3, CPU, lambda *point: seen.append(point))
    assert seen == sorted(seen) and seen[-1] == (150, 150) and {total for _, total in seen} == {150}


def test_progress_ends_where_jobs_differ_in_length(four_threads):
    seen = []

    def job(length):
        return lambda progress: [progress(step + 1, length) for step in range(length)]

    run_in_parallel([job(11), job(10), job(10)], CPU, lambda *point: seen.append(point))
    assert seen[-1] == (31, 31) and [done for done, _ in seen] == list(range(1, 32))
    assert all(done <= total for done, total in seen)


def test_the_first_error_is_told_and_ends_the_others(four_threads):
    reached = []

    def fails(progress):
        time.sleep(0.02)
        raise FloatingPointError("student loss is nan")

    def long(progress):
        for step in range(10_000):
            time.sleep(0.001)
            progress(step, 10_000)
            reached.append(step)

    with pytest.raises(FloatingPointError, match="nan"):
        run_in_parallel([long, fails, long], CPU, lambda *_: None)
    assert len(reached) < 10_000 and torch.get_num_threads() == 4


def test_an_interruption_ends_them_all(four_threads):
    reached = []

    def long(progress):
        for step in range(10_000):
            time.sleep(0.001)
            progress(step, 10_000)
            reached.append(step)

    def stop(done, total):
        if done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parallel([long] * 2, CPU, stop)
    assert len(reached) < 10_000
