"""PRIVATE. Encoded points on disk, found again by what they were made of, so that a second run takes seconds.

``<root>/features/<data set>-<side>-<key>.safetensors``: the key is a hash of the encoder, its options and the points.
Of private points that is as private as they are, and so is the folder, which its owner alone can enter. What was not
used for longest goes first where the limit is passed. A record that is to be forgotten is forgotten with the files
of its data set, which are made anew of the data that are there: ``rm <root>/features/<data set>-*``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from pate_torch.core.files import (
    atomic_replacement,
    compute_tensor_digest,
    create_private_folder,
    read_tensors,
)
from pate_torch.core.run_folders import hold_lock

README = """PRIVATE: do not publish, do not share.

Points as a frozen encoder sees them, private ones too: whoever has them can learn about single records. Made anew
when they are missing, so that all of it may be deleted at any time.
"""
FOLDER = "features"


@dataclass(frozen=True, kw_only=True)
class EncodingCache:
    """PRIVATE. Encoded points of one root.

    Attributes:
        root: Where teachers and ledger lie.
        max_bytes: Bytes that the files may take; 0: nothing is kept.
        notify: Told who else is encoding the same points.
    """

    root: Path
    max_bytes: int
    notify: Callable[[str], object]

    @property
    def folder(self) -> Path:
        """PRIVATE. Where they lie."""
        return self.root / FOLDER

    def get_or_encode(
        self, name: str, key_facts: Mapping[str, Any], x_N: Tensor, encode: Callable[[], Tensor]
    ) -> Tensor:
        """PRIVATE. The features of these points: those that are here, or else what ``encode`` makes.

        ``name`` begins the file's name; ``key_facts`` is plain data that decides the features beside the points.
        """
        if not self.max_bytes:
            return encode()
        key_text = json.dumps([key_facts, compute_tensor_digest(x_N)], sort_keys=True)
        key = hashlib.sha256(key_text.encode()).hexdigest()[:32]
        file = create_private_folder(self.folder, README) / f"{name}-{key}.safetensors"

        def report_busy(holder: str) -> None:
            self.notify(f"Waiting for {holder}, which encodes the same points.")

        with hold_lock(file.with_suffix(".lock"), "paths.root", on_wait=report_busy):
            feature_ND = self._load(file)
            if feature_ND is None:
                feature_ND = encode()
                self._save(file, feature_ND)
        return feature_ND

    def _load(self, file: Path) -> Tensor | None:
        if not file.exists():
            return None
        try:
            x_ND = read_tensors(file)["features"]
        except (ValueError, KeyError):  # damaged: made anew
            file.unlink(missing_ok=True)
            return None
        os.utime(file)  # used now
        return x_ND

    def _save(self, file: Path, x_ND: Tensor) -> None:
        size = x_ND.numel() * x_ND.element_size()
        if size > self.max_bytes:
            self.notify(f"Encoded points are not kept: they take {size / 1e9:.2g} GB, more than features.cache_gb.")
            return
        cached_files = sorted(self.folder.glob("*.safetensors"), key=lambda cached_file: cached_file.stat().st_mtime)
        total = size + sum(cached_file.stat().st_size for cached_file in cached_files)
        while total > self.max_bytes:
            oldest = cached_files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        with atomic_replacement(file) as temporary:
            save_file({"features": x_ND.contiguous()}, temporary)
