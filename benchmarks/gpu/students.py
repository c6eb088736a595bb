"""Checks of students and encoders on a GPU: they are the same again to the bit, and their steps do not wait."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import workloads
from benchmarks.gpu.findings import CodeLine, Finding, Setup, check_at_most, find_package_line
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features import contrastive
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.training import SYNC_EVERY
from pate_torch.teachers.engine import BLOCK_STEPS, train_stacked

Fit = Callable[[Progress], dict[str, Tensor]]
"""progress -> the learned tensors on the CPU."""


def make_fits(setup: Setup, students: dict[str, StudentAlgorithm], steps: int) -> dict[str, Fit]:
    """Return functions that fit these students, and a contrastive encoder that takes this many steps."""
    fits: dict[str, Fit] = {name: _make_student_fit(setup, algorithm) for name, algorithm in students.items()}

    def fit_encoder(progress: Progress) -> dict[str, Tensor]:
        task, encoder = workloads.make_student_task(setup), workloads.make_encoder(setup, steps)
        with patch.dict(
            contrastive._ENCODER_CACHE, clear=True
        ):  # else an encoder that was learned before would be returned
            learned = encoder.learn(task.pool_x, task.spec, seed=0, device=setup.device, progress=progress)
        return {name: value.cpu() for name, value in learned.state_dict().items()}

    return fits | {"contrastive": fit_encoder}


def _make_student_fit(setup: Setup, algorithm: StudentAlgorithm) -> Fit:
    def fit(progress: Progress) -> dict[str, Tensor]:
        student = algorithm.fit(workloads.make_student_task(setup), seed=0, device=setup.device, progress=progress)
        return {name: value.cpu() for name, value in student.module.state_dict().items()}

    return fit


# ---- repeatability ---------------------------------------------------------------------------------------------------


def check_repeatability(setup: Setup) -> Iterator[Finding]:
    """Fit every student and the contrastive encoder twice."""
    steps = setup.choose(40, 3)
    students = workloads.make_students(setup, steps) | workloads.make_other_students(setup, steps)
    for name, fit in make_fits(setup, students, steps).items():
        same = _is_repeatable(fit)
        value = "the same bits" if same else f"differs by {_find_nondeterministic_operations(fit)}"
        yield Finding(f"{name}, twice", value, passed=same)


def _is_repeatable(fit: Fit) -> bool:
    one, other = fit(do_nothing), fit(do_nothing)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _find_nondeterministic_operations(fit: Fit) -> str:
    """Name the operations that PyTorch knows to be nondeterministic, or say that it names none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            same = _is_repeatable(fit)
    finally:
        torch.use_deterministic_algorithms(False)
    messages = [str(warning.message) for warning in caught]
    named = {text.split(" does not have a deterministic")[0] for text in messages if "deterministic" in text}
    unnamed = "an algorithm that cuDNN or cuBLAS chose" if same else "an operation that PyTorch does not name"
    return ", ".join(sorted(named)) or unnamed


# ---- synchronizations ------------------------------------------------------------------------------------------------

FIRST_STEP, LAST_STEP = 3, 3 + SYNC_EVERY
MAX_SYNCS = {"contrastive": 0}
"""Intended syncs between these steps. Students read their losses and what they log; teachers wait twice in BLOCK."""
MAX_SYNCS_OTHERWISE = 2


class _EnoughSteps(Exception): ...


def check_syncs(setup: Setup) -> Iterator[Finding]:
    """Count where training makes the host wait for the GPU, by line of the package."""
    for name, fit in make_fits(setup, workloads.make_students(setup, 1000), 1000).items():
        yield from _report_syncs(name, SYNC_EVERY, _count_syncs(fit))
    yield from _report_syncs("teachers", BLOCK_STEPS, _count_teacher_syncs(setup))


def _report_syncs(name: str, steps: int, syncs: Counter[CodeLine]) -> Iterator[Finding]:
    limit = MAX_SYNCS.get(name, MAX_SYNCS_OTHERWISE)
    yield check_at_most(f"{name}: syncs in {steps} steps", syncs.total(), limit)
    for line, times in syncs.most_common():
        yield Finding(f"  {line}", times)


def _count_syncs(fit: Fit) -> Counter[CodeLine]:
    syncs, step = Counter[CodeLine](), 0

    def progress(done: int, total: int) -> None:
        nonlocal step
        step = done
        if done == LAST_STEP:
            raise _EnoughSteps

    def count(line: CodeLine) -> None:
        if step >= FIRST_STEP:
            syncs[line] += 1

    with suppress(_EnoughSteps), _watch_syncs(count):
        fit(progress)
    return syncs


def _count_teacher_syncs(setup: Setup) -> Counter[CodeLine]:
    """Count the syncs of ``BLOCK_STEPS`` steps of stacked teachers: those of two blocks less those of one."""
    spec, counts = workloads.make_spec(setup), []
    for blocks in (1, 2):
        lines: list[CodeLine] = []
        recipe = workloads.make_recipe("logistic", {}, steps=blocks * BLOCK_STEPS)
        with _watch_syncs(lines.append):
            train_stacked(workloads.draw_chunk(spec, teachers=2), spec, recipe, 0, setup.device)
        counts.append(Counter(lines))
    return counts[1] - counts[0]


@contextmanager
def _watch_syncs(count: Callable[[CodeLine], object]) -> Iterator[None]:
    """Pass the package's line of every sync of which PyTorch warns to ``count``."""

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            count(find_package_line())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            # In one thread, so that the line that called a backward pass lies below its warnings.
            with patch.object(warnings, "showwarning", show), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
