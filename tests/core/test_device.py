"""float32 means float32 wherever a run computes, settings return, and jobs run in parallel on one thread each."""

import ast
import threading
import time

import pytest
import torch

from pate_torch.core.device import deterministic_mode, float32_precision, run_in_parallel, single_thread_mode
from pate_torch.teachers import engine, training
from pate_torch.teachers.recipe import TeacherRecipe
from tests import ROOT

CPU = torch.device("cpu")


def get_switches():
    cudnn = torch.backends.cudnn
    return (
        torch.backends.cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.deterministic,
        cudnn.benchmark,
    )


def test_a_run_computes_float32_as_such_and_repeatably():
    before = get_switches()
    assert before[1] == "tf32", "by default cuDNN rounds"
    with deterministic_mode(CPU):
        assert get_switches() == ("ieee", "ieee", True, False)
        with float32_precision(tf32=True):
            assert get_switches() == ("tf32", "tf32", True, False)
        assert get_switches() == ("ieee", "ieee", True, False)
    assert get_switches() == before


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_may_be_named_with_or_without_its_number(device, simulated_gpu):
    with deterministic_mode(torch.device(device)):
        assert torch.zeros(2, device=device).add(1).tolist() == [1, 1]


def test_the_recipe_alone_decides_how_teachers_are_computed(monkeypatch):
    from tests.teachers.teacher_world import records, shards_of, spec

    precisions = []
    compute_losses = engine._compute_losses
    monkeypatch.setattr(
        engine, "_compute_losses", lambda *args: (precisions.append(get_switches()[:2]), compute_losses(*args))[1]
    )
    shards = shards_of([[0, 1], [2, 3]])
    for dtype, expected in (("float32", "ieee"), ("tf32", "tf32"), ("float64", "ieee")):
        recipe = TeacherRecipe(network="logistic", steps=1, batch_size=1, dtype=dtype)
        training.train(records(4), spec(), shards, recipe, seed=0)
        assert precisions.pop() == (expected, expected) and not precisions


# ---- jobs in parallel ------------------------------------------------------------------------------------------------


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_results_are_in_order_whoever_ends_first(four_threads):
    def make_job(k):
        def job(progress):
            time.sleep(0.02 * (3 - k))
            return k, torch.get_num_threads(), threading.get_ident()

        return job

    results = run_in_parallel([make_job(k) for k in range(3)], CPU, lambda *_: None)
    assert [k for k, _, _ in results] == [0, 1, 2]
    assert {threads for _, threads, _ in results} == {1}
    assert len({name for *_, name in results}) == 3 and torch.get_num_threads() == 4


class Load:
    """Counts how many jobs work at a time, and on how many of torch's threads each."""

    def __init__(self):
        self.lock, self.jobs, self.most_threads, self.threads = threading.Lock(), 0, 0, set()

    def work(self, *_):
        with self.lock:
            self.jobs += 1
            self.most_threads = max(self.most_threads, self.jobs * torch.get_num_threads())
            self.threads.add(torch.get_num_threads())
        time.sleep(0.01)
        with self.lock:
            self.jobs -= 1
        return 1


def test_jobs_take_turns_where_torch_has_one_thread():
    load = Load()
    with single_thread_mode():
        run_in_parallel([load.work] * 4, CPU, lambda *_: None)
    assert load.most_threads == 1


def test_jobs_within_jobs_work_on_no_more_threads_than_torch_has(four_threads):
    load = Load()

    def job(progress):
        run_in_parallel([load.work] * 5, CPU, lambda *_: None)

    run_in_parallel([job] * 5, CPU, lambda *_: None)
    assert load.threads == {1} and 2 <= load.most_threads <= 4 and torch.get_num_threads() == 4


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

    def make_job(length):
        return lambda progress: [progress(step + 1, length) for step in range(length)]

    run_in_parallel([make_job(length) for length in (11, 10, 10)], CPU, lambda *point: points.append(point))
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
