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
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.device import deterministic_mode, single_thread_mode
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.engine import Chunk, TrainingTask, gather_chunk, train_stacked
from pate_torch.teachers.ensemble import CPU_TEACHERS, TeacherEnsemble
from pate_torch.teachers.recipe import TeacherRecipe

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
    environment = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, "-c", "from pate_torch.teachers import independence; independence.run_received_work()"],
        input=pickle.dumps((sys.path, torch.get_num_threads())) + pickle.dumps((work_bytes, arguments)),
        capture_output=True,
        env=environment,
        check=False,
    )
    failure = f"exit code {process.returncode}", None
    error, result = pickle.loads(process.stdout) if process.returncode == 0 else failure
    if error:
        fix = "Define the teacher in a module that any process can import, without objects that only this process has."
        raise checks.error("teacher", "your teacher", f"cannot be trained again in a fresh process ({error})", fix)
    return result


def run_received_work() -> None:
    """Do the work that comes from the standard input, and write the result to the standard output."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # the work prints to the standard error, which is not shown
        paths, threads = pickle.load(sys.stdin.buffer)
        sys.path[:] = paths
        torch.set_num_threads(threads)
        work_bytes, arguments = pickle.load(sys.stdin.buffer)
        try:
            work = pickle.loads(work_bytes)
        except Exception as error:  # raised before a record was unpickled, so the message is safe
            out.write(pickle.dumps((f"{type(error).__name__}: {error}", None)))
            return
        try:
            out.write(pickle.dumps((None, work(*arguments))))
        except Exception as error:  # the message may quote a record
            out.write(pickle.dumps((type(error).__name__, None)))


@dataclass(frozen=True, eq=False, repr=False)
class Trial:
    """PRIVATE. Comparison of one teacher of an ensemble with its second training."""

    ensemble: TeacherEnsemble
    teacher: int
    retraining: Retraining

    @classmethod
    def draw(cls, ensemble: TeacherEnsemble, launches: Sequence[range], task: TrainingTask) -> Trial:
        """Draw a teacher from these launches, but not the first one, because it was trained before all others."""
        candidates = [(launch, teacher) for launch in launches for teacher in launch]
        launch, teacher = draw_candidate(candidates[1:] or candidates)
        row, own_chunk = teacher - launch.start, gather_chunk(task.private, task.shards, range(teacher, teacher + 1))
        own_tensors = own_chunk.x_kS, own_chunk.y_kS, own_chunk.size_k
        x_kS, y_kS, size_k = (value.new_zeros(len(launch), *value.shape[1:]) for value in own_tensors)
        x_kS[row], y_kS[row], size_k[:], size_k[row] = own_chunk.x_kS[0], own_chunk.y_kS[0], 1, own_chunk.size_k[0]
        chunk = Chunk(launch.start, x_kS, y_kS, size_k)
        return cls(ensemble, teacher, Retraining(chunk, row, task.spec, task.recipe, task.seed, task.device))

    def run(self, public_x: Tensor, device: torch.device) -> None:
        """Raise ValueError unless a second training gives the same parameters and probabilities on public points."""
        place = self.teacher % CPU_TEACHERS
        group = self.ensemble.select(slice(self.teacher - place, self.teacher - place + CPU_TEACHERS))
        expected_bytes = _compute_bytes(group, place, public_x, device)
        params = {name: torch.zeros_like(p) for name, p in group.params.items()}
        blank_ensemble = dataclasses.replace(group, params=params, trained_K=torch.zeros_like(group.trained_K))
        work = pickle.dumps(self.retraining)
        if call_in_fresh_process(work, blank_ensemble, place, public_x) != expected_bytes:
            raise dependence_error(len(self.ensemble))


@dataclass(frozen=True, eq=False, repr=False)
class Retraining:
    """PRIVATE. Launch with the shapes of the first training, in which all other teachers have one blank record.

    The shapes are the same, because the rounding depends on them. ``row`` is the row of the teacher in the launch.
    """

    chunk: Chunk
    row: int
    spec: DataSpec
    recipe: TeacherRecipe
    seed: int
    device: torch.device

    def __call__(self, blank_ensemble: TeacherEnsemble, place: int, public_x: Tensor) -> bytes:
        """PRIVATE. Train the teacher, and return its parameters and probabilities as bytes."""
        with deterministic_mode(self.device), single_thread_mode(self.device.type == "cpu"):
            result = train_stacked(self.chunk, self.spec, self.recipe, self.seed, self.device)
        for name, value in result.params.items():
            blank_ensemble.params[name][place] = value[self.row]
        blank_ensemble.trained_K[place] = bool(self.chunk.size_k[self.row])
        return _compute_bytes(blank_ensemble, place, public_x, self.device)


def _compute_bytes(ensemble: TeacherEnsemble, place: int, public_x: Tensor, device: torch.device) -> bytes:
    with deterministic_mode(device), single_thread_mode(device.type == "cpu"):
        probability_PC = ensemble.predict_proba(public_x, device=device)[place]
    tensors = [*(p[place] for p in ensemble.params.values()), probability_PC]
    return b"".join(value.contiguous().numpy().tobytes() for value in tensors)
