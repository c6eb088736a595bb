"""Speed of teachers, votes, the neighbor graph and students on a GPU.

Ratios are to a loop over teachers on the same GPU, or to the same work on the CPU: seconds of different machines cannot
be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import workloads
from benchmarks.gpu.findings import Finding, Setup
from pate_torch import networks
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.neighbors import find_nearest
from pate_torch.privacy.records import DataSpec
from pate_torch.students.training import GradientStudent
from pate_torch.teachers import stacked, training
from pate_torch.teachers.engine import train_stacked
from pate_torch.teachers.ensemble import TeacherEnsemble
from tests.teachers.loop import train_loop

LARGE_NETWORKS = ("convnet", "resnet")
"""One teacher fills a GPU: these are timed with fewer teachers, and need not gain by being stacked."""


def measure_speed(setup: Setup) -> Iterator[Finding]:
    """Time everything that takes long in a run."""
    spec = workloads.make_spec(setup)
    for network in ("logistic", "lean_cnn", *LARGE_NETWORKS):
        yield from _time_teachers(setup, spec, network)
    yield _time_votes(setup, spec)
    yield from _time_graph(setup)
    for name, algorithm in workloads.make_students(setup, 1000).items():
        if not isinstance(algorithm, GradientStudent):  # label spreading takes no steps
            continue
        fit = partial(algorithm.fit, workloads.make_student_task(setup), seed=0, device=setup.device)
        yield Finding(f"{name}: steps a second", _count_steps_per_second(setup, fit))


def _time_teachers(setup: Setup, spec: DataSpec, network: str) -> Iterator[Finding]:
    options, steps = workloads.choose_networks(setup)[network], setup.choose(64, 2)
    counts = setup.choose((64,) if network in LARGE_NETWORKS else (64, 250), (4,))
    num_parameters = networks.count_parameters(networks.build(network, spec.input_shape, spec.num_classes, **options))
    for dtype in ("float32", "tf32", "bf16"):
        recipe = workloads.make_recipe(network, options, steps=steps, batch_size=setup.choose(32, 8), dtype=dtype)
        pair = workloads.draw_chunk(spec, 2)
        loop_seconds = _time_second_call(partial(train_loop, pair, spec, recipe, 0, setup.device)) / 2
        for count in counts:
            size = min(count, training.compute_launch_size(recipe, num_parameters, spec, count, setup.device))
            chunk = workloads.draw_chunk(spec, size)
            seconds = _time_second_call(partial(train_stacked, chunk, spec, recipe, 0, setup.device)) / size
            name, ratio = f"{network}, {dtype}, {size} at once", loop_seconds / seconds
            yield Finding(f"{name}: teachers a second, of {steps} steps", 1 / seconds)
            demanded = network not in LARGE_NETWORKS and not setup.small
            yield Finding(f"{name}: times as fast as a loop", ratio, passed=ratio >= 1 if demanded else None)
            if dtype != "float32" or count != counts[0]:
                continue
            rivals: dict[str, tuple[str, Any]] = {"torch.vmap": ("has_stacked_form", lambda module: False)}
            if network != "logistic":  # cuDNN's convolutions in place of products of patches
                rivals["grouped convolutions"] = ("MATMUL_DEVICES", set())
            for rival, change in rivals.items():
                with patch.object(stacked, *change):
                    other_seconds = _time_second_call(partial(train_stacked, chunk, spec, recipe, 0, setup.device))
                yield Finding(f"{name}: times as fast as {rival}", other_seconds / size / seconds)


def _time_votes(setup: Setup, spec: DataSpec) -> Finding:
    options, teachers = workloads.choose_networks(setup)["lean_cnn"], setup.choose(250, 4)
    recipe = workloads.make_recipe("lean_cnn", options, steps=1)
    trained = train_stacked(workloads.draw_chunk(spec, teachers), spec, recipe, 0, setup.device)
    network = networks.describe("lean_cnn", spec.input_shape, spec.num_classes, **options)
    ensemble = TeacherEnsemble(network, [trained.params], torch.ones(teachers, dtype=torch.bool), spec)
    x = workloads.draw_images(spec, setup.choose(8192, 64))[0]
    seconds = _time_second_call(lambda: ensemble.count_votes(x, device=setup.device))
    return Finding("lean_cnn: votes a second", teachers * len(x) / seconds)


def _time_graph(setup: Setup) -> Iterator[Finding]:
    points = setup.choose(20_000, 50)
    x_PD = torch.randn(points, 64, generator=make_torch_generator(0, "graph"))
    cpu_seconds = _time_second_call(lambda: find_nearest(x_PD, 10))
    gpu_seconds = _time_second_call(lambda: find_nearest(x_PD.to(setup.device), 10))
    yield Finding(f"neighbor graph of {points} points", gpu_seconds, "s")
    yield Finding(f"neighbor graph of {points} points: times as fast as the CPU", cpu_seconds / gpu_seconds)


def _time_second_call(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class _EnoughSteps(Exception): ...


def _count_steps_per_second(setup: Setup, fit: Callable[..., object]) -> float:
    """Time the steps of a training after some to warm up, and stop it then."""
    first, last = setup.choose((20, 120), (1, 3))
    start = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal start
        if done in (first, last):
            torch.cuda.synchronize()
        if done == first:
            start = time.perf_counter()
        if done == last:
            raise _EnoughSteps

    try:
        fit(progress=progress)
    except _EnoughSteps:
        return (last - first) / (time.perf_counter() - start)
    raise AssertionError("a student takes more steps than are timed")
