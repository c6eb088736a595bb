"""A data set of features that a frozen encoder computes from the points of another data set."""

from __future__ import annotations

import functools
import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.progress import Stages
from pate_torch.data.base import DatasetSource, SourceFacts, make_encoded_spec
from pate_torch.data.streams import PointStream
from pate_torch.features.encoder import TOKENIZER_FILE, Encoder
from pate_torch.features.encoding import load_or_encode
from pate_torch.privacy import records
from pate_torch.privacy.records import Dataset, DataSpec, PublicPool

ENCODER_FOLDER = "encoder"
"""Name of the folder of encoder files in a release."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedDataset(DatasetSource):
    """A data set whose points are replaced by encoded features. The units and the roles of the records stay the same.

    The features of a point depend on this point alone. The normalization constants are the mean of the features of the
    public points and one common scale, because a common scale preserves angles. ``root`` is the folder of the cache.
    Encoders that are no torch modules use the CPU, and not ``device``.
    """

    source: DatasetSource
    encoder: Encoder
    root: Path
    device: torch.device

    @property
    def name(self) -> str:
        return self.source.name

    def declared_facts(self) -> SourceFacts:
        return self.source.declared_facts()

    def load(self, stages: Stages | None = None) -> Dataset:
        """Load and encode the data set. Raise ValueError if the encoder cannot encode its points."""
        return self.encode(self.source.load(), Stages(quiet=True) if stages is None else stages)

    def encode(self, data: Dataset, stages: Stages) -> Dataset:
        """Replace the points of ``data``, the data set of ``source``, by encoded features."""
        x_by_role = {"public": data.pool.x, "private": data.private.x, "test": data.evaluation.x}
        feature_by_role = encode_by_role(
            self.encoder, data.spec, x_by_role, name=data.spec.name, root=self.root, device=self.device, stages=stages
        )
        x_PD, card = feature_by_role["public"], self.encoder.make_card(data.spec)
        return replace(
            data,
            spec=make_encoded_spec(data.spec, card, x_PD),
            private=replace(data.private, x=feature_by_role["private"], origin=data.private.x),
            pool=PublicPool(x_PD, data.pool.split, data.pool.names),
            evaluation=replace(data.evaluation, x=feature_by_role["test"]),
            provenance={**data.provenance, records.NORMALIZATION_CONSTANTS: records.FROM_PUBLIC_POINTS},
        )

    def publish(self, folder: Path) -> None:
        """Copy the files of the encoder into ``folder``, if the owner agreed to publish them (``Encoder.publish``)."""
        for key, file in self.encoder.files.items() if self.encoder.publish else ():
            folder.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / (TOKENIZER_FILE if key == "tokenizer" else file.name))


def encode_by_role(
    encoder: Encoder,
    points: DataSpec,
    x_by_role: Mapping[str, Tensor | PointStream],
    *,
    name: str,
    root: Path,
    device: torch.device,
    stages: Stages,
) -> dict[str, Tensor]:
    """Encode public points, private records and test records. Private records are encoded by this function only.

    Guarantee: the features of a private record are finite and a function of that record alone. The second property is
    tested on a sample of public points. Features of private and test records that are not finite become zeros.

    The points are given by role: "public", "private" (PRIVATE) and optionally "test". They may be streams. ``name`` is
    that of the data set or account in the cache.
    """
    card = encoder.make_card(points)
    if not card.disjoint:
        data = "are not declared (features.trained_on)" if card.trained_on is None else f"are {card.trained_on}"
        stages.print_message(
            f"Encoder {card.name}: its training data {data}. No epsilon covers private records in these data. "
            "If there are none, set features.disjoint=true (in Python, Encoder(disjoint=True))."
        )
    subjects = {"public": "the public points", "private": "the private records", "test": "the test records"}

    @functools.cache  # once, and only if points are encoded
    def check_independence() -> None:
        public = x_by_role["public"]
        x_P = next(public.iterate_blocks()) if isinstance(public, PointStream) else public
        encoder.check_batch_independence(x_P, points, device)

    def encode(role: str) -> Tensor:
        check_independence()
        x, subject = x_by_role[role], f"{subjects[role]} of {name}"
        progress, start = stages(f"Encoding {subject}"), time.monotonic()
        blocks = x.iterate_blocks(progress) if isinstance(x, PointStream) else x
        feature_ND = encoder.encode(blocks, points, device=device, progress=progress, is_private=role != "public")
        ms_per_point = 1000 * (time.monotonic() - start) / max(1, len(x))
        stages.print_message(f"Encoded {subject} by {encoder.name}: {ms_per_point:.2g} ms per point.")
        return feature_ND

    code = f"torch {torch.__version__}" + ("" if encoder.module is None else f" {encoder.module!r}")
    facts = {"encoder": card.identity, "points": points.to_dict(), "code": code, "device": device.type}
    limits: Mapping[str, Any] = {"max_bytes": int(encoder.cache_gb * 1e9), "notify": stages.print_message}
    feature_by_role = {}
    for role, x in x_by_role.items():
        functions = functools.partial(_compute_digest, x), functools.partial(encode, role)
        feature_by_role[role] = load_or_encode(root, f"{name}-{role}", facts, *functions, **limits)
    if not bool(feature_by_role["public"].isfinite().all()):
        raise checks.error("features.name", card.name, "returns features of public points that are not finite")
    return {role: x_ND.nan_to_num(0, 0, 0) for role, x_ND in feature_by_role.items()}


def _compute_digest(x: Tensor | PointStream) -> str:
    if isinstance(x, Tensor):
        return compute_tensor_digest(x)
    digests = "".join(map(compute_tensor_digest, x.iterate_blocks()))
    return hashlib.sha256(digests.encode()).hexdigest()
