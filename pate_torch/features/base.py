"""The interfaces of features: recipes that learn them from public points, and frozen public encoders."""

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
    """A recipe for features that are learned from the public points alone: a frozen dataclass of options.

    Attributes:
        name: Name of the recipe in settings and reports.
    """

    name: str

    @property
    def asset(self) -> PublicAsset | None:
        """The public asset that the features use beside the public points, for the privacy statement; None if none."""
        return None

    @property
    def design(self) -> dict[str, Any] | None:
        """Name and options of the network whose lower part the encoder is; None if it is no network of this package."""
        return None

    def check(self, spec: DataSpec) -> None:  # noqa: B027
        """Raise ValueError if the recipe cannot take the data."""

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
        """Learn an encoder, in evaluation mode: normalized floats [B, ...] -> features [B, D].

        A run learns several times, for queries and for records: one seed must always give the same encoder.

        Args:
            x_P: Raw public points.
            spec: Public facts about the data.
            seed: Seed of the training.
            device: Device of the training.
            progress: Called at each step.
        """


class PointEncoder(ABC):
    """A frozen public encoder: computes the features that a whole run works on, of each point by itself.

    The implementation of this package is ``features.encoder.Encoder``.

    Attributes:
        name: Name of the encoder in settings and reports.
        cache_gb: Largest size of the encoded points on disk, in GB.
    """

    name: str
    cache_gb: float

    @property
    @abstractmethod
    def architecture(self) -> str:
        """What decides the features beside the card's ``identity``, as part of the key of the cache."""

    @abstractmethod
    def get_published_files(self) -> Mapping[str, Path]:
        """Return the files to publish beside the student, by their names there; none unless the owner agrees."""

    @abstractmethod
    def make_card(self, points: DataSpec) -> EncoderCard:
        """Make the description of the encoder for a release.

        Raises:
            ValueError: The encoder cannot take these points.
        """

    @abstractmethod
    def to_tensor(self, x: Any, points: DataSpec) -> Tensor:
        """Convert points, such as texts or the columns of a table, to a tensor."""

    @abstractmethod
    def encode(
        self,
        x: Any,
        points: DataSpec | None = None,
        *,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> Tensor:
        """Compute features [N, D], float32 on the CPU, of each point by itself, bit for bit."""

    @abstractmethod
    def check_batch_independence(self, x_P: Tensor, points: DataSpec, device: torch.device | str = "cpu") -> None:
        """Raise ValueError if the features of one public point depend on another point."""
