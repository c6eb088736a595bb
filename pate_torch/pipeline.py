"""A run from private data to a released student, stage by stage; the only composer of runs, and free of Hydra.

    data -> shards -> teachers -> votes | mechanism <- ledger | released labels -> student -> report

The account is opened, and the plan priced and held against the cap, before the first teacher is trained: a choice
that cannot work fails in seconds and costs nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pate_torch import checks, labelling, runs
from pate_torch.accounting import calibration
from pate_torch.accounting.events import Event
from pate_torch.ledger import Ledger
from pate_torch.noise import NoiseSource
from pate_torch.protocols import DatasetSource, Mechanism, QueryStrategy, Student, StudentAlgorithm, StudentTask
from pate_torch.types import Dataset, Release, Shards, Votes


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Everything a run is made of. Components first, then the choices of the top level."""

    source: DatasetSource
    partition: Any
    recipe: Any
    mechanism: Mechanism
    strategy: QueryStrategy
    student: StudentAlgorithm
    refit: StudentAlgorithm
    root: Path
    folder: Path
    seed: int
    num_teachers: int
    num_queries: int
    delta: float
    teachers: str | None = None
    labels: str | None = None
    noise: str = "torch"
    insecure_noise_seed: int | None = None
    budget_epsilon: float | None = None
    opening_budget: float = 10.0
    target_epsilon: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    baseline: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, low=0)
        checks.integer("num_teachers", self.num_teachers, low=1)
        checks.integer("num_queries", self.num_queries, low=1)
        checks.delta("privacy.delta", self.delta)
        for key in ("budget_epsilon", "target_epsilon"):
            if getattr(self, key) is not None:
                checks.positive(f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        if self.teachers is not None:
            runs.checked_id("teachers", self.teachers)
        if self.labels is not None:
            runs.checked_id("labels", self.labels)
