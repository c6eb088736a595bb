"""Chunks trained by one-thread processes: on a CPU, four of them beat four threads inside every small operation."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from pate_torch import networks
from pate_torch.teachers.engine import POINTS, Trained
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.shared_memory import SharedTensors
from pate_torch.types import DataSpec, PrivateData, Shards

_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def train_chunks(
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    chunks: list[range],
    wanted: list[int],
    workers: int,
) -> Iterator[tuple[int, Trained]]:
    """Yields (chunk number, what was learnt) as chunks finish. Raises RuntimeError when a worker dies."""
    records = SharedTensors.of({"x": private.x, "y": private.y, "index": shards.index_KS, "mask": shards.mask_KS})
    results = SharedTensors.empty(_result_shapes(spec, recipe, shards.num_teachers))
    setup = {
        "records": (records.fd, records.layout),
        "results": (results.fd, results.layout),
        "spec": asdict(spec),
        "recipe": asdict(recipe),
        "seed": seed,
        "chunks": [(teachers.start, teachers.stop) for teachers in chunks],
    }
    waiting = list(reversed(wanted))
    pool: list[_Worker] = []
    try:
        pool += [_Worker(setup, (records.fd, results.fd)) for _ in range(min(workers, len(waiting)))]
        with selectors.DefaultSelector() as selector:
            for worker in pool:
                worker.send(waiting.pop())
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            for _ in range(len(wanted)):
                [(key, _)] = selector.select()[:1]
                worker = key.data
                number = worker.receive()
                if waiting:
                    worker.send(waiting.pop())
                else:
                    selector.unregister(worker.answers)
                yield number, _rows(results, chunks[number])
    finally:
        for worker in pool:
            worker.stop()
        records.close()
        results.close()


def _result_shapes(spec: DataSpec, recipe: TeacherRecipe, teachers: int) -> dict[str, Any]:
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    points = min(POINTS, recipe.steps)
    curves = {name: (torch.float32, (points, teachers)) for name in ("loss", "accuracy")}
    return curves | {
        f"params.{name}": (recipe.torch_dtype, (teachers, *p.shape)) for name, p in module.named_parameters()
    }


def _rows(results: SharedTensors, teachers: range) -> Trained:
    rows = slice(teachers.start, teachers.stop)
    params = {n.removeprefix("params."): t[rows] for n, t in results.tensors.items() if n.startswith("params.")}
    return Trained(params, results.tensors["loss"][:, rows], results.tensors["accuracy"][:, rows])


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Every step frees and asks again for the same few megabytes; glibc would hand them back to the system each time.
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class _Worker:
    """A child process and the chunk it is busy with."""

    def __init__(self, setup: dict[str, Any], fds: tuple[int, ...]) -> None:
        package = str(Path(__file__).resolve().parents[2])
        environment = {key: value for key, value in os.environ.items() if key not in _GROUP}
        environment |= _ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in stop)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pate_torch.teachers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            pass_fds=fds,
            env=environment,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout
        self._write(json.dumps(setup))

    def _write(self, line: str) -> None:
        try:
            self.orders.write(line.encode() + b"\n")
            self.orders.flush()
        except BrokenPipeError:
            raise self._death() from None

    def send(self, number: int) -> None:
        self.number = number
        self._write(str(number))

    def receive(self) -> int:
        line = self.answers.readline()
        if not line:
            raise self._death()
        number = int(json.loads(line)["done"])
        assert number == self.number
        return number

    def _death(self) -> RuntimeError:
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        how = f"killed by signal {-code} (9: often out of memory)" if code < 0 else f"exit code {code}"
        return RuntimeError(
            f"a teacher worker died: {how}; {last[0]}. Finished chunks are kept where checkpoints are on; "
            "try fewer workers, or backend=vectorised"
        )

    def stop(self) -> None:
        for stream in (self.orders, self.answers):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
