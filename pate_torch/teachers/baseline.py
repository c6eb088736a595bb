"""PRIVATE. One network trained on every private record, without privacy, to compare with.

It spends nothing because it is shown to nobody but the owner, or belongs to a public benchmark.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pate_torch import networks
from pate_torch.core.progress import Stages
from pate_torch.privacy.records import Dataset, Shards
from pate_torch.students.base import Student
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train


def train_on_all(
    data: Dataset, recipe: TeacherRecipe, *, seed: int, device: torch.device, stages: Stages
) -> TeacherEnsemble:
    """PRIVATE. An ensemble of one, in larger batches; every rank of a torchrun takes part."""
    count = len(data.private)
    single_shard = Shards(torch.arange(count)[None], torch.ones(1, count, dtype=torch.bool), "replace_one")
    recipe = dataclasses.replace(recipe, batch_size=max(recipe.batch_size, min(128, count)))
    trunk = distributed.learn_public_trunk(recipe, data.pool, data.spec, seed, device, stages)
    progress = stages("Training a model without privacy")
    return train(
        data.private, data.spec, single_shard, recipe, seed=seed, device=device, trunk=trunk, progress=progress
    )


def compute_first_logits(ensemble: TeacherEnsemble, x: Tensor) -> Tensor:
    """PRIVATE. Logits, float32 [B, C], of the first teacher on raw points."""
    spec = ensemble.spec
    if ensemble.trunk is not None:
        x, spec = ensemble.trunk.compute_features(x, "cpu"), ensemble.trunk.spec
    module = networks.rebuild(ensemble.network)
    module.load_state_dict({name: parameter[0].float() for name, parameter in ensemble.params.items()})
    return Student(ensemble.network, module, spec).compute_logits(x)
