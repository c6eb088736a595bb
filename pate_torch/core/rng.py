"""Seeded random streams for splits, initialization, batches and augmentation.

The noise of mechanisms never comes from these streams (see ``privacy/noise.py``). Each use has a stream with its own
name, so that a draw in one place changes no draw elsewhere. The stream of teacher k depends on (seed, k) only, and not
on the backend, the chunk or the rank that trains the teacher.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_GENERATORS_LOCK = threading.RLock()


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed for the stream ``names`` by BLAKE2b, so that streams are independent in practice."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_member_seed(seed: int, k: int) -> int:
    """Derive the seed of the k-th of several students or encoders; the first has the same seed as a single one."""
    return seed if k == 0 else derive_seed(seed, "student", "member", k)


def make_torch_generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a torch generator for one named stream."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))


def make_numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """Make a NumPy generator (Philox) for one named stream."""
    return np.random.Generator(np.random.Philox(derive_seed(seed, *names)))


@contextmanager
def seeded_generators(seed: int, *names: str | int) -> Iterator[None]:
    """Seed the global generators of random, NumPy and torch, and restore their states at the end.

    Only one thread at a time has seeded generators.
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
