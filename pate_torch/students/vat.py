"""Virtual adversarial training with entropy minimization: smooth where the public points lie, decided between them.

Needs no distortion that keeps the class, so it serves feature rows as well as images.

Source: Miyato et al. 2018, equations 5-8 (local distributional smoothness, one power iteration) and section 3.4
(conditional entropy).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.students.base import StudentProblem
from pate_torch.students.training import (
    AveragedModel,
    Objective,
    SemiSupervisedStudent,
    TensorLog,
    compute_released_loss,
)

_PROBE = 1e-3
"""Length of the finite difference that finds the worst direction, measured as ``Vat.radius`` is."""


@dataclass(frozen=True, kw_only=True)
class Vat(SemiSupervisedStudent):
    """Cross-entropy, plus the change under the worst small disturbance, plus the entropy of the predictions.

    Attributes:
        radius: Length of the disturbance over the square root of the number of features (so: a typical change of one
            normalized feature).
        smoothness: Weight of the change.
        entropy: Weight of the entropy.
    """

    name: str = "vat"
    steps: int = 600
    radius: float = 0.15
    smoothness: float = 1.0
    entropy: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("student.radius", self.radius)
        checks.non_negative("student.smoothness", self.smoothness)
        checks.non_negative("student.entropy", self.entropy)

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        sampler = self.make_sampler(problem)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B = next(sampler.labeled_batches)
            x = sampler.weak(next(sampler.unlabeled_batches))
            logits = model(torch.cat([sampler.weak_labeled(index_B), x])).float()
            supervised_loss = compute_released_loss(problem, logits[: len(index_B)], index_B).mean()
            unlabeled_logits = logits[len(index_B) :]
            entropy = -(unlabeled_logits.softmax(1) * unlabeled_logits.log_softmax(1)).sum(1).mean()
            smoothness = compute_smoothness(model, x, self.radius, sampler.generator)
            if self.is_logged(step):
                note("student/smoothness", smoothness, step)
                note("student/entropy", entropy, step)
            return supervised_loss + self.smoothness * smoothness + self.entropy * entropy

        return compute_loss


def compute_smoothness(model: nn.Module, x: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    """Mean divergence between the prediction at x and at its adversarial neighbor at this ``radius``."""

    def compute_divergence(disturbance: Tensor) -> Tensor:
        disturbed_log_proba = model(x + disturbance).float().log_softmax(1)
        return F.kl_div(disturbed_log_proba, log_proba, log_target=True, reduction="batchmean")

    with _frozen_statistics(model):
        log_proba = model(x).float().log_softmax(1).detach()
        noise = torch.randn(x.shape, generator=generator, device=generator.device)
        direction = _scale_to_unit_rms(noise).requires_grad_()
        (gradient,) = torch.autograd.grad(compute_divergence(_PROBE * direction), direction)
        return compute_divergence(radius * _scale_to_unit_rms(gradient))


def _scale_to_unit_rms(x: Tensor) -> Tensor:
    """Every point scaled to root-mean-square 1 (zero stays zero)."""
    flat = x.flatten(1)
    return (flat / flat.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)).view_as(x)


@contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Batch normalization uses the batch's statistics but does not record them: disturbed points are not data."""
    momenta = {m: m.momentum for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    for layer in momenta:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum
