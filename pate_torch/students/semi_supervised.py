"""Students that also learn from public points without labels: label spreading, FixMatch and VAT.

Label propagation along the k-NN graph labels the public points only. Their votes, or a network that learns the
propagated labels, predict new points.

Sources: Zhou et al. 2004 (learning with local and global consistency); Sohn et al. 2020 (FixMatch); Berthelot et al.
2020 (distribution alignment, ReMixMatch section 3.1); Tarvainen and Valpola 2017 (averaged teacher); Miyato et al. 2018
(virtual adversarial training, equations 5-8, and conditional entropy, section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features import neighbors
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import ContrastiveFeatures, encode
from pate_torch.networks import L2Normalize
from pate_torch.students import training
from pate_torch.students.base import Student, StudentAlgorithm, StudentProblem, StudentTask
from pate_torch.students.training import AveragedModel, GradientStudent, Objective, TensorLog

ALPHA = 0.99
"""``alpha`` of ``propagate_labels`` for few answers, or for cells that were formed in other features."""
_ALIGNMENTS = ("uniform", "labels")
_PROPAGATED_ERROR_RATE = 0.1
"""Assumed share of errors in the propagated labels that are learned. On printed glyphs, 1 to 6 % of them were wrong."""
_NUM_NEIGHBORS = 10
_PROBE_RADIUS = 1e-3
"""Length of the finite difference that finds the adversarial direction, in the unit of ``Vat.radius``."""


@dataclass(frozen=True, kw_only=True)
class SemiSupervisedStudent(GradientStudent):
    """A gradient student whose loss includes public points without labels.

    Attributes:
        unlabeled_batch: Number of public points in a batch.
    """

    unlabeled_batch: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("student.unlabeled_batch", self.unlabeled_batch, low=1)


@dataclass(frozen=True, kw_only=True)
class LabelSpreading(StudentAlgorithm):
    """Propagated labels of the public points, and the vote of the nearest public points for new points.

    Attributes:
        features: Recipe of the features. None for principal axes, and for votes of the nearest raw points.
        alignment: Expected shares of the classes: "uniform" over the classes with labels, or as in the "labels".
    """

    has_linear_output: ClassVar[bool] = False
    name: str = "label_spreading"
    features: ContrastiveFeatures | None = None
    alignment: str = "uniform"

    def __post_init__(self) -> None:
        checks.one_of("student.alignment", self.alignment, _ALIGNMENTS)

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        problem, spec, pool_x = training.build_problem(task, seed, device), task.spec, task.pool_x
        target_C, encoder, trunk = compute_expected_shares(problem, self.alignment), None, nn.Sequential()
        options: dict[str, Any] = {"points": len(pool_x), "neighbors": _NUM_NEIGHBORS}
        if self.features is not None:
            encoder = self.features.learn(pool_x, spec, seed=seed, device=device)
            trunk, options["of"] = nn.Sequential(encoder, L2Normalize()), self.features.design
        share_PC = propagate(problem, self.features, target_C, encoder=encoder)
        description = networks.describe("neighbor_vote", spec.input_shape, spec.num_classes, **options)
        module = networks.rebuild(description)
        with torch.no_grad():
            places = [trunk(spec.normalize(x_B.to(device))).flatten(1).cpu() for x_B in pool_x.split(1024)]
        state = {f"0.{name}": value for name, value in trunk.state_dict().items()}
        module.load_state_dict(state | {"1.place_PD": torch.cat(places), "1.share_PC": share_PC})
        progress(1, 1)
        student = Student(description, module.to(device).eval(), spec)
        query_Q, label_Q = problem.query_Q.cpu()[:1000], problem.label_Q.cpu()[:1000]  # predictions are slow
        error = float((student.predict(pool_x[query_Q]) != label_Q).double().mean())
        log("student/training_error", error, 0)
        return student


@dataclass(frozen=True, kw_only=True)
class FixMatch(SemiSupervisedStudent):
    """FixMatch with an averaged teacher, for very few labels.

    The averaged model predicts the class of a weak view of a public point. If the prediction is confident, it is the
    target for a strong view. With few labels, early predictions are poor and confirm each other's errors, so propagated
    labels are further targets at first (20 labels, distorted printed digits, 600 steps: 90.2 % without propagated
    labels, 98.1 % with them).

    Attributes:
        threshold: Smallest confidence of a prediction that is a target.
        alignment: Expected shares of the classes: "uniform" over the classes with labels, or as in the "labels".
        propagation: Share of the steps with propagated labels, whose weight falls linearly to 0. 0 for no such labels.
        keep_fraction: Share of the propagated labels of each class that is learned: the labels with the widest lead.
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
                proba_UC = average.module(sampler.distort_weakly(index_U)).float().softmax(1)
            confidence_U, class_U = align(proba_UC).max(1)
            mask_U = (confidence_U >= self.threshold).float()
            # One pass over both parts, because batch statistics of a few labeled points alone would be poor.
            logits = model(
                torch.cat([sampler.distort_weakly(problem.query_Q[index_B]), sampler.distort_strongly(index_U)])
            ).float()
            labeled_logits, unlabeled_logits = logits[: len(index_B)], logits[len(index_B) :]
            loss = training.compute_released_loss(problem, labeled_logits, index_B).mean()
            consistency_loss = (F.cross_entropy(unlabeled_logits, class_U, reduction="none") * mask_U).mean()
            if propagated_P is not None and step < fade_steps:
                propagated_loss = compute_propagated_loss(unlabeled_logits, propagated_P[index_U])
                consistency_loss = consistency_loss + (1 - step / fade_steps) * propagated_loss
            if self.is_logged(step):
                note("student/confident", mask_U.mean(), step)
            return loss + consistency_loss

        return compute_loss


class Alignment:
    """Distribution alignment (ReMixMatch, section 3.1): predictions are scaled by expected share over recent mean.

    Args:
        target_C: Expected share of each class.
        decay: Decay of the mean prediction.
    """

    def __init__(self, target_C: Tensor, decay: float = 0.97) -> None:
        self.target_C, self.mean_C, self.decay = target_C, target_C.clone(), decay

    def __call__(self, proba_BC: Tensor) -> Tensor:
        """Scale class probabilities [B, C] and normalize each row."""
        self.mean_C = self.decay * self.mean_C + (1 - self.decay) * proba_BC.mean(0)
        scaled_BC = proba_BC * (self.target_C / self.mean_C.clamp(min=1e-4))
        return scaled_BC / scaled_BC.sum(1, keepdim=True).clamp(min=1e-12)


@dataclass(frozen=True, kw_only=True)
class Vat(SemiSupervisedStudent):
    """Virtual adversarial training: cross-entropy, adversarial divergence and entropy of the predictions.

    The adversarial divergence is the change of a prediction under the worst small perturbation of the point. No
    distortion that preserves the class is needed, so rows are supported as well as images.

    Attributes:
        radius: Root mean square of the perturbation over the normalized features.
        smoothness: Weight of the adversarial divergence.
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
            x = sampler.distort_weakly(next(sampler.unlabeled_batches))
            logits = model(torch.cat([sampler.distort_weakly(problem.query_Q[index_B]), x])).float()
            supervised_loss = training.compute_released_loss(problem, logits[: len(index_B)], index_B).mean()
            unlabeled_logits = logits[len(index_B) :]
            entropy = -(unlabeled_logits.softmax(1) * unlabeled_logits.log_softmax(1)).sum(1).mean()
            smoothness = compute_smoothness(model, x, self.radius, sampler.generator)
            if self.is_logged(step):
                note("student/smoothness", smoothness, step)
                note("student/entropy", entropy, step)
            return supervised_loss + self.smoothness * smoothness + self.entropy * entropy

        return compute_loss


def compute_smoothness(model: nn.Module, x: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    """Compute the mean divergence between the predictions at x and at the adversarial point at distance ``radius``."""

    def compute_divergence(perturbation: Tensor) -> Tensor:
        perturbed_log_proba = model(x + perturbation).float().log_softmax(1)
        return F.kl_div(perturbed_log_proba, log_proba, log_target=True, reduction="batchmean")

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
    """Let batch normalization use the statistics of the batch without recording them, because points are perturbed."""
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
    encoder: nn.Module | None = None,
    alpha: float = ALPHA,
) -> Tensor:
    """Propagate released labels along the k-NN graph of the public points, and return class probabilities [P, C].

    Args:
        problem: Released labels and public points.
        recipe: Recipe of the features of the graph. None for principal axes.
        target_C: Expected share of each class.
        encoder: Encoder whose features replace those of ``recipe``, on the device of the points. None to learn them.
        alpha: Share of a label that comes from the neighbors (``neighbors.propagate_labels``).
    """
    x_P, spec = problem.pool_x, problem.spec
    if encoder is None and recipe is not None:
        encoder = recipe.learn(x_P, spec, seed=problem.seed, device=x_P.device)
    place_PD = neighbors.compute_coordinates(x_P, spec) if encoder is None else encode(encoder, x_P, spec)
    place_PD = neighbors.to_graph_device(place_PD, x_P.device)
    graph = neighbors.build_neighbor_graph(place_PD, _NUM_NEIGHBORS, problem.search)
    seeds_PC = torch.zeros(len(x_P), spec.num_classes)
    seeds_PC[problem.query_Q.cpu()] = problem.target_QC.cpu()
    # Each class gets a mass of 1, because the number of its labels must not decide how far the labels spread.
    mass_PC = neighbors.propagate_labels(graph, seeds_PC / seeds_PC.sum(0).clamp(min=1), alpha)
    return neighbors.balance_classes(mass_PC, target_C.cpu()).to(x_P.device)


def select_most_confident(share_PC: Tensor, keep_fraction: float) -> Tensor:
    """Return the most probable class of each point [P]. In each class, only the share with the widest lead is kept.

    The lead is the difference of the two largest probabilities. Points that are not kept get -1.
    """
    top_2 = share_PC.topk(2, dim=1)
    class_P, lead_P = top_2.indices[:, 0], top_2.values[:, 0] - top_2.values[:, 1]
    for c in class_P.unique().tolist():
        mask_P = class_P == c
        class_P[mask_P & (lead_P < lead_P[mask_P].quantile(1 - keep_fraction))] = -1
    return class_P


def compute_propagated_loss(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Compute the mean of the noise-corrected cross-entropy of propagated labels, which is 0 for the label -1."""
    loss_B = training.compute_label_loss(logits_BC, label_B.clamp(min=0), _PROPAGATED_ERROR_RATE)
    return (loss_B * (label_B >= 0)).mean()


def compute_expected_shares(problem: StudentProblem, alignment: str) -> Tensor:
    """Compute the expected share of each class [C]: equal for all classes with labels, or as in the labels."""
    counts_C = torch.bincount(problem.label_Q, minlength=problem.spec.num_classes).float()
    if alignment == "uniform":
        # A class without labels gets no share, because points of other classes would have to fill the share.
        return (counts_C > 0).float() / (counts_C > 0).sum()
    # Each class gets one additional label, because a class without labels may exist.
    return (counts_C + 1) / (counts_C + 1).sum()
