"""Label spreading, distilled: propagate labels over the k-NN graph of the public points, and train a network on them.

The spread labels alone say nothing about new points and cannot be exported; the network can.

Source: Zhou et al. 2004 (learning with local and global consistency).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.features.augmentation import weak_view
from pate_torch.students.label_propagation import expected_shares, most_confident, propagate, propagated_loss
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
class LabelSpreading(GradientStudent):
    """Spreads over the learnt features where there is a recipe (``features``), else over the points' principal axes.

    Attributes:
        unlabeled_batch: Public points a step.
        keep_fraction: Share of each class's propagated labels that is learnt from: those with the widest lead.
        alignment: Expected share of each class, ``uniform`` or ``labels``.
    """

    everywhere: ClassVar[bool] = False
    name: str = "label_spreading"
    steps: int = 400
    unlabeled_batch: int = 128
    keep_fraction: float = 0.9
    alignment: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("student.unlabeled_batch", self.unlabeled_batch, low=1)
        checks.between("student.keep_fraction", self.keep_fraction, 0, 1)
        checks.one_of("student.alignment", self.alignment, ("uniform", "labels"))

    def objective(self, problem: StudentProblem, average: Average, note: Note) -> Objective:
        """Corrected cross-entropy on released and on propagated labels."""
        spec = problem.spec
        target_C = expected_shares(problem, self.alignment)
        propagated_P = most_confident(propagate(problem, self.features, target_C), self.keep_fraction)
        view, draws = weak_view(spec, self.affine), problem.stream("views")
        labeled = batches(len(problem.query_Q), self.batch_size, problem.stream("batches"))
        unlabeled = batches(len(problem.x_P), self.unlabeled_batch, problem.stream("unlabelled"))

        def loss(model: nn.Module, step: int) -> Tensor:
            chosen, points = next(labeled), next(unlabeled)
            own = model(view(problem.x_P[problem.query_Q[chosen]], spec, draws)).float()
            other = model(view(problem.x_P[points], spec, draws)).float()
            supervised = released_loss(problem, own, chosen).mean()
            return supervised + propagated_loss(other, propagated_P[points])

        return loss
