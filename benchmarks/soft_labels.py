"""Soft labels on real records beside hard ones and GNMax's at the same cost: what a student makes of 200 queries.

    PATE_DATA=data python -m benchmarks.soft_labels

Logistic teachers; a tenth of the records is public, a tenth is the test, and no setting looks at it. Epsilon is that of
the whole release at delta 1e-5, add_remove, unit record. Every mechanism gets the same votes and probabilities; for
every T that unanimous teachers could bear twice over. The student is ``Logistic(ridge=1)``; who gets no answer guesses.
Means over draws of the noise, then mean and standard error over splits. All figures are private of data of your own.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from benchmarks import measuring
from benchmarks.sparse_vector import DELTA, QUESTIONS, load
from pate_torch.accounting import calibration
from pate_torch.core.rng import make_numpy_generator
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SoftSparseVector, SparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, DataSpec, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.students.base import StudentTask
from pate_torch.students.linear import Logistic

TEACHERS = [400, 1600, 6400]
BINS = [2, 4, 10]
FAILURES = [1, 5, 20]
CPU = torch.device("cpu")


def probabilities(
    x: NDArray[np.float64], y: NDArray[np.int64], ask: NDArray[np.float64], teachers: int, classes: int
) -> torch.Tensor:
    """[K, Q, C] of so many logistic regressions, each on its own shard; a class that a shard lacks has none."""
    chance_KQC = np.zeros((teachers, len(ask), classes))
    for k, shard in enumerate(np.array_split(np.arange(len(y)), teachers)):
        seen = np.unique(y[shard])
        if len(seen) == 1:
            chance_KQC[k, :, seen[0]] = 1
        else:
            chance_KQC[k][:, seen] = LogisticRegression(max_iter=50).fit(x[shard], y[shard]).predict_proba(ask)
    return torch.from_numpy(chance_KQC)


class Judge:
    """Student and test of one split."""

    def __init__(
        self,
        spec: DataSpec,
        ask: NDArray[np.float64],
        truth: NDArray[np.int64],
        test_x: NDArray[np.float64],
        test_y: NDArray[np.int64],
    ) -> None:
        self._spec, self._truth = spec, truth
        self._ask, self._test_x = (torch.from_numpy(part).float() for part in (ask, test_x))
        self._test_y = torch.from_numpy(test_y)

    def __call__(self, label_Q: torch.Tensor, score_QC: torch.Tensor | None = None) -> dict[str, float]:
        """What a release gave, of all queries asked, and its student's test accuracy."""
        given = (label_Q != NO_ANSWER).nonzero()[:, 0]
        answered = len(given) / QUESTIONS
        if not len(given):
            return {"answered": answered, "student": 1 / self._spec.num_classes}
        share = None if score_QC is None else score_QC[given] / score_QC[given].sum(1, keepdim=True)
        task = StudentTask(self._spec, self._ask, given, label_Q[given], share, soft=share is not None)
        student = Logistic(ridge=1.0).fit(task, seed=0, device=CPU)
        right = float((label_Q[given].numpy() == self._truth[given.numpy()]).mean())
        test = float((student.compute_probabilities(self._test_x).argmax(1) == self._test_y).double().mean())
        return {"answered": answered, "right": right, "student": test}


def split(name: str, seed: int, args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for every K, epsilon and mechanism."""
    x, y = load(name, args.data)
    test, public, private = np.split(
        make_numpy_generator(seed, "soft labels").permutation(len(y)), [len(y) // 10, len(y) // 5]
    )
    ask, classes = public[:QUESTIONS], int(y.max()) + 1
    spec = measuring.make_spec(x.shape[1:], classes)
    judge, rows = Judge(spec, x[ask], y[ask], x[test], y[test]), list[dict[str, object]]()
    for teachers in (count for count in args.teachers if count <= len(private) // 4):
        chance_KQC = probabilities(x[private], y[private], x[ask], teachers, classes)
        counts_QC = torch.nn.functional.one_hot(chance_KQC.argmax(2), classes).sum(0)
        votes = Votes(counts_QC, teachers)
        soft = {bins: SoftVotes.from_probabilities(chance_KQC, bins) for bins in BINS}
        facts: dict[str, object] = {"data": name, "split": seed, "teachers": teachers}
        mean_QC = chance_KQC.mean(0)
        none = {"epsilon": float("inf")}
        rows.append(facts | none | {"by": "no noise, hard"} | judge(votes.compute_plurality()))
        rows.append(facts | none | {"by": "no noise, soft"} | judge(mean_QC.argmax(1), mean_QC))
        for epsilon in args.epsilons:
            for by, mechanism, opened in mechanisms(epsilon, teachers, classes, votes, soft):
                found = defaultdict[str, list[float]](list)
                for _ in range(args.draws):
                    answers = mechanism.release(opened, DryRunNoise(), MechanismContext(num_queries=QUESTIONS))
                    figures = judge(answers.label_Q, answers.score_QC)
                    if answers.score_QC is not None:  # the same answers learnt as hard labels
                        figures |= {"as_hard": judge(answers.label_Q)["student"]}
                    for key, value in figures.items():
                        found[key].append(value)
                T = getattr(mechanism, "max_failures", None)
                means = {key: float(np.mean(value)) for key, value in found.items()}
                rows.append(facts | {"epsilon": epsilon, "by": by, "T": T} | means)
    return rows


def mechanisms(
    epsilon: float, teachers: int, classes: int, votes: Votes, soft: dict[int, SoftVotes]
) -> list[tuple[str, Mechanism, Votes | SoftVotes]]:
    """Name, mechanism and what it opens, all of one cost."""
    sigma = calibration.calibrate_sigma(
        lambda sigma: GNMax(sigma=sigma).privacy_events(QUESTIONS), epsilon=epsilon, delta=DELTA
    )
    found: list[tuple[str, Mechanism, Votes | SoftVotes]] = [("GNMax", GNMax(sigma=sigma), votes)]
    for T in FAILURES:
        hard = SparseVector(epsilon=epsilon, delta=DELTA, max_failures=T)
        if 2 * hard.make_cost(QUESTIONS, classes).min_teachers <= teachers:
            found.append(("hard", hard, votes))
            scored = (SoftSparseVector(epsilon=epsilon, delta=DELTA, max_failures=T, bins=bins) for bins in BINS)
            found += [(f"soft, {each.bins} bins", each, soft[each.bins]) for each in scored]
    return found


def main() -> None:
    parser = measuring.make_parser(__doc__, "data")
    parser.add_argument("--sets", nargs="+", default=["mushroom", "a9a"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0])
    parser.add_argument("--teachers", nargs="+", type=int, default=TEACHERS)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print every split's rows")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    for name in args.sets:
        found = defaultdict[tuple[object, ...], list[dict[str, object]]](list)
        for seed in range(args.splits):
            for row in split(name, seed, args):
                if args.json:
                    print(json.dumps(row), flush=True)
                found[tuple(row.get(key) for key in ("data", "teachers", "epsilon", "by", "T"))].append(row)
        for key, rows in found.items() if not args.json else ():
            shown = [f"{part:g}" if isinstance(part, float) else str(part) for part in key]
            for column in ("answered", "right", "student", "as_hard"):
                values = np.array([row[column] for row in rows if column in row], dtype=float)
                if len(values):
                    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
                    shown.append(f"{column} {values.mean():.3f} +- {error:.3f}")
            print("  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
