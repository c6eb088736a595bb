"""Small private sets, shards and recipes for the tests of teachers."""

import dataclasses

import numpy as np
import torch

from pate_torch.core.executors import Workers
from pate_torch.features.augmentation import Affine
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import Identity, TeacherStore


def spec(classes: int = 4, size: int = 12) -> DataSpec:
    names = tuple(str(c) for c in range(classes))
    return DataSpec(
        name="squares", num_classes=classes, input_shape=(1, size, size), class_names=names, mean=(0.3,), std=(0.4,)
    )


def records(count: int, classes: int = 4, size: int = 12, seed: int = 0) -> PrivateRecords:
    """Images whose class is the quadrant with a bright square, plus noise."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=draw)
    x = torch.randint(90, (count, 1, size, size), generator=draw, dtype=torch.uint8)
    half = size // 2
    for i, label in enumerate(y.tolist()):
        row, column = divmod(label % 4, 2)
        x[i, 0, row * half : row * half + half, column * half : column * half + half] += 120
    return PrivateRecords.from_rows(x, y, np.arange(count).astype(str))


def shards_of(rows: list[list[int]], adjacency: str = "add_remove") -> Shards:
    width = max(1, *map(len, rows))
    index = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    return Shards(index, index >= 0, adjacency)


def even_shards(num_teachers: int, size: int) -> Shards:
    """As many records for each: the first ones to the first teacher, and so on."""
    return shards_of([list(range(k * size, k * size + size)) for k in range(num_teachers)])


def recipe(**changes: object) -> TeacherRecipe:
    base = {"network": "lean_cnn", "options": {"channels": [4, 8], "hidden": 16}, "label_smoothing": 0.0}
    base |= {"augment": Affine(rotate=10, scale=0.1, shift=1, shear=5), "steps": 12, "batch_size": 8}
    base |= {"learning_rate": 5e-3}
    return TeacherRecipe(**(base | changes))  # type: ignore[arg-type]


def processes(workers: int = 1, chunk: int = 3) -> Workers:
    """Three teachers at once, in this process."""
    return Workers(workers=workers, chunk=chunk)


def identity_of(store: TeacherStore, private: PrivateRecords, **changes: object) -> Identity:
    """What decides two teachers of these records, but for ``changes``."""
    base = {"dataset": "squares", "fingerprint": store.compute_fingerprint(private), "seed": 0, "num_teachers": 2}
    parts = {"partition": {"name": "add_remove", "sizes": (1, 2)}, "configuration": dataclasses.asdict(recipe())}
    return Identity(**(base | parts | changes))  # type: ignore[arg-type]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[int]:
    """Teachers whose parameters are not the same bits."""
    assert a.keys() == b.keys()
    teachers = len(next(iter(a.values())))
    return {k for k in range(teachers) for name in a if not torch.equal(a[name][k], b[name][k])}


def select(ensemble: TeacherEnsemble, teachers: slice) -> TeacherEnsemble:
    """An ensemble of some of the teachers."""
    params = {name: p[teachers] for name, p in ensemble.params.items()}
    return dataclasses.replace(ensemble, groups=[params], trained_K=ensemble.trained_K[teachers])
