"""The plain student: cross-entropy on the released labels, under augmentation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pate_torch.features.augmentation import make_weak_view
from pate_torch.students.training import (
    Average,
    GradientStudent,
    Note,
    Objective,
    StudentProblem,
    batches,
    released_loss,
)


@dataclass(frozen=True, kw_only=True)
class Supervised(GradientStudent):
    """Uses the answered points alone: quick, a baseline, and the default guide student."""

    name: str = "supervised"

    def objective(self, problem: StudentProblem, average: Average, note: Note) -> Objective:
        """Mean corrected cross-entropy of a batch of distorted labeled points."""
        view = make_weak_view(problem.spec, self.affine)
        draws = problem.stream("views")
        order = batches(len(problem.query_Q), self.batch_size, problem.stream("batches"))

        def loss(model: nn.Module, step: int) -> Tensor:
            chosen = next(order)
            x = view(problem.x_P[problem.query_Q[chosen]], problem.spec, draws)
            return released_loss(problem, model(x).float(), chosen).mean()

        return loss
