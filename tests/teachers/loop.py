"""Teachers trained one after the other: the plain program that the stacked engine is compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core.progress import do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.engine import Chunk, Feed, ShareCallback, TrainedChunk, _train_params, _zero_empty_teachers
from pate_torch.teachers.recipe import TeacherRecipe


def train_loop(
    chunk: Chunk,
    spec: DataSpec,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    tell: ShareCallback = do_nothing,
) -> TrainedChunk:
    """PRIVATE. Train one teacher after the other: the plain program, the reference of the stacked engine."""
    done: list[TrainedChunk] = []
    for row, teacher in enumerate(chunk.teachers):
        alone = Chunk(teacher, *(t[row : row + 1] for t in (chunk.x_kS, chunk.y_kS, chunk.size_k)))
        module: nn.Module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
        networks.initialize(module, make_torch_generator(seed, "teacher", teacher, "init"))
        module.to(device, recipe.torch_dtype)
        feed = Feed(alone, spec, recipe, seed, device)

        def forward(x: Tensor, module: nn.Module = module) -> Tensor:
            with arithmetic(recipe, device):
                return module(x[:, 0])[None]

        loss, accuracy = _train_params(forward, list(module.parameters()), feed, recipe, device, do_nothing)
        params = {name: p.detach().cpu()[None] for name, p in module.named_parameters()}
        done.append(_zero_empty_teachers(params, alone, loss, accuracy))
        if row + 1 < len(chunk):
            tell((row + 1) / len(chunk))
    params = {name: torch.cat([one.params[name] for one in done]) for name in done[0].params}
    return TrainedChunk(
        params, torch.cat([one.loss_Pk for one in done], 1), torch.cat([one.accuracy_Pk for one in done], 1)
    )


def arithmetic(recipe: TeacherRecipe, device: torch.device) -> AbstractContextManager[object]:
    """A context of bfloat16 arithmetic where the recipe asks for it."""
    if recipe.dtype == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
