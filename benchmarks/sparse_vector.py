"""The sparse vector on real votes: the fewest teachers at which T failures last for 200 queries, beside GNMax.

    PATE_DATA=data python benchmarks/sparse_vector.py --epsilon 1

Logistic teachers on mushroom, a9a and MNIST; a tenth of the records is public, a tenth is the test. Epsilon is that of
the whole release at delta 1e-5, add_remove, unit record; GNMax answers all queries at the same cost. The student is
a logistic regression on the answers. Medians over draws of the noise, one split. What is printed follows from private
votes: of data of your own it would be private.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from benchmarks import measuring
from pate_torch.accounting import calibration
from pate_torch.core.rng import make_numpy_generator
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from pate_torch.privacy.sensitive import Votes

QUESTIONS, DELTA = 200, 1e-5
TEACHERS = [round(100 * 2 ** (i / 2)) for i in range(12)]  # 100 to 4,525
FAILURES = [1, 5, 20, 50]


def load(name: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """All records, x [N, D] in [0, 1] and y in 0..C-1."""
    if name == "mnist":
        images, labels = (
            np.fromfile(data / "MNIST" / "raw" / f"train-{part}-ubyte", np.uint8, offset=skip)
            for part, skip in (("images-idx3", 16), ("labels-idx1", 8))
        )
        return images.reshape(len(labels), -1) / 255, labels.astype(np.int64)
    return measuring.load_libsvm(name, data)


def tally(x: np.ndarray, y: np.ndarray, ask: np.ndarray, teachers: int, classes: int) -> Votes:
    """The votes of so many logistic regressions, each on its own shard."""
    counts = np.zeros((len(ask), classes), np.int64)
    for shard in np.array_split(np.arange(len(y)), teachers):
        if len(np.unique(y[shard])) == 1:
            label = np.full(len(ask), y[shard][0])
        else:
            label = LogisticRegression(max_iter=50).fit(x[shard], y[shard]).predict(ask)
        counts[np.arange(len(ask)), label] += 1
    return Votes(torch.from_numpy(counts), teachers)


def student(x: np.ndarray, label: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> float:
    """Test accuracy of a logistic regression on the answers."""
    given = label != NO_ANSWER
    if len(np.unique(label[given])) < 2:
        return float("nan")
    return float(LogisticRegression(max_iter=200).fit(x[given], label[given]).score(test_x, test_y))


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "json")
    parser.add_argument("--sets", nargs="+", default=["mushroom", "a9a", "mnist"])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    for name in args.sets:
        for row in measure(name, args):
            text = json.dumps(row) if args.json else "  ".join(f"{key} {value}" for key, value in row.items())
            print(text, flush=True)


def measure(name: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """For every T the first number of teachers whose median run reaches the last query, and that of GNMax."""
    x, y = load(name, args.data)
    order = make_numpy_generator(args.seed, "sparse vector").permutation(len(y))
    test, public, private = np.split(order, [len(y) // 10, len(y) // 5])
    ask, classes = public[:QUESTIONS], int(y.max()) + 1
    rows, left = [], list(FAILURES)

    def released(mechanism: GNMax | SparseVector, votes: Votes) -> list[np.ndarray]:
        return [
            mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=QUESTIONS)).label_Q.numpy()
            for _ in range(args.draws)
        ]

    def judged(answers: list[np.ndarray]) -> dict[str, float]:
        right = [float((a == y[ask[: len(a)]])[a != NO_ANSWER].mean()) for a in answers if (a != NO_ANSWER).any()]
        learnt = [student(x[ask[: len(a)]], a, x[test], y[test]) for a in answers]
        return {
            "answered": float(np.median([(a != NO_ANSWER).sum() for a in answers])),
            "right": round(float(np.median(right)), 3) if right else float("nan"),
            "student": round(float(np.nanmedian(learnt)), 3) if not np.isnan(learnt).all() else float("nan"),
        }

    sigma = calibration.calibrate_sigma(
        lambda sigma: GNMax(sigma=sigma).privacy_events(QUESTIONS), epsilon=args.epsilon, delta=DELTA
    )
    for teachers in (count for count in TEACHERS if count <= len(private) // 4):
        votes = tally(x[private], y[private], x[ask], teachers, classes)
        gap = float(votes.compute_gaps().double().median())
        facts = {"data": name, "teachers": teachers, "median_gap": gap}
        rows.append(facts | {"by": f"GNMax, sigma {sigma:.3g}"} | judged(released(GNMax(sigma=sigma), votes)))
        for failures in list(left):
            mechanism = SparseVector(epsilon=args.epsilon, delta=DELTA, max_failures=failures)
            answers = released(mechanism, votes)
            if np.median([len(a) for a in answers]) == QUESTIONS:
                rows.append(facts | {"by": f"sparse vector, T {failures}"} | judged(answers))
                left.remove(failures)
    rows += [{"data": name, "by": f"sparse vector, T {failures}", "teachers": "none reach"} for failures in left]
    return rows


if __name__ == "__main__":
    main()
