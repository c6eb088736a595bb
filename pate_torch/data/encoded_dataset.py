"""A data set of features that a frozen encoder computes from the points of another data set."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.data.base import DatasetSource, SourceFacts, compute_common_scale
from pate_torch.features.encoder import Encoder
from pate_torch.features.encoding import EncodingCache
from pate_torch.privacy.records import FROM_PUBLIC_POINTS, NORMALIZATION_CONSTANTS, Dataset, DataSpec, PublicPool

ENCODER_FOLDER = "encoder"
"""The folder of the encoder's files in a release."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedDataset(DatasetSource):
    """A data set whose points are replaced by their features, each a function of one point. Units and roles stay.

    Features are centered by the mean of the public points' features and divided by one common scale, which preserves
    angles.

    Attributes:
        source: Source of the data set.
        encoder: Encoder of its points.
        root: Folder of the cache of encoded points.
        device: Device of a torch module.
    """

    source: DatasetSource
    encoder: Encoder
    root: Path
    device: torch.device

    @property
    def name(self) -> str:
        """Declared name of the source."""
        return self.source.name

    def declared_facts(self) -> SourceFacts:
        return self.source.declared_facts()

    def load(self, stages: Stages | None = None) -> Dataset:
        """Load the data set and encode it. Raise ValueError if the encoder does not take its points."""
        return self.encode(self.source.load(), Stages(quiet=True) if stages is None else stages)

    def encode(self, data: Dataset, stages: Stages) -> Dataset:
        """Replace the points of ``data``, which the source loaded, by their features."""
        sides = {"public": data.pool.x, "private": data.private.x, "test": data.evaluation.x}
        feature_by_side = encode_sides(
            self.encoder, data.spec, sides, name=data.spec.name, root=self.root, device=self.device, stages=stages
        )
        x_PD, card = feature_by_side["public"], self.encoder.make_card(data.spec)
        mean, std = compute_common_scale(x_PD)
        spec = replace(data.spec, input_shape=(x_PD.shape[1],), mean=mean, std=std, encoder=card)
        return replace(
            data,
            spec=replace(spec, schema=None, resize=None, text=None),
            private=replace(data.private, x=feature_by_side["private"], origin=data.private.x),
            pool=PublicPool(x_PD, data.pool.split, data.pool.names),
            evaluation=replace(data.evaluation, x=feature_by_side["test"]),
            provenance={**data.provenance, NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS},
        )

    def publish(self, folder: Path) -> None:
        """Copy the encoder's files into a folder of the release, if the owner agreed to publish them."""
        for name, file in self.encoder.get_published_files().items():
            folder.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)


def encode_sides(
    encoder: Encoder,
    points: DataSpec,
    sides: Mapping[str, Tensor],
    *,
    name: str,
    root: Path,
    device: torch.device,
    stages: Stages,
) -> dict[str, Tensor]:
    """Encode public points, private records and test records. Every use of an encoder on private records goes here.

    Guarantee: the features of a private record are finite and a function of that record alone, as far as a check on a
    sample of public points shows. Features that are not finite become zeros.

    Args:
        encoder: The encoder.
        points: Description of the points.
        sides: Points by side: "public", "private" (PRIVATE) and optionally "test".
        name: Name of the data set or account in the cache.
        root: Folder of the cache of encoded points.
        device: Device of a torch module.
        stages: Receiver of the progress and of the warning about the encoder's training data.

    Raises:
        ValueError: The encoder does not take the points, mixes them, or returns non-finite features of public points.
    """
    card, x_P = encoder.make_card(points), sides["public"]
    if not card.disjoint:
        training_data = f"It was trained on {card.trained_on}"
        if card.trained_on is None:
            training_data = "Nobody declares what it was trained on (features.trained_on)"
        stages.print_message(
            f"Encoder {card.name}: {training_data}. No epsilon covers what an encoder learned from private records. If "
            "it was trained on none, set features.disjoint=true (in Python, Encoder(disjoint=True))."
        )
    side_names = {"public": "the public points", "private": "the private records", "test": "the test records"}
    check_independence = functools.cache(lambda: encoder.check_batch_independence(x_P, points, device))

    def encode(side: str) -> Tensor:
        check_independence()
        subject = f"{side_names[side]} of {name}"
        progress, start = stages(f"Encoding {subject}"), time.monotonic()
        feature_ND = encoder.encode(sides[side], points, device=device, progress=progress)
        ms_per_point = 1000 * (time.monotonic() - start) / max(1, len(sides[side]))
        stages.print_message(f"Encoded {subject} by {encoder.name}: {ms_per_point:.2g} ms each.")
        return feature_ND

    facts = {"encoder": card.identity, "points": points.to_dict(), "code": encoder.architecture, "device": device.type}
    cache = EncodingCache(root=root, max_bytes=int(encoder.cache_gb * 1e9), notify=stages.print_message)
    feature_by_side = {
        side: cache.get_or_encode(f"{name}-{side}", facts, x_N, functools.partial(encode, side))
        for side, x_N in sides.items()
    }
    if not bool(feature_by_side["public"].isfinite().all()):
        raise checks.error("features.name", card.name, "returns features of public points that are not finite")
    return {side: x_ND if side == "public" else replace_non_finite(x_ND) for side, x_ND in feature_by_side.items()}


def replace_non_finite(x_ND: Tensor) -> Tensor:
    """Replace features that are not finite by zeros."""
    return x_ND.nan_to_num(0, 0, 0)
