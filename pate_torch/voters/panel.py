"""Teachers of any kind, fitted in this process and not kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pate_torch.teachers.panel import Panel
from pate_torch.types import Dataset
from pate_torch.voters.base import FittedVoters, VotersBase

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext


@dataclass(frozen=True, kw_only=True, eq=False)
class PanelVoters(VotersBase):
    """PRIVATE. Teachers of a panel, each voting on every public point by itself."""

    name: str = "panel"
    panel: Panel = field(repr=False)

    @property
    def num_teachers(self) -> int:
        return len(self.panel)

    def votes_per_question(self, data: Dataset, config: RunConfig) -> int | None:
        return self.num_teachers

    def fitted(self, run: RunContext) -> FittedVoters:
        """PRIVATE. The teachers' votes, recognized by a keyed hash."""
        with run.clock("votes"):
            votes = self.panel.votes(run.data.pool.x)
        return self.registered(run, votes)
