"""Second training of one teacher, in a process that holds only its own records. The result must be the same.

The second training has nothing in common with other teachers: no global generator, no cache, no network and no stacked
launch. A fault that affects n of K teachers is found with probability n / K, so reports say that one of K teachers was
trained a second time.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import pickle
import secrets
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.device import deterministic_mode, single_thread_mode
from pate_torch.core.executors import ProcessPool
from pate_torch.teachers.engine import Chunk, ChunkSource, TrainingTask, train_launch
from pate_torch.teachers.ensemble import CPU_TEACHERS, TeacherEnsemble

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


draw_candidate = secrets.choice
"""Function that draws from a sequence with the system's entropy, so that nobody can predict the draw."""


def dependence_error(num_teachers: int) -> ValueError:
    """Make the error for a teacher whose second training gave another result."""
    return checks.error(
        "teacher",
        f"1 of {num_teachers} teachers",
        "was trained again in a process that held only its own records, and came out different",
        "Either teachers share something (a global generator, a cache or a network), or training is not deterministic. "
        "Make all objects anew for each teacher, and draw from the seeded generators only.",
    )


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if obj is torch.ops or obj is torch.classes:  # found in functions of any attribute "ops", as in torchvision.ops
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def pickle_work(work: Callable[..., Any]) -> bytes:
    """Pickle the work for a fresh process. Raises ValueError if it cannot be pickled."""
    try:
        _Pickler(buffer := io.BytesIO()).dump(work)
        return buffer.getvalue()
    except Exception as error:
        message = f"cannot be sent to the fresh process that trains one teacher again ({type(error).__name__}: {error})"
        fix = "Define the teacher at the top level of a module, without an open file, lock or generator."
        raise checks.error("teacher", "your teacher", message, fix) from error


def call_in_fresh_process(work_bytes: bytes, *arguments: Any) -> Any:
    """PRIVATE. Return ``work(*arguments)``, computed in a new Python process that receives nothing else from this one.

    Raises:
        ValueError: The work cannot be unpickled in the new process, or fails.
    """
    with ProcessPool(1, "spawn", _isolate, torch.get_num_threads()) as pool:
        try:
            error, content = pool.submit(_do_work, work_bytes, pickle.dumps(arguments)).result()
        except BrokenExecutor:
            error, content = "the process ended", b""
    if error:
        fix = "Define the teacher in a module that any process can import, without objects that only this process has."
        raise checks.error("teacher", "your teacher", f"cannot be trained again in a fresh process ({error})", fix)
    return pickle.loads(content)


def _isolate(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for variable in _RANK_VARIABLES:
        os.environ.pop(variable, None)
    with open(os.devnull, "w") as devnull:  # the work may print a record
        os.dup2(devnull.fileno(), 1)
        os.dup2(devnull.fileno(), 2)


def _do_work(work_bytes: bytes, arguments_bytes: bytes) -> tuple[str, bytes]:
    """Return an error that quotes no record, and the pickled result."""
    try:
        work = pickle.loads(work_bytes)
    except Exception as error:  # raised before a record was unpickled, so the message is safe
        return f"{type(error).__name__}: {error}", b""
    try:
        return "", pickle.dumps(work(*pickle.loads(arguments_bytes)))
    except Exception as error:  # the message may quote a record
        return type(error).__name__, b""


@dataclass(frozen=True, eq=False, repr=False)
class RetrainingCheck:
    """PRIVATE. Comparison of one teacher of an ensemble with its second training."""

    ensemble: TeacherEnsemble
    teacher: int
    retraining: Retraining

    @classmethod
    def draw(
        cls, ensemble: TeacherEnsemble, groups: list[range], task: TrainingTask, get_chunk: ChunkSource
    ) -> RetrainingCheck:
        """Draw a teacher, but not the first one, because it was trained before all others."""
        candidates = [(launch, k) for group in groups for launch in task.plan_launches(group) for k in launch]
        launch, teacher = draw_candidate(candidates[1:])
        row, own_chunk = teacher - launch.start, get_chunk(range(teacher, teacher + 1))
        own_tensors = own_chunk.x_kS, own_chunk.y_kS, own_chunk.size_k
        x_kS, y_kS, size_k = (value.new_zeros(len(launch), *value.shape[1:]) for value in own_tensors)
        x_kS[row], y_kS[row], size_k[:], size_k[row] = own_chunk.x_kS[0], own_chunk.y_kS[0], 1, own_chunk.size_k[0]
        chunk = Chunk(launch.start, x_kS, y_kS, size_k)
        return cls(ensemble, teacher, Retraining(chunk, row, task))

    def run(self, public_x: Tensor, device: torch.device) -> None:
        """Raise ValueError unless a second training gives the same parameters and probabilities on public points."""
        chunks = self.ensemble.split_chunks(CPU_TEACHERS)
        rows, params = next(chunk for chunk in chunks if self.teacher < chunk[0].stop)
        trained_k, place = self.ensemble.trained_K[rows], self.teacher - rows.start
        evaluated = dataclasses.replace(self.ensemble, groups=[params], trained_K=trained_k)
        expected_bytes = _compute_bytes(evaluated, place, public_x, device)
        blank_params = {name: torch.zeros_like(p) for name, p in params.items()}
        blank = dataclasses.replace(evaluated, groups=[blank_params], trained_K=torch.zeros_like(trained_k))
        if call_in_fresh_process(pickle.dumps(self.retraining), blank, place, public_x) != expected_bytes:
            raise dependence_error(len(self.ensemble))


@dataclass(frozen=True, eq=False, repr=False)
class Retraining:
    """PRIVATE. Second training of a teacher, in a launch in which all other teachers have one blank record.

    The launch has the shapes of the first training, because the rounding depends on the shapes. The teacher is the
    one of this ``row`` of the chunk.
    """

    chunk: Chunk
    row: int
    task: TrainingTask

    def __call__(self, blank_ensemble: TeacherEnsemble, place: int, public_x: Tensor) -> bytes:
        """PRIVATE. Train the teacher, and return its parameters and probabilities as bytes."""
        device = self.task.device
        with deterministic_mode(device), single_thread_mode(device.type == "cpu"):
            result = train_launch(self.task, self.chunk)
        for name, value in result.params.items():
            blank_ensemble.groups[0][name][place] = value[self.row]
        blank_ensemble.trained_K[place] = bool(self.chunk.size_k[self.row])
        return _compute_bytes(blank_ensemble, place, public_x, device)


def _compute_bytes(ensemble: TeacherEnsemble, place: int, public_x: Tensor, device: torch.device) -> bytes:
    with deterministic_mode(device), single_thread_mode(device.type == "cpu"):
        probability_PC = ensemble.predict_proba(public_x, device=device)[place]
    tensors = [*(p[place] for p in ensemble.groups[0].values()), probability_PC]
    return b"".join(value.contiguous().numpy().tobytes() for value in tensors)
