"""The task of a student, the trained student, and the interface of student algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks, rng
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.encoder import Encoder
from pate_torch.privacy.records import DataSpec, EncoderCard, LinearModel


@dataclass(frozen=True, eq=False)
class StudentTask:
    """Releasable. All that a student sees.

    Attributes:
        spec: Public facts about the data.
        pool_x: All public points, [P, ...] as loaded.
        query_Q: Indices of the *answered* points.
        label_Q: Their labels.
        posterior_QC: Class probabilities by the released noisy counts, or (``soft``) the released scores; rows sum to
            1. None if only labels were released.
        soft: Whether ``posterior_QC`` holds scores, which are targets; posteriors of counts are likelihoods of labels.
        round_Q: Round, from 0, in which each question was asked; None if there was one round.
        guide: Student of all rounds but the last, by the same recipe; None if there is none.
        model: Linear model that gave the last round's answers, in the guide's features; None if no model did.
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

    def split_rounds(self) -> list[StudentTask]:
        """Split the task into one task for each round that has answers, on the CPU."""
        if self.round_Q is None or len(self.round_Q) == 0:
            return [self]
        tasks, round_Q = [], self.round_Q.cpu()
        for r in round_Q.unique().tolist():
            asked_Q = round_Q == r
            posterior_SC = None if self.posterior_QC is None else self.posterior_QC.cpu()[asked_Q]
            query_S, label_S = self.query_Q.cpu()[asked_Q], self.label_Q.cpu()[asked_Q]
            tasks.append(replace(self, query_Q=query_S, label_Q=label_S, posterior_QC=posterior_SC, round_Q=None))
        return tasks


@dataclass(frozen=True, eq=False)
class StudentProblem(StudentTask):
    """A task that was checked and lies on the device of the training (``training.build_problem``).

    Attributes:
        flip_rate: Share of wrong labels for which the loss is corrected.
        seed: Seed of all random choices of the training.
    """

    flip_rate: float = 0.0
    seed: int = 0

    @property
    def target_QC(self) -> Tensor:
        """Target probabilities: the label posteriors, or the labels as they are."""
        if self.posterior_QC is not None:
            return self.posterior_QC
        return F.one_hot(self.label_Q, self.spec.num_classes).float()

    def make_generator(self, *names: str | int) -> torch.Generator:
        """Make the generator of one named use of randomness, on the points' device."""
        return rng.make_torch_generator(self.seed, "student", *names, device=self.pool_x.device)


@dataclass(frozen=True, eq=False)
class Student:
    """Releasable. A trained student.

    Attributes:
        network: Description from which the network is built (``networks.describe``).
        module: The network, from normalized points to logits.
        spec: Public facts about the data.
        curves: Training curves by name, as (step, value).
        encoder: Encoder that makes features of points; None if it is not at hand or none is needed.
    """

    network: dict[str, Any]
    module: nn.Module
    spec: DataSpec
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    encoder: Encoder | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class, in the order of the probabilities."""
        return self.spec.class_names

    def encode(self, points: Any, *, unknown: str = "error") -> Tensor:
        """Convert raw points to a tensor: tables by the schema, and points that are not encoded yet by the encoder.

        Args:
            points: uint8 images, feature rows, texts, or a table: a DataFrame or {column: values}.
            unknown: Treatment of a value outside its column's categories: "error" or "zeros".

        Raises:
            ValueError: Points have another shape, or a table does not fit; names the columns and values.
        """
        spec, width = self.spec, tuple(self.spec.input_shape)
        is_array = hasattr(points, "shape") and hasattr(points, "dtype")
        if spec.encoder and not (is_array and "float" in str(points.dtype) and tuple(points.shape[1:]) == width):
            return self._encode_features(points, spec.encoder)
        if isinstance(points, Mapping) or hasattr(points, "columns"):
            if spec.schema is None:
                fix = f"Give an array of shape (N, {', '.join(map(str, width))})."
                raise checks.error("student", spec.name, "holds no schema to read tables by", fix)
            return torch.from_numpy(spec.schema.encode(points, unknown=unknown))
        x = torch.as_tensor(points)
        if tuple(x.shape[1:]) != width:
            problem = f"must have the shape (N, {', '.join(map(str, width))})"
            raise checks.error("points", tuple(x.shape), problem, "" if spec.schema is None else "Or give a DataFrame.")
        return x

    def _encode_features(self, points: Any, card: EncoderCard) -> Tensor:
        if card.points is None:
            problem = f"must be features of {card.name}, float rows [N, {self.spec.input_shape[0]}]"
            raise checks.error("points", type(points).__name__, problem, "Encode them as the data were.")
        if self.encoder is None:
            problem = f"needs the encoder {card.name}: weights {card.file or ''} with SHA-256 {card.sha256}"
            fix = "load_student(..., encoder=Encoder(weights=...)), of pate_torch.features.encoder."
            raise checks.error("student", self.spec.name, problem, fix)
        return self.encoder.encode(points, card.points, device=next(self.module.parameters()).device)

    def with_encoder(self, encoder: Encoder) -> Student:
        """Return the same student with its encoder; ValueError names both hashes if it is another encoder."""
        card = self.spec.encoder
        if card is None or card.points is None:
            raise checks.error("encoder", encoder.name, "is not needed: the student takes points as they are")
        given = encoder.make_card(card.points).identity
        for key, value in card.identity.items():
            if given[key] != value:
                fix = f"Use {card.name}, weights {card.file} with SHA-256 {card.sha256}."
                raise checks.error(f"encoder {key}", given[key], f"must be the student's, {value!r}", fix)
        return replace(self, encoder=encoder)

    @torch.no_grad()
    def compute_logits(self, x: Any) -> Tensor:
        """Compute logits, float32 [Q, C], of raw points as ``encode`` takes them."""
        network, device = self.module.eval(), next(self.module.parameters()).device
        parts = self.encode(x).split(1024)
        return torch.cat([network(self.spec.normalize(part.to(device))).float() for part in parts])

    def compute_probabilities(self, x: Any) -> Tensor:
        """Compute class probabilities of raw points, float32 [Q, C] on the CPU."""
        return self.compute_logits(x).softmax(1).cpu()

    predict_proba = compute_probabilities  # scikit-learn's name

    def predict(self, x: Any) -> Tensor:
        """Return the likeliest class of each raw point, int64 [Q]."""
        return self.compute_probabilities(x).argmax(1)

    def predict_names(self, x: Any) -> list[str]:
        """Return the name of the likeliest class of each raw point."""
        return [self.class_names[label] for label in self.predict(x).tolist()]


class StudentAlgorithm(ABC):
    """Trains a student on released labels and unlabeled public points. Its fields are recorded with the student.

    Attributes:
        name: Name in settings and reports.
        features: Recipe of the student's features, which are learned from public points; None if it takes points as
            they are.
    """

    name: str
    features: FeatureRecipe | None = None

    @property
    def returns_released_model(self) -> bool:
        """Whether the student is the model that the mechanism released, and learns nothing itself."""
        return False

    @property
    def guide(self) -> StudentAlgorithm | None:
        """The algorithm of the student that guides rounds of questions; None if it cannot guide any."""
        return self

    def check(self, spec: DataSpec) -> None:  # noqa: B027
        """Raise ValueError for data that the algorithm cannot take."""

    @abstractmethod
    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        """Train a student on released answers and public points.

        Args:
            task: Public points and released answers.
            seed: Seed of all random choices.
            device: Device of the training and of the student.
            progress: Called as progress(done, total).
            log: Called as log(tag, value, step) with training curves.

        Raises:
            ValueError: There are no labels.
        """
