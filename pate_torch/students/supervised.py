"""The plain student: cross-entropy on the released labels, under augmentation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pate_torch.students.base import StudentProblem
from pate_torch.students.training import AveragedModel, GradientStudent, Objective, TensorLog, compute_released_loss


@dataclass(frozen=True, kw_only=True)
class Supervised(GradientStudent):
    """Uses the answered points alone: quick, a baseline, and the default guide student."""

    name: str = "supervised"

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        sampler = self.make_sampler(problem)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B = next(sampler.labeled_batches)
            return compute_released_loss(problem, model(sampler.weak_labeled(index_B)).float(), index_B).mean()

        return compute_loss
