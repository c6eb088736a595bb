"""A student per round of answers: each learns from the one before, put right where the teachers were asked.

Later questions go where the first student wavers, so their answers are the hardest of all: among few labels, drawn
again and again, the wrong ones of them do more harm than the right ones good. Here they stand among the first student's
own labels of all other public points, most of which it is right about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pate_torch import rng
from pate_torch.protocols import Log, Progress, Student, StudentTask, silent
from pate_torch.students.rounds import Turns, by_round, remembered


@dataclass(frozen=True, kw_only=True)
class Successive(Turns):
    """``first`` learns from the answers of the first round (with one round, that is the student).

    For each later round ``then`` learns from labels of all public points: the answers where there are any, else what
    the student before says.
    """

    name: str = "successive"

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
        rounds = by_round(task)
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
        return remembered(
            (repr(self.first), seed, device),
            [task],
            lambda: self.first.fit(task, seed=seed, device=device, progress=progress, log=log),
        )
