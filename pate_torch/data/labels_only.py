"""Data whose features are public and only whose labels are private: any source under a weaker promise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from pate_torch.core import checks
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.privacy.records import LABEL_UNIT, Dataset, Evaluation, PublicPool


@dataclass(frozen=True, kw_only=True)
class LabelPrivacyDataset(DatasetSource):
    """The same records; the features of the private ones join the public points, without their labels.

    Representations, questions and students may then use all features, and a teacher all but its peers' labels.
    Neighbors differ in the label of one record (replace_one; how many records there are, and their features, are
    public). Under the promise of whole records every such release is one that publishes the records themselves: real
    data therefore keep their name, and an account opened for records refuses labels. Public benchmarks get an account
    of their own, "<name>_labels". A source that cannot bear a replaced record cannot bear a replaced label: it may be
    part of what decides who is private.

    Source: BTT18 section 4.2 (label-private learning); LZCW21 and PATE-FM measure in this setting.
    """

    source: DatasetSource

    @property
    def name(self) -> str:
        """Declared name of the source; what is loaded from a public benchmark has "_labels" added."""
        return self.source.name

    def declared_facts(self) -> SourceFacts:
        return dataclasses.replace(self.source.declared_facts(), num_public=None)  # private features join these points

    def load(self) -> Dataset:
        """Load the source, and move the private features into the pool.

        Raises:
            ValueError: Grouped units: a group owns several labels.
        """
        data = self.source.load()
        private, evaluation = data.private, data.evaluation
        if private.unit != "record":
            raise checks.error("labels_only", True, f"protects single labels, but the privacy unit is {private.unit}")
        # Truth about the private features is the private labels: measured on public benchmarks only.
        has_pool_labels = evaluation.pool_y is not None and data.spec.benchmark
        pool_y = (
            torch.cat([evaluation.pool_y, private.y]) if has_pool_labels and evaluation.pool_y is not None else None
        )
        name = f"{data.spec.name}_labels" if data.spec.benchmark else data.spec.name
        allows_replacement = "replace_one" in data.adjacencies
        return dataclasses.replace(
            data,
            spec=dataclasses.replace(data.spec, name=name),
            private=dataclasses.replace(private, unit=LABEL_UNIT),
            pool=PublicPool(torch.cat([data.pool.x, private.x]), data.pool.split),
            evaluation=Evaluation(evaluation.x, evaluation.y, pool_y, evaluation.public),
            adjacencies=("replace_one",) if allows_replacement else (),
            advice="Use partition=replace_one: a label is replaced, not removed."
            if allows_replacement
            else data.advice,
        )
