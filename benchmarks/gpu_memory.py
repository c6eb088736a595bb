"""Bytes that teachers take on a GPU, counted on the meta device, and what a launch of ``teachers.launch`` takes.

    python benchmarks/gpu_memory.py

Counted: the storages alive at the peak of one forward and backward pass of stacked teachers (convolutions as batched
products, as on a GPU), with the optimizer's moments; and of one forward pass that asks them. The meta device computes
nothing, so this runs anywhere. What the allocator leaves between blocks is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import measuring
from pate_torch import networks
from pate_torch.teachers import ensemble, stacked, training
from pate_torch.teachers.recipe import TeacherRecipe

NETWORKS = ("logistic", "mlp", "lean_cnn", "convnet", "resnet")
PIXELS = {28: 1, 32: 3, 64: 3, 224: 3}
"""Width of the images, and their channels."""


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and their largest sum."""

    def __init__(self, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {value.untyped_storage()._cdata: 0 for value in known.values()}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.drop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def drop(self, storage: int) -> None:
        self.now -= self.alive.pop(storage, 0)


def row(network: str, size: int, batch: int) -> list[str]:
    teachers, points, shape = 4, 16, (PIXELS[size], size, size)
    spec = measuring.make_spec(shape, 10, mean=0.5, std=0.5)
    recipe = TeacherRecipe(network=network, batch_size=batch)
    module = networks.build(network, shape, 10)
    params = {name: torch.empty(teachers, *p.shape, device="meta") for name, p in module.named_parameters()}
    with torch.no_grad(), Peak(params) as asked:
        stacked.forward(module, params, torch.empty(points, 1, *shape, device="meta"))
    params = {name: value.requires_grad_() for name, value in params.items()}
    with Peak(params) as trained:
        stacked.forward(module, params, torch.empty(batch, teachers, *shape, device="meta")).sum().backward()
    num_parameters = networks.count_parameters(module)
    train, ask = trained.peak / teachers + 12 * num_parameters, asked.peak / teachers + 4 * num_parameters
    launched = training.compute_launch_size(recipe, num_parameters, spec, 10_000, torch.device("cuda"))
    together = ensemble.compute_gpu_points(spec)
    mib, gib = 2**20, 2**30
    return [
        network,
        f"{size} x {size} x {PIXELS[size]}",
        f"{train / mib:.1f}",
        f"{launched}",
        f"{launched * train / gib:.1f}",
        f"{ask / points / mib:.3f}",
        f"{training.GROUP_TEACHERS} x {together}",
        f"{training.GROUP_TEACHERS * together * ask / points / gib:.1f}",
    ]


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    chosen = parser.parse_args()
    stacked.MATMUL_DEVICES.add("meta")
    print("| network | points | training, MiB a teacher | teachers of a launch | GiB of a launch "
          "| querying, MiB a teacher and point | teachers x points | GiB |")  # fmt: skip
    print("|---" * 8 + "|")
    for network in NETWORKS:
        for size in PIXELS:
            print("| " + " | ".join(row(network, size, chosen.batch)) + " |", flush=True)


if __name__ == "__main__":
    main()
