"""Parts about students and encoders: the same again to the bit, and what their steps wait for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pate_torch.features import contrastive
from pate_torch.gpu_check import worlds
from pate_torch.gpu_check.parts import Bench, Finding, at_most
from pate_torch.gpu_check.pretend import Site, site
from pate_torch.protocols import Progress, StudentAlgorithm, silent
from pate_torch.students.training import LOOKED_AT
from pate_torch.teachers.engine import BLOCK, train_stacked

Fit = Callable[[Progress], dict[str, Tensor]]
"""progress -> the tensors that were learnt, on the CPU."""


def _student(bench: Bench, algorithm: StudentAlgorithm) -> Fit:
    def fit(progress: Progress) -> dict[str, Tensor]:
        student = algorithm.fit(worlds.task(bench), seed=0, device=bench.device, progress=progress)
        return {name: value.cpu() for name, value in student.module.state_dict().items()}

    return fit


def _encoder(bench: Bench, steps: int) -> Fit:
    def fit(progress: Progress) -> dict[str, Tensor]:
        task = worlds.task(bench)
        with patch.dict(contrastive._LEARNT, clear=True):  # else it would be handed out again
            learnt = worlds.encoder(bench, steps).learn(
                task.pool_x, task.spec, seed=0, device=bench.device, progress=progress
            )
        return {name: value.cpu() for name, value in learnt.state_dict().items()}

    return fit


# ---- the same again --------------------------------------------------------------------------------------------------


def repeatability(bench: Bench) -> Iterator[Finding]:
    """Everything that is trained for the release, twice."""
    steps = bench.of(40, 3)
    algorithms = worlds.students(bench, steps) | worlds.pooled_students(bench, steps)
    fits = {name: _student(bench, algorithm) for name, algorithm in algorithms.items()}
    fits["contrastive encoder"] = _encoder(bench, steps)
    for name, fit in fits.items():
        same = _same(fit(silent), fit(silent))
        yield Finding(f"{name}, twice", "the same bits" if same else f"differs by {_blamed(fit)}", passed=same)


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _blamed(fit: Fit) -> str:
    """The operations that PyTorch knows to be unsettled; else what chooses its algorithms itself."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            same = _same(fit(silent), fit(silent))
    finally:
        torch.use_deterministic_algorithms(False)
    named = {str(one.message).split(" does not have a deterministic")[0] for one in caught
             if "deterministic" in str(one.message)}  # fmt: skip
    chosen = "an algorithm that cuDNN or cuBLAS chose" if same else "an operation that PyTorch does not name"
    return ", ".join(sorted(named)) or chosen


# ---- what steps wait for ---------------------------------------------------------------------------------------------

FIRST, LAST = 3, 3 + LOOKED_AT
"""Steps that are watched."""
WAITS = {"contrastive encoder": 0, "teachers": 2}
"""Syncs that are meant to be in them, and in ``BLOCK`` steps of teachers. Students read losses and what they note."""
STUDENT_WAITS = 2


class _EnoughSeen(Exception): ...


def syncs(bench: Bench) -> Iterator[Finding]:
    """Where training makes the host wait for the GPU, by line."""
    fits = {name: _student(bench, algorithm) for name, algorithm in worlds.students(bench, 1000).items()}
    fits["contrastive encoder"] = _encoder(bench, 1000)
    for name, fit in fits.items():
        yield from _shown(name, LOOKED_AT, _waits(fit))
    yield from _shown("teachers", BLOCK, _teachers_wait(bench))


def _shown(name: str, steps: int, waits: Counter[Site]) -> Iterator[Finding]:
    yield at_most(f"{name}: syncs in {steps} steps", waits.total(), WAITS.get(name, STUDENT_WAITS))
    for line, times in waits.most_common():
        yield Finding(f"  {line}", times)


def _waits(fit: Fit) -> Counter[Site]:
    """Syncs by line, over the steps that are watched."""
    seen, now = Counter[Site](), 0

    def progress(done: int, total: int) -> None:
        nonlocal now
        now = done
        if done == LAST:
            raise _EnoughSeen

    def count(line: Site) -> None:
        if now >= FIRST:
            seen[line] += 1

    with suppress(_EnoughSeen), _watched(count):
        fit(progress)
    return seen


def _teachers_wait(bench: Bench) -> Counter[Site]:
    """Syncs of ``BLOCK`` steps of stacked teachers: those of twice as many, less those of one."""
    spec, counted = worlds.spec(bench), []
    for blocks in (1, 2):
        seen: list[Site] = []
        with _watched(seen.append):
            recipe = worlds.recipe("logistic", {}, steps=blocks * BLOCK)
            train_stacked(worlds.chunk(spec, teachers=2), spec, recipe, 0, bench.device)
        counted.append(Counter(seen))
    return counted[1] - counted[0]


@contextmanager
def _watched(count: Callable[[Site], object]) -> Iterator[None]:
    """Tell of every sync that PyTorch warns of, by the package's line."""

    def show(message: Any, *where: Any, **more: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            count(site())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            # In one thread, so that the line which asked for a backward pass is below its warnings.
            with patch.object(warnings, "showwarning", show), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
