"""A student per round of answers: each learns from the one before, put right where the teachers were asked.

Later questions go where the first student wavers, so their answers are the hardest of all: among few labels, drawn
again and again, the wrong ones of them do more harm than the right ones good. Here they stand among the first student's
own labels of all other public points, most of which it is right about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pate_torch import checks, rng
from pate_torch.protocols import Checkable, Log, Progress, Student, StudentAlgorithm, StudentTask, silent
from pate_torch.representation import digest
from pate_torch.types import DataSpec


@dataclass(frozen=True, kw_only=True)
class Successive:
    """``first`` learns from the answers of the first round (with one round, that is the student).

    For each later round ``then`` learns from labels of all public points: the answers where there are any, else what
    the student before says.
    """

    first: StudentAlgorithm
    then: StudentAlgorithm
    name: str = "successive"

    def __post_init__(self) -> None:
        for key in ("first", "then"):
            if not isinstance(getattr(self, key), StudentAlgorithm):
                raise checks.fail(
                    f"student.{key}", getattr(self, key), "must be a student algorithm", "Give it a _target_."
                )

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError when one of them cannot take the data."""
        for part in (self.first, self.then):
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
        """The student of the last round. Raises ValueError without labels."""
        rounds = _rounds(task)
        student = self._start(rounds[0], seed, device, progress, log)
        for turn in range(1, len(rounds)):
            said_P = student.predict(task.pool_x)
            for told in rounds[: turn + 1]:
                said_P[told.query_Q] = told.label_Q
            student = self.then.fit(
                StudentTask(task.spec, task.pool_x, torch.arange(len(task.pool_x)), said_P),
                seed=rng.derive(seed, "student", "round", turn),
                device=device,
                progress=progress,
                log=lambda tag, value, step, turn=turn: log(f"{tag}/round_{turn}", value, step),  # type: ignore[misc]
            )
        return student

    def _start(self, task: StudentTask, seed: int, device: torch.device, progress: Progress, log: Log) -> Student:
        """``first``'s student. One that guided the questions is not trained a second time."""
        told = [x for x in (task.pool_x, task.query_Q, task.label_Q, task.belief_QC) if x is not None]
        key = (repr(self.first), repr(task.spec), *map(digest, told), str(seed), str(device))
        if key not in _FITTED:
            student = self.first.fit(task, seed=seed, device=device, progress=progress, log=log)
            _FITTED.clear()
            _FITTED[key] = student
        return _FITTED[key]


_FITTED: dict[tuple[str, ...], Student] = {}
"""The last first student of this process."""


def _rounds(task: StudentTask) -> list[StudentTask]:
    """The task of each round that has answers."""
    query_Q, label_Q = task.query_Q.cpu(), task.label_Q.cpu()
    round_Q = torch.zeros(len(query_Q), dtype=torch.int64) if task.round_Q is None else task.round_Q.cpu()
    told = []
    for turn in round_Q.unique().tolist() or [0]:
        mine = round_Q == turn
        belief_QC = None if task.belief_QC is None else task.belief_QC.cpu()[mine]
        told.append(replace(task, query_Q=query_Q[mine], label_Q=label_Q[mine], belief_QC=belief_QC, round_Q=None))
    return told
