"""Per-record gradients: the sum of clipped gradients of a linear softmax model, in exact fixed-point arithmetic.

The model maps features z of the public points to logits z W, and starts at W = 0. A record (z, y) contributes the
gradient of its log-likelihood, z (e_y - softmax(z W))^T. The noisy sum updates W a few times
(``mechanisms.gradient_descent``). The model is released, and a student learns from its logits on the public points. A
second round starts again in the features of that student, in which the classes are better separated. There are no
teachers.

The features are whitened by the covariance of the public points. This preconditions the steps like Newton's method,
at no cost in privacy. A constant 1 is appended, because classes need not be equally common. The vector z, with this 1,
and the residual e_y - softmax(z W) are clipped to length 1.

Guarantee: a gradient is a function of one unit's record and of public values (``map_records_batch_invariant``),
quantized to integers. Therefore sums are exact, a record does not influence the rounding of other gradients, and the
length of a gradient is at most ``UNIT_NORM``. One unit changes the sum by at most ``make_vector_sum_sensitivity`` x
``UNIT_NORM``. Source: Bassily, Smith & Thakurta 2014 (noisy gradient descent), here in full batches, with public
preconditioning.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.progress import Progress
from pate_torch.features.contrastive import append_mean_shift, encode
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods import feasibility, model_scale
from pate_torch.methods.base import FirstAnswers, MethodDescription, MethodInputs, ModelForecast, get_unit_column
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.methods.record_method import RecordMethod, map_records_batch_invariant
from pate_torch.privacy import sensitive
from pate_torch.privacy.partition import DatasetFacts, select_one_per_unit
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.whitening import Whitening
from pate_torch.students.base import StudentAlgorithm

_MAX_SIZE = (1 << 33) - 1
"""Largest declared number of records. An int64 holds the gradient sums of so many."""
_SIGNAL_TO_NOISE_PER_DIM = 8
"""Number of records per unit of noise for each feature dimension.

With more noise, fewer dimensions improve accuracy. With this constant ratio, the noise of a logit does not depend on
epsilon, the features or the number of records. The value was chosen on magic, spambase, satimage, package descriptions,
phrases of SST-2 and PneumoniaMNIST at epsilon 0.1 to 2 (docs/experiments/gradient-settings.md)."""
_POINTS_PER_DIM = 10
"""Smallest number of public points for each feature dimension. With fewer points, whitening enlarges dimensions that
hardly vary among the records (docs/experiments/better-models.md)."""
_CLASS_EXPONENT = 1 / 6
"""Exponent of half of the number of classes in the step size. With many classes, each has few records, and short steps
do not reach the sizes of logits that the records support (docs/experiments/better-models.md)."""
_BALANCE_EXPONENT = 0.75
"""Exponent of the balance of the classes in the number of dimensions, and of its inverse in the step size."""
_MIN_DIM = 0.5
_STEP_SIZE = 2.0
"""Size of a step for whitened points of length 1 (docs/experiments/gradient-settings.md)."""


def plan_descent(
    mechanism: GradientDescent, num_records: float, num_public: int | None, balance: float = 1.0, num_classes: int = 2
) -> tuple[GradientDescent, float]:
    """Set the step sizes for a number of records. No cost depends on them. Also return the effective dimension.

    The fewer records the rare classes have, the fewer dimensions and the longer steps are best. ``balance`` is 1 for
    equal classes (``FirstAnswers.estimate_balance``; docs/experiments/better-models.md).
    """
    max_dim = math.inf if num_public is None else num_public / _POINTS_PER_DIM
    balance_factor = balance**_BALANCE_EXPONENT
    signal_to_noise = num_records / mechanism.sigma * balance_factor
    dim = max(_MIN_DIM, min(signal_to_noise / _SIGNAL_TO_NOISE_PER_DIM, max_dim))
    step_size = _STEP_SIZE * math.sqrt(1 + dim)  # the root is about the length of a whitened point
    step_size *= (num_classes / 2) ** _CLASS_EXPONENT / balance_factor
    return replace(mechanism, first_step_size=step_size, step_size=step_size), dim


@dataclass(frozen=True, kw_only=True)
class GradientMethod(RecordMethod):
    """Per-record gradients: every record contributes its gradient to the sums that train a public model.

    Attributes:
        ridge: Constant that is added to the variance of every direction of the public features, in units of the mean
            variance. Without it, directions in which the public points hardly vary would carry noise alone.
        effective_dim: Effective number of directions of the public features, from which the ridge follows
            (``privacy.whitening.solve_ridge``). None to use ``ridge``.
        size: Approximate number of records, which must be public knowledge, as a scale of the steps. None to use the
            ``nominal_size`` that the data set declares.
        neighbors: Number of nearest public features whose weighted mean replaces each feature (one mean-shift step,
            ``networks.MeanShift``). This helps if the noise is large. 0 to keep the features.
        plans_from_counts: Whether ``effective_dim``, the step sizes and ``start_logits`` follow from the noisy class
            counts, and the model is rescaled (``model_scale``). Needs ``class_counts``.
        start_logits: Logits of the model before the first step. Empty for equal logits.
    """

    mechanism_type = GradientDescent
    mechanism: GradientDescent
    name: str = "gradients"
    ridge: float = 0.1
    effective_dim: float | None = None
    size: int | None = None
    neighbors: int = 0
    plans_from_counts: bool = False
    start_logits: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("method.ridge", self.ridge)
        checks.optional(checks.positive, "method.effective_dim", self.effective_dim)
        checks.integer("method.neighbors", self.neighbors, low=0)
        checks.optional(checks.integer, "method.size", self.size, low=1, high=_MAX_SIZE)
        if checks.boolean("method.plans_from_counts", self.plans_from_counts) and self.class_counts is None:
            fix = "Set first_answers=class_counts."
            raise checks.error("method.plans_from_counts", True, "needs the class counts of a first stage", fix)

    def check_student(self, student: StudentAlgorithm) -> None:
        """Raise ValueError if the released model uses features of another student than the published one."""
        if not student.returns_released_model:
            super().check_student(student)
            return
        if self.num_rounds > 1 and not self.releases_guide:
            fix = "Use student@guide_student=same."
            problem = "would use the features of another guide student than the published student"
            raise checks.error("student.publish", "released_model", problem, fix)
        features = student.features
        if not self.is_guided and features != self.features:
            expected_name = "none" if self.features is None else self.features.name
            problem = f"must be the features in which the model is trained, features={expected_name}"
            name = None if features is None else features.name
            raise checks.error("student.features", name, problem, "Set features, and leave out student.features.")

    def validate(self, facts: DatasetFacts) -> None:
        super().validate(facts)
        if not self.has_first_stage:
            self.get_size(facts.spec)

    def adapt(self, first_answers: FirstAnswers, facts: DatasetFacts) -> GradientMethod:
        """Set the size, and with ``plans_from_counts`` the other settings, from the noisy counts.

        With rare classes, the model starts near the class frequencies instead of equal logits.
        """
        declared_size = facts.spec.nominal_size if self.size is None else self.size
        size = first_answers.estimate_size(facts.num_units, declared_size)
        if not self.plans_from_counts:
            return replace(self, size=size)
        balance, start_C = first_answers.estimate_balance(), first_answers.estimate_start_logits()
        mechanism, dim = plan_descent(self.mechanism, size, len(facts.pool), balance, facts.spec.num_classes)
        return replace(self, size=size, mechanism=mechanism, effective_dim=dim, start_logits=tuple(start_C.tolist()))

    def forecast_model(self, first_answers: FirstAnswers, facts: DatasetFacts) -> ModelForecast:
        size = self.get_size(facts.spec)
        minority = size * (1 - float(first_answers.estimate_frequencies().max()))
        return feasibility.forecast_gradients(size, minority, self.mechanism.sigma)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        return describe(facts.unit, self.mechanism.steps)

    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        if self.has_first_stage:
            return super().to_record(facts)
        return super().to_record(facts) | {"declared_size": self.get_size(facts.spec)}

    def get_size(self, spec: DataSpec) -> int:
        """Return the declared number of records. Raises ValueError if no number is declared."""
        size = spec.nominal_size if self.size is None else self.size
        if size is None:
            fix = "Declare the approximate number of records, if it is public knowledge."
            problem = "must be given, because the data set declares no nominal_size"
            raise checks.error("method.size", None, problem, fix)
        return size

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        prepared = super().prepare(inputs)
        if self.plans_from_counts and inputs.first_answers is not None:
            assert isinstance(prepared.sensitive, sensitive.GradientSums)
            prepared.finish_release = functools.partial(
                model_scale.rescale_release,
                mechanism=self.mechanism,
                public=prepared.sensitive.without_records(),
                frequency_C=inputs.first_answers.estimate_frequencies(),
                num_units=self.get_size(inputs.facts.spec),
                seed=inputs.seed,
            )
        return prepared

    def make_sensitive(
        self, private: PrivateRecords, shards: Shards, facts: DatasetFacts, encoder: nn.Module, progress: Progress
    ) -> sensitive.GradientSums:
        spec, private = facts.spec, select_one_per_unit(private, shards.adjacency)
        encoder = append_mean_shift(encoder, facts.pool.x, spec, self.neighbors)
        feature_PD = encode(encoder, facts.pool.x, spec)
        whitening = Whitening.from_features(feature_PD, self.ridge, self.effective_dim)

        def whiten(feature_BD: Tensor) -> Tensor:
            return sensitive.quantize(whitening.whiten_and_clip(feature_BD)).short()

        self.mechanism.check_discrete((whitening.axis_DE.shape[1] + 1, spec.num_classes))
        z_ND = map_records_batch_invariant(whiten, encoder, private, spec, progress)
        sensitivity = sensitive.make_vector_sum_sensitivity(shards.adjacency, z_ND.shape[1] * spec.num_classes)
        start_DC = torch.zeros(z_ND.shape[1], spec.num_classes, dtype=torch.float64)
        if self.start_logits:
            start_DC[-1] = whitening.radius * torch.tensor(self.start_logits)  # the last feature is the constant 1
        return sensitive.GradientSums(
            z_ND=z_ND,
            y_N=private.y,
            z_PD=whitening.whiten_and_clip(feature_PD).float(),
            feature_PD=feature_PD,
            num_classes=spec.num_classes,
            sensitivity=sensitive.make_record_sum_sensitivity(shards, sensitivity),
            scale=whitening.radius / self.get_size(spec),
            whitening=whitening,
            start_DC=start_DC,
            neighbors=self.neighbors,
        )


def describe(unit: str, steps: int) -> MethodDescription:
    """Describe the method for reports, given the privacy unit and the number of steps of a round."""
    times = "once" if steps == 1 else f"{steps} times"
    one = get_unit_column(unit) or "record"
    sentence = f"Every {one} contributed its gradient {times}{{each_round}}"
    return MethodDescription(
        subject="gradients",
        procedure=f"Every {one} contributed its gradients, the directions in which a public model would have to "
        "change to predict it better, clipped to a fixed length. The mechanism {mechanism} added noise to every sum of "
        "these gradients. Only models trained on the noisy sums, and their answers on public points, were released. A "
        "student sees nothing but public points and these answers.",
        query_sentence="{asked}{each_round}, answered by models trained on noisy sums of all records' gradients",
        examples="Public points, each with the class given by the model trained on noisy sums. Some classes are wrong, "
        "because of the noise and of errors of the model.",
        assumptions=(f"{sentence}, of length at most 1 and computed from its own record and public values alone.",),
    )
