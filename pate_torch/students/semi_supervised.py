"""Students that also learn from public points without labels: label spreading, FixMatch, and adversarial smoothness.

Propagated labels along the k-NN graph of the public points label no new point; a network that learns them does.

Sources: Zhou et al. 2004 (learning with local and global consistency); Sohn et al. 2020 (FixMatch); Berthelot et al.
2020 (distribution alignment, ReMixMatch section 3.1); Tarvainen and Valpola 2017 (averaged teacher); Miyato et al. 2018
(virtual adversarial training, equations 5-8, and conditional entropy, section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import encode
from pate_torch.features.neighbors import (
    build_neighbor_graph,
    compute_coordinates,
    propagate_labels,
    sinkhorn_balance,
    to_graph_device,
)
from pate_torch.networks import make_feature_extractor
from pate_torch.students.base import Student, StudentProblem
from pate_torch.students.training import (
    AveragedModel,
    GradientStudent,
    Objective,
    TensorLog,
    compute_label_loss,
    compute_released_loss,
)

ALPHA = 0.99
"""``alpha`` of ``propagate_labels`` for a few answers, or those of cells that lie in other features."""
_ALIGNMENTS = ("uniform", "labels")
_PROPAGATED_ERROR_RATE = 0.1  # of kept propagated labels: 1-6 % measured on printed glyphs; more is safer than less
_NUM_NEIGHBORS = 10
_PROBE_RADIUS = 1e-3
"""Length of the finite difference that finds the worst direction, measured as ``Vat.radius`` is."""


@dataclass(frozen=True, kw_only=True)
class SemiSupervisedStudent(GradientStudent):
    """A gradient student whose loss also takes public points without labels.

    Attributes:
        unlabeled_batch: Number of public points in a batch.
    """

    unlabeled_batch: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("student.unlabeled_batch", self.unlabeled_batch, low=1)


@dataclass(frozen=True, kw_only=True)
class LabelSpreading(SemiSupervisedStudent):
    """A network of labels that spread over learned features (``features``), or else over the points' principal axes.

    Attributes:
        keep_fraction: Share of each class's propagated labels that is learned: those with the widest lead.
        alignment: Expected share of each class, see ``compute_expected_shares``.
    """

    include_unqueried: ClassVar[bool] = False
    name: str = "label_spreading"
    steps: int = 400
    keep_fraction: float = 0.9
    alignment: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("student.keep_fraction", self.keep_fraction, 0, 1)
        checks.one_of("student.alignment", self.alignment, _ALIGNMENTS)

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        target_C = compute_expected_shares(problem, self.alignment)
        propagated_P = select_most_confident(propagate(problem, self.features, target_C), self.keep_fraction)
        sampler = self.make_sampler(problem, self.unlabeled_batch)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B, index_U = next(sampler.labeled_batches), next(sampler.unlabeled_batches)
            labeled_logits = model(sampler.weak(problem.query_Q[index_B])).float()
            unlabeled_logits = model(sampler.weak(index_U)).float()
            supervised_loss = compute_released_loss(problem, labeled_logits, index_B).mean()
            return supervised_loss + compute_propagated_loss(unlabeled_logits, propagated_P[index_U])

        return compute_loss


@dataclass(frozen=True, kw_only=True)
class FixMatch(SemiSupervisedStudent):
    """Consistency under strong distortion, with guesses of the averaged model as targets: strong with very few labels.

    The averaged model guesses the class of a weak view of a public point; where it is confident, the model must predict
    the same for a strong view. With few labels those guesses start badly and confirm each other's mistakes, so at first
    propagated labels lead (20 labels, distorted printed digits, 600 steps: 90.2 % without, 98.1 % with).

    Attributes:
        threshold: Confidence from which a guess counts.
        alignment: Share of the guesses that each class should get, see ``compute_expected_shares``.
        propagation: Share of the steps over which propagated labels lead, fading linearly (0: never).
        keep_fraction: Share of each class's propagated labels that is learned: those with the widest lead.
    """

    include_unqueried: ClassVar[bool] = False
    name: str = "fixmatch"
    steps: int = 600
    threshold: float = 0.95
    alignment: str = "uniform"
    propagation: float = 0.35
    keep_fraction: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("threshold", "propagation", "keep_fraction"):
            checks.between(f"student.{key}", getattr(self, key), 0, 1)
        checks.one_of("student.alignment", self.alignment, _ALIGNMENTS)

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        sampler = self.make_sampler(problem, self.unlabeled_batch)
        target_C = compute_expected_shares(problem, self.alignment)
        align = Alignment(target_C)
        fade_steps = max(1, round(self.propagation * self.steps))
        propagated_P = None
        if self.propagation:
            propagated_P = select_most_confident(propagate(problem, self.features, target_C), self.keep_fraction)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B, index_U = next(sampler.labeled_batches), next(sampler.unlabeled_batches)
            with torch.no_grad():
                guess_UC = average.module(sampler.weak(index_U)).float().softmax(1)
            confidence_U, class_U = align(guess_UC).max(1)
            mask_U = (confidence_U >= self.threshold).float()
            # One pass over both parts: batch statistics of a few repeated labeled points alone would be poor.
            logits = model(torch.cat([sampler.weak(problem.query_Q[index_B]), sampler.strong(index_U)])).float()
            labeled_logits, unlabeled_logits = logits[: len(index_B)], logits[len(index_B) :]
            loss = compute_released_loss(problem, labeled_logits, index_B).mean()
            consistency_loss = (F.cross_entropy(unlabeled_logits, class_U, reduction="none") * mask_U).mean()
            if propagated_P is not None and step < fade_steps:
                propagated_loss = compute_propagated_loss(unlabeled_logits, propagated_P[index_U])
                consistency_loss = consistency_loss + (1 - step / fade_steps) * propagated_loss
            if self.is_logged(step):
                note("student/confident", mask_U.mean(), step)
            return loss + consistency_loss

        return compute_loss


class Alignment:
    """Distribution alignment (ReMixMatch, section 3.1): guesses are scaled by expected share over recent mean guess.

    Args:
        target_C: Share of the guesses that each class should get.
        decay: Decay of the mean guess.
    """

    def __init__(self, target_C: Tensor, decay: float = 0.97) -> None:
        self.target_C, self.mean_C, self.decay = target_C, target_C.clone(), decay

    def __call__(self, guess_BC: Tensor) -> Tensor:
        """Scale class probabilities [B, C] and normalize each row."""
        self.mean_C = self.decay * self.mean_C + (1 - self.decay) * guess_BC.mean(0)
        scaled_BC = guess_BC * (self.target_C / self.mean_C.clamp(min=1e-4))
        return scaled_BC / scaled_BC.sum(1, keepdim=True).clamp(min=1e-12)


@dataclass(frozen=True, kw_only=True)
class Vat(SemiSupervisedStudent):
    """Cross-entropy, plus the change under the worst small disturbance, plus the entropy of the predictions.

    Virtual adversarial training needs no distortion that keeps the class, so it serves rows as well as images.

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
        sampler = self.make_sampler(problem, self.unlabeled_batch)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B = next(sampler.labeled_batches)
            x = sampler.weak(next(sampler.unlabeled_batches))
            logits = model(torch.cat([sampler.weak(problem.query_Q[index_B]), x])).float()
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
        (gradient,) = torch.autograd.grad(compute_divergence(_PROBE_RADIUS * direction), direction)
        return compute_divergence(radius * _scale_to_unit_rms(gradient))


def _scale_to_unit_rms(x: Tensor) -> Tensor:
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


def propagate(
    problem: StudentProblem,
    recipe: FeatureRecipe | None,
    target_C: Tensor,
    *,
    previous_student: Student | None = None,
    alpha: float = ALPHA,
) -> Tensor:
    """Propagate released labels over the k-NN graph of the public points: probabilities [P, C].

    Args:
        problem: Released labels and public points.
        recipe: Recipe of the features in which points are joined; None for principal axes.
        target_C: Share that each class should get.
        previous_student: An earlier student, in whose features points are joined instead.
        alpha: See ``neighbors.propagate_labels``.
    """
    x_P, spec = problem.pool_x, problem.spec
    if previous_student is not None:
        feature_PD = encode(make_feature_extractor(previous_student.module), x_P, spec)
    elif recipe is not None:
        feature_PD = encode(recipe.learn(x_P, spec, seed=problem.seed, device=x_P.device), x_P, spec)
    else:
        feature_PD = compute_coordinates(x_P, spec)
    graph = build_neighbor_graph(to_graph_device(feature_PD, x_P.device), _NUM_NEIGHBORS)
    seeds_PC = torch.zeros(len(x_P), spec.num_classes)
    seeds_PC[problem.query_Q.cpu()] = problem.target_QC.cpu()
    # One unit of mass a class, however many labels it has: chance must not decide how far a class reaches.
    mass_PC = propagate_labels(graph, seeds_PC / seeds_PC.sum(0).clamp(min=1), alpha)
    return sinkhorn_balance(mass_PC, target_C.cpu()).to(x_P.device)


def select_most_confident(share_PC: Tensor, keep_fraction: float) -> Tensor:
    """Select the likeliest class of each point, and -1 outside the share of each class with the widest lead."""
    top_2 = share_PC.topk(2, dim=1)
    class_P, lead_P = top_2.indices[:, 0], top_2.values[:, 0] - top_2.values[:, 1]
    for c in class_P.unique().tolist():
        mask_P = class_P == c
        class_P[mask_P & (lead_P < lead_P[mask_P].quantile(1 - keep_fraction))] = -1
    return class_P


def compute_propagated_loss(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Compute the mean corrected cross-entropy of propagated labels; -1 (not kept) counts nothing."""
    return (compute_label_loss(logits_BC, label_B.clamp(min=0), _PROPAGATED_ERROR_RATE) * (label_B >= 0)).mean()


def compute_expected_shares(problem: StudentProblem, alignment: str) -> Tensor:
    """Compute each class's expected share [C]: ``uniform`` over the classes with labels, or that of the ``labels``."""
    counts_C = torch.bincount(problem.label_Q, minlength=problem.spec.num_classes).float()
    if alignment == "uniform":
        # A class without labels cannot be recognized; asking for its share would hand it a neighbor's points.
        return (counts_C > 0).float() / (counts_C > 0).sum()
    # One extra label a class: an unseen class is rare, not impossible.
    return (counts_C + 1) / (counts_C + 1).sum()
