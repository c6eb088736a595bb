"""Boosted stumps: scikit-learn's AdaBoost as a network, the ensemble that LZCW21 suggests after Theorem 19.

The plurality of teachers is a vote, and votes of simple hypotheses, each fitted where those before it erred, come near
it. (``student=ensemble`` is bagging: students fitted side by side.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import AdaBoostClassifier

from pate_torch import networks
from pate_torch.core import checks, rng
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.students.training import build_problem

_MISSING_CLASS_LOGIT = -30.0  # logit of a class without labels


@dataclass(frozen=True, kw_only=True)
class AdaBoost(StudentAlgorithm):
    """AdaBoost (SAMME) over decision stumps on the answered points, in float32 features as they are normalized.

    Attributes:
        iterations: Most stumps; fewer where one of them makes no error.
        learning_rate: Weight of a stump, as a share of what it would have.
    """

    name: str = "adaboost"
    iterations: int = 50
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        checks.integer("student.iterations", self.iterations, low=1)
        checks.positive("student.learning_rate", self.learning_rate)

    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = do_nothing,
        log: Log = do_nothing,
    ) -> Student:
        """Fit the vote of stumps.

        Raises:
            ValueError: There are no labels.
        """
        problem = build_problem(task, seed, torch.device("cpu"))
        spec, label_Q = task.spec, problem.label_Q.numpy()
        x_QD = spec.normalize(problem.x_P[problem.query_Q]).flatten(1).numpy()
        x_SD, label_S, share_S = problem.to_weighted_rows(x_QD)
        if share_S is not None:
            x_SD, label_S, share_S = x_SD[share_S > 0], label_S[share_S > 0], share_S[share_S > 0]
        present_classes = np.unique(label_S)
        stumps: list[tuple[int, float, np.ndarray, np.ndarray]] = []
        if len(present_classes) > 1:
            random_state = rng.derive_seed(seed, "student", "adaboost") % 2**32
            model = AdaBoostClassifier(
                n_estimators=self.iterations, learning_rate=self.learning_rate, random_state=random_state
            ).fit(x_SD, label_S, share_S)
            weights = model.estimator_weights_[: len(model.estimators_)]
            for stump, weight in zip(model.estimators_, weights / weights.sum(), strict=True):
                stumps.append(_compute_stump_votes(stump, float(weight), present_classes, spec.num_classes))
        iterations = max(1, len(stumps))
        description = networks.describe("boosted_stumps", spec.input_shape, spec.num_classes, iterations=iterations)
        module = networks.rebuild(description)
        bias_C = np.full(spec.num_classes, _MISSING_CLASS_LOGIT)
        bias_C[present_classes] = 0.0
        state = {"bias_C": bias_C}
        if stumps:
            columns = map(np.array, zip(*stumps, strict=True))
            state |= dict(zip(("feature_K", "cut_K", "low_KC", "high_KC"), columns, strict=True))
        module.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()}, strict=False)
        progress(1, 1)
        module = module.eval().to(device)
        with torch.no_grad():
            prediction_Q = module(torch.from_numpy(x_QD).to(device)).argmax(1).cpu().numpy()
        error = float(np.mean(prediction_Q != label_Q))
        log("student/training_error", error, 0)
        return Student(description, module, spec, {"student/training_error": [(0, error)]})


def _compute_stump_votes(
    stump: Any, weight: float, present_classes: np.ndarray, num_classes: int
) -> tuple[int, float, np.ndarray, np.ndarray]:
    """(feature, cut, votes at or below it, votes above it) of a fitted stump, in all classes."""
    tree = stump.tree_
    is_leaf = tree.node_count == 1
    low_C, high_C = (
        _compute_leaf_votes(tree.value[node, 0], weight, present_classes, num_classes)
        for node in ((0, 0) if is_leaf else (1, tree.children_right[0]))
    )
    return (0, 0.0, low_C, high_C) if is_leaf else (int(tree.feature[0]), float(tree.threshold[0]), low_C, high_C)


def _compute_leaf_votes(value: np.ndarray, weight: float, present_classes: np.ndarray, num_classes: int) -> np.ndarray:
    """SAMME's votes of one leaf, over the number of classes less one: as scikit-learn turns them to probabilities."""
    num_other_classes = len(present_classes) - 1
    vote_C = np.zeros(num_classes)
    vote_C[present_classes] = -weight / num_other_classes
    vote_C[present_classes[int(np.argmax(value))]] = weight
    return vote_C / num_other_classes
