"""Findings of the GPU check, the setup that its parts share, and the line of the package that is being executed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import torch

import pate_torch

T = TypeVar("T")
_PACKAGE = str(Path(pate_torch.__file__).resolve().parent)


@dataclass(frozen=True)
class Setup:
    """The device that is checked, and whether workloads are tiny, so that trying the check itself takes seconds."""

    device: torch.device
    small: bool = False

    def choose(self, full: T, small: T) -> T:
        return small if self.small else full


@dataclass(frozen=True)
class Finding:
    """One figure, and whether it is as it should be; ``passed`` is None if nothing is demanded of it."""

    what: str
    value: float | str
    unit: str = ""
    passed: bool | None = None


class PartNotRun(Exception):
    """A part of the check that this machine cannot run; the message says why."""


def check_at_most(what: str, value: float, limit: float) -> Finding:
    return Finding(f"{what} (at most {limit:g})", value, passed=value <= limit)


class CodeLine(NamedTuple):
    """A line of the package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def find_package_line() -> CodeLine:
    """Return the innermost line of the package that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            return CodeLine(code.co_filename[len(_PACKAGE) + 1 :], frame.f_lineno, code.co_name)
        frame = frame.f_back
    return CodeLine("elsewhere", 0, "")
