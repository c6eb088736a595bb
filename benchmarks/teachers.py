"""Training K teachers: this engine against a well-written sequential loop, in one run on one machine.

    python benchmarks/teachers.py [--json] [--teachers 48 250] [--networks logistic mlp lean_cnn lean_cnn+augment]

The loop is plain PyTorch as one would write it with care: every shard preloaded, normalized and in memory once, a fused
optimizer, no data loader, all cores as threads. Teachers are independent, so it is timed on a few of them (after a
warm-up) and scaled. The engine is timed whole, starting its worker processes included. Records are random images:
time does not depend on what is in them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks import measuring
from pate_torch import networks
from pate_torch.features.augmentation import Affine, warp
from pate_torch.privacy.records import PrivateRecords, Shards
from pate_torch.teachers.engine import gather_chunk, train_stacked
from pate_torch.teachers.training import TeacherRecipe, compute_launch_size, train

SHARD = 240
SPEC = measuring.make_spec((1, 28, 28), 10, mean=0.1307, std=0.3081)
AFFINE = Affine(rotate=12, scale=0.12, shift=2.5, shear=7)


def sequential(
    recipe: TeacherRecipe,
    private: PrivateRecords,
    shards: Shards,
    teachers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds for one teacher, the mean of ``teachers`` after one for warming up."""
    marks = []
    for k in range(teachers + 1):
        x = private.x[shards.get_indices(k)].float() / 255
        x = x if recipe.augment else SPEC.normalize(x)
        y = private.y[shards.get_indices(k)]
        module = networks.build(recipe.network, SPEC.input_shape, SPEC.num_classes, **recipe.options)
        optimizer = torch.optim.Adam(module.parameters(), lr=recipe.learning_rate, fused=True)
        marks.append(clock())
        step = 0
        while step < recipe.steps:
            for index in torch.randperm(SHARD).split(recipe.batch_size):
                if len(index) < recipe.batch_size or step == recipe.steps:
                    continue
                batch = x[index]
                if recipe.augment:
                    theta = recipe.augment.draw(len(index), SPEC.input_shape, torch.default_generator)
                    batch = SPEC.normalize(warp(batch, theta))
                optimizer.param_groups[0]["lr"] = recipe.compute_learning_rate(step)
                loss = F.cross_entropy(module(batch), y[index], label_smoothing=recipe.label_smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                step += 1
    marks.append(clock())
    return (marks[-1] - marks[1]) / teachers


def measure_core(case: str, teachers: int, steps: int, repeats: int, sample: int) -> dict[str, object]:
    """Processor time of one core per step of one teacher: one-thread loop against one chunk. Other programs on the
    machine disturb it little, and it leaves out what processes and threads add or cost."""
    network, _, augmented = case.partition("+")
    recipe = TeacherRecipe(network=network, steps=steps, augment=AFFINE if augmented else None)
    module = networks.build(recipe.network, SPEC.input_shape, SPEC.num_classes)
    size = compute_launch_size(recipe, networks.count_parameters(module), SPEC, teachers, torch.device("cpu"))
    private, shards = measuring.make_shards_of_images(max(size, sample + 1), SHARD)
    chunk = gather_chunk(private, shards, range(size))
    loop, ours = [], []
    for _ in range(repeats):
        loop.append(sequential(recipe, private, shards, sample, time.process_time) / steps)
        seconds = measuring.measure_seconds(lambda: train_stacked(chunk, SPEC, recipe, 0, torch.device("cpu")))
        ours.append(seconds / steps / size)
    return {
        "case": case,
        "teachers": teachers,
        "chunk": size,
        "sequential_s": statistics.median(loop),
        "engine_s": statistics.median(ours),
        "speedup": measuring.compute_speedup(loop, ours),
    }


def measure(case: str, teachers: int, steps: int, repeats: int, sample: int) -> dict[str, object]:
    network, _, augmented = case.partition("+")
    recipe = TeacherRecipe(network=network, steps=steps, augment=AFFINE if augmented else None)
    private, shards = measuring.make_shards_of_images(teachers, SHARD)
    loop, ours = [], []
    for _ in range(repeats):  # one after the other, so that both meet the same state of the machine
        loop.append(teachers * sequential(recipe, private, shards, min(sample, teachers - 1)))
        ours.append(measuring.measure_seconds(lambda: train(private, SPEC, shards, recipe, seed=0), time.perf_counter))
    return {
        "case": case,
        "teachers": teachers,
        "steps": steps,
        "sequential_s": statistics.median(loop),
        "engine_s": statistics.median(ours),
        "speedup": measuring.compute_speedup(loop, ours),
    }


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--teachers", type=int, nargs="+", default=[48, 250])
    parser.add_argument("--networks", nargs="+", default=["logistic", "mlp", "lean_cnn", "lean_cnn+augment"])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sample", type=int, default=3, help="teachers the sequential loop is timed on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the sequential loop")
    parser.add_argument(
        "--per-core", action="store_true", help="processor time of one core; steadier on a busy machine"
    )
    args = parser.parse_args()
    torch.set_num_threads(1 if args.per_core else args.threads)
    rows = []
    for case in args.networks:
        for teachers in args.teachers:
            load = os.getloadavg()[0]
            row = (measure_core if args.per_core else measure)(
                case, teachers, args.steps, args.repeats, args.sample
            ) | {"load_before": round(load, 1)}
            rows.append(row)
            if not args.json:
                unit, factor = ("ms per step", 1e3) if args.per_core else ("s", 1.0)
                print(
                    f"{case:18s} K={teachers:<5d} loop {factor * float(row['sequential_s']):8.2f} {unit}"
                    f"   engine {factor * float(row['engine_s']):8.2f} {unit}"
                    f"   {row['speedup']:5.2f}x   (load before: {load:.1f})",
                    flush=True,
                )
    if args.json:
        json.dump({"threads": torch.get_num_threads(), "rows": rows}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
