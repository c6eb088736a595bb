"""How stable on average the shipped learners are (BTT18 Definition 5.7), by the size of a shard.

    PATE_DATA=data python -m benchmarks.learner_stability

Teachers as each data set recommends them, without distortions, and the probability that they give class 1 of 200 points
they have not seen. What Theorem 5.14 asks for is beside it: bins of 16 alpha sqrt(2 n), which say something below 1.
"""

from __future__ import annotations

import json

import numpy as np
from sklearn.datasets import load_digits

from benchmarks import measuring
from benchmarks.sparse_vector import load
from benchmarks.theory.stability import by_teachers, on_average_stability
from pate_torch.core.rng import make_numpy_generator
from pate_torch.teachers.recipe import TeacherRecipe

LEARNERS = {
    "digits": ("logistic", "mlp", "lean_cnn"),
    "mushroom": ("logistic", "mlp"),
    "a9a": ("logistic", "mlp"),
}
POINTS = 200


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "json")
    parser.add_argument("--sets", nargs="+", default=list(LEARNERS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[10, 30, 100, 300, 1000])
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.sets:
        images = name == "digits"
        x, y = load_digits(return_X_y=True) if images else load(name, args.data)
        x = np.rint(x * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8) if images else x.astype(np.float32)
        points, pool = np.split(make_numpy_generator(args.seed, "learner stability").permutation(len(y)), [POINTS])
        spec = measuring.make_spec(x.shape[1:], int(y.max()) + 1, mean=0.5, std=0.5)
        for network in LEARNERS[name]:
            recipe = TeacherRecipe(
                network=network,
                steps=600 if images else 300,
                batch_size=16 if images else 32,
                learning_rate=1e-2 if network == "logistic" else 4e-3,
            )
            fit = by_teachers(recipe, spec, soft=True)
            for n in args.sizes:
                found = on_average_stability(fit, x[pool], y[pool], x[points], n=n, pairs=args.pairs, seed=args.seed)
                row = {
                    "data": name,
                    "learner": network,
                    "n": n,
                    "typical": found.typical,
                    "typical_error": found.typical_error,
                    "worst": found.alpha,
                    "worst_error": found.error,
                    "bins_typical": 16 * found.typical * float(np.sqrt(2 * n)),
                }
                text = "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                )
                print(json.dumps(row) if args.json else text, flush=True)


if __name__ == "__main__":
    main()
