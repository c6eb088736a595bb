"""Linear students: logistic regression on labels (LZCW21 section 5), regression of counts, the model of gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import append_mean_shift, encode
from pate_torch.privacy.records import LinearModel
from pate_torch.privacy.whitening import Whitening
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.students.labels import compute_rms, select_by_cross_validation, suppress_class_warnings
from pate_torch.students.training import build_problem

_LOGITS_PER_SHARE = 2.0
"""Slope of the logits of ``CountRegression`` by the share of the votes, over the number of classes. 1 would repeat the
shares, but teachers together are more often right than one of them (docs/experiments/teacher-settings.md)."""
_MISSING_CLASS_LOGIT = -30.0
"""Logit of a class without labels, which is a probability of about 1e-13."""
_NUM_RIDGES, _NUM_MATCHINGS = 65, 200
"""Numbers of compared ridges, and of steps towards the class frequencies."""
_MIN_COMPARED_PROBABILITY = 1e-30
"""Smallest probability whose logit is compared, because float32 stores smaller probabilities inaccurately."""
_MAX_LOGIT_DEVIATION = 0.02
"""Largest deviation of logits over their standard deviation. It is about 1 for wrong features, 0.001 for rounding."""


@dataclass(frozen=True, kw_only=True)
class Logistic(StudentAlgorithm):
    """Multinomial logistic regression on the answered points. The loss is convex, so the seed has no effect.

    The loss is not corrected for label noise, because the corrected loss would not be convex. Symmetric noise changes
    mainly the length of the weight vectors.

    Attributes:
        ridge: Weight of half the squared norm of the weights beside the summed loss (1/C in scikit-learn). The
            intercept has no penalty. None for cross-validation on the labels, for features of mean square 1.
    """

    name: str = "logistic"
    ridge: float | None = None

    def __post_init__(self) -> None:
        checks.optional(checks.positive, "student.ridge", self.ridge)

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        problem = build_problem(task, seed, torch.device("cpu"))
        spec, label_Q = task.spec, problem.label_Q.numpy()
        x_QD = spec.normalize(problem.pool_x[problem.query_Q], torch.float64).flatten(1).numpy()
        ridge, rms = self.ridge, 1.0
        if ridge is None:
            rms, point_Q = compute_rms(x_QD), problem.query_Q.numpy()
            best_model, _ = select_by_cross_validation(x_QD / rms, label_Q, point_Q, spec.num_classes, linear_only=True)
            ridge = 1 / best_model.C
        x_SD, label_S, weight_S = x_QD / rms, label_Q, None
        if problem.soft:  # one row for each class of each point, weighted by its probability: the same cross-entropy
            label_S = np.tile(np.arange(spec.num_classes), len(x_SD))
            x_SD, weight_S = np.repeat(x_SD, spec.num_classes, 0), problem.target_QC.double().numpy().ravel()
        weight_CD, bias_C = _fit_logistic(x_SD, label_S, spec.num_classes, ridge, weight_S)
        weight_CD /= rms
        description = networks.describe("logistic", spec.input_shape, spec.num_classes)
        module = networks.rebuild(description)
        module.load_state_dict({"1.weight": torch.from_numpy(weight_CD), "1.bias": torch.from_numpy(bias_C)})
        progress(1, 1)
        error = float(np.mean((x_QD @ weight_CD.T + bias_C).argmax(1) != label_Q))
        log("student/training_error", error, 0)
        return Student(description, module.eval().to(device), spec)


def _fit_logistic(
    x_QD: np.ndarray, label_Q: np.ndarray, num_classes: int, ridge: float, weight_Q: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Fit scikit-learn's LogisticRegression, and return weights [C, D] and biases [C] of all classes."""
    from sklearn.linear_model import LogisticRegression

    weight_CD = np.zeros((num_classes, x_QD.shape[1]))
    bias_C = np.full(num_classes, _MISSING_CLASS_LOGIT)
    present_classes = np.unique(label_Q)
    if len(present_classes) == 1:
        bias_C[present_classes] = 0.0
        return weight_CD, bias_C
    with suppress_class_warnings():
        model = LogisticRegression(C=1 / ridge, max_iter=2000, tol=1e-7).fit(x_QD, label_Q, weight_Q)
    coefficients, intercepts = model.coef_, model.intercept_
    if len(present_classes) == 2:
        # scikit-learn fits one logit, of the second class. Two halves of opposite sign have the same softmax.
        coefficients, intercepts = np.concatenate([-coefficients, coefficients]) / 2, intercepts * [-0.5, 0.5]
    weight_CD[present_classes], bias_C[present_classes] = coefficients, intercepts
    return weight_CD, bias_C


@dataclass(frozen=True, kw_only=True)
class ReleasedModel(StudentAlgorithm):
    """The linear model that noisy gradients fitted to private records (``method=gradients``). Nothing is trained.

    Attributes:
        features: Recipe of the features of the run. None if the inputs of the model are the raw points.
    """

    name: str = "released_model"
    features: FeatureRecipe | None = None

    @property
    def returns_released_model(self) -> bool:
        return True

    @property
    def guide(self) -> None:
        """None, because later rounds use the features of a student, and this student learns no features."""
        return None

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        student = make_linear_student(task, None, self.features, seed, device)
        progress(1, 1)
        return student


@dataclass(frozen=True, kw_only=True)
class CountRegression(StudentAlgorithm):
    """Ridge regression of the noisy counts, whose noise is known. The seed draws the features only.

    The ridge maximizes the evidence. The logits are a multiple of the regression plus an offset for each class. With
    released class frequencies, the offsets are those at which each class has its frequency among the public points.

    Attributes:
        features: Recipe of the features of unit length. None to use the points.
    """

    name: str = "count_regression"
    features: FeatureRecipe | None = None

    @property
    def needs_counts(self) -> bool:
        return True

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        problem, noisy, spec = build_problem(task, seed, torch.device("cpu")), task.noisy_counts, task.spec
        if noisy is None:
            fix = "Set mechanism.counts=true."
            raise checks.error("student", self.name, "needs noisy counts, but only labels were released", fix)
        recipe = self.features
        encoder = nn.Flatten() if recipe is None else recipe.learn(task.pool_x, spec, seed=seed, device=device)
        feature_PD, count_QC = encode(encoder.to(device), task.pool_x, spec).double(), noisy.counts_QC.cpu().double()
        mean_D = feature_PD[problem.query_Q].mean(0)
        weight_DC, deviation = _regress(feature_PD[problem.query_Q] - mean_D, count_QC, noisy.sigma)
        # Of this multiple, the softmax is about the probability that a class has the most votes without noise.
        sharpness = 1.7 / deviation
        offset_C = sharpness * count_QC.mean(0)
        if task.frequency_C is not None:
            logit_PC = sharpness * (feature_PD - mean_D) @ weight_DC
            offset_C = match_frequencies(logit_PC, task.frequency_C, _NUM_MATCHINGS)
        # A teacher has one vote on each query, so the mean of the sums of counts is about the number of teachers.
        scale = _LOGITS_PER_SHARE * spec.num_classes / max(1.0, float(count_QC.sum(1).mean()))
        weight_DC, bias_C = scale * weight_DC, scale / sharpness * offset_C
        posterior_QC = ((feature_PD[problem.query_Q] - mean_D) @ weight_DC + bias_C).softmax(1)
        # Centered features of unit length are shorter than this radius, so none is clipped.
        whitening = Whitening(mean_D.float(), torch.eye(len(mean_D)), radius=4.0)
        weight_EC = F.pad(whitening.radius * weight_DC, (0, 0, 0, 1))  # the constant feature has no weight
        model = LinearModel(weight_EC.float(), bias_C.float(), whitening)
        progress(1, 1)
        return make_linear_student(replace(task, model=model, posterior_QC=posterior_QC), None, recipe, seed, device)


def _regress(z_QD: Tensor, count_QC: Tensor, sigma: float) -> tuple[Tensor, float]:
    """Return the weights [D, C] of a ridge regression, and the standard deviation of a difference of two predictions.

    The prior of the weights is normal with mean 0. Its variance is the one of a grid at which the centered counts, with
    noise of standard deviation ``sigma``, are most likely.
    """
    u_QR, value_R, axis_RD = torch.linalg.svd(z_QD, full_matrices=False)
    rotated_RC = u_QR.T @ (count_QC - count_QC.mean(0))
    # Variance of the signal along each axis over that of the noise, for each prior of the grid.
    ratio_GR = torch.logspace(-8, 8, _NUM_RIDGES, dtype=torch.float64)[:, None] * value_R.square()
    ratio_GR = ratio_GR / value_R.square().mean().clamp(min=1e-12)
    energy_R = rotated_RC.square().sum(1) / sigma**2
    cost_G = (count_QC.shape[1] * ratio_GR.log1p() + energy_R / (1 + ratio_GR)).sum(1)
    shrinkage_R = 1 - 1 / (1 + ratio_GR[cost_G.argmin()])
    scale_R = torch.where(value_R > 1e-9 * value_R.max(), shrinkage_R / value_R, 0.0)
    deviation = sigma * math.sqrt(2 * max(float(shrinkage_R.sum()), 1.0) / len(z_QD))
    return axis_RD.T @ (scale_R[:, None] * rotated_RC), deviation


def match_frequencies(logit_PC: Tensor, frequency_C: Tensor, num_steps: int) -> Tensor:
    """Compute offsets of the logits, [C], at which the class probabilities have these means over the points."""
    offset_C = torch.zeros_like(frequency_C)
    for _ in range(num_steps):
        # In logarithms, because a class may have probability 0 at every point if noise outweighs the records.
        log_mean_C = (logit_PC + offset_C).log_softmax(1).logsumexp(0) - math.log(len(logit_PC))
        offset_C = offset_C + frequency_C.log() - log_mean_C
    return offset_C - offset_C.mean()


def make_linear_student(
    task: StudentTask, guide: Student | None, recipe: FeatureRecipe | None, seed: int, device: torch.device
) -> Student:
    """Make a student of the released linear model and the features on which the model was fitted.

    ``task`` is that of the last round, with the released model and its answers. The inputs of the model are features
    of ``guide``, or else those of ``recipe``, or else the raw points.

    Raises:
        ValueError: No model was released, or the model was fitted on other features.
    """
    spec, model = task.spec, task.model
    if model is None:
        problem = "needs a model that was trained by noisy gradients, but no model was released"
        fix = "Use method=gradients mechanism=gradient_descent, or student.publish=student."
        raise checks.error("student.publish", "released_model", problem, fix)
    trunk: nn.Module = nn.Flatten()
    design: dict[str, Any] = {"name": "logistic", "options": {}}
    if guide is not None:
        trunk = networks.make_feature_extractor(guide.module)
        design = {key: guide.network[key] for key in ("name", "options")}
    elif recipe is not None:
        if recipe.design is None:
            fix = "Define the property design (name and options of the network), or use student.publish=student."
            raise checks.error("features", recipe.name, "has no design, so the student cannot be saved", fix)
        trunk, design = recipe.learn(task.pool_x, spec, seed=seed, device=device), recipe.design
    trunk = append_mean_shift(trunk.to(device), task.pool_x, spec, model.neighbors)
    options = {"points": len(task.pool_x), "neighbors": model.neighbors} if model.neighbors else {}
    options["directions"] = len(model.weight_DC) - 1
    description = networks.describe("probe", spec.input_shape, spec.num_classes, of=design, **options)
    module = networks.rebuild(description)
    state = {f"0.{name}": value for name, value in trunk.state_dict().items()}
    state |= {f"2.{name}": value for name, value in model.whitening.to_tensors().items()}
    state |= {"3.weight": model.weight_DC.T.contiguous(), "3.bias": model.bias_C}
    if module.get_submodule("2").axis_DE.shape != model.whitening.axis_DE.shape:
        raise _make_feature_error("the number of features differs")
    module.load_state_dict(state)
    student = Student(description, module.to(device).eval(), spec)
    deviation = _compute_logit_deviation(student, task)
    if not deviation < _MAX_LOGIT_DEVIATION:
        raise _make_feature_error(f"logits differ from the released logits by {deviation:.2g} standard deviations")
    return student


def _compute_logit_deviation(student: Student, task: StudentTask) -> float:
    """Compute the largest deviation of the student's logits from the released logits, over their standard deviation."""
    assert task.posterior_QC is not None, "a model is released together with its logits"
    released_QC = task.posterior_QC.cpu().double()
    comparable_Q = (released_QC > _MIN_COMPARED_PROBABILITY).all(1)
    if not bool(comparable_Q.any()):
        return 0.0
    released_QC = released_QC[comparable_Q].log()
    logit_QC = student.compute_logits(task.pool_x[task.query_Q[comparable_Q].cpu()]).cpu().double().log_softmax(1)
    return float((logit_QC - released_QC).abs().max() / released_QC.std().clamp(min=1))


def _make_feature_error(reason: str) -> ValueError:
    problem = f"needs the features on which the model was fitted, but the run has other features: {reason}"
    fix = "Use the same student as in the run, with student@guide_student=same, or use student.publish=student."
    return checks.error("student.publish", "released_model", problem, fix)
