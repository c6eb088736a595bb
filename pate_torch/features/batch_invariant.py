"""Points encoded independently: no point influences the rounding of another's features, so sensitivity stays."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pate_torch.core.parallel import run_in_parallel, single_thread_mode
from pate_torch.protocols import Progress

SLOTS = 8
"""Points in a batch: of small networks one takes a third of the time that it takes alone, and more bring no more."""
_BLOCK = 64
"""Batches whose answers are brought back together."""


def map_independently(
    say: Callable[[Iterator[Tensor]], Tensor], x_N: Tensor, progress: Progress, slots: int = SLOTS
) -> Tensor:
    """What ``say`` makes of each point, [N, ...]; it gets batches of ``slots`` points, and gives [R, slots, ...].

    In ordinary batches the last bits of one could follow from how many others there are, or from its place among them.
    Here all batches are of one shape, filled up with blanks, and a point's place in its batch follows from its content
    alone. What is added in which order follows from shape, place and how the memory is aligned: so no point influences
    the rounding of another's.

    Args:
        say: Of R batches.
        x_N: Points [N, ...].
        progress: Told per cent: how many there are may be private.
        slots: Points in a batch.
    """
    slot_N = np.array([zlib.crc32(x.tobytes()) % slots for x in x_N.contiguous().numpy()], dtype=np.int64)
    record_BN = [np.flatnonzero(slot_N == slot) for slot in range(slots)]
    record_RB = np.full((max(1, *map(len, record_BN)), slots), -1)  # -1: a blank
    for slot, records in enumerate(record_BN):
        record_RB[: len(records), slot] = records

    def batch(record_B: Tensor) -> Tensor:
        # Gathered, not sliced: a part of a tensor is aligned as it comes.
        x_B = x_N.new_zeros((slots, *x_N.shape[1:]))
        x_B[record_B >= 0] = x_N[record_B[record_B >= 0]]
        return x_B

    def answers(record_RB: Tensor) -> Tensor:
        return say(batch(record_B) for record_B in record_RB)

    with single_thread_mode():
        first = answers(torch.full((1, slots), -1))[0]
    # Filled in place: small tensors kept from each batch, among its large ones, would leave holes that nothing fills.
    said_N = first.new_empty((len(x_N), *first.shape[1:]))

    def ask(record_RB: Tensor, progress: Progress) -> None:
        for begin in range(0, len(record_RB), _BLOCK):
            block_RB = record_RB[begin : begin + _BLOCK]
            said_N[block_RB[block_RB >= 0]] = answers(block_RB)[block_RB >= 0]
            progress(min(begin + _BLOCK, len(record_RB)), len(record_RB))

    def tell(done: int, total: int) -> None:
        progress(100 * done // total, 100)

    shares = torch.from_numpy(record_RB).tensor_split(min(torch.get_num_threads(), len(record_RB)))
    run_in_parallel([functools.partial(ask, share) for share in shares], torch.device("cpu"), tell)
    return said_N
