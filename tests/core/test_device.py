"""float32 means float32 wherever a run computes, settings return, and jobs run in parallel on one thread each."""

import ast
import functools
import threading
import time

import pytest
import torch

from pate_torch.core.device import deterministic_mode, float32_precision, run_in_parallel, single_thread_mode
from pate_torch.core.progress import do_nothing
from pate_torch.teachers import engine, training
from pate_torch.teachers.recipe import TeacherRecipe
from tests import ROOT
from tests.teachers.teacher_world import records, shards_of, spec

CPU = torch.device("cpu")


def get_switches():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic, cudnn.benchmark


def test_a_run_computes_float32_as_such_and_repeatably():
    before = get_switches()
    assert before[1] == "tf32", "by default cuDNN rounds"
    with deterministic_mode(CPU):
        assert get_switches() == ("ieee", "ieee", True, False)
        with float32_precision(tf32=True):
            assert get_switches() == ("tf32", "tf32", True, False)
        assert get_switches() == ("ieee", "ieee", True, False)
    assert get_switches() == before


@pytest.mark.parametrize(
    "first,second,expected",
    [
        (float32_precision, functools.partial(float32_precision, tf32=True), ("tf32", "tf32")),
        (lambda: deterministic_mode(CPU), lambda: deterministic_mode(CPU), ("ieee", "ieee", True, False)),
    ],
)
def test_blocks_of_threads_that_end_in_another_order_keep_and_restore_the_switches(first, second, expected):
    before, first, second = get_switches(), first(), second()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert get_switches()[: len(expected)] == expected != before[: len(expected)]
    second.__exit__(None, None, None)
    assert get_switches() == before


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_may_be_named_with_or_without_its_number(device, simulated_gpu):
    with deterministic_mode(torch.device(device)):
        assert torch.zeros(2, device=device).add(1).tolist() == [1, 1]


def test_the_recipe_alone_decides_how_teachers_are_computed(monkeypatch):
    precisions, compute_losses = [], engine._compute_losses

    def note_and_compute(*args):
        precisions.append(get_switches()[:2])
        return compute_losses(*args)

    monkeypatch.setattr(engine, "_compute_losses", note_and_compute)
    for dtype, expected in (("float32", "ieee"), ("tf32", "tf32"), ("float64", "ieee")):
        recipe = TeacherRecipe(network="logistic", steps=1, batch_size=1, dtype=dtype)
        training.train(records(4), spec(), shards_of([[0, 1], [2, 3]]), recipe, seed=0)
        assert precisions.pop() == (expected, expected) and not precisions


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_results_are_in_order_whoever_ends_first(four_threads):
    def run(k, progress):
        time.sleep(0.02 * (3 - k))
        return k, torch.get_num_threads(), threading.get_ident()

    results = run_in_parallel([functools.partial(run, k) for k in range(3)], CPU, do_nothing)
    assert [(k, threads) for k, threads, _ in results] == [(0, 1), (1, 1), (2, 1)]
    assert len({name for *_, name in results}) == 3 and torch.get_num_threads() == 4


def test_jobs_within_jobs_work_on_no_more_threads_than_torch_has(four_threads):
    """Also where torch has one thread: jobs then take turns."""
    lock, jobs, most_jobs, threads = threading.Lock(), [], [], set()

    def work(progress):
        with lock:
            jobs.append(1)
            most_jobs.append(len(jobs))
            threads.add(torch.get_num_threads())
        time.sleep(0.01)
        with lock:
            jobs.pop()

    run_in_parallel([lambda progress: run_in_parallel([work] * 5, CPU, do_nothing)] * 5, CPU, do_nothing)
    assert threads == {1} and 2 <= max(most_jobs) <= 4 and torch.get_num_threads() == 4
    most_jobs.clear()
    with single_thread_mode():
        run_in_parallel([work] * 4, CPU, do_nothing)
    assert most_jobs == [1] * 4


def test_every_pool_of_threads_keeps_torch_to_one_thread():
    calls = [
        (file.name, node)
        for file in (ROOT / "pate_torch").rglob("*.py")
        if "ThreadPoolExecutor" in file.read_text()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ThreadPoolExecutor")
    ]
    assert len(calls) >= 3
    for name, call in calls:
        arguments = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert arguments.get("initializer") == "torch.set_num_threads" and arguments.get("initargs") == "(1,)", name


def test_progress_counts_all_jobs_and_ends_where_they_differ_in_length(four_threads):
    points = []

    def run(length, progress):
        for step in range(length):
            progress(step + 1, length)

    jobs = [functools.partial(run, length) for length in (11, 10, 10)]
    run_in_parallel(jobs, CPU, lambda *point: points.append(point))
    assert points[-1] == (31, 31) and [done for done, _ in points] == list(range(1, 32))
    assert all(done <= total for done, total in points)


@pytest.mark.parametrize("error", [FloatingPointError("student loss is nan"), KeyboardInterrupt()])
def test_the_first_error_or_an_interrupt_ends_all_jobs(error, four_threads):
    steps = []

    def run_long(progress):
        for step in range(10_000):
            time.sleep(0.001)
            progress(step, 10_000)
            steps.append(step)

    def fail(progress):
        time.sleep(0.02)
        raise error

    def interrupt(done, total):
        if done > 20 and isinstance(error, KeyboardInterrupt):
            raise error

    jobs = [run_long, run_long] if isinstance(error, KeyboardInterrupt) else [run_long, fail, run_long]
    with pytest.raises(type(error)):
        run_in_parallel(jobs, CPU, interrupt)
    assert len(steps) < 10_000 and torch.get_num_threads() == 4
