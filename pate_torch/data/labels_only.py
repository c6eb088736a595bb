"""Data whose features are public and whose labels are private."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pate_torch.core import checks
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.privacy.records import LABEL_UNIT, Dataset, PublicPool


@dataclass(frozen=True, kw_only=True)
class LabelPrivacyDataset(DatasetSource):
    """The records of another source, whose private features join the public points, without their labels.

    Encoders, query strategies and students may use all features. Neighbors differ in the label of one record
    (replace_one); the number of records and their features are public. Such a release breaks the guarantee of an
    account for whole records, so data of an owner keep their name, and an account that was opened for records refuses
    labels. Public benchmarks get a separate account, "<name>_labels". If a source does not support replaced records, it
    does not support replaced labels, because a label may take part in the decision which records are private.

    Attributes:
        source: Source of the records.

    Source: BTT18 section 4.2 (label-private learning). LZCW21 and PATE-FM use this setting.
    """

    source: DatasetSource

    @property
    def name(self) -> str:
        """Declared name of the source."""
        return self.source.name

    def declared_facts(self) -> SourceFacts:
        return replace(self.source.declared_facts(), num_public=None)  # private features join the public points

    def load(self) -> Dataset:
        data = self.source.load()
        private, evaluation = data.private, data.evaluation
        if private.unit != "record":  # a group owns several labels
            raise checks.error("labels_only", True, f"protects single labels, but the privacy unit is {private.unit}")
        pool_y = None
        # The true labels of the private features are private, so they serve as metrics for public benchmarks only.
        if evaluation.pool_y is not None and data.spec.benchmark:
            pool_y = torch.cat([evaluation.pool_y, private.y])
        name = f"{data.spec.name}_labels" if data.spec.benchmark else data.spec.name
        adjacencies = ("replace_one",) if "replace_one" in data.adjacencies else ()
        advice = "Use partition=replace_one: a label is replaced, not removed." if adjacencies else data.advice
        return replace(
            data,
            spec=replace(data.spec, name=name),
            private=replace(private, unit=LABEL_UNIT),
            pool=PublicPool(torch.cat([data.pool.x, private.x]), data.pool.split),
            evaluation=replace(evaluation, pool_y=pool_y),
            adjacencies=adjacencies,
            advice=advice,
        )
