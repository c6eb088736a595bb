"""Released labels propagated over the k-NN graph of the public points, and which of them to train on."""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch.features.contrastive import encode
from pate_torch.features.neighbors import balanced, coordinates, neighbor_graph, placed, spread
from pate_torch.networks import feature_extractor
from pate_torch.protocols import FeatureRecipe, Student
from pate_torch.students.training import StudentProblem, label_loss

_ERROR = 0.1  # of a propagated label that is kept: 1-6 % measured on printed glyphs; more is safer than less
_NEIGHBORS = 10
ALPHA = 0.99
"""For a few answers, or those of cells that lie in other features (``neighbors.spread``)."""


def propagate(
    problem: StudentProblem,
    recipe: FeatureRecipe | None,
    target_C: Tensor,
    *,
    before: Student | None = None,
    alpha: float = ALPHA,
) -> Tensor:
    """Released labels propagated over the k-NN graph of the public points, as probabilities [P, C].

    Args:
        problem: The released labels and the public points.
        recipe: Of the features that the graph joins; None: principal axes.
        target_C: Share that each class should get.
        before: An earlier student, whose features then take their place.
        alpha: See ``neighbors.spread``.
    """
    x_P, spec = problem.x_P, problem.spec
    if before is not None:
        feature_PD = encode(feature_extractor(before.module), x_P, spec)
    elif recipe is not None:
        encoder = recipe.learn(x_P, spec, seed=problem.seed, device=x_P.device)
        feature_PD = encode(encoder, x_P, spec)
    else:
        feature_PD = coordinates(x_P, spec)
    graph = neighbor_graph(placed(feature_PD, x_P.device), _NEIGHBORS)
    seeds_PC = torch.zeros(len(x_P), spec.num_classes, device=graph.device)
    seeds_PC[problem.query_Q.to(graph.device)] = problem.target_QC.to(graph.device)
    # One unit of mass a class, however many labels it has: chance must not decide how far a class reaches.
    seeds_PC = seeds_PC / seeds_PC.sum(0).clamp(min=1)
    mass_PC = spread(graph, seeds_PC, alpha)
    return balanced(mass_PC, target_C.to(graph.device)).to(x_P.device)


def most_confident(share_PC: Tensor, keep_fraction: float) -> Tensor:
    """The likeliest class of each point, and -1 outside the ``keep_fraction`` of each class with the widest lead."""
    best = share_PC.topk(2, dim=1)
    class_P, lead_P = best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
    for c in class_P.unique().tolist():
        mine = class_P == c
        class_P[mine & (lead_P < lead_P[mine].quantile(1 - keep_fraction))] = -1
    return class_P


def propagated_loss(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Mean corrected cross-entropy of propagated labels; -1 (not kept) counts nothing."""
    return (label_loss(logits_BC, label_B.clamp(min=0), _ERROR) * (label_B >= 0)).mean()


def expected_shares(problem: StudentProblem, kind: str) -> Tensor:
    """The share that each class should get, [C]: ``uniform`` over the classes with labels, else the labels' own."""
    counts_C = torch.bincount(problem.label_Q, minlength=problem.spec.num_classes).float()
    if kind == "uniform":
        # A class without labels cannot be recognized; asking for its share would hand it a neighbor's points.
        return (counts_C > 0).float() / (counts_C > 0).sum()
    # One extra label a class: an unseen class is rare, not impossible.
    return (counts_C + 1) / (counts_C + 1).sum()
