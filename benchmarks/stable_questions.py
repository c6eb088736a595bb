"""Active learning with the sparse vector (LZCW21 Remark 25): does it ask the queries that the sparse vector loses?

    PATE_DATA=data python benchmarks/stable_questions.py --out docs/images/active-sparse-vector.png

Logistic teachers on mushroom and a9a; 800 records are public, at most 200 of them asked; a tenth is the test; all is
drawn anew in every split. Epsilon is that of the whole release at delta 1e-5, add_remove, unit record: GNMax as an
exact Gaussian, the sparse vector by its calibration. The student is a logistic regression on the answers.
The ``settled`` rule was chosen on ``--sets made``. What is printed follows from private votes: of data of your own it
would be private.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from benchmarks import measuring
from pate_torch.accounting import calibration
from pate_torch.core.rng import make_numpy_generator
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SparseVector, compute_instability_distance
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from pate_torch.privacy.sensitive import Votes
from pate_torch.queries.base import (
    QueryState,
    QueryStrategy,
    Random,
    compute_round_size,
    get_features,
    get_open_points,
    shuffle,
)
from pate_torch.queries.clusters import Medoids
from pate_torch.queries.disagreement import Disagreement, append_ones

PUBLIC, QUESTIONS, DELTA = 800, 200, 1e-5
DRAWS = 5  # of the sparse vector's noise
EPSILONS = (0.5, 1.0, 2.0)
FAILURES = (1, 5)
TEACHERS = {"mushroom": (65, 1600), "a9a": (260, 1131, 2263), "made": (800, 1600)}
"""A hundred records a teacher, as in LZCW21's Table 4; and as many teachers as the sparse vector wants."""


SHOWN = {"mushroom": 1600, "a9a": 1131}
COLORS = {"ASQ": "#1f4e79", "random": "#7f7f7f", "settled": "#c55a11"}
"""Of the picture."""


@dataclass(frozen=True, kw_only=True)
class Settled(QueryStrategy):
    """The most doubtful of the surer half: medoids first, then by a ridge regression on the answers.

    A query refused counts as half an answer for either class.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "settled"
    rounds: int = 16
    skip: float = 0.5

    def select(self, state: QueryState) -> Tensor:
        """Pool indices, int64 [at most state.remaining]; the doubtful part last."""
        count, points = compute_round_size(state), shuffle(get_open_points(state), state, self.name)
        if len(state.query_Q) == 0:
            return Medoids().select(replace(state, num_remaining=count, num_rounds_left=1))
        if len(state.label_Q[state.label_Q != NO_ANSWER].unique()) < 2:
            return points[:count]
        x_PD = append_ones(get_features(state, 128))
        x_QD, sign_Q = x_PD[state.query_Q], (2.0 * state.label_Q - 1).double()
        sign_Q[state.label_Q == NO_ANSWER] = 0
        ridge_DD = torch.eye(x_PD.shape[1], dtype=torch.float64)
        sure_P = (x_PD @ torch.linalg.solve(x_QD.T @ x_QD + ridge_DD, x_QD.T @ sign_Q)).abs()
        points = points[sure_P[points].argsort(stable=True)]
        doubtful = sure_P[points] < sure_P.quantile(self.skip)
        return torch.cat([points[~doubtful], points[doubtful].flip(0)])[:count]


STRATEGIES: dict[str, QueryStrategy] = {"ASQ": Disagreement(), "random": Random(), "settled": Settled()}


def load(name: str, data: Path, split: int) -> tuple[Tensor, Tensor]:
    """All records in the order of the split, x [N, D] float32 and y in 0, 1."""
    if name == "made":  # the stand-in on which strategies are chosen
        x, y = make_classification(
            20_000, 40, n_informative=10, n_redundant=10, flip_y=0.02, class_sep=1.5, random_state=split
        )
    else:
        x, y = measuring.load_libsvm(name, data)
    order = make_numpy_generator(split, "stable queries").permutation(len(y))
    return torch.from_numpy(x[order]).float(), torch.from_numpy(y[order].astype(np.int64))


def tally(x: Tensor, y: Tensor, ask: Tensor, teachers: int, steps: int = 15) -> Votes:
    """The votes of so many ridge-1 logistic regressions, each on its own shard.

    The weights are sums a_i x_i over the shard's records: Newton's steps take a matrix of its n + 1 unknowns.
    """
    size = len(y) // teachers
    x_KND = x[: teachers * size].view(teachers, size, -1)
    sign = (2.0 * y[: teachers * size] - 1).double().view(teachers, size, 1)
    gram = (x_KND @ x_KND.mT).double()
    design = torch.cat([gram, torch.ones_like(sign)], 2)  # scores = design @ (a, intercept)
    penalty = torch.zeros(teachers, size + 1, size + 1, dtype=torch.float64)
    penalty[:, :size, :size] = gram
    penalty[:, range(size + 1), range(size + 1)] += 1e-3  # makes it invertible, and holds the intercept
    unknown = torch.zeros(teachers, size + 1, 1, dtype=torch.float64)
    for _ in range(steps):
        wrong = torch.sigmoid(-sign * (design @ unknown))
        slope = penalty @ unknown - design.mT @ (sign * wrong)
        unknown -= torch.linalg.solve(design.mT @ (wrong * (1 - wrong) * design) + penalty, slope)
    weight_KD = (x_KND.mT @ unknown[:, :size].float()).squeeze(2)
    ones_Q = ((ask @ weight_KD.T + unknown[:, size, 0].float()) > 0).sum(1)
    return Votes(torch.stack([teachers - ones_Q, ones_Q], 1), teachers)


def asked(strategy: QueryStrategy, x: Tensor, votes: Votes, mechanism: GNMax | SparseVector | None, seed: int) -> tuple:
    """Which public points are asked, in order, and their answers; None: the votes' own winners."""
    none = torch.zeros(0, dtype=torch.int64)
    point_Q, label_Q, noise = none, none, DryRunNoise()
    spec = measuring.make_spec(x.shape[1:], 2)
    for turn in range(strategy.rounds):
        state = QueryState(spec, x, point_Q, label_Q, QUESTIONS - len(point_Q), strategy.rounds - turn, seed)
        ask = strategy.select(state) if state.num_remaining else none
        if len(ask) == 0:
            break
        here = votes.select(ask)
        failed, answered = int((label_Q == NO_ANSWER).sum()), int((label_Q != NO_ANSWER).sum())
        context = MechanismContext(QUESTIONS, strategy.rounds, turn, failed, answered)
        label = here.compute_plurality() if mechanism is None else mechanism.release(here, noise, context).label_Q
        point_Q, label_Q = torch.cat([point_Q, ask[: len(label)]]), torch.cat([label_Q, label])
        if len(label) < len(ask) or (isinstance(mechanism, SparseVector) and failed_all(mechanism, label_Q)):
            break
    return point_Q, label_Q


def failed_all(mechanism: SparseVector, label_Q: Tensor) -> bool:
    """Whether the sparse vector has stopped."""
    return int((label_Q == NO_ANSWER).sum()) >= mechanism.max_failures


def accuracy(x: Tensor, label: Tensor, test_x: Tensor, test_y: Tensor) -> float:
    """Of a logistic regression on the answers; the one class that was answered; a coin where none was."""
    x, label = x[label != NO_ANSWER], label[label != NO_ANSWER]
    if len(label.unique()) == 2:
        return float(
            LogisticRegression(max_iter=200).fit(x.numpy(), label.numpy()).score(test_x.numpy(), test_y.numpy())
        )
    return float((test_y == label[0]).float().mean()) if len(label) else 0.5


def lost(votes: Votes, mechanism: SparseVector, draws: int = 2000) -> np.ndarray:
    """For every query the chance that a fresh threshold fails it, [P]."""
    scales, stream = mechanism.make_cost(QUESTIONS), make_numpy_generator(0, "lost")
    bar = (
        scales.threshold
        + stream.laplace(0, scales.noise_scale, draws)
        - stream.laplace(0, 2 * scales.noise_scale, draws)
    )
    return 1 - np.searchsorted(np.sort(bar), compute_instability_distance(votes.counts_QC).numpy()) / draws


def measure(name: str, split: int, data: Path, only: list[str]) -> list[dict[str, Any]]:
    """All figures of one split."""
    x, y = load(name, data, split)
    cut = len(y) // 10
    test, public, private = (slice(0, cut), slice(cut, cut + PUBLIC), slice(cut + PUBLIC, None))
    pool, rows = x[public], []
    for teachers in TEACHERS[name]:
        votes = tally(x[private], y[private], pool, teachers)
        gap = votes.compute_gaps().double()
        at = {"data": name, "split": split, "teachers": teachers}
        plurality = float((votes.compute_plurality() == y[public]).double().mean())
        for ask in only:
            strategy = STRATEGIES[ask]
            point, label = asked(strategy, pool, votes, None, split)
            least = set(gap.argsort()[: len(point)].tolist())
            row: dict[str, Any] = {
                "asked": len(point),
                "overlap": len(least & set(point.tolist())) / len(point),
                "chance": len(point) / PUBLIC,
                "gap_asked": float(gap[point].median()),
                "gap_all": float(gap.median()),
                "plurality": plurality,
                "accuracy": accuracy(pool[point], label, x[test], y[test]),
            }
            for epsilon in EPSILONS:
                for failures in FAILURES:
                    chance = lost(votes, SparseVector(epsilon=epsilon, delta=DELTA, max_failures=failures))
                    row[f"lost_asked {epsilon:g} T{failures}"] = float(chance[point].mean())
                    row[f"lost_all {epsilon:g} T{failures}"] = float(chance.mean())
            rows.append(at | {"ask": ask, "by": "no noise"} | row)
        for epsilon in EPSILONS:
            sigma = calibration.calibrate_sigma(
                lambda sigma: GNMax(sigma=sigma).privacy_events(QUESTIONS), epsilon=epsilon, delta=DELTA
            )
            ways: dict[str, GNMax | SparseVector] = {"GNMax": GNMax(sigma=sigma)}
            for failures in FAILURES:
                vector = SparseVector(epsilon=epsilon, delta=DELTA, max_failures=failures)
                if teachers >= vector.make_cost(QUESTIONS).min_teachers:
                    ways[f"T{failures}"] = vector
            for by, mechanism in ways.items():
                for ask in only:
                    draws = []
                    for _ in range(DRAWS if by != "GNMax" else 1):
                        point, label = asked(STRATEGIES[ask], pool, votes, mechanism, split)
                        given = label != NO_ANSWER
                        right = float((label == y[public][point])[given].double().mean()) if given.any() else np.nan
                        learnt = accuracy(pool[point], label, x[test], y[test])
                        both = float(len(label[given].unique()) == 2)
                        draws.append((len(point), int(given.sum()), right, both, learnt))
                    mean = [float(value) for value in np.nanmean([*draws, [np.nan] * 5], 0)]
                    row = dict(zip(("asked", "answered", "right", "two_classes", "accuracy"), mean, strict=True))
                    rows.append(at | {"ask": ask, "by": by, "epsilon": epsilon} | row)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard error over the splits."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(key) for key in ("data", "teachers", "by", "epsilon", "ask"))].append(row)
    found = []
    for (name, teachers, by, epsilon, ask), group in groups.items():
        line = {"data": name, "teachers": teachers, "by": by, "epsilon": epsilon, "ask": ask, "splits": len(group)}
        for key in group[0]:
            if key not in ("data", "split", *line):
                value = np.array([row[key] for row in group], float)
                value = value[~np.isnan(value)]
                error = value.std(ddof=1) / len(value) ** 0.5 if len(value) > 1 else float("nan")
                line[key] = (round(float(value.mean()), 4) if len(value) else float("nan"), round(float(error), 4))
        found.append(line)
    return found


def picture(lines: list[dict[str, Any]], data: Path) -> Figure:
    """Overlap of what is asked with the least stable points, and accuracy against epsilon; bars are standard errors."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    overlap, *panels = figure.subplots(1, 1 + len(SHOWN), width_ratios=[1.1, *[1] * len(SHOWN)])
    plain = [line for line in lines if line["by"] == "no noise"]
    places = list(dict.fromkeys((line["data"], line["teachers"]) for line in plain))
    for i, (ask, color) in enumerate(COLORS.items()):
        bars = [line for line in plain if line["ask"] == ask]
        where = np.arange(len(bars)) + 0.27 * (i - 1)
        height, error = zip(*(line["overlap"] for line in bars), strict=True)
        overlap.bar(where, height, 0.25, yerr=error, color=color, label=ask)
        overlap.hlines([line["chance"][0] for line in bars], where - 0.12, where + 0.12, color="black", linewidth=1.2)
    overlap.set_xticks(range(len(places)), [f"{name}\n{teachers:,}" for name, teachers in places], fontsize=8)
    overlap.set(title="asked, of the least stable (line: by chance)", ylabel="share")
    overlap.legend(frameon=False, fontsize=8)
    for axes, (name, teachers) in zip(panels, SHOWN.items(), strict=True):
        for ask, color in COLORS.items():
            for by, style in (("GNMax", "-"), ("T1", "--"))[ask == "settled" :]:
                place = {"data": name, "teachers": teachers, "by": by, "ask": ask}
                dots = [line for line in lines if place.items() <= line.items()]
                mean, error = zip(*(line["accuracy"] for line in dots), strict=True)
                label = f"{ask}, {'GNMax' if by == 'GNMax' else 'sparse vector, T 1'}"
                at = [line["epsilon"] for line in dots]
                axes.errorbar(at, mean, error, fmt=f"o{style}", markersize=3, color=color, label=label)
        larger = load(name, data, 0)[1].double().mean()
        axes.axhline(float(max(larger, 1 - larger)), color="black", linestyle=":", linewidth=1, label="larger class")
        axes.set(
            title=f"{name}, {teachers:,} teachers", xlabel="epsilon (delta 1e-5, add_remove, record)", xscale="log"
        )
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
    panels[0].set_ylabel("student, test accuracy")
    panels[0].legend(frameon=False, fontsize=7, loc="lower right", bbox_to_anchor=(1, 0.08))
    for axes in (overlap, *panels):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "json")
    parser.add_argument("--sets", nargs="+", default=["mushroom", "a9a"], choices=TEACHERS)
    parser.add_argument("--ask", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--splits", type=int, default=30)
    parser.add_argument("--rows", type=Path, help="every split's figures as JSON; splits found there are not repeated")
    parser.add_argument("--out", type=Path, help="the picture")
    args = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing where nothing was answered
    rows = measuring.Rows(args.rows).read() if args.rows else []
    done = {(row["data"], row["split"]) for row in rows}
    for split in range(args.splits):
        for name in args.sets:
            if (name, split) not in done:
                rows += (new := measure(name, split, args.data, args.ask))
                if args.rows:
                    with args.rows.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in new)
    for line in summary(rows):
        print(json.dumps(line) if args.json else "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)
    if args.out:
        picture(summary(rows), args.data).savefig(args.out, dpi=90)


if __name__ == "__main__":
    main()
