"""Methods in which teachers vote: their base class, votes from a file, and teachers that the user brings.

A file of votes shows neither that every privacy unit was in the shard of one teacher, nor the adjacency. The owner of
the data is responsible for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods import feasibility
from pate_torch.methods.base import MethodDescription, MethodInputs, format_one_unit
from pate_torch.methods.labeling import LabelingMethod, PreparedLabeling
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.panel import Panel
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.voting import read_votes


@dataclass(frozen=True, kw_only=True)
class VotingMethod(LabelingMethod):
    """Base of the methods in which teachers vote."""

    mechanism_type = VoteMechanism
    mechanism: VoteMechanism

    def validate(self, facts: DatasetFacts) -> None:
        super().validate(facts)
        size, num_classes, allow = self.ensemble_size, facts.spec.num_classes, self.allow_uninformative_labels
        assert size is not None
        plan = {"num_queries": self.num_queries, "num_teachers": size, "num_classes": num_classes}
        self.mechanism.check(**plan, rounds=self.num_rounds)
        feasibility.check_informative(self.mechanism, size, num_classes, allow_uninformative=allow)

    def format_noise_warning(self, facts: DatasetFacts) -> str | None:
        size, num_classes = self.ensemble_size, facts.spec.num_classes
        assert size is not None
        return feasibility.format_low_signal_warning(self.mechanism, size, num_classes, self.num_queries)

    def from_votes(self, inputs: MethodInputs, votes: Votes, *, are_from_records: bool = True) -> PreparedLabeling:
        """PRIVATE. Prepare the method to answer from these votes, under a new id.

        With ``are_from_records``, the teachers were trained on the records of this run and on no others. The store then
        maps the id to these records, which the owner's membership test takes as members, and else to the votes.
        """
        store = inputs.store
        fingerprint = store.compute_votes_fingerprint(votes)
        if are_from_records:
            fingerprint = store.compute_fingerprint(inputs.records)
        prepared = PreparedLabeling.from_method(self, inputs, votes, id=store.create_alias(fingerprint))
        prepared.votes = votes
        return prepared


@dataclass(frozen=True, kw_only=True, eq=False)
class VotesFile(VotingMethod):
    """Votes of teachers that were trained elsewhere.

    Attributes:
        path: File of the votes (``teachers.voting.read_votes``), which ``complete`` reads. None if ``votes`` are given.
        votes: PRIVATE. Votes on the public points. None to read ``path``.
    """

    name: str = "votes_file"
    path: Path | None = None
    votes: Votes | None = field(default=None, repr=False)

    def validate(self, facts: DatasetFacts) -> None:
        super().validate(facts)
        if self.has_first_stage:
            problem = "counts private records, and a file of votes comes without them"
            raise checks.error("first_answers", "class_counts", problem, "Use first_answers=none.")

    @property
    def ensemble_size(self) -> int | None:
        return None if self.votes is None else self.votes.num_teachers

    def complete(self, facts: DatasetFacts, stages: Stages) -> LabelingMethod:
        method, votes = super().complete(facts, stages), self.votes
        assert isinstance(method, VotesFile)
        if votes is None and self.path is not None:
            votes = read_votes(self.path, num_classes=facts.spec.num_classes, num_points=len(facts.pool))
        return replace(method, votes=votes)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        assert self.votes is not None, "complete comes first"
        return describe(self.votes.num_teachers, facts.unit, counts=self.mechanism.releases_counts)

    def compute_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. Compute a keyed hash of the votes, because the records are not available."""
        assert self.votes is not None, "complete comes first"
        return store.compute_votes_content_fingerprint(self.votes)

    def compute_call_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. Compute a keyed hash of the votes in their order."""
        assert self.votes is not None, "complete comes first"
        return store.compute_votes_fingerprint(self.votes)

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        assert self.votes is not None, "complete comes first"
        return self.from_votes(inputs, self.votes, are_from_records=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class PanelMethod(VotingMethod):
    """PRIVATE. Classifiers or networks that the user brings. They are fitted in this process and not stored.

    Attributes:
        panel: PRIVATE. Fitted teachers.
        teacher_repr: Class and parameters of the teachers, as text.
    """

    name: str = "panel"
    panel: Panel = field(repr=False)
    teacher_repr: str = ""

    @property
    def ensemble_size(self) -> int:
        return len(self.panel)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        return describe(self.ensemble_size, facts.unit, counts=self.mechanism.releases_counts, retrains_one=True)

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. Count the votes, after one teacher that was trained a second time has given the same votes."""
        with inputs.clock("votes"):
            votes = self.panel.count_votes(inputs.facts.pool.x, inputs.stages("Counting votes"))
        return self.from_votes(inputs, votes, are_from_records=False)


def describe(
    num_teachers: int, unit: str, *, counts: bool = False, soft: bool = False, retrains_one: bool = False
) -> MethodDescription:
    """Describe teachers for reports.

    With ``counts``, noisy vote counts are released beside the labels, and with ``soft``, scores of the classes. With
    ``retrains_one``, one of several teachers was trained a second time.
    """
    one_unit = "each record" if unit == "record" else format_one_unit(unit)
    retraining_sentence = (
        f" One of the {num_teachers} teachers, drawn at random, was trained a second time in a process that held only "
        "its own share, and the result was the same."
    )
    extra_output = ", with the noisy votes behind them," if counts else ", with a score of each class," if soft else ""
    action = "gave class probabilities for" if soft else "voted on"
    noise_target = "a measure of their agreement" if soft else "the votes"
    return MethodDescription(
        subject="teachers",
        procedure=f"Each of {num_teachers} teachers was trained on its own share of the records, and they {action} "
        f"{{asked}} public queries. The mechanism {{mechanism}} added noise to {noise_target}, and only its "
        f"{{answered}} answers{extra_output} were released. A student sees "
        "nothing but public points and these answers.",
        query_sentence=f"{{answered}} of {{asked}} answered, by {num_teachers} teachers",
        examples="Public points, each with the label that the noisy vote gave it. Some labels are wrong, because of "
        "the noise and of errors of the teachers.",
        assumptions=(
            f"{one_unit[0].upper()}{one_unit[1:]} reached exactly one of the {num_teachers} teachers, and no teacher "
            "learned anything from outside its own share."
            + (retraining_sentence if retrains_one and num_teachers > 1 else ""),
        ),
        public_time=True,
    )
