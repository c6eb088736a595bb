"""Votes of teachers trained anywhere: read from a file, checked, and recognized by a keyed hash.

A file holds K x P predictions (one row per teacher, a class in 0..C-1 for each public point) or P x C counts (one row
per point, summing to K): CSV, NPY, or safetensors with a single tensor. Nothing is unpickled, since a pickle runs code.
The owner vouches for what no file can show: that every privacy unit reached one teacher, and for the adjacency.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pate_torch.core.progress import Stages
from pate_torch.methods import teacher_votes
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.description import MethodDescription
from pate_torch.methods.labeling import LabelingMethod, PreparedLabeling
from pate_torch.methods.teacher_votes import VotingMethod
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.voting import read_votes


@dataclass(frozen=True, kw_only=True, eq=False)
class VotesFile(VotingMethod):
    """Votes that were made elsewhere.

    Attributes:
        path: The file, read once there are data.
        votes: PRIVATE. Votes that are here already.
    """

    name: str = "votes_file"
    path: Path | None = None
    votes: Votes | None = field(default=None, repr=False)

    @property
    def ensemble_size(self) -> int | None:
        return None if self.votes is None else self.votes.num_teachers

    def complete(self, facts: DatasetFacts, stages: Stages) -> LabelingMethod:
        """This method with its votes, which must be on this public pool."""
        method, votes = super().complete(facts, stages), self.votes
        assert isinstance(method, VotesFile)
        if votes is None and self.path is not None:
            votes = read_votes(self.path, num_classes=facts.spec.num_classes, num_points=len(facts.pool))
        return replace(method, votes=votes)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        num_teachers = self._loaded_votes.num_teachers
        return teacher_votes.describe(num_teachers, facts.unit, counts=self.mechanism.releases_counts)

    def compute_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. A keyed hash of the votes, in place of the records."""
        return store.compute_votes_fingerprint(self._loaded_votes)

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. The votes, as they were read."""
        return self.from_votes(inputs, self._loaded_votes, are_from_records=False)

    @property
    def _loaded_votes(self) -> Votes:
        assert self.votes is not None, "complete comes first"
        return self.votes
