"""Slopes: every record says which way a public model should move. No teacher is trained.

The model is linear in features of the public points, z -> z W, and starts at W = 0. A record (z, y) answers with the
slope of its log-likelihood, z (e_y - softmax(z W))^T: next to nothing where the model is right and sure. A census
(``reverse_knn.py``) tells which classes lie in a cell, so that two classes within one cell are told apart by nothing;
slopes part them by a line, with all records on both its sides. The noisy sum of slopes moves W, a few times, and the
model's answers on the public points are what a student learns from; in features of that student the classes stand
further apart, and a second round starts anew there.

The features are turned and scaled so that the public points spread alike in every direction (their covariance is
public, so a step as good as Newton's costs nothing more), and a 1 follows them, for classes are not equally common; z,
with it, and the change e_y - softmax(z W) are cut to length 1.

Guarantee: a slope is a function of one unit's record and of public values (``map_records_independently``), written in
whole numbers: so sums are exact, no record has a say in the rounding of another's, and the length of a slope is at most
``WHOLE``. So one unit more or less moves the sum by at most ``types.one_vector`` x ``WHOLE``.
Source: the noisy gradient descent of Bassily, Smith & Thakurta 2014, in full batches, preconditioned by public points.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from pate_torch.core import checks
from pate_torch.data.units import one_per_unit
from pate_torch.features.whitening import Whitening
from pate_torch.protocols import Progress, silent
from pate_torch.types import Dataset, Shards, of_each_record, one_vector
from pate_torch.voters.base import RecordVoters
from pate_torch.voters.gradient_sums import Leanings, whole
from pate_torch.voters.records import encode_public, map_records_independently

if TYPE_CHECKING:
    from pate_torch.config import RunConfig

_MOST = 1 << 22
"""Records: the sums of fewer are exact (``gradient_sums.WHOLE``)."""


@dataclass(frozen=True, kw_only=True)
class Slopes(RecordVoters):
    """ridge: added to the variance of every direction of the public points, of the mean variance: directions in which
    the public points hardly spread would carry noise alone. size: about how many records there are, which must be
    public knowledge: it sets how far a slope moves the model; None: what the data set declares (``nominal_size``).
    neighbours: of a record only so many public points around it count, in whose midst it is taken to lie
    (``networks.Among``); 0: it lies where it lies. That helps where the noise is large.
    """

    mechanism: ClassVar[str] = "descent"
    name: str = "slopes"
    ridge: float = 0.1
    size: int | None = None
    neighbours: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("voting.ridge", self.ridge)
        checks.integer("voting.neighbours", self.neighbours, low=0)
        if self.size is not None:
            checks.integer("voting.size", self.size, low=1, high=_MOST - 1)

    @property
    def releases_model(self) -> bool:
        return True

    def validate_for(self, data: Dataset, config: RunConfig) -> None:
        """Raise ValueError as ``RecordVoters`` does, and as ``check_size``."""
        super().validate_for(data, config)
        self.check_size(data)

    def facts(self, data: Dataset, config: RunConfig) -> dict[str, Any]:
        return {"voting": asdict(self)}

    def check_size(self, data: Dataset) -> None:
        """Raise ValueError where nobody declares how many records there are, or there are too many for exact sums."""
        if self.declared(data) is None:
            fix = "Declare about how many records there are, where that is public knowledge."
            raise checks.fail("voting.size", None, "must be given: the data set declares no nominal_size", fix)
        if len(data.private) >= _MOST:  # not how many: that is private
            raise checks.fail("voting", self.name, f"takes fewer than {_MOST} records", "Use voting=census.")

    def declared(self, data: Dataset) -> int | None:
        """About how many records there are, as publicly declared."""
        return data.spec.nominal_size if self.size is None else self.size

    def ask(
        self,
        data: Dataset,
        shards: Shards,
        *,
        encoder: nn.Module | None,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
    ) -> Leanings:
        """PRIVATE. The first record of every unit of all shards, ready to be asked, under the shards' adjacency.

        encoder: see ``RecordVoters.ask``. Raises ValueError as ``check_size`` does.
        """
        self.check_size(data)
        private, encoder, place_PD = encode_public(data, shards, encoder, device, self.neighbours)
        private, whitening = one_per_unit(private, shards.adjacency), Whitening.of(place_PD, self.ridge)
        z_ND = map_records_independently(
            lambda place_BD: whole(whitening.bounded(place_BD)).int(), encoder, private, data.spec, progress
        )
        size = self.declared(data)
        assert size is not None
        classes, width = data.spec.num_classes, z_ND.shape[1]
        sensitivity = of_each_record(shards, one_vector(shards.adjacency, width * classes))
        return Leanings(
            z_ND=z_ND,
            y_N=private.y,
            place_PD=whitening(place_PD),
            num_classes=classes,
            sensitivity=sensitivity,
            scale=whitening.radius / size,
            whitening=whitening,
            neighbours=self.neighbours,
        )
