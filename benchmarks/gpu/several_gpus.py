"""A check of teachers that torchrun deals to all GPUs. Run as a module, it is the program of one rank."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import workloads
from benchmarks.gpu.findings import Finding, PartNotRun, Setup
from pate_torch.core import ranks
from pate_torch.core.device import deterministic_mode
from pate_torch.core.executors import Workers
from pate_torch.teachers import training
from pate_torch.teachers.groups import VoteRequest
from pate_torch.teachers.training import train

ROOT = Path(__file__).resolve().parents[2]


def check_several_gpus(setup: Setup) -> Iterator[Finding]:
    """Train and ask teachers on all GPUs: every rank works on a GPU of its own, and votes are those of one rank."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        raise PartNotRun("there is one GPU")
    yield from compare_ranks(setup.device.type, ranks)


def compare_ranks(device: str, ranks: int) -> Iterator[Finding]:
    """Compare several ranks on one kind of device with one rank."""
    [alone], together = _launch_ranks(device, 1), _launch_ranks(device, ranks)
    seconds = [rank["seconds"] for rank in together]
    devices = [rank["device"] for rank in together]
    yield Finding("devices of the ranks", " ".join(devices), passed=device == "cpu" or len(set(devices)) == ranks)
    share = min(seconds) / max(seconds)
    yield Finding("time of the least busy rank, as a share of the busiest's", share, passed=share > 0.3)
    if device != "cpu":
        least = min(rank["peak_bytes"] for rank in together) / 2**20
        yield Finding("least memory that a rank took", least, "MiB", passed=least > 0)
    same = all(rank["votes"] == alone["votes"] for rank in together)
    yield Finding("votes", "those of one rank" if same else "others than one rank's", passed=same)
    yield Finding(f"times as fast as one rank, of {ranks}", alone["seconds"] / max(seconds))


def _launch_ranks(device: str, ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += ["-m", "benchmarks.gpu.several_gpus", folder, device]
        done = subprocess.run(words, capture_output=True, text=True, timeout=90, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"torchrun ended with {done.returncode}: {done.stderr[-500:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def run_rank(kind: str, folder: Path) -> dict[str, Any]:
    """Train this rank's teachers and ask them; launches of one size give the same bits on any number of ranks."""
    device = ranks.get_local_device(torch.device(kind))
    setup = Setup(device, small=kind == "cpu")
    spec = workloads.make_spec(setup)
    private, shards = workloads.draw_shards(spec, teachers=16 * training.GROUP_TEACHERS, size=12)
    options = workloads.choose_networks(setup)["lean_cnn"]
    recipe = workloads.make_recipe("lean_cnn", options, steps=100)
    ends, votes = list[float](), list[Any]()
    with deterministic_mode(device):
        start = time.monotonic()
        train(
            private,
            spec,
            shards,
            recipe,
            seed=0,
            device=device,
            executor=Workers(chunk=training.GROUP_TEACHERS),
            folder=folder / "teachers",
            request=VoteRequest(private.x[:200]),
            on_votes=votes.append,
            progress=lambda *_: ends.append(time.monotonic()),
        )
    return {
        "device": str(device),
        "seconds": ends[-1] - start,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if kind != "cpu" else 0,
        "votes": votes[0].counts_QC.tolist(),
    }


if __name__ == "__main__":
    result = run_rank(sys.argv[2], Path(sys.argv[1]))
    (Path(sys.argv[1]) / f"{ranks.get_world().rank}.json").write_text(json.dumps(result))
