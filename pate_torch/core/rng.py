"""Seeded random streams: splits, initialization, batches and augmentation. Never noise (see ``noise/source.py``).

Every consumer names its own stream, so that drawing more in one place changes nothing anywhere else, and
teacher k's stream depends on (seed, k) alone, whatever the backend, the chunk or the rank it is trained in.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called ``names``: BLAKE2b, so that streams are independent in practice."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


_SHARED = threading.RLock()


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Seed the generators that everything in this process draws from (random, NumPy's, torch's), and restore them.

    One thread at a time: two of them would seed each other's generators.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _SHARED, torch.random.fork_rng(devices=gpus):
        before, value = (random.getstate(), np.random.get_state()), derive(seed, *names)
        random.seed(value)
        np.random.seed(value % 2**32)
        torch.manual_seed(value)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def member(seed: int, k: int) -> int:
    """Seed of the k-th of several students or encoders of one kind; the first has the seed it would have alone."""
    return seed if k == 0 else derive(seed, "student", "member", k)


def torch_stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one named stream."""
    return torch.Generator(device=device).manual_seed(derive(seed, *names))


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator (Philox) for one named stream."""
    return np.random.Generator(np.random.Philox(derive(seed, *names)))
