"""Peak memory of training and voting per teacher, for up to 5,000 teachers.

    python benchmarks/memory.py [--json] [--networks logistic lean_cnn] [--teachers 250 1000 5000] [--queries 10000]

Each case runs in a process of its own. Bytes per teacher are the peak resident memory above that of the same program
with its data loaded and before training; beside them the bytes of one teacher's parameters, the least there can be.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys


def peak() -> int:
    """Peak resident bytes of this process and of the largest of its workers."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one(network: str, teachers: int, queries: int) -> dict[str, object]:
    import numpy as np
    import torch

    from pate_torch.core.rng import make_torch_generator
    from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
    from pate_torch.teachers.recipe import TeacherRecipe
    from pate_torch.teachers.training import train

    names = tuple("0123456789")
    spec = DataSpec(name="random", num_classes=10, input_shape=(1, 28, 28), class_names=names, mean=(0.1,), std=(0.3,))
    count = 12 * teachers
    draw = make_torch_generator(0, "benchmark", "memory")
    x = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=draw)
    index = torch.arange(count).view(teachers, 12)
    private = PrivateRecords.from_rows(x, torch.randint(10, (count,), generator=draw), np.arange(count).astype(str))
    public = torch.randint(256, (queries, 1, 28, 28), dtype=torch.uint8, generator=draw)
    recipe = TeacherRecipe(network=network, steps=3)
    few = Shards(index[:8], index[:8] >= 0, "replace_one")
    torch.set_num_threads(1)
    train(private, spec, few, recipe, seed=0)
    before = peak()
    ensemble = train(private, spec, Shards(index, index >= 0, "replace_one"), recipe, seed=0)
    trained = peak()
    ensemble.count_votes(public)
    own = sum(p[0].numel() * p.element_size() for p in ensemble.params.values())
    return {
        "network": network,
        "teachers": teachers,
        "parameter_bytes": own,
        "training_bytes_per_teacher": round((trained - before) / teachers),
        "voting_extra_mib": round((peak() - trained) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["logistic", "lean_cnn"])
    parser.add_argument("--teachers", type=int, nargs="+", default=[250, 1000, 5000])
    parser.add_argument("--queries", type=int, default=10_000, help="public points voted on")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "TEACHERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.queries)))
        return
    rows = []
    for network in args.networks:
        for teachers in args.teachers:
            command = [sys.executable, __file__, f"--queries={args.queries}", "--one", network, str(teachers)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            if not args.json:
                row = rows[-1]
                print(
                    f"{network:9s} K={teachers:<5d} {row['training_bytes_per_teacher'] / 1e3:8.1f} kB per teacher"
                    f" (parameters {row['parameter_bytes'] / 1e3:.1f} kB)   votes on {args.queries} points:"
                    f" {row['voting_extra_mib']} MiB more",
                    flush=True,
                )
    if args.json:
        json.dump(rows, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
