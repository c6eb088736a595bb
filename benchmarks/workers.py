"""Processes of the package beside a bare ``ProcessPoolExecutor``, and how busy simulated workers are.

    PYTHONPATH=. python benchmarks/workers.py

Both train the same groups in two processes of one thread; times alternate, and the ratio is that of the medians. The
simulations run the scheduler with a virtual clock.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.fonts.glyphs import Glyphs
from pate_torch.core.executors import Workers
from pate_torch.privacy.partition import AddRemove
from pate_torch.teachers.engine import train_launches
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import _make_task, split_groups, train
from tests.core.test_scheduling import Simulation


def _train_bare(train_group: functools.partial, get_chunk: functools.partial, group: range) -> int:
    return len(train_group(get_chunk(group)))


def measure(num_teachers: int, runs: int) -> tuple[float, float]:
    """Return the median seconds of the package and of a bare pool."""
    data = Glyphs(private=100 * num_teachers, public=200, test=1, size=16).load()
    shards = AddRemove().make_shards(data.private, num_teachers, seed=0)
    recipe, device = TeacherRecipe(network="lean_cnn", steps=100, batch_size=32), torch.device("cpu")
    task, get_chunk = _make_task(data.private, data.spec, shards, recipe, 0, device, None, None)
    seconds: dict[str, list[float]] = {"package": [], "bare": []}
    for _ in range(runs):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            train(data.private, data.spec, shards, recipe, seed=0, executor=Workers(workers=2), folder=Path(folder))
        seconds["package"].append(time.perf_counter() - start)
        start = time.perf_counter()
        work = functools.partial(_train_bare, functools.partial(train_launches, task), get_chunk)
        context = torch.multiprocessing.get_context("fork")
        with ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as pool:
            list(pool.map(work, split_groups(num_teachers, 2, 16)))
        seconds["bare"].append(time.perf_counter() - start)
    return statistics.median(seconds["package"]), statistics.median(seconds["bare"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teachers", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours, bare = measure(options.teachers, options.runs)
    print(f"{options.teachers} teachers: {ours:.2f} s, a bare pool {bare:.2f} s, ratio {ours / bare:.2f}")
    for workers in (2, 4, 8, 16):
        busy = 50 / (workers * Simulation([1.0] * workers).run(split_groups(50, workers, 16))[0])
        print(f"50 teachers on {workers} equal workers: {busy:.0%} busy")
    deaths = {5: 40.5, 6: 110.25}
    found, _ = Simulation([0.5] + [1.0] * 63, deaths).run([range(k, k + 1) for k in range(10_000)])
    optimum = (10_000 - sum(deaths.values())) / 61.5
    print(f"10,000 groups on 64 workers, one half as fast, two die: {found / optimum:.3f} times the optimum")


if __name__ == "__main__":
    main()
