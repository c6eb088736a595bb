"""Teachers trained one after the other: the plain program that the stacked engine is compared with."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core.rng import make_torch_generator
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.engine import Chunk, TrainedChunk, train_params
from pate_torch.teachers.recipe import TeacherRecipe


def train_loop(chunk: Chunk, spec: DataSpec, recipe: TeacherRecipe, seed: int, device: torch.device) -> TrainedChunk:
    """PRIVATE. Train one teacher after the other, each as a module of its own."""
    results: list[TrainedChunk] = []
    for row, teacher in enumerate(chunk.teachers):
        own_chunk = Chunk(teacher, *(t[row : row + 1] for t in (chunk.x_kS, chunk.y_kS, chunk.size_k)))
        module: nn.Module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
        networks.initialize(module, make_torch_generator(seed, "teacher", teacher, "init"))
        module.to(device, recipe.torch_dtype)

        params = {name: p.detach()[None] for name, p in module.named_parameters()}

        def forward(x: Tensor, module: nn.Module = module, params: dict[str, Tensor] = params) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16) if recipe.dtype == "bf16" else nullcontext():
                return torch.func.functional_call(module, {n: p[0] for n, p in params.items()}, (x[:, 0],))[None]

        results.append(train_params(forward, params, own_chunk, spec, recipe, seed, device))
    params, curves = (
        {name: torch.cat([rows[name] for rows in parts]) for name in parts[0]}
        for parts in ([one.params for one in results], [one.curves for one in results])
    )
    return TrainedChunk(params, curves)
