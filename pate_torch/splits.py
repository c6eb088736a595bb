"""PRIVATE. The data of a run, and the records that it holds out."""

from __future__ import annotations

from dataclasses import dataclass

from pate_torch.config import RunConfig
from pate_torch.core.progress import Stages
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.privacy.units import drop_unusable


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataSplits:
    """PRIVATE. The data, split as the configuration says.

    Attributes:
        data: Without the private records that are held out.
        all_private: All private records, whose account is charged.
        validation: Those held out for choosing a student; None: none are.
        membership_holdout: Those held out for the owner's membership test; None: none are.
    """

    data: Dataset
    all_private: PrivateRecords
    validation: PrivateRecords | None = None
    membership_holdout: PrivateRecords | None = None

    @classmethod
    def from_config(cls, config: RunConfig, stages: Stages) -> DataSplits:
        """Load the data set and split it."""
        source, validation, membership_holdout = config.dataset, None, None
        data = source.load(stages) if isinstance(source, EncodedDataset) else source.load()
        data = drop_unusable(data, config.partition.adjacency)
        all_private = data.private
        if config.selection is not None:
            data, validation = config.selection.hold_out(data, config.partition.adjacency, config.seed)
        if config.membership is not None and not config.method.releases_model:
            data, membership_holdout = config.membership.hold_out(data, config.partition.adjacency, config.seed)
        return cls(data=data, all_private=all_private, validation=validation, membership_holdout=membership_holdout)
