"""Where data come from: what every source declares before it reads anything, and the data set that it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pate_torch.privacy.records import Dataset


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Releasable. What a source declares before it reads anything; None where it declares nothing.

    Attributes:
        name: Declared name of the data set.
        num_classes: Number C of classes.
        num_private: About how many private records there are, as published or declared.
        num_public: Number P of public points.
        is_benchmark: Whether all records are public data.
        paths: Where the main file of an owner may lie; empty for data that are no files of an owner.
        root: The data root, where the source names one.
    """

    name: str
    num_classes: int | None = None
    num_private: int | None = None
    num_public: int | None = None
    is_benchmark: bool = False
    paths: frozenset[Path] = frozenset()
    root: str | None = None


class DatasetSource(ABC):
    """Loads one data set."""

    if TYPE_CHECKING:  # a field of most sources, which a property here would give itself as its default value

        @property
        def name(self) -> str:
            """Declared name."""

    def declared_facts(self) -> SourceFacts:
        """The public facts that are known before anything is read."""
        return SourceFacts(name=self.name)

    @abstractmethod
    def load(self) -> Dataset:
        """The private, public and evaluation sides.

        Raises:
            ValueError: The data cannot be found; names the folder and the switch.
        """
