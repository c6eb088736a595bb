"""Devices, settings of PyTorch for reproducible results, and jobs that run in parallel."""

from __future__ import annotations

import functools
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Progress

T = TypeVar("T")
_switch_lock = threading.Lock()
_switches_by_block: dict[object, dict[tuple[Any, str], Any]] = {}
"""Values that the active blocks of ``_set_switches`` ask for, and those before the first block, under None."""
Device = torch.device | str


def parse_device(name: object) -> torch.device:
    """Return the torch device of this name. ``auto`` is CUDA if available, else MPS if available, else the CPU."""
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if str(name) == "auto":
        return torch.device(next(kind for kind, count in counts.items() if count))
    try:
        device = torch.device(str(name))
        count = counts[device.type]
    except (RuntimeError, KeyError) as error:
        raise checks.error("device", name, "must be auto, cpu, cuda, cuda:<n> or mps") from error
    if (device.index or 0) >= count:
        problem = f"is not available: this machine has {count} {device.type} devices, numbered from 0"
        raise checks.error("device", name, problem, "Use device=cpu or device=auto.")
    return device


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; a copy from the CPU to a GPU is asynchronous, from pinned memory."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@contextmanager
def _set_switches(value_by_switch: dict[tuple[Any, str], Any]) -> Iterator[None]:
    # All threads share the backends. The block that began last decides, and the last to end restores previous values.
    block = object()

    def apply_values() -> None:
        values = {switch: value for held in _switches_by_block.values() for switch, value in held.items()}
        for (backend, name), value in values.items():
            setattr(backend, name, value)

    with _switch_lock:
        previous = _switches_by_block.setdefault(None, {})
        previous.update({switch: getattr(*switch) for switch in value_by_switch if switch not in previous})
        _switches_by_block[block] = value_by_switch
        apply_values()
    try:
        yield
    finally:
        with _switch_lock:
            del _switches_by_block[block]
            apply_values()
            if len(_switches_by_block) == 1:
                _switches_by_block.clear()


@contextmanager
def float32_precision(*, tf32: bool = False) -> Iterator[None]:
    """Compute matrix products and convolutions of float32 tensors in full precision, or in TF32 if ``tf32``.

    By default PyTorch uses TF32 in the convolutions of cuDNN, even if matrix products use full precision.
    """
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    with _set_switches({(backend, "fp32_precision"): "tf32" if tf32 else "ieee" for backend in backends}):
        yield


def describe_processor(device: torch.device) -> str:
    """Describe the kind of processor and the version of torch, on which the last bits of results depend."""
    kind = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name} {kind} with torch {torch.__version__}"


@contextmanager
def deterministic_mode(device: torch.device) -> Iterator[None]:
    """Compute with full float32 precision and deterministic algorithms, and make ``device`` the current device."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this at the first matrix product
        if device.index is not None:  # torch.device("cuda") is the current device already
            torch.cuda.set_device(device)
    cudnn = torch.backends.cudnn
    with _set_switches({(cudnn, "deterministic"): True, (cudnn, "benchmark"): False}), float32_precision():
        yield


@contextmanager
def single_thread_mode(enabled: bool = True) -> Iterator[None]:
    """Run the torch operations of the calling thread without further threads, if ``enabled``.

    On a busy machine, waiting for the threads can take a hundred times longer than small operations.
    """
    num_threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def run_in_parallel(jobs: Sequence[Callable[[Progress], T]], device: torch.device, progress: Progress) -> list[T]:
    """Run the jobs and return their results in order: in parallel threads on a CPU, else one by one.

    On a CPU the operations of a job use one thread, so that results do not depend on the number of processors. Jobs
    should take about equally long and spend their time in torch or Pillow, which release Python's interpreter lock.
    (Processes would need copies of the points and the results.) The first error ends all jobs and is raised.
    """
    counts_by_job: dict[int, tuple[int, int]] = {}
    lock, stop_event = threading.Lock(), threading.Event()

    def report(job: int, done: int, total: int) -> None:
        with lock:
            if stop_event.is_set():
                raise RuntimeError("This job was stopped because another job failed.")
            counts_by_job[job] = done, total
            dones, totals = zip(*counts_by_job.values(), strict=True)
            num_waiting = len(jobs) - len(totals)  # a waiting job counts like the longest job that has begun
            progress(sum(dones), sum(totals) + max(totals) * num_waiting)

    work = [functools.partial(job, functools.partial(report, k)) for k, job in enumerate(jobs)]
    if device.type != "cpu":
        return [run_job() for run_job in work]
    workers = min(len(jobs), torch.get_num_threads())
    with single_thread_mode(), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(run_job) for run_job in work]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:  # raises the first error, before the RuntimeError of a stopped job
                future.result()
        finally:
            stop_event.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return [future.result() for future in futures]
