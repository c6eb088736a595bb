"""All that a plan may know of a data set: what its configuration declares. Nothing here opens a file.

A source is built, never asked to ``load()``: settings chosen by a look at private records would be a release that no
account pays for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Public facts, each None where nobody declared it.

    Attributes:
        size: Private records.
        pool: Public points.
    """

    name: str
    num_classes: int | None = None
    size: int | None = None
    pool: int | None = None

    @classmethod
    def of(cls, source: Any) -> Declared:
        """Read off a source's own configuration: a benchmark's published constants, a user's declared keys."""
        classes = getattr(source, "num_classes", getattr(source, "classes", getattr(source, "class_names", None)))
        if hasattr(source, "nominal_size"):
            size = source.nominal_size
        else:  # a benchmark: so many of its records, or all of them
            size = getattr(source, "private", None) or getattr(source, "size", None)
        return cls(
            name=source.name,
            num_classes=classes if classes is None or isinstance(classes, int) else len(classes),
            size=size,
            pool=getattr(source, "public", None),
        )

    def shard(self, num_teachers: int) -> int | None:
        """Records of each teacher, about."""
        return None if self.size is None else self.size // num_teachers
