"""What makes features of points: learnt from public points, or a frozen public encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.records import DataSpec, EncoderCard, PublicAsset


class FeatureRecipe(ABC):
    """Makes features of points, from the public ones alone: a frozen dataclass of choices.

    Attributes:
        name: As settings and reports call it.
    """

    name: str

    @property
    def asset(self) -> PublicAsset | None:
        """The public asset that the features rest on, for the privacy statement; None: public points alone."""
        return None

    @property
    def design(self) -> dict[str, Any] | None:
        """Name and options of the network of which the encoder is the lower part; None: no network of this package."""
        return None

    def check(self, spec: DataSpec) -> None:  # noqa: B027
        """Raise ValueError for data that the recipe cannot take."""

    @abstractmethod
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


class PointEncoder(ABC):
    """A frozen public encoder: gives the features that a whole run works on, of each point by itself.

    See ``features.encoder.Encoder``.

    Attributes:
        name: As settings and reports call it.
        cache_gb: Most that encoded points may take on disk, in GB.
    """

    name: str
    cache_gb: float

    @property
    @abstractmethod
    def architecture(self) -> str:
        """What decides the features beside the card's ``identity``, for finding encoded points again."""

    @abstractmethod
    def get_published_files(self) -> Mapping[str, Path]:
        """The files that are put beside the student, by the names that they get there; none unless the owner agrees."""

    @abstractmethod
    def make_card(self, points: DataSpec) -> EncoderCard:
        """What a release says of it.

        Raises:
            ValueError: It cannot take these points.
        """

    @abstractmethod
    def to_tensor(self, x: Any, points: DataSpec) -> Tensor:
        """Points, as whoever has them gives them, as a tensor."""

    @abstractmethod
    def encode(
        self,
        x: Any,
        points: DataSpec | None = None,
        *,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> Tensor:
        """Features [N, D], float32 on the CPU: of each point by itself, bit for bit."""

    @abstractmethod
    def check_batch_independence(self, x_P: Tensor, points: DataSpec, device: torch.device | str = "cpu") -> None:
        """Raise ValueError where one public point's features follow from another."""
