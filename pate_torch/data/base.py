"""Where data come from."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pate_torch.privacy.records import Dataset


class DatasetSource(ABC):
    """Loads one data set.

    Attributes:
        name: Declared name, whose account is charged.
    """

    name: str

    @abstractmethod
    def load(self) -> Dataset:
        """The private, public and evaluation sides.

        Raises:
            ValueError: The data cannot be found; names the folder and the switch.
        """
