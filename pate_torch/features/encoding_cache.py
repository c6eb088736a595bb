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

from pate_torch.core import locks
from pate_torch.core.files import atomic_replacement, compute_tensor_digest, create_private_folder, read_tensors

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
        most: Bytes that the files may take; 0: nothing is kept.
        say: Told who else is encoding the same points.
    """

    root: Path
    most: int
    say: Callable[[str], object]

    @property
    def folder(self) -> Path:
        """PRIVATE. Where they lie."""
        return self.root / FOLDER

    def encoded(self, name: str, made_of: Mapping[str, Any], x_N: Tensor, encode: Callable[[], Tensor]) -> Tensor:
        """PRIVATE. The features of these points: those that are here, or else what ``encode`` makes.

        Args:
            name: Beginning of the file's name.
            made_of: What decides the features beside the points: plain data.
            x_N: The points.
            encode: Makes them.
        """
        if not self.most:
            return encode()
        plain = json.dumps([made_of, compute_tensor_digest(x_N)], sort_keys=True)
        key = hashlib.sha256(plain.encode()).hexdigest()[:32]
        file = create_private_folder(self.folder, README) / f"{name}-{key}.safetensors"

        def busy(who: str) -> None:
            self.say(f"Waiting for {who}, which encodes the same points.")

        with locks.hold(file.with_suffix(".lock"), "paths.root", on_wait=busy):
            found = self._found(file)
            if found is None:
                found = encode()
                self._keep(file, found)
        return found

    def _found(self, file: Path) -> Tensor | None:
        if not file.exists():
            return None
        try:
            x_ND = read_tensors(file)["features"]
        except (ValueError, KeyError):  # damaged: made anew
            file.unlink(missing_ok=True)
            return None
        os.utime(file)  # used now
        return x_ND

    def _keep(self, file: Path, x_ND: Tensor) -> None:
        size = x_ND.numel() * x_ND.element_size()
        if size > self.most:
            self.say(f"Encoded points are not kept: they take {size / 1e9:.2g} GB, more than features.cache_gb.")
            return
        held = sorted(self.folder.glob("*.safetensors"), key=lambda kept: kept.stat().st_mtime)
        total = size + sum(kept.stat().st_size for kept in held)
        for oldest in held:
            if total <= self.most:
                break
            total -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        with atomic_replacement(file) as temporary:
            save_file({"features": x_ND.contiguous()}, temporary)
