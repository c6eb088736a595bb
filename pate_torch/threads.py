"""How many threads torch's operations get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """Operations of this thread run alone, where ``when``.

    Small operations gain little from being shared out, and wait for each other a hundred times longer than they work
    once the machine has something else to do.
    """
    before = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
