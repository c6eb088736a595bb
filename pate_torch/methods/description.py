"""How a method describes itself in public reports: sentences that ``release.json`` keeps beside the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pate_torch.core import checks
from pate_torch.privacy.records import LABEL_UNIT

_KEYS = {"subject": "who", "procedure": "how", "query_sentence": "questions"}
"""Keys in ``release.json`` of the fields that have another name there."""


@dataclass(frozen=True, kw_only=True)
class MethodDescription:
    """Public sentences for the privacy statement, the report and the model card.

    In the sentences, ``{asked}`` and ``{answered}`` stand for numbers of questions, ``{mechanism}`` for the mechanism
    with its parameters, and ``{each_round}`` for `` in each of 3 rounds``, or for nothing if there was one round.

    Attributes:
        subject: Plural noun for what answers the questions, such as "teachers".
        procedure: Sentences on what is computed, what receives noise, what is released and what a student sees.
        assumptions: Sentences that must be true for the guarantee to hold.
        query_sentence: Part of a sentence on the number of questions.
        examples: Caption of public points with the labels that were released for them.
        public_time: Whether the computing time of the answers depends on public sizes alone and may be published.
        uses_size: Whether the method uses the declared number of records.
        discrete: Whether the method supports ``noise=discrete``.
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
        object.__setattr__(self, "assumptions", tuple(checks.collection("description.assumptions", self.assumptions)))
        for sentence in (self.subject, self.procedure, self.query_sentence, self.examples, *self.assumptions):
            checks.nonempty_string("description", sentence)
        for name in ("public_time", "uses_size", "discrete"):
            checks.boolean(f"description.{name}", getattr(self, name))

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> MethodDescription:
        """Make a description from the output of ``to_dict``. Raises KeyError, TypeError or ValueError if it differs."""
        return cls(**{field.name: facts[_KEYS.get(field.name, field.name)] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the content for ``release.json``."""
        values = asdict(self) | {"assumptions": list(self.assumptions)}
        return {_KEYS.get(name, name): value for name, value in values.items()}


def get_unit_column(unit: str) -> str:
    """Return the column that names the units of a group; empty for other units."""
    return unit.removeprefix("group:") if unit.startswith("group:") else ""


def format_one_unit(unit: str) -> str:
    """Format a privacy unit in words, as in "one record" or "all records of one patient"."""
    if unit == LABEL_UNIT:
        return "the label of one record"
    return "one record" if unit == "record" else f"all records of one {get_unit_column(unit)}"
