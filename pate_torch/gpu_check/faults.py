"""Faults that are planted on the pretend GPU, one at a time, to see that the check reports them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pate_torch.core import device
from pate_torch.core.rng import torch_stream
from pate_torch.gpu_check import parts
from pate_torch.students.training import Average
from pate_torch.teachers import engine, launch
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.voters import records


@contextmanager
def rounded() -> Iterator[None]:
    """float32 is left as PyTorch comes: TF32 in convolutions."""
    with ExitStack() as changed:
        for module in (device, engine):
            changed.enter_context(patch.object(module, "float32", lambda **_: nullcontext()))
        yield


@contextmanager
def unsettled() -> Iterator[None]:
    """Convolutions may differ from run to run."""
    with patch.object(parts, "settled", lambda device: device_float32()):
        yield


device_float32 = device.float32


@contextmanager
def mixed_teachers() -> Iterator[None]:
    """A teacher's loss takes a little of the others'."""
    plain = engine._losses

    def losses(logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
        own = plain(logits, y, smoothing)
        return own * (1 + 1e-3 * own.mean())

    with patch.object(engine, "_losses", losses):
        yield


@contextmanager
def mixed_records() -> Iterator[None]:
    """A record's feature takes a little of those of its batch."""
    plain = records.encode

    def encode(*given: Any) -> Tensor:
        feature_BD = plain(*given)
        return feature_BD + 1e-6 * feature_BD.mean(0)

    with patch.object(records, "encode", encode):
        yield


@contextmanager
def small_plan() -> Iterator[None]:
    """The plan knows a tenth of what teachers take."""
    plain = launch.training_bytes
    with patch.object(launch, "training_bytes", lambda recipe, cost: plain(recipe, cost) // 10):
        yield


@contextmanager
def _each_update(also: Any) -> Iterator[None]:
    """Something more in every step of a student."""
    plain = Average.update

    def update(self: Average) -> None:
        plain(self)
        also(next(self.module.parameters()))

    with patch.object(Average, "update", update):
        yield


@contextmanager
def looked_at() -> Iterator[None]:
    """A student's step looks at a weight."""
    with _each_update(lambda weight: weight.sum().item()):
        yield


@contextmanager
def misplaced() -> Iterator[None]:
    """A student's step adds numbers of the host to those of the GPU."""
    with _each_update(lambda weight: weight + torch.zeros(weight.shape)):
        yield


@contextmanager
def host_generator() -> Iterator[None]:
    """A student's step draws numbers for the GPU from a generator of the host."""
    with _each_update(lambda weight: torch.rand(2, generator=torch_stream(0, "x"), device=weight.device)):
        yield


@contextmanager
def wrong_votes() -> Iterator[None]:
    """Teachers on a GPU vote for the class that they believe in least."""
    plain = Ensemble.opinions

    def opinions(self: Ensemble, x: Tensor, hear: Any, *given: Any, **named: Any) -> None:
        def heard(rows: slice, said: Iterable[tuple[int, Tensor]]) -> None:
            hear(rows, ((start, -logits if logits.is_cuda else logits) for start, logits in said))

        plain(self, x, heard, *given, **named)

    with patch.object(Ensemble, "opinions", opinions):
        yield
