"""Tensors in anonymous memory that child processes map: no name in the file system, gone with the last process."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ALIGN = 64


class SharedTensors:
    """Named tensors in one anonymous mapping.

    Private records are neither pickled nor written to a disk, and a killed run leaves nothing behind.

    Args:
        fd: File descriptor, by which a child attaches to the mapping.
        layout: Plain data: name, type, shape and place of each tensor.
    """

    def __init__(self, fd: int, layout: Mapping[str, Any]) -> None:
        self.fd, self.layout = fd, dict(layout)
        self._map = mmap.mmap(fd, self.layout["bytes"])
        self.tensors: dict[str, Tensor] = {}
        for name, (dtype, shape, offset) in self.layout["tensors"].items():
            count = math.prod(shape)
            kind = getattr(torch, dtype)
            flat = torch.frombuffer(self._map, dtype=kind, count=count, offset=offset) if count else torch.empty(0)
            self.tensors[name] = flat.to(kind).view(shape)

    @classmethod
    def empty(cls, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> SharedTensors:
        """Zero-filled tensors of these types and shapes."""
        layout, offset = {}, 0
        for name, (dtype, shape) in shapes.items():
            layout[name] = (str(dtype).removeprefix("torch."), list(shape), offset)
            offset += -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN
        fd = _anonymous_file()
        os.ftruncate(fd, max(offset, ALIGN))
        return cls(fd, {"bytes": max(offset, ALIGN), "tensors": layout})

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Copies of these tensors."""
        shared = cls.empty({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
        for name, tensor in tensors.items():
            shared.tensors[name].copy_(tensor)
        return shared

    def close(self) -> None:
        """Close the file; the memory lives until the last tensor of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pate_torch")
    with tempfile.TemporaryFile() as file:  # no name either, where the system has no memfd
        return os.dup(file.fileno())
