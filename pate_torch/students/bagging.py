"""A voting student by bagging: several students of one kind on resampled labels, pooled (Breiman 1996).

The ensemble's plurality need not lie near any single hypothesis of the class; votes of several come nearer. LZCW21's
Theorem 20 is about the empirical risk minimizer over such votes, which bagging is not; for boosting, which it suggests,
see ``adaboost``.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from pate_torch import networks
from pate_torch.core import checks, rng
from pate_torch.core.device import run_in_parallel
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask


@dataclass(frozen=True, kw_only=True)
class BaggingStudent(StudentAlgorithm):
    """Bagging: several fits of ``member``; the module returns their mean log-probabilities.

    The first fit is the one that ``member`` alone would give; each other has a seed, and so features, of its own.
    Answers are public, so members cost no privacy.

    Attributes:
        members: Number of fits.
        bootstrap: Whether each but the first learns from as many answers as there are, drawn with replacement.
    """

    member: StudentAlgorithm
    name: str = "ensemble"
    members: int = 5
    bootstrap: bool = True

    def __post_init__(self) -> None:
        checks.integer("student.members", self.members, low=1)
        checks.boolean("student.bootstrap", self.bootstrap)
        if not isinstance(self.member, StudentAlgorithm):
            raise checks.error("student.member", self.member, "must be a student algorithm", "Give it a _target_.")

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError when the member cannot take the data."""
        self.member.check(spec)

    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = do_nothing,
        log: Log = do_nothing,
    ) -> Student:
        """Fit the voting student.

        Raises:
            ValueError: There are no labels.
        """
        member_logs: list[list[tuple[str, float, int]]] = [[] for _ in range(self.members)]

        def fit_member(k: int, progress: Progress) -> Student:
            # The first is the student alone: it starts from the features that chose the questions.
            return self.member.fit(
                self._resample(task, seed, k),
                seed=rng.derive_member_seed(seed, k),
                device=device,
                progress=progress,
                log=lambda tag, value, step: member_logs[k].append((f"{tag}/{k}", value, step)),
            )

        students = run_in_parallel([functools.partial(fit_member, k) for k in range(self.members)], device, progress)
        for tag, value, step in itertools.chain(*member_logs):  # one after the other: threads come in any order
            log(tag, value, step)
        spec, design = task.spec, {key: students[0].network[key] for key in ("name", "options")}
        description = networks.describe("voting", spec.input_shape, spec.num_classes, members=self.members, of=design)
        module = networks.Voting([student.module for student in students]).eval()
        curves = {f"{tag}/{k}": curve for k, student in enumerate(students) for tag, curve in student.curves.items()}
        return Student(description, module, spec, curves)

    def _resample(self, task: StudentTask, seed: int, k: int) -> StudentTask:
        count = len(task.query_Q)
        if k == 0 or not self.bootstrap or count == 0:
            return task
        generator = rng.make_torch_generator(seed, "student", "bootstrap", k)
        return task.select(torch.randint(count, (count,), generator=generator))
