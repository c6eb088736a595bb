"""Chunks trained by one-thread processes: on a CPU, four of them beat four threads inside every small operation.

The main process puts the private records into anonymous shared memory (``SharedTensors``: no name in the file system,
gone with the last process). A worker reads chunk numbers, a line each, trains them, writes their parameters back, and
answers with lines of JSON: the share of a chunk that is done, and its number when it is finished. It ends when its
orders close, so that no worker outlives its run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import multiprocessing
import multiprocessing.process
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import IO, Any, TextIO

import torch
from torch import Tensor

from pate_torch import networks
from pate_torch.core.progress import do_nothing
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers import distributed
from pate_torch.teachers.engine import CURVE_POINTS, TrainedChunk, TrainingTask, gather_rows, train_stacked
from pate_torch.teachers.recipe import TeacherRecipe


def train_chunks(
    task: TrainingTask,
    chunks: list[range],
    workers: int,
    report_share: Callable[[range, float], object] = do_nothing,
) -> Iterator[tuple[range, TrainedChunk]]:
    """PRIVATE. Train chunks in worker processes; yields (teachers, what was learnt) as they finish.

    Args:
        task: What the teachers are trained on.
        chunks: The teachers of each chunk.
        workers: Number of processes.
        report_share: Called with (teachers, share done) in between.

    Raises:
        ChildProcessError: A worker died.
    """
    private, shards = task.private, task.shards
    records = SharedTensors.from_tensors(
        {"x": private.x, "y": private.y, "index": shards.index_KS, "mask": shards.mask_KS}
    )
    results = SharedTensors.from_shapes(_get_result_shapes(task.spec, task.recipe, shards.num_teachers))
    setup = {
        "spec": task.spec.to_dict(),
        "recipe": asdict(task.recipe),
        "seed": task.seed,
        "chunks": [(teachers.start, teachers.stop) for teachers in chunks],
    }
    pending = list(reversed(range(len(chunks))))
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(pending))):
            pool.append(_start_worker(setup, records, results, pool))
        with selectors.DefaultSelector() as selector:
            for worker in pool:
                worker.send(pending.pop())
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            while selector.get_map():
                [(key, _)] = selector.select()[:1]
                worker = key.data
                number, share = worker.receive()
                if share is not None:
                    report_share(chunks[number], share)
                    continue
                if pending:
                    worker.send(pending.pop())
                else:
                    selector.unregister(worker.answers)
                yield chunks[number], _read_results(results, chunks[number])
    finally:
        for worker in pool:
            worker.stop()
        records.close()
        results.close()


def _get_result_shapes(spec: DataSpec, recipe: TeacherRecipe, teachers: int) -> dict[str, Any]:
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    points = min(CURVE_POINTS, recipe.steps)
    curves = {name: (torch.float32, (points, teachers)) for name in ("loss", "accuracy")}
    return curves | {
        f"params.{name}": (recipe.torch_dtype, (teachers, *p.shape)) for name, p in module.named_parameters()
    }


def _read_results(results: SharedTensors, teachers: range) -> TrainedChunk:
    rows = slice(teachers.start, teachers.stop)
    params = {n.removeprefix("params."): t[rows] for n, t in results.tensors.items() if n.startswith("params.")}
    return TrainedChunk(params, results.tensors["loss"][:, rows], results.tensors["accuracy"][:, rows])


_MALLOC_OPTIONS = {"TRIM_THRESHOLD": (-1, 2**31 - 1), "TOP_PAD": (-2, 1 << 26), "MMAP_THRESHOLD": (-3, 1 << 25)}
"""glibc's malloc.h: parameters and values. Each step of a worker frees and asks again for the same few megabytes, which
glibc would hand back to the system every time."""

_BLOCK_BYTES, _PAGE_BYTES = 24 << 20, 2 << 20

_STOP_TIMEOUT_SECONDS = 5.0
"""Seconds that a worker told to stop is given before it is killed."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | {
    f"MALLOC_{name}_": str(value) for name, (_, value) in _MALLOC_OPTIONS.items()
}


def _keep_memory() -> None:
    """What the environment does for a program of its own: keep freed memory, in pages of 2 MB; nothing off glibc."""
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("mallopt", "malloc", "free", "madvise")):
        return
    for parameter, value in _MALLOC_OPTIONS.values():
        libc.mallopt(parameter, value)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    blocks = [libc.malloc(_BLOCK_BYTES) for _ in range(16)]
    for block in blocks:
        if block:
            first = -(-block // _PAGE_BYTES) * _PAGE_BYTES
            libc.madvise(first, (block + _BLOCK_BYTES - first) // _PAGE_BYTES * _PAGE_BYTES, mmap.MADV_HUGEPAGE)
    for block in blocks:
        libc.free(block)


class _Worker:
    """A child process and the chunk it is busy with."""

    process: multiprocessing.process.BaseProcess | _SubprocessAdapter

    def __init__(self) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in stop)
        child_orders, orders = os.pipe()
        answers, child_answers = os.pipe()
        self.orders, self.answers = os.fdopen(orders, "wb", 0), os.fdopen(answers, "rb", 0)
        self._child_fds = child_orders, child_answers

    def send(self, number: int) -> None:
        self.number = number
        self._write(str(number))

    def _write(self, line: str) -> None:
        try:
            self.orders.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise self._worker_death_error() from None

    def receive(self) -> tuple[int, float | None]:
        """(the chunk's number, the share of it that is done; None where it is finished)."""
        line = self.answers.readline()
        if not line:
            raise self._worker_death_error()
        reply = json.loads(line)
        assert reply.get("done", self.number) == self.number
        return self.number, reply.get("share")

    def _worker_death_error(self) -> ChildProcessError:
        self.process.join()
        code = self.process.exitcode or 0
        self.errors.seek(0)
        last_lines = self.errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        cause = f"killed by signal {-code} (9: often out of memory)" if code < 0 else f"exit code {code}"
        return ChildProcessError(
            f"a teacher worker died: {cause}; {last_lines[0]}. Finished chunks are kept where checkpoints are on; "
            "try fewer workers, or backend=vectorized"
        )

    def stop(self) -> None:
        self.orders.close()
        self.answers.close()
        self.process.join(_STOP_TIMEOUT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.errors.close()


class _ForkedWorker(_Worker):
    """A copy of this process: it starts at once, and has the records and torch already."""

    def __init__(self, setup: dict[str, Any], records: SharedTensors, results: SharedTensors, pool: list[_Worker]):
        super().__init__()
        # The copy must not hold the near ends of any worker's pipes, or that worker would never see them close.
        parent_fds = [stream.fileno() for worker in [*pool, self] for stream in (worker.orders, worker.answers)]
        child_orders, child_answers = self._child_fds

        def run_child() -> None:
            try:
                for fd in parent_fds:
                    os.close(fd)
                for fd in (1, 2):
                    os.dup2(self.errors.fileno(), fd)
                _keep_memory()
                serve(setup, os.fdopen(child_orders), os.fdopen(child_answers, "w"), records.tensors, results.tensors)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)  # nothing of the main process is to be finished here: no ledger, no writer, no buffer

        self.process = multiprocessing.get_context("fork").Process(target=run_child, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads: see can_fork
            self.process.start()
        os.close(child_orders)
        os.close(child_answers)


class _SpawnedWorker(_Worker):
    """A Python of its own, which takes some three seconds to import torch."""

    def __init__(self, setup: dict[str, Any], records: SharedTensors, results: SharedTensors):
        super().__init__()
        child_orders, child_answers = self._child_fds
        self.process = _SubprocessAdapter(
            subprocess.Popen(
                [sys.executable, "-m", "pate_torch.teachers.workers"],
                stdin=child_orders,
                stdout=child_answers,
                stderr=self.errors,
                pass_fds=(records.fd, results.fd),
                env=distributed.make_child_environment() | _ENVIRONMENT,
            )
        )
        os.close(child_orders)
        os.close(child_answers)
        mappings = {"records": (records.fd, records.layout), "results": (results.fd, results.layout)}
        self._write(json.dumps(setup | mappings))


class _SubprocessAdapter:
    """A subprocess, spoken of as multiprocessing does."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen, self.kill = popen, popen.kill

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)


def can_fork() -> bool:
    """Whether a copy of this process can go on computing on one thread, as workers of torch's DataLoader do.

    Where a GPU is driven, autograd has threads that a copy lacks, and it refuses; where ranks communicate, so has the
    group.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available() and not torch.distributed.is_initialized()


def _start_worker(
    setup: dict[str, Any], records: SharedTensors, results: SharedTensors, pool: list[_Worker]
) -> _Worker:
    return _ForkedWorker(setup, records, results, pool) if can_fork() else _SpawnedWorker(setup, records, results)


def serve(
    setup: Mapping[str, Any],
    orders: TextIO,
    answers: TextIO,
    records: Mapping[str, Tensor],
    results: Mapping[str, Tensor],
) -> None:
    """Train the chunks whose numbers come on ``orders`` until it closes, which ends the process."""
    torch.set_num_threads(1)
    spec = DataSpec.from_dict(setup["spec"])
    recipe = TeacherRecipe(**setup["recipe"])
    tasks: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders, tasks), daemon=True).start()

    def report_share(share: float) -> None:
        print(json.dumps({"share": share}), file=answers, flush=True)

    while True:
        number = tasks.get()
        teachers = range(*setup["chunks"][number])
        chunk = gather_rows(records["x"], records["y"], records["index"], records["mask"], teachers)
        result = train_stacked(chunk, spec, recipe, setup["seed"], torch.device("cpu"), report_share)
        rows = slice(teachers.start, teachers.stop)
        for name, parameter in result.params.items():
            results["params." + name][rows] = parameter
        results["loss"][:, rows], results["accuracy"][:, rows] = result.loss_Pk, result.accuracy_Pk
        print(json.dumps({"done": number}), file=answers, flush=True)


def _listen(orders: TextIO, tasks: queue.SimpleQueue[int]) -> None:
    for line in orders:
        tasks.put(int(line))
    os._exit(0)  # the run is over, or its main process is gone: stop in the middle of a chunk too


def main() -> None:
    """Run a worker: the setup is the first line of its orders."""
    setup = json.loads(sys.stdin.readline())
    records, results = (SharedTensors(*setup[name]).tensors for name in ("records", "results"))
    serve(setup, sys.stdin, sys.stdout, records, results)


ALIGNMENT_BYTES = 64


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
    def from_shapes(cls, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> SharedTensors:
        """Zero-filled tensors of these types and shapes."""
        layout, offset = {}, 0
        for name, (dtype, shape) in shapes.items():
            layout[name] = (str(dtype).removeprefix("torch."), list(shape), offset)
            offset += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fd = _create_anonymous_file()
        os.ftruncate(fd, max(offset, ALIGNMENT_BYTES))
        return cls(fd, {"bytes": max(offset, ALIGNMENT_BYTES), "tensors": layout})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Copies of these tensors."""
        shared_tensors = cls.from_shapes({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
        for name, tensor in tensors.items():
            shared_tensors.tensors[name].copy_(tensor)
        return shared_tensors

    def close(self) -> None:
        """Close the file; the memory lives until the last tensor of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _create_anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pate_torch")
    with tempfile.TemporaryFile() as file:  # no name either, where the system has no memfd
        return os.dup(file.fileno())


if __name__ == "__main__":
    main()
