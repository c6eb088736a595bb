"""What a census and slopes share: the records of all shards, in features of the public points, each encoded alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pate_torch.data.units import take
from pate_torch.protocols import Progress
from pate_torch.representation import encode
from pate_torch.threads import side_by_side
from pate_torch.types import Dataset, DataSpec, PrivateData, Shards


def call(
    data: Dataset, shards: Shards, encoder: nn.Module | None, device: torch.device | str
) -> tuple[PrivateData, nn.Module, Tensor]:
    """(PRIVATE: the records of all shards; the encoder; unit-length features of the public points).

    encoder: normalised points -> features; None: the normalised points themselves.
    """
    encoder = (nn.Flatten() if encoder is None else encoder).to(device)
    encoder = encoder.to(memory_format=torch.channels_last)  # one image alone takes two thirds of the time
    private = take(data.private, shards.index_KS[shards.mask_KS].numpy())
    return private, encoder, encode(encoder, data.pool.x, data.spec)


def one_by_one(
    say: Callable[[Tensor], Tensor], encoder: nn.Module, private: PrivateData, spec: DataSpec, progress: Progress
) -> Tensor:
    """PRIVATE. What ``say`` makes of the features [1, D] of each record, [N, ...]: one record at a time.

    In a batch the rounding of one could follow from how many others there are. (A batch would take a fifth to three
    quarters less time, by network and processor.)
    """

    def ask(x_BP: Tensor, progress: Progress) -> Tensor:
        said, parts = [], x_BP.split(1)
        for n, x in enumerate(parts):
            said.append(say(encode(encoder, x, spec)))
            progress(n + 1, len(parts))
        return torch.cat(said)

    def tell(done: int, total: int) -> None:
        progress(100 * done // total, 100)  # per cent: how many records there are is private

    parts = private.x.tensor_split(max(1, min(torch.get_num_threads(), len(private.x))))
    return torch.cat(side_by_side([functools.partial(ask, x_BP) for x_BP in parts], torch.device("cpu"), tell))
