"""PRIVATE. Groups of teachers, the units of work. A worker of any executor trains a group and counts its votes.

The parameters and the counts of a group lie in two files of a private folder, and are not computed again where the
files are found. Workers inherit the records in memory, or read those of their group from the folder. Nothing else that
a worker receives or returns depends on a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from pate_torch.core import checks, files, ranks
from pate_torch.core.device import Device, describe_processor, deterministic_mode, single_thread_mode
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.teachers.engine import CURVES, Chunk, ChunkSource, TrainingTask, train_launches
from pate_torch.teachers.ensemble import TeacherEnsemble, VoteFunction

RECORDS_KEY = "__records__"
"""Name of the tensor with a hash of the group's records, in each of its files."""


@dataclass(frozen=True, eq=False, repr=False)
class VoteRequest:
    """Request for the votes of all teachers: public points, and the way in which every teacher votes on them.

    ``vote`` labels all points together. It is None if a teacher votes on each point independently. ``bins`` is the
    number of bins in which class probabilities are counted, or None to count votes. ``variant`` is a key of ``vote``.
    """

    x: Tensor
    vote: VoteFunction | None = None
    bins: int | None = None
    variant: str = ""

    def count(
        self, ensemble: TeacherEnsemble, device: Device = "cpu", progress: Progress = do_nothing
    ) -> Votes | SoftVotes:
        """PRIVATE. Count the votes of an ensemble, or its class probabilities."""
        if self.bins is not None:
            return ensemble.tally_probabilities(self.x, self.bins, device, progress)
        return Votes(ensemble.tally(self.x, device, progress, self.vote), len(ensemble))


@dataclass(frozen=True, eq=False, repr=False)
class Manifest:
    """Public settings that decide the groups of one training.

    The two keys are hashes of all that decides the parameters, and the counts, besides the records. ``request`` has no
    points. ``progress_file`` holds the finished share of each teacher's training, float32 [K].
    """

    folder: Path
    task: TrainingTask
    request: VoteRequest
    teachers_key: str
    votes_key: str
    progress_file: Path

    @classmethod
    def make(cls, folder: Path, task: TrainingTask, request: VoteRequest) -> Manifest:
        """Make the manifest, which is the same on all ranks. Raise ValueError if their processors differ."""
        if len(kinds := set(ranks.gather_objects(task.processor))) > 1:
            raise checks.error("device", ", ".join(sorted(kinds)), "must be of one kind on all ranks")
        facts = task.network, task.spec.to_dict(), asdict(task.recipe), task.seed, task.launch_size, task.processor
        request_facts = files.compute_tensor_digest(request.x), request.bins, request.variant
        folder, rank = files.create_private_folder(folder), ranks.get_world().rank
        keys, request = (_hash(*facts), _hash(*facts, *request_facts)), replace(request, x=torch.zeros(0))
        return cls(folder, task, request, *keys, folder / f"progress_{rank}")


_inherited_inputs: dict[Path, tuple[ChunkSource, Tensor]] = {}
"""PRIVATE. Sources of the records, and the points, by folder. Forked workers inherit them."""


@contextlib.contextmanager
def provide_inputs(
    folder: Path, groups: list[range], get_chunk: ChunkSource, x: Tensor, *, by_files: bool
) -> Iterator[None]:
    """PRIVATE. Provide workers with the records of each group and the points, in memory or also ``by_files``."""
    written = {group: _get_records_file(folder, group) for group in groups if by_files}
    try:
        _inherited_inputs[folder] = get_chunk, x
        for group, file in written.items():
            _write(file, _get_tensors(get_chunk(group)))
        if by_files:
            _write(folder / "points.safetensors", {"x": x})
        yield
    finally:
        del _inherited_inputs[folder]
        for file in written.values():
            file.unlink(missing_ok=True)


def train_group(manifest: Manifest, group: range, on_progress: Callable[[], object] = do_nothing) -> tuple[str, str]:
    """PRIVATE. Train a group and count its votes, unless this was done. Return the names of the two files.

    ``on_progress`` is called when ``manifest.progress_file`` has changed. Raise ValueError if this processor is of
    another kind than the main process's.
    """
    task, folder = manifest.task, manifest.folder
    if (processor := describe_processor(task.device)) != task.processor:
        problem = f"is the processor of a worker, but the main process has {task.processor}"
        raise checks.error("executor", processor, problem, "Use workers with processors and software of one kind.")
    if folder in _inherited_inputs:
        get_chunk, x = _inherited_inputs[folder]
        chunk = get_chunk(group)
    else:
        chunk = Chunk(group.start, **files.read_tensors(_get_records_file(folder, group)))
        x = files.read_tensors(folder / "points.safetensors")["x"]
    records_hash = _hash(*map(files.compute_tensor_digest, _get_tensors(chunk).values()))

    def report_share(share: float) -> None:
        np.memmap(manifest.progress_file, np.float32, "r+", 4 * group.start, len(group))[:] = share
        on_progress()

    def read_or_compute(kind: str, key: str, compute: Callable[[], dict[str, Tensor]]) -> tuple[str, dict[str, Tensor]]:
        name = f"{kind}_{group.start:06d}_{_hash(key, len(group))}.safetensors"
        with contextlib.suppress(ValueError, KeyError):  # the file is missing or damaged
            tensors = files.read_tensors(folder / name)
            if bytes(tensors.pop(RECORDS_KEY).tolist()).hex() == records_hash:
                return name, tensors
        tensors = compute()
        _write(folder / name, {**tensors, RECORDS_KEY: torch.tensor(list(bytes.fromhex(records_hash)))})
        return name, tensors

    def count() -> dict[str, Tensor]:
        params = {name: value for name, value in tensors.items() if name not in CURVES}
        ensemble = TeacherEnsemble(task.network, [params], chunk.size_k > 0, task.spec)
        return _get_tensors(replace(manifest.request, x=x).count(ensemble, task.device))

    with deterministic_mode(task.device), single_thread_mode(task.device.type == "cpu"):
        train = lambda: train_launches(task, chunk, report_share)  # noqa: E731
        teachers_name, tensors = read_or_compute("teachers", manifest.teachers_key, train)
        return teachers_name, read_or_compute("votes", manifest.votes_key, count)[0]


class GroupTally:
    """PRIVATE. Files of the counts of all groups, each of which is counted once, by its first result."""

    def __init__(self, manifest: Manifest, num_teachers: int) -> None:
        self.manifest, self.num_teachers = manifest, num_teachers
        self.name_by_group: dict[tuple[str, range], str] = {}

    def add(self, votes_key: str, group: range, name: str) -> None:
        """Add the file of a group of the training with this key, unless the group has one already."""
        self.name_by_group.setdefault((votes_key, group), name)

    def sum_counts(self) -> Votes | SoftVotes:
        """PRIVATE. Sum the counts. Under torchrun, every rank adds its groups and receives the sum over all ranks.

        Raise ValueError if a teacher is missing or counted twice, or if counts belong to another training.
        """
        keys = [key for part in ranks.gather_objects(list(self.name_by_group)) for key in part]
        teachers = sorted(teacher for _, group in keys for teacher in group)
        if teachers != list(range(self.num_teachers)) or {key for key, _ in keys} != {self.manifest.votes_key}:
            problem = "every teacher must be counted once, in groups of one training"
            raise checks.error("votes", f"{len(teachers)} of {self.num_teachers} teachers", problem, "Start again.")
        totals = dict[str, Tensor]()
        for file_name in self.name_by_group.values():
            counts = files.read_tensors(self.manifest.folder / file_name)
            del counts[RECORDS_KEY]
            totals = {name: value.int() + totals.get(name, 0) for name, value in counts.items()}
        shapes = next(filter(None, ranks.gather_objects({name: value.shape for name, value in totals.items()})))
        for name, shape in shapes.items():  # a rank without groups adds zeros
            ranks.add_over_ranks(totals.setdefault(name, torch.zeros(shape, dtype=torch.int32)))
        kind: Callable[..., Votes | SoftVotes] = Votes if self.manifest.request.bins is None else SoftVotes
        return kind(**totals, num_teachers=self.num_teachers)


def _hash(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _get_records_file(folder: Path, group: range) -> Path:
    return folder / f"records_{group.start:06d}.safetensors"


def _get_tensors(value: Chunk | Votes | SoftVotes) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in vars(value).items() if isinstance(tensor, Tensor)}


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    with files.atomic_replacement(file) as temporary:
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary)
