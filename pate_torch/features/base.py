"""The interface of recipes for features that are learned from public points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from pate_torch.core.device import Device
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.records import DataSpec, PublicAsset


class FeatureRecipe(ABC):
    """A recipe for features that are learned from the public points alone. Subclasses are frozen dataclasses."""

    name: str

    @property
    def asset(self) -> PublicAsset | None:
        """Public asset that the features use besides the public points. None if there is no such asset."""
        return None

    @property
    def design(self) -> dict[str, Any] | None:
        """Name and options of the network whose trunk is the encoder. None if the encoder is another module."""
        return None

    def check(self, spec: DataSpec) -> None:  # noqa: B027
        """Raise ValueError if the recipe does not support the data."""

    @abstractmethod
    def learn(
        self, x_P: Tensor, spec: DataSpec, *, seed: int, device: Device = "cpu", progress: Progress = do_nothing
    ) -> nn.Module:
        """Learn an encoder from normalized floats [B, ...] to features [B, D]. It is returned in evaluation mode.

        The public points x_P are raw. A run learns features several times, for example for queries and for records, so
        the same seed must always give the same encoder.
        """
