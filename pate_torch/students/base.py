"""The inputs of a student, the trained student, and the interface of student algorithms."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks, rng
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.data.streams import PointForm, PointStream
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.encoder import Encoder
from pate_torch.features.neighbors import NeighborSearch
from pate_torch.privacy.records import DataSpec, EncoderCard, LinearModel, NoisyCounts


@dataclass(frozen=True, eq=False)
class StudentTask:
    """Releasable. The public points and the released answers from which a student learns.

    Attributes:
        spec: Public facts about the data.
        pool_x: Raw public points [P, ...].
        query_Q: Indices of the answered points.
        label_Q: Released label of each answered point.
        posterior_QC: Class probabilities of each answered point, from the released noisy counts or, if ``soft``, from
            the released scores. None if only labels were released.
        soft: Whether the student fits ``posterior_QC`` by cross-entropy. If False, ``posterior_QC`` is the likelihood
            of each class (see ``training.compute_released_loss``).
        round_Q: Round, from 0, in which each query was asked. None if there was only one round.
        guide: Student of the same algorithm, trained on all rounds but the last. None if there is no such student.
        model: Released linear model that gave the answers of the last round. None if no model was released.
        noisy_counts: Noisy counts of the answered points. None if they were not released.
        frequency_C: Noisy class frequencies of the private records, float64 [C]. None if they were not released.
        search: Search for neighbors of the run, which keeps results about public points alone.
    """

    spec: DataSpec
    pool_x: Tensor
    query_Q: Tensor
    label_Q: Tensor
    posterior_QC: Tensor | None = None
    soft: bool = False
    round_Q: Tensor | None = None
    guide: Student | None = None
    model: LinearModel | None = None
    noisy_counts: NoisyCounts | None = None
    frequency_C: Tensor | None = None
    search: NeighborSearch = field(default_factory=NeighborSearch)

    def split_rounds(self) -> list[StudentTask]:
        """Split the task into one task for each round with answers, on the CPU."""
        if self.round_Q is None or len(self.round_Q) == 0:
            return [self]
        tasks, round_Q = [], self.round_Q.cpu()
        for r in round_Q.unique().tolist():
            mask_Q = round_Q == r
            posterior_SC = None if self.posterior_QC is None else self.posterior_QC.cpu()[mask_Q]
            query_S, label_S = self.query_Q.cpu()[mask_Q], self.label_Q.cpu()[mask_Q]
            part = replace(self, query_Q=query_S, label_Q=label_S, posterior_QC=posterior_SC, round_Q=None)
            tasks.append(replace(part, noisy_counts=None))
        return tasks


@dataclass(frozen=True, eq=False)
class StudentProblem(StudentTask):
    """A checked task on the training device (``training.build_problem``).

    Attributes:
        flip_rate: Share of wrong labels for which the loss is corrected.
        seed: Seed of all random choices in the training.
    """

    flip_rate: float = 0.0
    seed: int = 0

    @property
    def target_QC(self) -> Tensor:
        """Class probabilities of each answered point: ``posterior_QC``, or else one-hot labels."""
        if self.posterior_QC is not None:
            return self.posterior_QC
        return F.one_hot(self.label_Q, self.spec.num_classes).float()

    def make_generator(self, *names: str | int) -> torch.Generator:
        return rng.make_torch_generator(self.seed, "student", *names, device=self.pool_x.device)


@dataclass(frozen=True, eq=False)
class Student:
    """Releasable. A trained student.

    Attributes:
        network: Description of the network (``networks.describe``).
        module: Network from normalized points to logits.
        spec: Public facts about the data.
        encoder: Encoder that computes features of raw points. None if no encoder is needed or loaded.
    """

    network: dict[str, Any]
    module: nn.Module
    spec: DataSpec
    encoder: Encoder | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, in the order of the columns of the probabilities."""
        return self.spec.class_names

    def encode(self, points: Any, *, unknown: str = "error", first_row: int = 0) -> Tensor:
        """Convert raw points to the input tensor. The schema converts tables, and the encoder computes features.

        Args:
            points: Images, a Dataset or a folder (``PointStream``), feature rows, texts, or a table (a DataFrame,
                {column: values} or an object array).
            unknown: Treatment of a value that is not a category of its column: "error" or "zeros".
            first_row: Number of the first row of a table, for messages.

        Raises:
            ValueError: The shape of the points is wrong, or a table does not fit the schema.
        """
        spec, width = self.spec, tuple(self.spec.input_shape)
        is_array = hasattr(points, "shape") and hasattr(points, "dtype")
        if spec.encoder and not (is_array and "float" in str(points.dtype) and tuple(points.shape[1:]) == width):
            return self._encode_features(points, spec.encoder)
        is_table = isinstance(points, Mapping) or hasattr(points, "columns")
        if is_table or (is_array and str(points.dtype) == "object"):
            if spec.schema is None:
                fix = f"Pass an array of shape (N, {', '.join(map(str, width))})."
                raise checks.error("student", spec.name, "has no schema, so tables cannot be converted", fix)
            return torch.from_numpy(spec.schema.encode(points, unknown=unknown, first_row=first_row))
        x = PointStream("points", points, PointForm(width)).load() if spec.is_image else torch.as_tensor(points)
        if tuple(x.shape[1:]) != width:
            problem = f"must have the shape (N, {', '.join(map(str, width))})"
            raise checks.error("points", tuple(x.shape), problem, "" if spec.schema is None else "Or pass a DataFrame.")
        return x

    def _encode_features(self, points: Any, card: EncoderCard) -> Tensor:
        if card.points is None:
            problem = f"must be features of {card.name}, float rows [N, {self.spec.input_shape[0]}]"
            fix = "Encode the points with the encoder of the training data."
            raise checks.error("points", type(points).__name__, problem, fix)
        if self.encoder is None:
            problem = f"needs the encoder {card.name}: weights {card.file or ''} with SHA-256 {card.sha256}"
            fix = "Use load_student(..., encoder={'weights': <file>}), or an Encoder of pate_torch.features.encoder."
            raise checks.error("student", self.spec.name, problem, fix)
        if card.points.is_image:
            points = PointStream("points", points, PointForm(tuple(card.points.input_shape))).iterate_blocks()
        return self.encoder.encode(points, card.points, device=next(self.module.parameters()).device)

    def with_encoder(self, encoder: Encoder) -> Student:
        """Return the student with ``encoder``. Raise ValueError if the student was trained with another encoder."""
        card = self.spec.encoder
        if card is None or card.points is None:
            raise checks.error("encoder", encoder.name, "must be None, because the student applies no encoder")
        encoder.check_card(card)
        return replace(self, encoder=encoder)

    @torch.no_grad()
    def compute_logits(self, x: Any) -> Tensor:
        """Compute logits, float32 [Q, C], of raw points (see ``encode``)."""
        network, device = self.module.eval(), next(self.module.parameters()).device
        parts = self.encode(x).split(1024)
        return torch.cat([network(self.spec.normalize(part.to(device))).float() for part in parts])

    def compute_probabilities(self, x: Any) -> Tensor:
        """Compute class probabilities of raw points, float32 [Q, C] on the CPU."""
        return self.compute_logits(x).softmax(1).cpu()

    @torch.no_grad()
    def adjust_logits(self, multiple: float, offset_C: Tensor) -> Student:
        """Return the student with the logits ``multiple`` * logits + ``offset_C``, up to a shift of all classes alike.

        Raise ValueError if the last layer is not linear.
        """
        student = replace(self, module=copy.deepcopy(self.module))
        for layer in networks.list_output_layers(student.module):
            layer.weight.mul_(multiple)
            layer.bias.mul_(multiple).add_(offset_C.to(layer.bias))
        return student

    predict_proba = compute_probabilities  # the name in scikit-learn

    def predict(self, x: Any) -> Tensor:
        """Return the most probable class of each raw point, int64 [Q]."""
        return self.compute_probabilities(x).argmax(1)

    def predict_names(self, x: Any) -> list[str]:
        return [self.class_names[label] for label in self.predict(x).tolist()]


class StudentAlgorithm(ABC):
    """A training algorithm of students. Subclasses are dataclasses, and their fields are recorded with the student.

    Attributes:
        name: Name of the algorithm in settings and reports.
        features: Recipe of the features of the student, which are learned from public points. None for raw points.
        has_linear_output: Whether the last layer of the student is linear (``Student.adjust_logits``).
    """

    name: str
    features: FeatureRecipe | None = None
    has_linear_output: ClassVar[bool] = True

    @property
    def returns_released_model(self) -> bool:
        """Whether the student is the model that the mechanism released."""
        return False

    @property
    def needs_counts(self) -> bool:
        """Whether the student learns from noisy counts alone."""
        return False

    @property
    def guide(self) -> StudentAlgorithm | None:
        """Algorithm of the students between rounds of queries. None if there can be no such students."""
        return self

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError if the algorithm or its features do not support the data."""
        if self.features is not None:
            self.features.check(spec)

    @abstractmethod
    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        """Train a student on released answers and public points.

        The training is repeatable, given ``seed``. ``log`` is called as log(tag, value, step) for the training curves.
        Raise ValueError if the task has no labels.
        """
