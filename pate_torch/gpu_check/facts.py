"""What there is: the GPU, its software, and the switches that decide how float32 is multiplied."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from pate_torch.gpu_check.parts import Bench, Finding


def facts(bench: Bench) -> Iterator[Finding]:
    """The machine, and what a run sets (``core.device.settled``)."""
    card: Any = torch.cuda.get_device_properties(bench.device)
    yield Finding("device", card.name)
    yield Finding("number of GPUs", torch.cuda.device_count())
    yield Finding("memory", card.total_memory / 2**30, "GiB")
    yield Finding("driver", "none" if bench.toy else _driver())
    yield Finding("torch", torch.__version__)
    yield Finding("CUDA", str(torch.version.cuda))
    yield Finding("cuDNN", "none" if bench.toy else str(torch.backends.cudnn.version()))
    yield Finding("Python", platform.python_version())
    cudnn: Any = torch.backends.cudnn
    switches = {
        "float32 products": (torch.backends.cuda.matmul.fp32_precision, "ieee"),
        "float32 convolutions": (cudnn.conv.fp32_precision, "ieee"),
        "convolutions": ("deterministic" if cudnn.deterministic else "as they come", "deterministic"),
        "algorithms": ("measured" if cudnn.benchmark else "not measured", "not measured"),
    }
    for name, (found, wanted) in switches.items():
        yield Finding(f"{name} within a run", found, passed=found == wanted)


def _driver() -> str:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown: no nvidia-smi"
    return asked.stdout.split("\n")[0].strip()
