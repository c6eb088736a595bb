"""Labels propagated over the k-NN graph of the public points, and a student that learns them.

The propagated labels alone say nothing about new points and cannot be exported; a network trained on them can.

Source: Zhou et al. 2004 (learning with local and global consistency).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
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
    Objective,
    SemiSupervisedStudent,
    TensorLog,
    compute_label_loss,
    compute_released_loss,
)

_PROPAGATED_ERROR_RATE = 0.1  # of kept propagated labels: 1-6 % measured on printed glyphs; more is safer than less
_NUM_NEIGHBORS = 10
ALPHA = 0.99
"""``alpha`` of ``propagate_labels`` for a few answers, or those of cells that lie in other features."""
ALIGNMENTS = ("uniform", "labels")


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
        checks.one_of("student.alignment", self.alignment, ALIGNMENTS)

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        target_C = compute_expected_shares(problem, self.alignment)
        propagated_P = select_most_confident(propagate(problem, self.features, target_C), self.keep_fraction)
        sampler = self.make_sampler(problem)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B, index_U = next(sampler.labeled_batches), next(sampler.unlabeled_batches)
            labeled_logits = model(sampler.weak_labeled(index_B)).float()
            unlabeled_logits = model(sampler.weak(index_U)).float()
            supervised_loss = compute_released_loss(problem, labeled_logits, index_B).mean()
            return supervised_loss + compute_propagated_loss(unlabeled_logits, propagated_P[index_U])

        return compute_loss


def propagate(
    problem: StudentProblem,
    recipe: FeatureRecipe | None,
    target_C: Tensor,
    *,
    previous_student: Student | None = None,
    alpha: float = ALPHA,
) -> Tensor:
    """Released labels propagated over the k-NN graph of the public points, as probabilities [P, C].

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
    seeds_PC = torch.zeros(len(x_P), spec.num_classes, device=graph.device)
    seeds_PC[problem.query_Q.to(graph.device)] = problem.target_QC.to(graph.device)
    # One unit of mass a class, however many labels it has: chance must not decide how far a class reaches.
    mass_PC = propagate_labels(graph, seeds_PC / seeds_PC.sum(0).clamp(min=1), alpha)
    return sinkhorn_balance(mass_PC, target_C.to(graph.device)).to(x_P.device)


def select_most_confident(share_PC: Tensor, keep_fraction: float) -> Tensor:
    """The likeliest class of each point, and -1 outside the ``keep_fraction`` of each class with the widest lead."""
    top_2 = share_PC.topk(2, dim=1)
    class_P, lead_P = top_2.indices[:, 0], top_2.values[:, 0] - top_2.values[:, 1]
    for c in class_P.unique().tolist():
        mask_P = class_P == c
        class_P[mask_P & (lead_P < lead_P[mask_P].quantile(1 - keep_fraction))] = -1
    return class_P


def compute_propagated_loss(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Mean corrected cross-entropy of propagated labels; -1 (not kept) counts nothing."""
    return (compute_label_loss(logits_BC, label_B.clamp(min=0), _PROPAGATED_ERROR_RATE) * (label_B >= 0)).mean()


def compute_expected_shares(problem: StudentProblem, alignment: str) -> Tensor:
    """The share that each class should get, [C]: ``uniform`` over the classes with labels, else the ``labels``' own."""
    counts_C = torch.bincount(problem.label_Q, minlength=problem.spec.num_classes).float()
    if alignment == "uniform":
        # A class without labels cannot be recognized; asking for its share would hand it a neighbor's points.
        return (counts_C > 0).float() / (counts_C > 0).sum()
    # One extra label a class: an unseen class is rare, not impossible.
    return (counts_C + 1) / (counts_C + 1).sum()
