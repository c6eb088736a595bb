"""Data sets with public features and private labels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pate_torch.core import checks
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.privacy.records import LABEL_UNIT, Dataset, PublicPool


@dataclass(frozen=True, kw_only=True)
class LabelPrivacyDataset(DatasetSource):
    """A data set whose features are public and whose labels are private: all features become public points.

    Encoders, query strategies and students may use all features. Adjacent data sets differ in the label of one record
    (replace_one). The number of records and their features are public. A release of features breaks the guarantee of an
    account for whole records. Therefore data of an owner keep their name, and an account that was opened for whole
    records refuses labels. Public benchmarks get a separate account, "<name>_labels". A source that does not support
    replaced records does not support replaced labels, because a label may decide which records are private.

    Source: BTT18 section 4.2 (label-private learning). LZCW21 uses this setting, too.
    """

    source: DatasetSource

    @property
    def name(self) -> str:
        return self.source.name

    def declared_facts(self) -> SourceFacts:
        return replace(self.source.declared_facts(), num_public=None)  # private features join the public points

    def load(self) -> Dataset:
        data = self.source.load()
        private, evaluation = data.private, data.evaluation
        if private.unit != "record":  # a group owns several labels
            raise checks.error("labels_only", True, f"protects single labels, but the privacy unit is {private.unit}")
        pool_y = None
        # The true labels of private records are private: only public benchmarks may compare answers with them.
        if evaluation.pool_y is not None and data.spec.benchmark:
            pool_y = torch.cat([evaluation.pool_y, private.y])
        name = f"{data.spec.name}_labels" if data.spec.benchmark else data.spec.name
        adjacencies = ("replace_one",) if "replace_one" in data.adjacencies else ()
        advice = "Use partition=replace_one: adjacent data sets differ in one label." if adjacencies else data.advice
        return replace(
            data,
            spec=replace(data.spec, name=name),
            private=replace(private, unit=LABEL_UNIT),
            pool=PublicPool(torch.cat([data.pool.x, private.x]), data.pool.split),
            evaluation=replace(evaluation, pool_y=pool_y),
            adjacencies=adjacencies,
            advice=advice,
        )
