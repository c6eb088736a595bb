"""What a GPU computes is what was asked for: float32 as float32, by algorithms that give the same bits again.

It computes while the host goes on, wherever nothing is read back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A GPU copies it from pinned memory, and the host goes on."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@contextmanager
def float32_precision(*, tf32: bool = False) -> Iterator[None]:
    """Compute products and convolutions of float32 as such, or rounded to TF32.

    (As it comes, PyTorch rounds in cuDNN's convolutions, whatever is said of matrix products.)
    """
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    previous_precisions = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for backend, precision in zip(backends, previous_precisions, strict=True):
            backend.fp32_precision = precision


@contextmanager
def deterministic_mode(device: torch.device) -> Iterator[None]:
    """Work on this device: a bare "cuda" means it, float32 is float32, and convolutions are deterministic."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product
        if device.index is not None:  # else the present one is meant, which set_device would refuse
            torch.cuda.set_device(device)
    cudnn = torch.backends.cudnn
    previous_settings = cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        with float32_precision():
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = previous_settings
