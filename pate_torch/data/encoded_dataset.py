"""A data set as a frozen encoder sees it: private records, public points and test records alike."""

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
from pate_torch.features.base import PointEncoder
from pate_torch.features.encoding import EncodingCache
from pate_torch.privacy.records import (
    FROM_PUBLIC_POINTS,
    NORMALIZATION_CONSTANTS,
    Dataset,
    DataSpec,
    EncoderCard,
    PublicPool,
)

ENCODER_FOLDER = "encoder"
"""The folder of the encoder's files in a release."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedDataset(DatasetSource):
    """A data set whose points are features of another's, each of its own point alone: units and roles are the other's.

    Features are centered by the mean of the public points' and divided by their common deviation, so that angles
    between them stay about what the encoder made them.

    Attributes:
        source: The data set.
        encoder: What encodes its points.
        root: Where encoded points are kept.
        device: Where a torch module runs.
    """

    source: DatasetSource
    encoder: PointEncoder
    root: Path
    device: torch.device

    @property
    def name(self) -> str:
        return self.source.name

    def declared_facts(self) -> SourceFacts:
        return self.source.declared_facts()

    def load(self, stages: Stages | None = None) -> Dataset:
        """Load the data set and encode it, or find its points encoded.

        Args:
            stages: Shows progress; None: shows none.

        Raises:
            ValueError: The encoder cannot take its points.
        """
        return self.encode(self.source.load(), Stages(quiet=True) if stages is None else stages)

    def encode(self, data: Dataset, stages: Stages) -> Dataset:
        """What the encoder makes of ``data``, which the source loaded."""
        card = self.encoder.make_card(data.spec)
        sides = {"public": data.pool.x, "private": data.private.x, "test": data.evaluation.x}
        feature_by_side = encode_sides(
            self.encoder, data.spec, sides, name=data.spec.name, root=self.root, device=self.device, stages=stages
        )
        x_PD = feature_by_side["public"]
        mean, std = compute_common_scale(x_PD)
        spec = replace(
            data.spec,
            input_shape=(x_PD.shape[1],),
            mean=mean,
            std=std,
            schema=None,
            resize=None,
            text=None,
            encoder=card,
        )
        private, test = data.private, data.evaluation
        return replace(
            data,
            spec=spec,
            private=replace(private, x=feature_by_side["private"], origin=private.x),
            pool=PublicPool(x_PD, data.pool.split, data.pool.names),
            evaluation=replace(test, x=feature_by_side["test"]),
            provenance={**data.provenance, NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS},
        )

    def publish(self, folder: Path) -> None:
        """Put the encoder's files beside the student, where the owner wants that."""
        for name, file in self.encoder.get_published_files().items():
            folder.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)


def encode_sides(
    encoder: PointEncoder,
    points: DataSpec,
    sides: Mapping[str, Tensor],
    *,
    name: str,
    root: Path,
    device: torch.device,
    stages: Stages,
) -> dict[str, Tensor]:
    """Features of public points and of private records: the one gate to an encoder, whoever asks.

    Guarantee: the features of a private record are a function of that record alone, as far as it shows on a sample of
    public points, and are finite: a record that the encoder makes nothing finite of counts as zeros.

    Args:
        encoder: The encoder.
        points: What the points are.
        sides: Points by side: "public", "private" (PRIVATE) and perhaps "test".
        name: Name of the data set or account, in the cache.
        root: Where encoded points are kept.
        device: Where a torch module runs.
        stages: Shows progress, and the warning about what the encoder was trained on.

    Raises:
        ValueError: The encoder cannot take the points, lets them see each other, or gives numbers of public points that
            are not finite.
    """
    card, x_P = encoder.make_card(points), sides["public"]
    if not card.disjoint:
        stages.print_message(format_overlap_warning(card))
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

    key_facts = {
        "encoder": card.identity,
        "points": points.to_dict(),
        "code": encoder.architecture,
        "device": device.type,
    }
    cache = EncodingCache(root=root, max_bytes=int(encoder.cache_gb * 1e9), notify=stages.print_message)
    feature_by_side = {
        side: cache.get_or_encode(f"{name}-{side}", key_facts, x_N, functools.partial(encode, side))
        for side, x_N in sides.items()
    }
    if not bool(feature_by_side["public"].isfinite().all()):
        raise checks.error("features.name", card.name, "gives numbers that are not finite, of public points")
    return {side: x_ND if side == "public" else replace_non_finite(x_ND) for side, x_ND in feature_by_side.items()}


def replace_non_finite(x_ND: Tensor) -> Tensor:
    """Features with zeros in place of numbers that are not finite."""
    return x_ND.nan_to_num(0, 0, 0)


def format_overlap_warning(card: EncoderCard) -> str:
    """What is said of an encoder that may know private records already."""
    if card.trained_on is None:
        origin = "Nobody declares what it was trained on (features.trained_on)"
    else:
        origin = f"It was trained on {card.trained_on}"
    return (
        f"Encoder {card.name}: {origin}. What it learned of a private record there, no epsilon covers; if you know that"
        " none was among it, say features.disjoint=true (in Python, Encoder(disjoint=True))."
    )
