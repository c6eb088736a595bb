"""Differentially private deep learning by PATE: ``from pate_torch import PATEClassifier, PATE, load_student``.

The names are imported at their first use, so that ``import pate_torch`` and ``pate --help`` are quick. The import sets
no environment variable and no import hook.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pate_torch.api.classifier import PATEClassifier as PATEClassifier
    from pate_torch.api.labeler import PrivateLabeler as PrivateLabeler
    from pate_torch.api.pate import PATE as PATE
    from pate_torch.api.released import ReleasedClassifier as ReleasedClassifier
    from pate_torch.api.split import split_public as split_public
    from pate_torch.api.synthesizer import TabularSynthesizer as TabularSynthesizer
    from pate_torch.students.store import load_student as load_student
    from pate_torch.teachers.network import Network as Network

_MODULE_BY_NAME = {
    "PATEClassifier": "pate_torch.api.classifier",
    "PATE": "pate_torch.api.pate",
    "Network": "pate_torch.teachers.network",
    "PrivateLabeler": "pate_torch.api.labeler",
    "ReleasedClassifier": "pate_torch.api.released",
    "load_student": "pate_torch.students.store",
    "split_public": "pate_torch.api.split",
    "TabularSynthesizer": "pate_torch.api.synthesizer",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())  # an application chooses where messages go

__all__ = list(_MODULE_BY_NAME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # imports parsers of archives and of email

        return version("pate-torch")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'pate_torch' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULE_BY_NAME]
