"""Virtual adversarial training with entropy minimization: smooth where the public points lie, decided between them.

Needs no distortion that keeps the class, so it serves feature rows as well as images.

Source: Miyato et al. 2018, equations 5-8 (local distributional smoothness, one power iteration) and section 3.4
(conditional entropy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks
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
class Vat(GradientStudent):
    """Cross-entropy, plus the change under the worst small disturbance, plus the entropy of the predictions.

    Attributes:
        unlabeled_batch: Public points a step.
        radius: Length of the disturbance over the square root of the number of features (so: a typical change of one
            normalized feature).
        probe: Length, likewise, of the finite difference that finds its direction.
        smoothness: Weight of the change.
        entropy: Weight of the entropy.
    """

    name: str = "vat"
    steps: int = 600
    unlabeled_batch: int = 128
    radius: float = 0.15
    probe: float = 1e-3
    smoothness: float = 1.0
    entropy: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("student.unlabeled_batch", self.unlabeled_batch, low=1)
        checks.positive("student.radius", self.radius)
        checks.positive("student.probe", self.probe)
        checks.non_negative("student.smoothness", self.smoothness)
        checks.non_negative("student.entropy", self.entropy)

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        """Corrected cross-entropy on labels, plus smoothness and entropy on public points."""
        spec = problem.spec
        view, generator = make_weak_view(spec, self.affine), problem.make_generator("views")
        labeled_batches = iterate_batches(len(problem.query_Q), self.batch_size, problem.make_generator("batches"))
        unlabeled_batches = iterate_batches(
            len(problem.x_P), self.unlabeled_batch, problem.make_generator("unlabelled")
        )

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B = next(labeled_batches)
            x = view(problem.x_P[next(unlabeled_batches)], spec, generator)
            labeled_x = view(problem.x_P[problem.query_Q[index_B]], spec, generator)
            logits = model(torch.cat([labeled_x, x])).float()
            supervised_loss = compute_released_loss(problem, logits[: len(index_B)], index_B).mean()
            unlabeled_logits = logits[len(index_B) :]
            entropy = -(unlabeled_logits.softmax(1) * unlabeled_logits.log_softmax(1)).sum(1).mean()
            smoothness = self._compute_smoothness(model, x, generator)
            if step % max(1, self.steps // 50) == 0:
                note("student/smoothness", smoothness, step)
                note("student/entropy", entropy, step)
            return supervised_loss + self.smoothness * smoothness + self.entropy * entropy

        return compute_loss

    def _compute_smoothness(self, model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
        """Mean divergence between the prediction at x and at its adversarial neighbor."""
        with frozen_statistics(model):
            log_proba = model(x).float().log_softmax(1).detach()
            direction = scale_to_unit_rms(
                torch.randn(x.shape, generator=generator, device=generator.device)
            ).requires_grad_()
            probe_loss = F.kl_div(
                model(x + self.probe * direction).float().log_softmax(1),
                log_proba,
                log_target=True,
                reduction="batchmean",
            )
            (gradient,) = torch.autograd.grad(probe_loss, direction)
            adversarial_x = x + self.radius * scale_to_unit_rms(gradient)
            return F.kl_div(
                model(adversarial_x).float().log_softmax(1), log_proba, log_target=True, reduction="batchmean"
            )


def scale_to_unit_rms(x: Tensor) -> Tensor:
    """Every point scaled to root-mean-square 1 (zero stays zero)."""
    flat = x.flatten(1)
    return (flat / flat.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)).view_as(x)


class frozen_statistics:
    """Batch normalization uses the batch's statistics but does not record them: disturbed points are not data.

    Args:
        model: Whose layers they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def __enter__(self) -> None:
        self.momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            layer.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        for layer, momentum in zip(self.layers, self.momenta, strict=True):
            layer.momentum = momentum
