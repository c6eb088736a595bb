"""Linear empirical risk minimization: scikit-learn's logistic regression as a network (LZCW21 section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.students.label_noise import (
    LINEAR_MODELS,
    compute_rms,
    select_by_cross_validation,
    suppress_class_warnings,
)
from pate_torch.students.training import build_problem

_MISSING_CLASS_LOGIT = -30.0  # logit of a class without labels: a probability of 1e-13


@dataclass(frozen=True, kw_only=True)
class Logistic(StudentAlgorithm):
    """Multinomial logistic regression on the answered points; convex, so the seed changes nothing.

    Symmetric label flips are left uncorrected: they shrink the fit but do not turn it, and the corrected loss would not
    be convex.

    Attributes:
        ridge: Weight of half the squared norm against the summed loss (1/C of scikit-learn); the intercept is free.
            None: chosen by cross-validation on the labels, for features scaled to a mean square of 1.
        balanced: Weight classes inversely to their label counts.
        max_iterations: Largest number of iterations of the solver.
    """

    name: str = "logistic"
    ridge: float | None = None
    balanced: bool = False
    max_iterations: int = 2000

    def __post_init__(self) -> None:
        if self.ridge is not None:
            checks.positive("student.ridge", self.ridge)
        checks.boolean("student.balanced", self.balanced)
        checks.integer("student.max_iterations", self.max_iterations, low=1)

    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = do_nothing,
        log: Log = do_nothing,
    ) -> Student:
        """Fit the linear classifier.

        Raises:
            ValueError: There are no labels.
        """
        problem = build_problem(task, seed, torch.device("cpu"))
        spec, label_Q = task.spec, problem.label_Q.numpy()
        x_QD = spec.normalize(problem.x_P[problem.query_Q], torch.float64).flatten(1).numpy()
        ridge, rms = self.ridge, 1.0
        if ridge is None:
            rms, point_Q = compute_rms(x_QD), problem.query_Q.numpy()
            best_model, _ = select_by_cross_validation(x_QD / rms, label_Q, point_Q, spec.num_classes, LINEAR_MODELS)
            ridge = 1 / best_model.C
        x_SD, label_S, share_S = problem.to_weighted_rows(x_QD / rms)
        weight_CD, bias_C = self._solve(x_SD, label_S, spec.num_classes, ridge, share_S)
        weight_CD /= rms
        description = networks.describe("logistic", spec.input_shape, spec.num_classes)
        module = networks.rebuild(description)
        module.load_state_dict({"1.weight": torch.from_numpy(weight_CD), "1.bias": torch.from_numpy(bias_C)})
        progress(1, 1)
        error = float(np.mean((x_QD @ weight_CD.T + bias_C).argmax(1) != label_Q))
        log("student/training_error", error, 0)
        return Student(description, module.eval().to(device), spec, {"student/training_error": [(0, error)]})

    def _solve(
        self, x_QD: np.ndarray, label_Q: np.ndarray, num_classes: int, ridge: float, share_Q: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        weight_CD = np.zeros((num_classes, x_QD.shape[1]))
        bias_C = np.full(num_classes, _MISSING_CLASS_LOGIT)
        present_classes = np.unique(label_Q)
        if len(present_classes) == 1:
            bias_C[present_classes] = 0.0
            return weight_CD, bias_C
        class_weight = "balanced" if self.balanced else None
        model = LogisticRegression(C=1 / ridge, max_iter=self.max_iterations, tol=1e-7, class_weight=class_weight)
        with suppress_class_warnings():
            model.fit(x_QD, label_Q, share_Q)
        coefficients, intercepts = model.coef_, model.intercept_
        if len(present_classes) == 2:
            # One logit for the second class: halves of either sign have the same softmax.
            coefficients, intercepts = np.concatenate([-coefficients, coefficients]) / 2, intercepts * [-0.5, 0.5]
        weight_CD[present_classes], bias_C[present_classes] = coefficients, intercepts
        return weight_CD, bias_C
