"""A method with a first stage: noisy counts of the classes, by which it decides how many questions are worth asking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.base import FirstAnswers, MethodInputs
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.partition import select_one_per_unit
from pate_torch.privacy.records import MechanismContext, PrivateRecords
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram


@dataclass(frozen=True, kw_only=True)
class CountedReverseKnn(ReverseKnn):
    """Reverse k-NN labeling that asks at most one question for each unit that there seems to be.

    Attributes:
        num_classes: Number of classes, which is public.
        first_sigma: Standard deviation of the noise of each class count, in units.
    """

    has_first_stage: ClassVar[bool] = True
    name: str = "counted_reverse_knn"
    num_classes: int = 3
    first_sigma: float = 5.0

    @property
    def first_mechanism(self) -> Histogram:
        return replace(self.mechanism, sigma=self.first_sigma)

    def label_events(self) -> tuple[PrivacyEvent, ...]:
        """Of the table of class counts, in which a unit moves one number, and of all questions."""
        return (*self.first_mechanism.privacy_events(1), *super().label_events())

    def first_answers(self, records: PrivateRecords, spending: Spending) -> FirstAnswers:
        """PRIVATE. One count of every unit, for its class."""
        adjacency = self.mechanism.adjacency
        label_U = self.select_labels(records, adjacency)
        table = CellHistogram(
            torch.bincount(label_U, minlength=self.num_classes)[None],
            COUNT_SENSITIVITY[adjacency],
            torch.zeros(1, dtype=torch.int64),
        )
        spending.check_adjacency(table.sensitivity)
        context = MechanismContext(num_queries=1)
        answers = spending.accept(self.first_mechanism.release(table, spending.noise, context))
        spending.record_cost(answers.events)
        assert answers.noisy_counts is not None
        return FirstAnswers(answers.noisy_counts.counts_QC[0].double(), self.first_sigma)

    @staticmethod
    def select_labels(records: PrivateRecords, adjacency: str) -> torch.Tensor:
        """PRIVATE. The class of one record of every unit."""
        return select_one_per_unit(records, adjacency).y

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. As many questions as there seem to be units."""
        first_answers = inputs.first_answers
        assert first_answers is not None
        prepared = super().prepare(inputs)
        prepared.num_queries = max(1, min(self.num_queries, round(float(first_answers.counts_C.sum()))))
        return prepared
