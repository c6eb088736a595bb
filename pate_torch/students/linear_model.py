"""The released linear model (``mechanism=gradient_descent``) as a student: fitted to private records, with noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import append_mean_shift
from pate_torch.privacy.records import LinearModel
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask


@dataclass(frozen=True, kw_only=True)
class ReleasedModel(StudentAlgorithm):
    """The model that gradients were fitted to (``method=gradients``), as it was released. Nothing is trained.

    Attributes:
        features: Those of the run; None: the points themselves.
    """

    name: str = "released_model"
    features: FeatureRecipe | None = None

    @property
    def returns_released_model(self) -> bool:
        return True

    @property
    def feature_recipe(self) -> FeatureRecipe | None:
        return self.features

    @property
    def guide(self) -> None:
        """It guides no round: later ones lie in features of a student, and it has none of its own."""
        return None

    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = do_nothing,
        log: Log = do_nothing,
    ) -> Student:
        """The model.

        Raises:
            ValueError: None was released, or it is of other features.
        """
        student = make_linear_student(task, None, self.features, seed, device)
        progress(1, 1)
        return student


_MIN_COMPARED_PROBABILITY = 1e-30
"""Probabilities below, of which float32 knows few digits, are not compared."""
_MAX_LOGIT_DEVIATION = 0.02
"""Of the spread of the released logits: other features miss them by all of it, rounding by a thousandth."""


def make_linear_student(
    task: StudentTask, guide: Student | None, recipe: FeatureRecipe | None, seed: int, device: torch.device
) -> Student:
    """The model of the last round, over the features in which it was fitted to the records.

    Args:
        task: Task of the last round, with the released model and its answers.
        guide: Student in whose features the model was fitted; None if it was fitted in those of ``recipe``.
        recipe: Recipe of the features; None if the model takes the points themselves.
        seed: Seed of the features.
        device: Device of the student.

    Raises:
        ValueError: No model was released, or it is of other features.
    """
    spec, model = task.spec, task.model
    if model is None:
        fix = "Use method=gradients mechanism=gradient_descent, or student.publish=student."
        raise checks.error(
            "student.publish", "released_model", "is the model trained on gradients, and none was released", fix
        )
    trunk, design = _build_trunk(task, guide, recipe, seed, device)
    trunk = append_mean_shift(trunk.to(device), task.pool_x, spec, model.neighbors)
    shift_options = {"points": len(task.pool_x), "neighbors": model.neighbors} if model.neighbors else {}
    description = networks.describe("probe", spec.input_shape, spec.num_classes, of=design, **shift_options)
    module = networks.rebuild(description)
    state = {f"0.{name}": value for name, value in trunk.state_dict().items()}
    state |= {"2.weight": (model.weight_DC.T / model.radius).contiguous(), "2.bias": model.bias_C / model.radius}
    if module.get_submodule("2").weight.shape != state["2.weight"].shape:
        raise _foreign_model_error("has another width")
    module.load_state_dict(state)
    student = Student(description, module.to(device).eval(), spec)
    deviation = _compute_logit_deviation(student, task, model)
    if not deviation < _MAX_LOGIT_DEVIATION:
        raise _foreign_model_error(f"its logits lie {deviation:.2g} of their spread from the released ones")
    return student


def _compute_logit_deviation(student: Student, task: StudentTask, model: LinearModel) -> float:
    """How far the student's logits lie from those that were released, at most, in units of their spread."""
    assert task.posterior_QC is not None, "a model was released with its logits"
    released_QC = task.posterior_QC.cpu().double()
    comparable_Q = (released_QC > _MIN_COMPARED_PROBABILITY).all(1)
    if not bool(comparable_Q.any()):
        return 0.0
    released_QC = released_QC[comparable_Q].log()
    logit_QC = student.compute_logits(task.pool_x[task.query_Q[comparable_Q].cpu()]).cpu().double()
    logit_QC = (model.radius * logit_QC).log_softmax(1)
    return float((logit_QC - released_QC).abs().max() / released_QC.std().clamp(min=1))


def _foreign_model_error(reason: str) -> ValueError:
    problem = f"is a model of other features than those of the students: {reason}"
    fix = "Use the student of the run that asked, with student@guide_student=same; or student.publish=student."
    return checks.error("student.publish", "released_model", problem, fix)


def _build_trunk(
    task: StudentTask, guide: Student | None, recipe: FeatureRecipe | None, seed: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The encoder that the round was asked in, and the name and options of the network whose lower part it is."""
    if guide is not None:
        return networks.make_feature_extractor(guide.module), {key: guide.network[key] for key in ("name", "options")}
    if recipe is None:
        return nn.Flatten(), {"name": "logistic", "options": {}}
    if recipe.design is None:
        fix = "Give the recipe a design (name and options of its network), or use student.publish=student."
        raise checks.error("features", recipe.name, "does not say of which network the encoder is a part", fix)
    return recipe.learn(task.pool_x, task.spec, seed=seed, device=device), recipe.design
