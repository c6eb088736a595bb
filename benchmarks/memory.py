"""Peak memory of training and voting per teacher, for up to 5,000 teachers.

    python benchmarks/memory.py [--json] [--networks logistic lean_cnn] [--teachers 250 1000 5000] [--queries 10000]

Each case runs in a process of its own. Bytes per teacher are the peak resident memory above that of the same program
with its data loaded and before training; beside them the bytes of one teacher's parameters, the least there can be.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks import measuring


def one(network: str, teachers: int, queries: int) -> dict[str, object]:
    import torch

    from pate_torch.core.rng import make_torch_generator
    from pate_torch.privacy.records import Shards
    from pate_torch.teachers.recipe import TeacherRecipe
    from pate_torch.teachers.training import train

    spec = measuring.make_spec((1, 28, 28), 10, mean=0.1, std=0.3)
    private, shards = measuring.make_shards_of_images(teachers, 12)
    draw = make_torch_generator(0, "benchmark", "memory")
    public = torch.randint(256, (queries, 1, 28, 28), dtype=torch.uint8, generator=draw)
    recipe, index = TeacherRecipe(network=network, steps=3), shards.index_KS[:8]
    torch.set_num_threads(1)
    train(private, spec, Shards(index, index >= 0, "replace_one"), recipe, seed=0)
    before = measuring.get_peak_bytes()
    ensemble = train(private, spec, shards, recipe, seed=0)
    trained = measuring.get_peak_bytes()
    ensemble.count_votes(public)
    own = sum(p[0].numel() * p.element_size() for p in ensemble.params.values())
    return {
        "network": network,
        "teachers": teachers,
        "parameter_bytes": own,
        "training_bytes_per_teacher": round((trained - before) / teachers),
        "voting_extra_mib": round((measuring.get_peak_bytes() - trained) / 2**20, 1),
    }


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--networks", nargs="+", default=["logistic", "lean_cnn"])
    parser.add_argument("--teachers", type=int, nargs="+", default=[250, 1000, 5000])
    parser.add_argument("--queries", type=int, default=10_000, help="public points voted on")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "TEACHERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.queries)))
        return
    rows = []
    for network in args.networks:
        for teachers in args.teachers:
            rows.append(measuring.run_script(__file__, f"--queries={args.queries}", "--one", network, teachers))
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
