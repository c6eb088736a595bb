"""Differentially private deep learning by PATE: ``from pate_torch import PATEClassifier, Pate, load_student``.

The names are imported when first used, so that ``import pate_torch`` (and ``pate --help``) stays quick.

Where torch is not loaded yet, its threads are told to sleep while they wait for each other (``OMP_WAIT_POLICY``, unless
it is set): they would keep processors from whatever else the machine does, and so from each other.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pate_torch.classifier import PATEClassifier as PATEClassifier
    from pate_torch.estimator import Pate as Pate
    from pate_torch.labeler import PrivateLabeler as PrivateLabeler
    from pate_torch.students.export import load_student as load_student

_HOMES = {
    "PATEClassifier": "pate_torch.classifier",
    "Pate": "pate_torch.estimator",
    "PrivateLabeler": "pate_torch.labeler",
    "load_student": "pate_torch.students.export",
}

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["PATEClassifier", "Pate", "PrivateLabeler", "load_student"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pate_torch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
