"""A data set as a frozen encoder sees it: private records, public points and test records alike."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.features.encoding_cache import EncodingCache
from pate_torch.protocols import DatasetSource, PointEncoder
from pate_torch.types import Dataset, EncoderCard, PublicPool

ENCODER = "encoder"
"""The folder of the encoder's files in a release."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
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

    def __getattr__(self, name: str) -> Any:
        """What else the data set declares: its size, its classes, whether it is a public benchmark."""
        if name.startswith("_") or name == "source":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.source, name)

    def load(self, stages: Stages | None = None) -> Dataset:
        """Load the data set and encode it, or find its points encoded.

        Args:
            stages: Shows progress; None: shows none.

        Raises:
            ValueError: The encoder cannot take its points.
        """
        return self.encoded(self.source.load(), Stages(quiet=True) if stages is None else stages)

    def encoded(self, data: Dataset, stages: Stages) -> Dataset:
        """What the encoder makes of ``data``, which the source loaded."""
        card = self.encoder.card(data.spec)
        if not card.disjoint:
            stages.say(overlap(card))
        x_PD = self._features(data, "public", data.pool.x, stages)
        if not bool(x_PD.isfinite().all()):
            raise checks.fail("features.name", card.name, "gives numbers that are not finite, of public points")
        mean_D, std = x_PD.double().mean(0), x_PD.double().std(0, correction=0).square().mean().sqrt()
        spec = replace(
            data.spec,
            input_shape=(x_PD.shape[1],),
            mean=tuple(mean_D.tolist()),
            std=(float(std) or 1.0,) * x_PD.shape[1],
            schema=None,
            resize=None,
            text=None,
            encoder=card,
        )
        private, test = data.private, data.evaluation
        # A record that the encoder makes nothing finite of says nothing, and stops nobody's run.
        x_ND = self._features(data, "private", private.x, stages).nan_to_num(0, 0, 0)
        return replace(
            data,
            spec=spec,
            private=replace(private, x=x_ND, origin=private.x),
            pool=PublicPool(x_PD, data.pool.split, data.pool.names),
            evaluation=replace(test, x=self._features(data, "test", test.x, stages).nan_to_num(0, 0, 0)),
        )

    def publish(self, folder: Path) -> None:
        """Put the encoder's files beside the student, where the owner wants that."""
        for name, file in self.encoder.published().items():
            folder.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)

    def _features(self, data: Dataset, side: str, x_N: Tensor, stages: Stages) -> Tensor:
        encoder, points = self.encoder, data.spec

        def encode() -> Tensor:
            if side == "public":
                encoder.refuse_company(x_N, points, self.device)
            sides = {"public": "the public points", "private": "the private records", "test": "the test records"}
            which = f"{sides[side]} of {points.name}"
            progress, began = stages(f"Encoding {which}"), time.monotonic()
            found = encoder.encode(x_N, points, device=self.device, progress=progress)
            each = 1000 * (time.monotonic() - began) / max(1, len(x_N))
            stages.say(f"Encoded {which} by {encoder.name}: {each:.2g} ms each.")
            return found

        card = encoder.card(points)
        made_of = {"encoder": card.identity, "points": points.to_dict(), "code": encoder.architecture}
        made_of["device"] = self.device.type
        cache = EncodingCache(root=self.root, most=int(encoder.cache_gb * 1e9), say=stages.say)
        return cache.encoded(f"{points.name}-{side}", made_of, x_N, encode)


def overlap(card: EncoderCard) -> str:
    """What is said of an encoder that may know private records already."""
    if card.trained_on is None:
        told = "Nobody declares what it was trained on (features.trained_on)"
    else:
        told = f"It was trained on {card.trained_on}"
    return (
        f"Encoder {card.name}: {told}. What it learnt of a private record there, no epsilon covers; if you know that "
        "none was among it, say features.disjoint=true."
    )
