"""What a GPU gains: teachers by network and number, votes, neighbor graph and students, beside a plain program's time.

Ratios are to a loop over teachers on the same GPU, or to the same work on the CPU: seconds of different machines say
nothing to each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pate_torch.core.rng import torch_stream
from pate_torch.features.neighbors import nearest
from pate_torch.gpu_check import worlds
from pate_torch.gpu_check.parts import Bench, Finding, at_least
from pate_torch.networks import describe
from pate_torch.teachers import launch
from pate_torch.teachers.engine import train_loop, train_stacked
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.types import DataSpec

SLOW = ("convnet", "wide_resnet")
"""Large enough to fill a GPU one by one: timed at fewer teachers, and need not gain by being stacked."""


def speed(bench: Bench) -> Iterator[Finding]:
    """Everything that takes long in a run."""
    spec = worlds.spec(bench)
    for network in ("logistic", "lean_cnn", *SLOW):
        yield from _teachers(bench, spec, network)
    yield from _votes(bench, spec)
    yield from _graph(bench)
    for name, algorithm in worlds.students(bench, 1000).items():
        fit = partial(algorithm.fit, worlds.task(bench), seed=0, device=bench.device)
        yield Finding(f"{name}: steps a second", _steps_a_second(bench, fit))


def _teachers(bench: Bench, spec: DataSpec, network: str) -> Iterator[Finding]:
    options, steps = worlds.teacher_networks(bench)[network], bench.of(64, 2)
    sizes = bench.of((64,) if network in SLOW else (64, 250), (4,))
    cost = launch.network_cost(network, options, spec)
    for dtype in ("float32", "tf32", "bf16"):
        recipe = worlds.recipe(network, options, steps=steps, batch_size=bench.of(32, 8), dtype=dtype)
        few = worlds.chunk(spec, 2)
        alone = _seconds(partial(train_loop, few, spec, recipe, 0, bench.device)) / 2
        for count in sizes:
            size = min(count, launch.train_size(recipe, cost, count, bench.device))
            chunk = worlds.chunk(spec, size)
            each = _seconds(partial(train_stacked, chunk, spec, recipe, 0, bench.device)) / size
            name = f"{network}, {dtype}, {size} at once"
            yield Finding(f"{name}: teachers a second, of {steps} steps", 1 / each)
            if network in SLOW:
                yield Finding(f"{name}: times a loop", alone / each)
            else:
                yield at_least(f"{name}: times a loop", alone / each, 1.0)


def _votes(bench: Bench, spec: DataSpec) -> Iterator[Finding]:
    options, teachers = worlds.teacher_networks(bench)["lean_cnn"], bench.of(250, 4)
    few = worlds.recipe("lean_cnn", options, steps=1)
    trained = train_stacked(worlds.chunk(spec, teachers), spec, few, 0, bench.device)
    network = describe("lean_cnn", spec.input_shape, spec.num_classes, **options)
    ensemble = Ensemble(network, trained.params, torch.ones(teachers, dtype=torch.bool), spec)
    x = worlds.images(spec, bench.of(8192, 64))[0]
    seconds = _seconds(lambda: ensemble.votes(x, device=bench.device))
    yield Finding("lean_cnn: votes a second", teachers * len(x) / seconds)


def _graph(bench: Bench) -> Iterator[Finding]:
    points = bench.of(20_000, 50)
    x_PD = torch.randn(points, 64, generator=torch_stream(0, "graph"))
    here, there = _seconds(lambda: nearest(x_PD, 10)), _seconds(lambda: nearest(x_PD.to(bench.device), 10))
    yield Finding(f"neighbor graph of {points} points", there, "s")
    yield Finding(f"neighbor graph of {points} points: times the CPU", here / there)


def _seconds(work: Callable[[], object]) -> float:
    """How long some work takes the second time."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class _Timed(Exception): ...


def _steps_a_second(bench: Bench, fit: Callable[..., object]) -> float:
    """Of a training that is stopped when enough steps are timed, after some to begin with."""
    first, last = bench.of((20, 120), (1, 3))
    start = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal start
        if done in (first, last):
            torch.cuda.synchronize()
        if done == first:
            start = time.perf_counter()
        if done == last:
            raise _Timed

    try:
        fit(progress=progress)
    except _Timed:
        return (last - first) / (time.perf_counter() - start)
    raise AssertionError("a student takes more steps than are timed")
