"""PRIVATE. Finished chunks of an interrupted training, one file each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.torch import save_file

from pate_torch.core.files import content, private_folder, read_tensors, replacing
from pate_torch.teachers.engine import Chunk, Trained
from pate_torch.teachers.recipe import TeacherRecipe


class Checkpoints:
    """A folder of chunks, each file named by what decides its result (records, recipe, seed): a stale one is not found.

    Args:
        folder: PRIVATE. The folder for the files.
        recipe: Recipe of the teachers.
        seed: Seed of their training.
    """

    def __init__(self, folder: Path, recipe: TeacherRecipe, seed: int) -> None:
        self.folder = private_folder(Path(folder))
        self.decides = json.dumps([recipe.configuration(), seed], sort_keys=True)

    def _path(self, chunk: Chunk) -> Path:
        state = hashlib.sha256(self.decides.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(content(tensor))
        return self.folder / f"chunk_{chunk.first:05d}_{state.hexdigest()[:32]}.safetensors"

    def load(self, chunk: Chunk) -> Trained | None:
        """The trained chunk, or None; a damaged file is trained again rather than trusted."""
        path = self._path(chunk)
        if not path.exists():
            return None
        try:
            tensors = read_tensors(path)
            loss, accuracy = tensors.pop("curve.loss"), tensors.pop("curve.accuracy")
        except (ValueError, KeyError):
            return None
        return Trained(tensors, loss, accuracy)

    def save(self, chunk: Chunk, trained: Trained) -> None:
        """Write a chunk beside and rename it: a run killed here leaves no half a chunk."""
        tensors = trained.params | {"curve.loss": trained.loss_Pk, "curve.accuracy": trained.accuracy_Pk}
        with replacing(self._path(chunk)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
