"""Experiments that are more than one run: chosen by ``experiment=<name>``, found by the ``_target_`` of ``study``."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pate_torch.config import RunConfig


@runtime_checkable
class Study(Protocol):
    """Takes the place of ``pipeline.run``: given the composed plan, it runs what it compares and writes its tables."""

    def run(self, plan: RunConfig) -> None:
        """Run it; raises ValueError for a choice of the user's that cannot work, before anything is charged."""
        ...
