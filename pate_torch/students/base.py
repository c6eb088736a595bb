"""What learns from released labels and public points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks, rng
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features.base import FeatureRecipe, PointEncoder
from pate_torch.privacy.records import DataSpec, EncoderCard, LinearModel


@dataclass(frozen=True, eq=False)
class StudentTask:
    """Releasable. All a student sees.

    Attributes:
        spec: Public facts about the data.
        pool_x: Every public point.
        query_Q: Indices of the *answered* points.
        label_Q: Their labels.
        posterior_QC: How far the released noisy counts speak for each class, or (``soft``) the released scores; rows
            sum to 1; None: only labels were released.
        soft: Whether they are scores: to be learnt as they are, where counts say which label is likely.
        round_Q: The round, from 0, in which each was asked; None: all in one.
        guide: The student of all rounds but the last, by the same recipe; None: there is none.
        model: The linear model that gave the last round's answers, in the guide's features; None: no model did.
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

    def select(self, index_S: Tensor) -> StudentTask:
        """The task with these of its answers alone, on the CPU."""
        posterior_SC = None if self.posterior_QC is None else self.posterior_QC.cpu()[index_S]
        round_S = None if self.round_Q is None else self.round_Q.cpu()[index_S]
        query_S, label_S = self.query_Q.cpu()[index_S], self.label_Q.cpu()[index_S]
        return replace(self, query_Q=query_S, label_Q=label_S, posterior_QC=posterior_SC, round_Q=round_S)


@dataclass(frozen=True, eq=False)
class StudentProblem:
    """A student's task, checked, on the device it is trained on (``training.build_problem``).

    Attributes:
        spec: Public facts about the data.
        x_P: Raw public points.
        query_Q: Indices of the answered points.
        label_Q: Their labels.
        flip_rate: Label error to correct for.
        seed: Seed of every random choice of the training.
        posterior_QC: Label posteriors, float32, positive; None where only labels were released.
        soft: Whether the posteriors are released scores.
    """

    spec: DataSpec
    x_P: Tensor
    query_Q: Tensor
    label_Q: Tensor
    flip_rate: float
    seed: int
    posterior_QC: Tensor | None = None
    soft: bool = False

    @property
    def target_QC(self) -> Tensor:
        """Target probabilities: the label posteriors, or the labels as they are."""
        if self.posterior_QC is not None:
            return self.posterior_QC
        return F.one_hot(self.label_Q, self.spec.num_classes).float()

    def to_weighted_rows(self, x_QD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Rows, labels and weights (None if all are one) for learners that know no soft labels.

        Of soft labels every class of every point is a row, weighted by its share: the same cross-entropy.
        """
        if not self.soft:
            return x_QD, self.label_Q.cpu().numpy(), None
        classes = self.spec.num_classes
        label_S = np.tile(np.arange(classes), len(x_QD))
        return np.repeat(x_QD, classes, 0), label_S, self.target_QC.double().cpu().numpy().ravel()

    def make_generator(self, *names: str | int) -> torch.Generator:
        """The generator of one named use of randomness, on the points' device."""
        return rng.make_torch_generator(self.seed, "student", *names, device=self.x_P.device)


@dataclass(frozen=True, eq=False)
class Student:
    """Releasable. A trained student.

    Attributes:
        network: Its buildable description (``networks.describe``).
        module: The weights.
        spec: Public facts about the data.
        curves: Training curves, by name: (step, value).
        encoder: Makes features of points, where the student needs them; None: it is not here, or none is needed.
    """

    network: dict[str, Any]
    module: nn.Module
    spec: DataSpec
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    encoder: PointEncoder | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class, in the order of the probabilities."""
        return self.spec.class_names

    def encode(self, points: Any, *, unknown: str = "error") -> Tensor:
        """Raw points as a tensor: arrays as they are, tables by the schema that the student carries.

        Where the student works on features of an encoder, these are made of the points, or given as float rows.

        Args:
            points: uint8 images, feature rows, texts, or a table: a DataFrame or {column: values}.
            unknown: What becomes of a value outside its column's categories: "error" or "zeros".

        Raises:
            ValueError: Points of another shape, or a table that does not fit; names the columns and values.
        """
        if self.spec.encoder is not None and not self._is_encoded(points):
            return self._encode_features(points, self.spec.encoder)
        if isinstance(points, Mapping) or hasattr(points, "columns"):
            if self.spec.schema is None:
                fix = f"Give an array of shape (N, {', '.join(map(str, self.spec.input_shape))})."
                raise checks.error("student", self.spec.name, "holds no schema to read tables by", fix)
            return torch.from_numpy(self.spec.schema.encode(points, unknown=unknown))
        x = torch.as_tensor(points)
        if tuple(x.shape[1:]) != tuple(self.spec.input_shape):
            expected_shape = ", ".join(map(str, self.spec.input_shape))
            fix = "" if self.spec.schema is None else "Or give a DataFrame."
            raise checks.error("points", tuple(x.shape), f"must have the shape (N, {expected_shape})", fix)
        return x

    def with_encoder(self, encoder: PointEncoder) -> Student:
        """The same student, with the encoder that it needs.

        Raises:
            ValueError: Another one: names both hashes.
        """
        needed_card = self.spec.encoder
        if needed_card is None or needed_card.points is None:
            raise checks.error("encoder", encoder.name, "is not needed: the student takes points as they are")
        given_card = encoder.make_card(needed_card.points)
        for key, value in needed_card.identity.items():
            if given_card.identity[key] != value:
                fix = f"Use {needed_card.name}, weights {needed_card.file} with SHA-256 {needed_card.sha256}."
                raise checks.error(f"encoder {key}", given_card.identity[key], f"must be the student's, {value!r}", fix)
        return replace(self, encoder=encoder)

    def _is_encoded(self, points: Any) -> bool:
        """Whether points are features already: float rows of the right width."""
        is_array = hasattr(points, "shape") and hasattr(points, "dtype")
        return is_array and "float" in str(points.dtype) and tuple(points.shape[1:]) == tuple(self.spec.input_shape)

    def _encode_features(self, points: Any, card: EncoderCard) -> Tensor:
        if card.points is None:
            problem = f"must be features of {card.name}, float rows [N, {self.spec.input_shape[0]}]"
            raise checks.error("points", type(points).__name__, problem, "Encode them as the data were.")
        if self.encoder is None:
            problem = f"needs the encoder {card.name}: weights {card.file or ''} with SHA-256 {card.sha256}"
            fix = "load_student(..., encoder=Encoder(weights=...)), of pate_torch.features.encoder."
            raise checks.error("student", self.spec.name, problem, fix)
        device = next(self.module.parameters()).device
        return self.encoder.encode(self.encoder.to_tensor(points, card.points), card.points, device=device)

    @torch.no_grad()
    def compute_logits(self, x: Any, batch: int = 1024) -> Tensor:
        """Logits, float32 [Q, C], of raw points, as ``encode`` takes them."""
        self.module.eval()
        device = next(self.module.parameters()).device
        x = self.encode(x)
        parts = [self.module(self.spec.normalize(part.to(device))).float() for part in x.split(batch)]
        return torch.cat(parts) if parts else torch.zeros(0, self.spec.num_classes)

    def compute_probabilities(self, x: Any, batch: int = 1024) -> Tensor:
        """Class probabilities on the CPU, float32 [Q, C], of raw points."""
        return self.compute_logits(x, batch).softmax(1).cpu()

    predict_proba = compute_probabilities  # by the name that scikit-learn gives it

    def predict(self, x: Any, batch: int = 1024) -> Tensor:
        """The likeliest class of each raw point, int64 [Q]."""
        return self.compute_probabilities(x, batch).argmax(1)

    def predict_names(self, x: Any, batch: int = 1024) -> list[str]:
        """The name of the likeliest class of each raw point."""
        return [self.class_names[label] for label in self.predict(x, batch).tolist()]


class StudentAlgorithm(ABC):
    """Trains a student on released labels and unlabeled public points: a frozen dataclass of choices.

    Attributes:
        name: As settings and reports call it.
    """

    name: str

    @property
    def returns_released_model(self) -> bool:
        """Whether the student is the model that the mechanism released, and learns nothing itself."""
        return False

    @property
    def guide(self) -> StudentAlgorithm | None:
        """The same algorithm as it guides rounds of questions; None: it cannot."""
        return self

    @property
    def feature_recipe(self) -> FeatureRecipe | None:
        """How the student's features are learnt from public points; None: it takes points as they are."""
        return None

    def check(self, spec: DataSpec) -> None:  # noqa: B027
        """Refuse data that the algorithm cannot take.

        Raises:
            ValueError: It cannot; says what would.
        """

    @abstractmethod
    def fit(
        self,
        task: StudentTask,
        *,
        seed: int,
        device: torch.device,
        progress: Progress = do_nothing,
        log: Log = do_nothing,
    ) -> Student:
        """The trained student."""
