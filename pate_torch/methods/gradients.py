"""Per-record gradients: the sum of clipped gradients of a softmax-linear model, in exact fixed-point arithmetic.

A public model is linear in features z of the public points, z -> z W, and starts at W = 0. A record (z, y) answers with
the gradient of its log-likelihood, z (e_y - softmax(z W))^T. The noisy sum moves W a few times
(``mechanisms.gradient_descent``), and the model is released: its logits on the public points are what a student learns
from. A second round starts anew in the features of that student, where the classes are further apart. No teacher is
trained.

The features are whitened by the public points (their covariance is public, so a step as good as Newton's costs nothing
more) and a 1 is appended, for classes are not equally common. z, with it, and the residual e_y - softmax(z W) are
clipped to length 1.

Guarantee: a gradient is a function of one unit's record and of public values (``map_records_batch_invariant``),
quantized to whole numbers: so sums are exact, no record influences the rounding of another's, and a gradient is at most
``UNIT_NORM`` long. So one unit more or less moves the sum by at most ``sensitive.make_vector_sum_sensitivity`` x
``UNIT_NORM``. Source: the noisy gradient descent of Bassily, Smith & Thakurta 2014, in full batches, preconditioned by
public points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.description import MethodDescription, get_unit_column
from pate_torch.methods.records import RecordMethod, encode_public, map_records_batch_invariant
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.partition import select_one_per_unit
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import (
    GradientSums,
    make_record_sum_sensitivity,
    make_vector_sum_sensitivity,
    quantize,
)
from pate_torch.privacy.whitening import Whitening
from pate_torch.students.base import StudentAlgorithm

_MAX_RECORDS = 1 << 22
"""Records: the sums of fewer are exact (``sensitive.UNIT_NORM``)."""


@dataclass(frozen=True, kw_only=True)
class GradientMethod(RecordMethod):
    """Every record answers with the gradient of a public model.

    Attributes:
        ridge: Added to the variance of every direction of the public points, in units of the mean variance: directions
            in which they hardly spread would carry noise alone.
        effective_dim: In place of the ridge: how many directions of the public points are to count, effectively. The
            ridge follows (``features.whitening.solve_ridge``). None: ``ridge`` holds.
        size: About how many records there are, which must be public knowledge: it scales the steps. None: what the data
            set declares (``nominal_size``).
        neighbors: Replace each feature by the weighted mean of its so many nearest public features (one mean-shift
            step, ``networks.MeanShift``); 0: leave it. That helps where the noise is large.
    """

    mechanism_type: ClassVar[type[RecordMechanism]] = GradientDescent
    mechanism: GradientDescent
    name: str = "gradients"
    ridge: float = 0.1
    effective_dim: float | None = None
    size: int | None = None
    neighbors: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("method.ridge", self.ridge)
        if self.effective_dim is not None:
            checks.positive("method.effective_dim", self.effective_dim)
        checks.integer("method.neighbors", self.neighbors, low=0)
        if self.size is not None:
            checks.integer("method.size", self.size, low=1, high=_MAX_RECORDS - 1)

    def check_student(self, student: StudentAlgorithm) -> None:
        """Raise ValueError where the released model lies in features of another student than the published one."""
        if not student.returns_released_model:
            return
        if self.num_rounds > 1 and not self.releases_guide:
            fix = "Use student@guide_student=same."
            raise checks.error("student.publish", "released_model", "lies in the features of its own guide", fix)
        features = student.features
        if not self.is_guided and features != self.features:
            expected_name = "none" if self.features is None else self.features.name
            problem = f"must be those in which the model is fitted to the records: features={expected_name}"
            raise checks.error(
                "student.features", None if features is None else features.name, problem, "Set features alone."
            )

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError as ``RecordMethod`` does, and where nobody declares how many records there are."""
        super().validate(facts)
        self.get_size(facts.spec)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        return describe(facts.unit, self.mechanism.steps)

    def get_nominal_size(self, spec: DataSpec) -> int | None:
        """About how many records there are, as publicly declared."""
        return spec.nominal_size if self.size is None else self.size

    def get_size(self, spec: DataSpec) -> int:
        """The same.

        Raises:
            ValueError: Nobody declares it.
        """
        size = self.get_nominal_size(spec)
        if size is None:
            fix = "Declare about how many records there are, where that is public knowledge."
            raise checks.error("method.size", None, "must be given: the data set declares no nominal_size", fix)
        return size

    def build_sensitive(
        self,
        records: PrivateRecords,
        shards: Shards,
        facts: DatasetFacts,
        *,
        encoder: nn.Module | None,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> GradientSums:
        """PRIVATE. The first record of every unit of all shards, ready to be asked, under the shards' adjacency.

        ``encoder``: see ``RecordMethod.build_sensitive``.

        Raises:
            ValueError: Nobody declares how many records there are, or there are too many for exact sums.
        """
        size, spec = self.get_size(facts.spec), facts.spec
        if len(records) >= _MAX_RECORDS:  # not how many: that is private
            raise checks.error(
                "method", self.name, f"takes fewer than {_MAX_RECORDS} records", "Use method=reverse_knn."
            )
        private, encoder, feature_PD = encode_public(records, shards, facts, encoder, device, self.neighbors)
        private = select_one_per_unit(private, shards.adjacency)
        whitening = Whitening.from_features(feature_PD, self.ridge, self.effective_dim)
        z_ND = map_records_batch_invariant(
            lambda feature_BD: quantize(whitening.whiten_and_clip(feature_BD)).short(),
            encoder,
            private,
            spec,
            progress,
        )
        classes, width = spec.num_classes, z_ND.shape[1]
        sensitivity = make_record_sum_sensitivity(
            shards, make_vector_sum_sensitivity(shards.adjacency, width * classes)
        )
        return GradientSums(
            z_ND=z_ND,
            y_N=private.y,
            z_PD=whitening(feature_PD),
            feature_PD=feature_PD,
            num_classes=classes,
            sensitivity=sensitivity,
            scale=whitening.radius / size,
            whitening=whitening,
            neighbors=self.neighbors,
        )


def describe(unit: str, steps: int) -> MethodDescription:
    """What reports say of the gradients of all records, of which each round took so many."""
    sentence = (
        f"Every {get_unit_column(unit) or 'record'} gave its gradient {'once' if steps == 1 else f'{steps} times'}"
    )
    return MethodDescription(
        subject="gradients",
        procedure=f"{sentence}{{each_round}}: the direction in which a public model would have to change to be right "
        "about it, clipped to length 1. The mechanism {mechanism} added noise to every sum of these gradients, and "
        "only models trained on the noisy sums left, with their answers on public points. A student sees nothing but "
        "public points and these answers.",
        query_sentence="{asked}{each_round}, answered by models trained on noisy sums of all records' gradients",
        examples="Public points, each with the class given by the model trained on noisy sums. Noise and models err.",
        assumptions=(
            f"{sentence}{{each_round}}, never longer than 1, computed from itself and from public values alone.",
        ),
        discrete=False,
    )
