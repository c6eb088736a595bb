"""The interface of recipes for features that are learned from public points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.records import DataSpec, PublicAsset

Device = torch.device | str


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
        self, x_P: Tensor, spec: DataSpec, *, seed: int, device: Device = "cpu", progress: Progress = do_nothing
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
