"""Teachers of any kind, fitted in this process and not kept: classifiers or networks of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from pate_torch.methods import teacher_votes
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.description import MethodDescription
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.methods.teacher_votes import VotingMethod
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.teachers import voting
from pate_torch.teachers.panel import Panel


@dataclass(frozen=True, kw_only=True, eq=False)
class PanelMethod(VotingMethod):
    """PRIVATE. Teachers of a panel, each voting on every public point by itself.

    Attributes:
        panel: The teachers.
        teacher_repr: What they are, in words: their class and its parameters.
    """

    name: str = "panel"
    panel: Panel = field(repr=False)
    teacher_repr: str = ""

    @property
    def ensemble_size(self) -> int:
        return len(self.panel)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        counts = self.mechanism.releases_counts
        return teacher_votes.describe(self.ensemble_size, facts.unit, counts=counts, retrains_one=True)

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. The teachers' votes, recognized by a keyed hash, once one teacher has cast the same votes alone."""
        pool_x = inputs.facts.pool.x
        with inputs.clock("votes"):
            prediction_KQ = self.panel.predict(pool_x)
            if self.panel.retraining_check is not None:
                progress = inputs.stages("Training one teacher again, alone")
                self.panel.check_retraining(pool_x, prediction_KQ)
                progress(1, 1)
            votes = voting.count_votes(prediction_KQ, self.panel.spec.num_classes)
        return self.from_votes(inputs, votes, are_from_records=False)
