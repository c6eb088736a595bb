"""The plain student: cross-entropy on the released labels, under augmentation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pate_torch.features.augmentation import make_weak_view
from pate_torch.students.training import (
    AveragedModel,
    GradientStudent,
    Objective,
    StudentProblem,
    TensorLog,
    compute_released_loss,
    iterate_batches,
)


@dataclass(frozen=True, kw_only=True)
class Supervised(GradientStudent):
    """Uses the answered points alone: quick, a baseline, and the default guide student."""

    name: str = "supervised"

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        """Mean corrected cross-entropy of a batch of distorted labeled points."""
        view = make_weak_view(problem.spec, self.affine)
        generator = problem.make_generator("views")
        labeled_batches = iterate_batches(len(problem.query_Q), self.batch_size, problem.make_generator("batches"))

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B = next(labeled_batches)
            x = view(problem.x_P[problem.query_Q[index_B]], problem.spec, generator)
            return compute_released_loss(problem, model(x).float(), index_B).mean()

        return compute_loss
