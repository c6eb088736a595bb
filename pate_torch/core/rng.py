"""Seeded random streams: splits, initialization, batches and augmentation. Never noise (see ``privacy/noise.py``).

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


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called ``names``: BLAKE2b, so that streams are independent in practice."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


_GENERATORS_LOCK = threading.RLock()


@contextmanager
def seeded_generators(seed: int, *names: str | int) -> Iterator[None]:
    """Seed the generators that everything in this process draws from (random, NumPy's, torch's), and restore them.

    One thread at a time: two of them would seed each other's generators.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _GENERATORS_LOCK, torch.random.fork_rng(devices=gpus):
        previous_states, derived_seed = (random.getstate(), np.random.get_state()), derive_seed(seed, *names)
        random.seed(derived_seed)
        np.random.seed(derived_seed % 2**32)
        torch.manual_seed(derived_seed)
        try:
            yield
        finally:
            random.setstate(previous_states[0])
            np.random.set_state(previous_states[1])


def derive_member_seed(seed: int, k: int) -> int:
    """Seed of the k-th of several students or encoders of one kind; the first has the seed it would have alone."""
    return seed if k == 0 else derive_seed(seed, "student", "member", k)


def make_torch_generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one named stream."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))


def make_numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator (Philox) for one named stream."""
    return np.random.Generator(np.random.Philox(derive_seed(seed, *names)))
