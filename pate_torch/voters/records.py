"""What reverse k-NN labeling and per-record gradients share: the records of all shards, in public features."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core.parallel import side_by_side
from pate_torch.data.units import take
from pate_torch.features.contrastive import encode, mean_shift
from pate_torch.protocols import Progress
from pate_torch.types import Dataset, DataSpec, PrivateData, Shards


def encode_public(
    data: Dataset, shards: Shards, encoder: nn.Module | None, device: torch.device | str, neighbors: int = 0
) -> tuple[PrivateData, nn.Module, Tensor]:
    """PRIVATE. The records of all shards, the encoder, and the features of the public points.

    Args:
        data: The run's data.
        shards: Which hold the records.
        encoder: Normalized points -> features; None: the normalized points themselves.
        device: Device of the encoding.
        neighbors: Number of public neighbors in a mean-shift step of every feature; 0: none.

    Returns:
        PRIVATE records; the encoder, with the mean-shift step; unit-length features of the public points.
    """
    encoder = (nn.Flatten() if encoder is None else encoder).to(device)
    encoder = encoder.to(memory_format=torch.channels_last)  # few images take less time
    encoder = mean_shift(encoder, data.pool.x, data.spec, neighbors)
    private = take(data.private, shards.index_KS[shards.mask_KS].numpy())
    return private, encoder, encode(encoder, data.pool.x, data.spec)


_SLOTS = 8
"""Records in a batch: of small networks one takes a third of the time that it takes alone, and more bring no more."""


def map_records_independently(
    say: Callable[[Tensor], Tensor], encoder: nn.Module, private: PrivateData, spec: DataSpec, progress: Progress
) -> Tensor:
    """PRIVATE. Apply ``say`` to the features of each record, [N, ...]; it gets those of a batch, [8, D].

    In ordinary batches the last bits of one could follow from how many others there are, or from its place among them.
    Here all batches are of one shape, filled up with blanks, and a record's place in its batch follows from its content
    alone. What is added in which order follows from shape, place and how the memory is aligned: so no record influences
    the rounding of another's.
    """
    slots = [zlib.crc32(x.tobytes()) % _SLOTS for x in private.x.contiguous().numpy()]
    slot_N = torch.tensor(slots, dtype=torch.int64)
    so_far_NS = F.one_hot(slot_N, _SLOTS).cumsum(0)  # records of each slot, up to and with this one
    batch_N = so_far_NS.gather(1, slot_N[:, None]).squeeze(1) - 1
    batches = max(1, int(torch.bincount(slot_N, minlength=_SLOTS).max()))
    x_RSP = private.x.new_zeros((batches, _SLOTS, *private.x.shape[1:]))
    x_RSP[batch_N, slot_N] = private.x

    def ask(x_RSP: Tensor, progress: Progress) -> Tensor:
        said = []
        for n, x_SP in enumerate(x_RSP):
            # A clone, as a part of a tensor is aligned as it comes.
            said.append(say(encode(encoder, x_SP.clone(), spec)))
            progress(n + 1, len(x_RSP))
        return torch.stack(said)

    def tell(done: int, total: int) -> None:
        progress(100 * done // total, 100)  # per cent: how many records there are is private

    shares = x_RSP.tensor_split(min(torch.get_num_threads(), batches))
    said = side_by_side([functools.partial(ask, share) for share in shares], torch.device("cpu"), tell)
    return torch.cat(said)[batch_N, slot_N]
