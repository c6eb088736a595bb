"""A student of carried labels: what was answered travels along the public points' neighbour graph, and the clearest of
what arrives is all that ``then`` learns from, as if it had been answered.

For many answers of which some are wrong, or that speak for a cell of points and not for one: neighbours outvote the
mistakes. (Printed glyphs, distorted, at epsilon .097: of the labels of 400 cells 90 % are right, of the 80 % clearest
carried ones 99.4 to 99.8 %.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pate_torch import checks
from pate_torch.protocols import Checkable, Log, Progress, Student, StudentAlgorithm, StudentTask, silent
from pate_torch.representation import Representation
from pate_torch.students.carrying import carried, trusted
from pate_torch.students.training import pose
from pate_torch.types import DataSpec


@dataclass(frozen=True, kw_only=True)
class Carried:
    """representation: whose features the graph joins; None: principal axes. trust: share of each carried class that is
    learnt from, those with the widest lead. Each class is expected to have the share that the answers give it.
    """

    then: StudentAlgorithm
    name: str = "carried"
    representation: Representation | None = None
    trust: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.then, StudentAlgorithm):
            raise checks.fail("student.then", self.then, "must be a student algorithm", "Give it a _target_.")
        checks.between("student.trust", self.trust, 0, 1)

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError when ``then`` cannot take the data."""
        if isinstance(self.then, Checkable):
            self.then.check(spec)
        if self.representation is not None:
            self.representation.check(spec)

    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = silent,
        log: Log = silent,
    ) -> Student:
        """``then``'s student. Raises ValueError without labels."""
        problem = pose(task, seed, device)
        if problem.belief_QC is not None:
            told_QC = problem.belief_QC
        else:
            told_QC = F.one_hot(problem.label_Q, task.spec.num_classes).float()
        class_P = trusted(carried(problem, self.representation, told_QC.mean(0)), self.trust).cpu()
        query_Q = (class_P >= 0).nonzero().squeeze(1)
        clear = StudentTask(task.spec, task.pool_x, query_Q, class_P[query_Q])
        return self.then.fit(clear, seed=seed, device=device, progress=progress, log=log)
