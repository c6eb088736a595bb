"""What releases say of their voters that were written before voters described themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pate_torch.voters import gradients, reverse_knn, teachers
from pate_torch.voters.description import VotersDescription, each_unit

_COUNTED = ("teachers", "teachers_transductive", "votes_file", "panel", "inductive", "transductive", "brought")
"""Voters whose votes were there before they were asked, so that their time was public."""


def describe(record: Mapping[str, Any]) -> VotersDescription:
    """Who answered, by the answers that lie beside this record, which is one of before."""
    unit, parameters = record["unit"], record["parameters"]
    if "scores_sha256" in record:
        return gradients.describe(unit, parameters.get("steps", 1))
    if "cells_sha256" in record:
        return reverse_knn.describe(unit)
    number, name = record["num_teachers"], record.get("voters") or record.get("voting")
    described = teachers.describe(number, unit, counts=parameters.get("counts") is True)
    described = replace(described, public_time=name in _COUNTED)
    return _successors(described, number, unit) if record.get("succession") is True else described


def _successors(described: VotersDescription, number: int, unit: str) -> VotersDescription:
    """With those who took the teachers' place after the first round."""
    others = "(after the first round as many successors, who started from what the answers so far taught a student)"
    later = (
        f"{each_unit(unit)} reached exactly one of the {number} successors of each later round, who learnt from their "
        "own share and from answers that had left before."
    )
    return replace(
        described,
        how=described.how.replace("teachers,", f"teachers {others},", 1),
        assumptions=(*described.assumptions, later),
        public_time=False,
    )
