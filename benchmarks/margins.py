"""LZCW21 Figures 3 and 4 on a9a: 250 logistic teachers, 2,000 queries.

    PATE_DATA=data python -m benchmarks.margins --out outputs/margins

Reads $PATE_DATA/libsvm/a9a.svm.gz. The figures come from votes: on data of your own they are private.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_svmlight_file
from sklearn.linear_model import LogisticRegression

from benchmarks import measuring
from benchmarks.theory.margins import (
    disagreement_margin,
    expected_margin,
    margin_correlation,
    margin_distribution,
    share_of_ones,
)
from pate_torch.core.rng import make_numpy_generator
from pate_torch.planning.diagnosis import compute_margin_curve
from pate_torch.privacy.sensitive import Votes


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "json")
    parser.add_argument("--out", type=Path, default=Path("outputs/margins"))
    parser.add_argument("--teachers", type=int, default=250)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    x, y = load_svmlight_file(str(args.data / "libsvm" / "a9a.svm.gz"), n_features=123)
    x, y = x.toarray(), y > 0
    order = make_numpy_generator(args.seed, "margins").permutation(len(y))
    public, private = order[: len(y) // 5], order[len(y) // 5 :]
    queries = public[: args.queries]

    best = LogisticRegression(max_iter=1000).fit(x[private], y[private])
    reference = best.predict(x[queries])
    ones = np.zeros(len(queries), dtype=np.int64)
    right = []
    for shard in np.array_split(private, args.teachers):
        teacher = LogisticRegression(max_iter=1000).fit(x[shard], y[shard])
        label = teacher.predict(x[queries])
        right.append(float((label == y[queries]).mean()))
        ones += label
    votes = Votes(torch.from_numpy(np.stack([args.teachers - ones, ones], 1)), args.teachers)

    share = share_of_ones(votes)
    margin, against = expected_margin(share), disagreement_margin(share, reference)
    xi = [0.05, 1 / 6, 0.25, 0.4]
    figures = {
        "teachers": args.teachers,
        "queries": len(queries),
        "records_per_teacher": len(private) / args.teachers,
        "accuracy_teacher": float(np.mean(right)),
        "accuracy_majority": float(((share > 0.5) == y[queries]).mean()),
        "accuracy_reference": float((reference == y[queries]).mean()),
        "majority_agrees_with_reference": float(((share > 0.5) == reference).mean()),
        "mean_margin": float(margin.mean()),
        "nu_at_xi": {f"{a:.3g}": float(v) for a, v in zip(xi, compute_margin_curve(votes, np.array(xi)), strict=True)},
        "high_margin_against_reference": float((against > 0.25).mean()),
        "slope_200": float(-against[:200].sum() / margin[:200].sum()),
        "slope_all": float(-against.sum() / margin.sum()),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    margin_distribution(votes, reference).savefig(args.out / "figure3.png", dpi=130)
    margin_correlation(votes, reference).savefig(args.out / "figure4.png", dpi=130)
    if args.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:32s} {value}")
    print(f"figures in {args.out}")


if __name__ == "__main__":
    main()
