"""Seeded random streams: splits, initialization, batches and augmentation. Never noise (see ``noise/source.py``).

Every consumer names its own stream, so that drawing more in one place changes nothing anywhere else, and
teacher k's stream depends on (seed, k) alone, whatever the backend, the chunk or the rank it is trained in.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called ``names``: BLAKE2b, so that streams are independent in practice."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def member(seed: int, k: int) -> int:
    """Seed of the k-th of several students or encoders of one kind; the first has the seed it would have alone."""
    return seed if k == 0 else derive(seed, "student", "member", k)


def torch_stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one named stream."""
    return torch.Generator(device=device).manual_seed(derive(seed, *names))


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator (Philox) for one named stream."""
    return np.random.Generator(np.random.Philox(derive(seed, *names)))
