"""Where data come from."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pate_torch.privacy.records import Dataset


class DatasetSource(ABC):
    """Loads one data set."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Declared name."""

    @abstractmethod
    def load(self) -> Dataset:
        """The private, public and evaluation sides.

        Raises:
            ValueError: The data cannot be found; names the folder and the switch.
        """
