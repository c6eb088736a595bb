"""The places where the project grows. Each implementation is one file and one YAML, found by ``_target_``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.core import checks
from pate_torch.sensitive import Sensitivity
from pate_torch.types import Answers, Dataset, DataSpec, EncoderCard, LinearModel, MechanismContext, PrivateData, Shards

Progress = Callable[[int, int], None]
"""Called as progress(done, total) by everything that takes long."""

Log = Callable[[str, float, int], None]
"""Called as log(tag, value, step); what is private is decided by who passes it."""


def do_nothing(*_: object) -> None:
    """A Progress and a Log that shows nothing."""


@runtime_checkable
class DatasetSource(Protocol):
    """Loads one data set."""

    @property
    def name(self) -> str:
        """Declared name."""
        ...

    def load(self) -> Dataset:
        """The private, public and evaluation sides.

        Raises:
            ValueError: The data cannot be found; names the folder and the switch.
        """
        ...


@runtime_checkable
class Partition(Protocol):
    """Deals privacy units to shards; see data/partition.py."""

    @property
    def adjacency(self) -> str:
        """The neighboring relation that its shards justify: ``add_remove`` or ``replace_one``."""
        ...

    def make_shards(self, private: PrivateData, num_teachers: int, seed: int) -> Shards:
        """Disjoint shards, one for each teacher."""
        ...


@runtime_checkable
class FeatureRecipe(Protocol):
    """Makes features of points, from the public ones alone: a frozen dataclass of choices."""

    @property
    def name(self) -> str:
        """As settings and reports call it."""
        ...

    def learn(
        self,
        x_P: Tensor,
        spec: DataSpec,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> nn.Module:
        """The encoder, in evaluation mode: normalized floats [B, ...] -> features [B, D].

        A run asks several times, for questions and for records: the same seed must give the same encoder.

        Args:
            x_P: Raw public points.
            spec: Public facts about the data.
            seed: Seed of the training.
            device: Device of the training.
            progress: Told of each step.
        """
        ...


@runtime_checkable
class PointEncoder(Protocol):
    """A frozen public encoder: gives the features that a whole run works on, of each point by itself.

    See ``features.encoder.Encoder``.
    """

    @property
    def name(self) -> str:
        """As settings and reports call it."""
        ...

    @property
    def cache_gb(self) -> float:
        """Most that encoded points may take on disk, in GB."""
        ...

    @property
    def architecture(self) -> str:
        """What decides the features beside the card's ``identity``, for finding encoded points again."""
        ...

    def get_published_files(self) -> Mapping[str, Path]:
        """The files that are put beside the student, by the names that they get there; none unless the owner agrees."""
        ...

    def make_card(self, points: DataSpec) -> EncoderCard:
        """What a release says of it.

        Raises:
            ValueError: It cannot take these points.
        """
        ...

    def to_tensor(self, x: Any, points: DataSpec) -> Tensor:
        """Points, as whoever has them gives them, as a tensor."""
        ...

    def encode(
        self,
        x: Any,
        points: DataSpec | None = None,
        *,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> Tensor:
        """Features [N, D], float32 on the CPU: of each point by itself, bit for bit."""
        ...

    def check_batch_independence(self, x_P: Tensor, points: DataSpec, device: torch.device | str = "cpu") -> None:
        """Raise ValueError where one public point's features follow from another."""
        ...


@runtime_checkable
class Mechanism(Protocol):
    """A noisy answer to votes: a frozen keyword-only dataclass, every method pure but for the noise drawn.

    ``privacy_events`` prices a whole release of ``num_queries`` in at most ``rounds`` calls of ``release`` and is
    charged before anything is drawn; the events of ``Answers`` never exceed it, summed over the calls. One that looks
    at ``context.student_QC`` says so by a class attribute ``uses_guide = True``.
    """

    @property
    def name(self) -> str:
        """As settings and reports call it."""
        ...

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Refuse a plan that cannot work.

        Raises:
            ValueError: It cannot; says what would.
        """
        ...

    @property
    def max_sensitivity(self) -> Sensitivity:
        """Sensitivity that ``privacy_events`` prices; ``release`` opens no value whose own is larger."""
        ...

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Events of a whole release at its worst."""
        ...

    def release(self, sensitive: Any, noise: Any, context: MechanismContext, /) -> Answers:
        """Answers of one round, marked by the source of the noise (``NoiseSource.stamp``): others are not released.

        Args:
            sensitive: ``Votes``, or what records say where the mechanism is for these.
            noise: Noise that was paid for.
            context: What may be known besides the votes.
        """
        ...

    def make_outcome_model(self) -> OutcomeModel | None:
        """What each query releases, as a categorical law of the votes; None where there is no such law."""
        ...


@dataclass(frozen=True, eq=False)
class QueryState:
    """Releasable. All a query strategy sees: public points, what was asked and answered, and the student's opinion.

    Attributes:
        spec: Public facts about the data.
        pool_x: Public points, [P, ...] as loaded.
        query_Q: Pool indices already asked, in order.
        label_Q: Their released labels; -1: none.
        num_remaining: Queries still allowed.
        num_rounds_left: Including this one.
        seed: Names the strategy's own stream.
        student_PC: The current student's class probabilities on the whole pool; None: before the first round.
        feature_PD: Features learnt from public points without labels, on the run's device, or None.
    """

    spec: DataSpec
    pool_x: Tensor
    query_Q: Tensor
    label_Q: Tensor
    num_remaining: int
    num_rounds_left: int
    seed: int
    student_PC: Tensor | None = None
    feature_PD: Tensor | None = None


@runtime_checkable
class QueryStrategy(Protocol):
    """Chooses which public points to ask next: a frozen dataclass of choices, which the release's record holds.

    A strategy that never looks at ``state.student_PC`` may say so by a class attribute ``uses_guide = False``: then no
    student is fitted between its rounds.
    """

    @property
    def name(self) -> str:
        """As settings and reports call it."""
        ...

    @property
    def rounds(self) -> int:
        """Number of times it wants to be asked."""
        ...

    def select(self, state: QueryState) -> Tensor:
        """Pool indices (int64, distinct, none asked before, at most ``state.num_remaining``)."""
        ...


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
        shape = tuple(getattr(points, "shape", ()))
        is_float = "float" in str(getattr(points, "dtype", ""))
        return is_float and len(shape) == 2 and shape[1:] == tuple(self.spec.input_shape)

    def _encode_features(self, points: Any, card: EncoderCard) -> Tensor:
        if card.points is None:
            expected_input = f"features of {card.name}, float rows [N, {self.spec.input_shape[0]}]"
            raise checks.error(
                "points", type(points).__name__, f"must be {expected_input}", "Encode them as the data were."
            )
        if self.encoder is None:
            message = f"needs the encoder {card.name}: weights {card.file or ''} with SHA-256 {card.sha256}"
            fix = "load_student(..., encoder=Encoder(weights=...)), of pate_torch.features.encoder."
            raise checks.error("student", self.spec.name, message, fix)
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

    def predict_proba(self, x: Any, batch: int = 1024) -> Tensor:
        """The same as ``compute_probabilities``, by the name that scikit-learn gives it."""
        return self.compute_probabilities(x, batch)

    def predict(self, x: Any, batch: int = 1024) -> Tensor:
        """The likeliest class of each raw point, int64 [Q]."""
        return self.compute_probabilities(x, batch).argmax(1)

    def predict_names(self, x: Any, batch: int = 1024) -> list[str]:
        """The name of the likeliest class of each raw point."""
        return [self.class_names[label] for label in self.predict(x, batch).tolist()]


@runtime_checkable
class StudentAlgorithm(Protocol):
    """Trains a student on released labels and unlabeled public points: a frozen dataclass of choices."""

    @property
    def name(self) -> str:
        """As settings and reports call it."""
        ...

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
        ...


@runtime_checkable
class Checkable(Protocol):
    """A student algorithm that can tell beforehand whether it can take the data."""

    def check(self, spec: DataSpec) -> None:
        """Refuse data that the algorithm cannot take.

        Raises:
            ValueError: It cannot; says what would.
        """
        ...


@runtime_checkable
class HypothesisClass(Protocol):
    """A small class, enumerated exactly (NB20, DF20, WLF16)."""

    name: str
    vc_dimension: int

    def enumerate_dichotomies(self, x: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """Every labeling of the points x [n, D] that the class realizes, bool [M, n], and one hypothesis for each."""
        ...

    def predict(self, hypothesis: Any, x: np.ndarray) -> np.ndarray:
        """The labels of x [n, D], bool [n]."""
        ...
