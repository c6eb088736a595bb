"""What a report says of those who answered: their own sentences, kept in the release's record beside the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pate_torch.core import checks
from pate_torch.privacy.records import LABEL_UNIT

_KEYS = {"subject": "who", "procedure": "how", "query_sentence": "questions"}
"""Fields whose key in the release's record is another word."""


@dataclass(frozen=True, kw_only=True)
class MethodDescription:
    """Public sentences for the privacy statement, the report and the model card.

    In all of them ``{asked}`` and ``{answered}`` stand for the number of questions, ``{mechanism}`` for the mechanism
    with its parameters, and ``{each_round}`` for `` in each of 3 rounds`` (nothing where there was one).

    Attributes:
        subject: What the student, or the labels, are of: a plural, as "teachers".
        procedure: What they did, what noise was added to, what left, and what a student sees of it.
        assumptions: What must be true of them for the guarantee to hold, a sentence each.
        query_sentence: How many questions were put to them, as a part of a sentence.
        examples: Caption of public points with the labels released for them.
        public_time: Whether public sizes alone decide how long they take to answer, so that it may be shown.
        uses_size: Whether the declared number of records decides anything of theirs.
        discrete: Whether ``noise=discrete`` is to be had with them.
    """

    subject: str
    procedure: str
    assumptions: tuple[str, ...]
    query_sentence: str = "{answered} of {asked} answered"
    examples: str = "Public points, each with the label released for it. Noise errs: some are wrong."
    public_time: bool = False
    uses_size: bool = True
    discrete: bool = True

    def __post_init__(self) -> None:
        for name in ("subject", "procedure", "query_sentence", "examples"):
            checks.nonempty_string(f"description.{name}", getattr(self, name))
        object.__setattr__(self, "assumptions", checks.collection("description.assumptions", self.assumptions))
        for sentence in self.assumptions:
            checks.nonempty_string("description.assumptions", sentence)
        for name in ("public_time", "uses_size", "discrete"):
            checks.boolean(f"description.{name}", getattr(self, name))

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> MethodDescription:
        """Inverse of ``to_dict``. Raises ValueError or TypeError for anything else."""
        keys = {field.name: _KEYS.get(field.name, field.name) for field in fields(cls)}
        if missing := [key for key in keys.values() if key not in facts]:
            raise ValueError(f"{', '.join(missing)} is missing")
        values = {name: facts[key] for name, key in keys.items()}
        return cls(**{**values, "assumptions": tuple(values["assumptions"])})

    def to_dict(self) -> dict[str, Any]:
        """What the release's record holds."""
        values = asdict(self) | {"assumptions": list(self.assumptions)}
        return {_KEYS.get(name, name): value for name, value in values.items()}


# ---- a privacy unit in words ---------------------------------------------------------------------------------------


def get_unit_column(unit: str) -> str:
    """The column that makes the unit; empty unless records are protected in groups."""
    return unit.removeprefix("group:") if unit.startswith("group:") else ""


def format_one_unit(unit: str) -> str:
    """As in "one record", "all records of one patient"."""
    if unit == LABEL_UNIT:
        return "the label of one record"
    return "one record" if unit == "record" else f"all records of one {get_unit_column(unit)}"


def format_each_unit(unit: str) -> str:
    """At the beginning of a sentence of one unit's way: "Each record", "All records of one patient"."""
    return "Each record" if unit == "record" else format_one_unit(unit)[0].upper() + format_one_unit(unit)[1:]


def format_every_unit(unit: str) -> str:
    """At the beginning of a sentence on all units: "Every record", "Every patient"."""
    if unit == LABEL_UNIT:
        return "The label of every record"
    return f"Every {get_unit_column(unit) or 'record'}"
