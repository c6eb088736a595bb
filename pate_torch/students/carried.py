"""A student of carried labels: what was answered travels along the public points' neighbour graph, and the clearest of
what arrives is all that it learns from, as if it had been answered.

For many answers of which some are wrong, or that speak for a cell of points and not for one: neighbours outvote the
mistakes. (Printed glyphs, distorted, at epsilon .097: of 400 cells 89 to 90 % of the labels are right, of the clearest
80 % of the carried ones 99.0 to 99.4 %; LOG.md.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pate_torch.core import checks
from pate_torch.features.contrastive import Representation
from pate_torch.protocols import Checkable, Log, Progress, Student, StudentAlgorithm, StudentTask, silent
from pate_torch.students.carrying import REACH, carried, trusted
from pate_torch.students.ensemble import Ensemble
from pate_torch.students.linear_model import linear_student
from pate_torch.students.task import by_round
from pate_torch.students.training import pose
from pate_torch.types import DataSpec


@dataclass(frozen=True, kw_only=True)
class Carried:
    """``first`` makes the first student, ``then`` each that follows.

    representation: whose features the graph joins; None: principal axes. trust: share of each carried class that is
    learnt from, those with the widest lead. Each class is expected to have the share that the answers give it.

    Students follow each other: ``generations`` of them learn from the answers of the first round, and one more from
    those of each later round. The first, by ``first``, is as good as the features. For each later one, by ``then``, the
    graph lies in the features of the one before, where the classes are further apart: ``trust_later`` of the carried
    labels are clear enough. ``reach``: how far answers travel, see ``neighbors.spread``. Where they were asked for in
    those features too (``reach_later``), they say more of the points about them, and need not travel as far for their
    mistakes to be outvoted.

    ``members``: how many students each generation is, pooled; each starts from features of its own, and the next
    graph lies in the features of all of them side by side.

    ``last``: what is given in the end. "student": one that learnt from the last round's answers. "model": the linear
    model itself that gave them (``voting=slopes``), in the features of the students before. It was led by the private
    records, which those students never saw, and so does not repeat what they got wrong of the public points.
    """

    first: StudentAlgorithm
    then: StudentAlgorithm
    name: str = "carried"
    representation: Representation | None = None
    trust: float = 0.8
    trust_later: float = 0.95
    reach: float = REACH
    reach_later: float = 0.9
    generations: int = 2
    members: int = 1
    last: str = "student"

    def __post_init__(self) -> None:
        for key in ("first", "then"):
            if not isinstance(getattr(self, key), StudentAlgorithm):
                raise checks.fail(
                    f"student.{key}", getattr(self, key), "must be a student algorithm", "Give it a _target_."
                )
        checks.between("student.trust", self.trust, 0, 1)
        checks.between("student.trust_later", self.trust_later, 0, 1)
        checks.between("student.reach", self.reach, 0, 1, open_=True)
        checks.between("student.reach_later", self.reach_later, 0, 1, open_=True)
        checks.integer("student.generations", self.generations, low=1)
        checks.integer("student.members", self.members, low=1)
        checks.one_of("student.last", self.last, ("student", "model"))

    @property
    def guide(self) -> Carried:
        """The recipe of the students that guide rounds: this one, but that it never gives the model."""
        return replace(self, last="student")

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError when one of them cannot take the data."""
        for part in (self.first, self.then, self.representation):
            if isinstance(part, Checkable):
                part.check(spec)

    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = silent,
        log: Log = silent,
    ) -> Student:
        """The student of the last generation, or the model of the last round.

        Where the guide is one of this recipe's own students (``task.guide``), it has learnt from all rounds but the
        last, and the others follow it.

        Raises:
            ValueError: There are no labels, or (``last``) no model was released.
        """
        rounds = by_round(task)
        told = rounds[:1] * self.generations + rounds[1:]
        learnt = told if self.last == "student" else told[: -1 if len(rounds) > 1 else 0]
        student, first = task.guide, 0 if task.guide is None else len(told) - 1
        curves = {} if student is None else dict(student.curves)
        for turn in range(first, len(learnt)):
            student = self._generation(learnt, turn, student, seed, device, progress, log)
            curves |= {_tag(tag, turn): curve for tag, curve in student.curves.items()}
        if self.last == "model":
            student = linear_student(task, student, self.representation, seed, device)
        assert student is not None
        return replace(student, curves=curves)

    def _generation(
        self,
        told: Sequence[StudentTask],
        turn: int,
        before: Student | None,
        seed: int,
        device: torch.device,
        progress: Progress,
        log: Log,
    ) -> Student:
        """The student of one turn. before: that of the turn before."""
        reach = self.reach if turn < self.generations else self.reach_later
        clear = self._clear(told[turn], before, reach, seed, device)
        algorithm = self.first if before is None else self.then
        if self.members > 1:
            algorithm = Ensemble(member=algorithm, members=self.members, bootstrap=False)
        return algorithm.fit(
            clear,
            seed=seed,
            device=device,
            progress=lambda done, total: progress(turn * total + done, len(told) * total),
            log=lambda tag, value, step: log(_tag(tag, turn), value, step),
        )

    def _clear(
        self, task: StudentTask, before: Student | None, reach: float, seed: int, device: torch.device
    ) -> StudentTask:
        """The clearest carried labels. before: the student of the generation before, whose features help."""
        problem = pose(task, seed, device)
        trust = self.trust if before is None else self.trust_later
        share_PC = carried(problem, self.representation, problem.told_QC.mean(0), before=before, reach=reach)
        class_P = trusted(share_PC, trust).cpu()
        query_Q = (class_P >= 0).nonzero().squeeze(1)
        return StudentTask(task.spec, task.pool_x, query_Q, class_P[query_Q])


def _tag(tag: str, turn: int) -> str:
    """Curves of the first student keep their names, those of later ones get their number."""
    return f"{tag}/{turn}" if turn else tag
