"""Teachers dealt to 1, 2 and 4 ranks by torchrun (gloo, one thread each): time and parallel efficiency.

    python benchmarks/scaling.py [--json] [--ranks 1 2 4] [--teachers 64]

Times are those of ``train`` on rank 0, gathering included, starting Python and torch excluded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import measuring


def rank(teachers: int, steps: int, folder: Path) -> None:
    import torch

    from pate_torch.core import ranks
    from pate_torch.core.executors import Workers
    from pate_torch.teachers.recipe import TeacherRecipe
    from pate_torch.teachers.training import train

    torch.set_num_threads(1)
    spec = measuring.make_spec((1, 28, 28), 10, mean=0.1, std=0.3)
    private, shards = measuring.make_shards_of_images(teachers, 240)
    options = {"seed": 0, "executor": Workers(workers=1, chunk=8), "folder": folder}
    train(private, spec, shards, TeacherRecipe(steps=2), **options)  # warm-up
    ranks.broadcast_object()  # waits for the slowest rank
    start = time.perf_counter()
    train(private, spec, shards, TeacherRecipe(steps=steps), **options)
    if ranks.is_main():
        print(json.dumps({"seconds": time.perf_counter() - start}))


def run(ranks: int, teachers: int, steps: int) -> float:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    with tempfile.TemporaryDirectory() as folder:
        words = ("--rank", folder, "--teachers", teachers, "--steps", steps)
        return float(measuring.run_script(__file__, *words, launcher=launcher)["seconds"])


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--teachers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.teachers, args.steps, args.rank)
        return
    times: dict[int, list[float]] = {ranks: [] for ranks in args.ranks}
    for _ in range(args.repeats):  # interleaved, so that all meet the same state of the machine
        for ranks in args.ranks:
            times[ranks].append(run(ranks, args.teachers, args.steps))
    one = args.ranks[0]
    rows = []
    for ranks in args.ranks:
        speedup = measuring.compute_speedup(times[one], times[ranks])
        efficiency = speedup * one / ranks
        rows.append({"ranks": ranks, "seconds": statistics.median(times[ranks]), "efficiency": efficiency})
        if not args.json:
            print(f"{ranks} ranks {rows[-1]['seconds']:7.2f} s   {speedup:4.2f}x   efficiency {efficiency:.2f}")
    if args.json:
        json.dump({"load": os.getloadavg()[0], "rows": rows}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
