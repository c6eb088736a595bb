"""Excess error of the PAC algorithms against n, with fitted and predicted slopes; AgPrivCl beside plain voting.

    python benchmarks/pac_utility.py [--repeats 60] [--quick] [--json]

Two classes of known VC dimension (thresholds, 1; stumps over two features, 3 at most), uniform points, a fixed target,
labels clean or flipped with probability 0.1. The excess error of a hypothesis is exact, not estimated.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import measuring
from benchmarks.replications.query_algorithms import run_high_confidence
from benchmarks.theory.agnostic import AgPrivClPlan, compute_two_thirds_teachers, run_ag_priv_cl, run_sub_samp
from benchmarks.theory.classes import Listed
from pate_torch.core.rng import make_numpy_generator
from pate_torch.hypotheses.classes import HypothesisClass, Stump, Stumps, Thresholds, fit_erm
from pate_torch.hypotheses.exponential import run_exponential_mechanism, run_sspp
from pate_torch.hypotheses.prediction import compute_flipping_gamma
from pate_torch.hypotheses.sample import BelowGuaranteeWarning, Sample, compute_net_size, draw_without_replacement
from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, Answers

EPSILON = 1.0
TARGET = 0.37
NOISE = DryRunNoise(insecure_seed=1)  # a benchmark on synthetic data: repeatable, not private


@dataclass(frozen=True)
class StudentProblem:
    name: str
    hypotheses: HypothesisClass
    features: int
    flip: float

    def draw(self, n: int, generator: np.random.Generator) -> Sample:
        x = generator.random((n, self.features))
        return Sample(x, (x[:, 0] >= TARGET) ^ (generator.random(n) < self.flip))

    def disagreement(self, h: Any) -> float:
        """P(h(x) != target(x)) for uniform x, exactly."""
        if not isinstance(h, Stump):
            return abs(min(max(float(h), 0.0), 1.0) - TARGET)
        t = min(max(h.threshold, 0.0), 1.0)
        apart = abs(t - TARGET) if h.feature == 0 else t * (1 - TARGET) + (1 - t) * TARGET
        return apart if h.is_above else 1 - apart

    def excess(self, h: Any) -> float:
        return (1 - 2 * self.flip) * self.disagreement(h)

    def grid(self) -> list[Any]:
        """A public finite sub-class: 2,000 cuts per feature."""
        cuts = (np.arange(2000) + 0.5) / 2000
        if self.features == 1:
            return cuts.tolist()
        return [Stump(j, float(t), above) for j in range(self.features) for t in cuts for above in (True, False)]


Run = Callable[[StudentProblem, Sample, np.random.Generator], float]


def by_erm(problem: StudentProblem, sample: Sample, _: np.random.Generator) -> float:
    return problem.excess(fit_erm(problem.hypotheses, sample.x, sample.y))


def by_grid(problem: StudentProblem, sample: Sample, _: np.random.Generator) -> float:
    done = run_exponential_mechanism(problem.hypotheses, problem.grid(), sample, epsilon=EPSILON, budget=NOISE)
    return problem.excess(done.hypothesis)


def by_boosting(problem: StudentProblem, sample: Sample, _: np.random.Generator) -> float:
    options = {"epsilon": EPSILON, "failure": 0.1, "budget": NOISE}
    return problem.excess(run_high_confidence(problem.hypotheses, problem.grid(), sample, **options).hypothesis)


def by_sspp(problem: StudentProblem, sample: Sample, generator: np.random.Generator) -> float:
    public = generator.random((sample.n // 8, problem.features))
    return problem.excess(run_sspp(problem.hypotheses, sample, public, epsilon=EPSILON, budget=NOISE).hypothesis)


def _stable_disagreement(problem: StudentProblem, sample: Sample, gamma: float, alpha: float) -> float:
    """E[P(answer != target)] of the stable predictor: its hypothesis's exact law, averaged over a few subsets."""
    size = min(int(gamma * sample.n), compute_net_size(alpha, alpha, problem.hypotheses.vc_dimension))
    found = []
    for _ in range(5):
        index = draw_without_replacement(sample.n, size, NOISE)
        candidates = problem.hypotheses.enumerate_representatives(sample.x[index])
        wrong = problem.hypotheses.count_errors(candidates, sample.x, sample.y)
        found.append(
            np.exp(compute_log_probabilities(-wrong, gamma / 2)) @ [problem.disagreement(h) for h in candidates]
        )
    return float(np.mean(found))


def by_stable(problem: StudentProblem, sample: Sample, _: np.random.Generator) -> float:
    return (1 - 2 * problem.flip) * _stable_disagreement(problem, sample, 0.2, 4 / np.sqrt(sample.n))


def by_flipping(problem: StudentProblem, sample: Sample, _: np.random.Generator) -> float:
    alpha = 5 / np.sqrt(sample.n)
    apart = _stable_disagreement(problem, sample, compute_flipping_gamma(EPSILON, alpha, "sharp"), alpha)
    return (1 - 2 * problem.flip) * (alpha + (1 - 2 * alpha) * apart)


ALGORITHMS: dict[str, tuple[Run, float, str]] = {
    "ERM (not private)": (by_erm, -1.0, "d/n; with 10 % noise d/n too (bounded noise, tau = 1)"),
    "exponential mechanism, grid": (by_grid, -1.0, "ln M/(epsilon n)"),
    "high confidence": (by_boosting, -1.0, "the same in every fold"),
    "SSPP, n/8 public": (by_sspp, -1.0, "d/m + d ln m/(epsilon n)"),
    "stable predictor, gamma 0.2": (by_stable, -1.0, "d ln n/(gamma n)"),
    "private prediction": (by_flipping, -0.5, "alpha = 5/sqrt(n): flips, and d/(epsilon alpha n)"),
}


def slope(n: list[int], error: list[float]) -> float:
    return float(np.polyfit(np.log(n), np.log(np.maximum(error, 1e-9)), 1)[0])


def curves(sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    for hypotheses, features in ((Thresholds(), 1), (Stumps(2), 2)):
        for flip in (0.0, 0.1):
            problem = StudentProblem(hypotheses.name, hypotheses, features, flip)
            for name, (run, predicted, why) in ALGORITHMS.items():
                mean, error = [], []
                for n in sizes:
                    generator = make_numpy_generator(0, hypotheses.name, str(flip), name, n)
                    found = [run(problem, problem.draw(n, generator), generator) for _ in range(repeats)]
                    mean.append(float(np.mean(found)))
                    error.append(float(np.std(found) / np.sqrt(repeats)))
                row = {"class": hypotheses.name, "label_noise": flip, "algorithm": name, "n": sizes, "excess": mean}
                yield row | {"error": error, "slope": slope(sizes, mean), "predicted": predicted, "why": why}


def agnostic(sizes: list[int]) -> Iterator[dict[str, Any]]:
    """AgPrivCl ("sharp", with and without step 4) beside sub-sample and aggregate, both at (1, 1e-5), 40 queries.

    Voting fails: LZCW21 Example 1, three hypotheses of error 1/2 whose majority errs 3/4 of the time.
    Noisy threshold: 30 % of the labels flipped; errors are counted against the best hypothesis. Unanswered = wrong.
    """
    fails = Listed([lambda x, j=j: np.isin(x[:, 0], (0, j)) for j in (1, 2, 3)])
    asked = {"epsilon": 1.0, "delta": 1e-5, "alpha": 0.1, "beta": 0.1}
    for n in sizes:
        for name in ("voting fails", "noisy threshold"):
            generator = make_numpy_generator(1, name, n)
            if name == "voting fails":
                hypotheses: HypothesisClass = fails
                x, q = generator.integers(0, 4, n).astype(float), generator.integers(0, 4, 40).astype(float)[:, None]
                sample, truth, best = Sample(x, np.ones(n)), np.ones(40), 0.5
            else:
                hypotheses = Thresholds()
                x, q = generator.random(n), generator.random((40, 1))
                sample = Sample(x, (x >= TARGET) ^ (generator.random(n) < 0.3))
                truth, best = (q[:, 0] >= TARGET).astype(float), 0.0
            plan = AgPrivClPlan(n=n, num_queries=40, vc_dimension=1, **asked, constants="sharp", resample=False)
            mechanism = SparseVector(epsilon=1.0, delta=1e-5, max_failures=plan.mechanism.max_failures)
            many = min(n, compute_two_thirds_teachers(mechanism, 40, asked["beta"]))
            agprivcl = partial(run_ag_priv_cl, **asked, constants="sharp")
            rows: dict[str, Callable[..., Answers]] = {
                "plain": partial(run_sub_samp, num_teachers=many, mechanism=mechanism),
                "AgPrivCl, no resampling": partial(agprivcl, resample=False),
                "AgPrivCl": partial(agprivcl, resample=True),
            }
            for label, run in rows.items():
                try:
                    found = run(hypotheses, sample, q, budget=NOISE).label_Q.numpy()
                except ValueError:  # too few teachers for the threshold: nothing is answered, and nothing charged
                    found = np.full(len(q), NO_ANSWER)
                yield {
                    "problem": name,
                    "n": n,
                    "algorithm": label,
                    "error": float((found != truth).mean()),
                    "unanswered": float((found < 0).mean()),
                    "best": best,
                    "teachers": {"plain": many, "AgPrivCl": None}.get(label, plan.num_teachers),
                    "subset": n if label == "plain" else plan.subset_size,
                }


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", BelowGuaranteeWarning)
    sizes = [1000, 2000, 4000] if args.quick else [1000, 2000, 4000, 8000, 16000]
    found = {"curves": list(curves(sizes, args.repeats))}
    found["agnostic"] = list(agnostic([300_000] if args.quick else [300_000, 1_000_000, 3_000_000]))
    if args.json:
        print(json.dumps(found))
        return
    for row in found["curves"]:
        errors = "  ".join(f"{e:.5f}" for e in row["excess"])
        head = f"{row['class']:10s} noise {row['label_noise']:.1f}  {row['algorithm']:28s}"
        print(f"{head} {errors}   slope {row['slope']:+.2f} (predicted {row['predicted']:+.1f}: {row['why']})")
    print(f"n = {sizes}\n")
    for row in found["agnostic"]:
        where = f"{row['problem']:16s} n = {row['n']:>9,}  {row['algorithm']:24s}"
        print(f"{where} error {row['error']:.3f}  unanswered {row['unanswered']:.3f}  best of class {row['best']:.1f}")


if __name__ == "__main__":
    main()
