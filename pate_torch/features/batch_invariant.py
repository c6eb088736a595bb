"""Batches in which no point influences the rounding errors of another point's result."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pate_torch.core.device import run_in_parallel, single_thread_mode
from pate_torch.core.progress import Progress

BATCH_SIZE, ROW_BATCH_SIZE = 8, 64
"""Number of points in a batch. Small networks take a third of the time of single points; more points gain nothing.
Layers without convolutions, as of a table, take half of the time in larger batches."""
_BLOCK_BATCHES = 64
"""Number of batches per copy from the device to the host."""


def map_batch_invariant(
    fn: Callable[[Iterator[Tensor]], Tensor], x_N: Tensor, progress: Progress, batch_size: int = BATCH_SIZE
) -> Tensor:
    """Apply ``fn`` to each point, [N, ...], so that no point influences the result of another point.

    The order of additions, and so the last bits of a result, depends on the shape of the batch, on the position in the
    batch and on the alignment of the memory. Here all batches have one shape, with zeros at unused positions, and the
    position of a point in its batch depends on the content of the point alone.

    ``fn`` maps R batches to results [R, batch_size, ...]. ``progress`` is called with percentages, because the number
    of points may be private.
    """
    slot_N = np.array([zlib.crc32(x.tobytes()) % batch_size for x in x_N.contiguous().numpy()], dtype=np.int64)
    record_BN = [np.flatnonzero(slot_N == slot) for slot in range(batch_size)]
    record_RB = np.full((max(1, *map(len, record_BN)), batch_size), -1)  # -1 is an unused position
    for slot, records in enumerate(record_BN):
        record_RB[: len(records), slot] = records

    def make_batch(record_B: Tensor) -> Tensor:
        # A copy, because a slice would have the alignment of its tensor.
        x_B = x_N.new_zeros((batch_size, *x_N.shape[1:]))
        x_B[record_B >= 0] = x_N[record_B[record_B >= 0]]
        return x_B

    def compute_outputs(record_RB: Tensor) -> Tensor:
        return fn(make_batch(record_B) for record_B in record_RB)

    with single_thread_mode():
        blank_output = compute_outputs(torch.full((1, batch_size), -1))[0]
    # Results are written in place, because many small tensors between large ones would fragment the memory.
    output_N = blank_output.new_empty((len(x_N), *blank_output.shape[1:]))

    def process_share(record_RB: Tensor, progress: Progress) -> None:
        for begin in range(0, len(record_RB), _BLOCK_BATCHES):
            block_RB = record_RB[begin : begin + _BLOCK_BATCHES]
            output_N[block_RB[block_RB >= 0]] = compute_outputs(block_RB)[block_RB >= 0]
            progress(min(begin + _BLOCK_BATCHES, len(record_RB)), len(record_RB))

    shares = torch.from_numpy(record_RB).tensor_split(min(torch.get_num_threads(), len(record_RB)))
    jobs = [functools.partial(process_share, share) for share in shares]
    run_in_parallel(jobs, torch.device("cpu"), lambda done, total: progress(100 * done // total, 100))
    return output_N
