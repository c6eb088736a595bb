"""What a learner must have for soft labels (BTT18 section 5), measured by retraining: stability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.theory.sample_sizes import btt18_lemma_5_8
from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.rng import derive_seed, make_numpy_generator
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.engine import Chunk, train_stacked
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import compute_launch_size

Floats = NDArray[np.float64]

FitPredict = Callable[[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic], list[int]], Floats]
"""(x [B, n, ...], y [B, n], points [Q, ...], coins [B]) -> scores in [0, 1], [B, Q]: B models trained side by side.

``coins`` seed the models: two data sets with the same coins must be trained with the same randomness.
"""


def one_by_one(fit_predict: Callable[..., Floats]) -> FitPredict:
    """Lift ``fit_predict(x [n, ...], y [n], points, coin) -> [Q]`` to a batch, one model after another."""

    def batched(
        x_B: NDArray[np.generic], y_B: NDArray[np.generic], points: NDArray[np.generic], coins: list[int]
    ) -> Floats:
        return np.stack([fit_predict(x, y, points, coin) for x, y, coin in zip(x_B, y_B, coins, strict=True)])

    return batched


@dataclass(frozen=True, eq=False, repr=False)
class _Retrained(Chunk):
    """A chunk whose members are named by their coins, so that two data sets with the same coins draw the same."""

    coins: tuple[int, ...] = ()

    @property
    def teachers(self) -> Sequence[int]:
        return self.coins


def by_teachers(
    recipe: TeacherRecipe, spec: DataSpec, *, label: int = 1, soft: bool = False, device: torch.device | str = "cpu"
) -> FitPredict:
    """The learner that trains this project's teachers: a batch of data sets is trained as one stack of teachers.

    It takes x as uint8 images or rows (as ``spec`` says) and y as class numbers. Scores are votes, 1.0 where the class
    voted for is ``label``, else 0.0; or (``soft``) its probabilities, which ``mechanism=soft_sparse_vector`` opens.
    The coins name the streams of initialization, batches and distortions, as a teacher's number does.

    Args:
        recipe: How a teacher is trained.
        spec: Public facts about the data.
        label: Whose votes or probabilities are the scores.
        soft: Whether they are probabilities.
        device: Where teachers are trained.

    Raises:
        ValueError: A recipe that does not fit the data, or one with a public start (it learns from points that no pair
            of data sets holds).
    """
    if recipe.start is not None:
        raise checks.error("teacher.start", recipe.start.features.name, "must be null here")
    recipe.check(spec)
    checks.integer("label", label, low=0, high=spec.num_classes - 1)
    device = torch.device(device)
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    kind = torch.uint8 if spec.is_image else torch.float32
    num_parameters = networks.count_parameters(networks.rebuild(network))

    def batched(
        x_B: NDArray[np.generic], y_B: NDArray[np.generic], points: NDArray[np.generic], coins: list[int]
    ) -> Floats:
        x, y = torch.as_tensor(x_B).to(kind), torch.as_tensor(y_B).to(torch.int64)
        size = compute_launch_size(recipe, num_parameters, spec, len(x), device)
        parts, asked = [], torch.as_tensor(points).to(kind)
        for rows in (slice(first, first + size) for first in range(0, len(x), size)):
            full = torch.full((len(x[rows]),), x.shape[1])
            chunk = _Retrained(0, x[rows], y[rows], full, tuple(coins[rows]))
            params = train_stacked(chunk, spec, recipe, 0, device).params
            teachers = TeacherEnsemble(network, [params], full > 0, spec)
            if soft:
                parts.append(teachers.predict_proba(asked, device=device)[..., label])
            else:
                parts.append(teachers.predict(asked, device=device) == label)
        return torch.cat(parts).double().numpy()

    return batched


@dataclass(frozen=True, eq=False)
class OnAverageStability:
    """Measured on-average stability of a learner.

    Attributes:
        alpha: The largest over points of the root mean square change.
        alpha_Q: Per point.
        error: Standard error of alpha at its point; that the point was chosen for it makes alpha too large.
        typical: The root mean square change over all points, which is no bound.
        typical_error: Its standard error.
        half_width: 4 alpha sqrt(2 n), within which three in four models predict of their expectation (BTT18 Lemma 5.8).
    """

    alpha: float
    alpha_Q: Floats
    error: float
    typical: float
    typical_error: float
    half_width: float


def on_average_stability(
    fit_predict: FitPredict,
    x: NDArray[np.generic],
    y: NDArray[np.generic],
    points: NDArray[np.generic],
    *,
    n: int,
    pairs: int,
    seed: int,
    batch: int = 64,
) -> OnAverageStability:
    """Estimate alpha: (1/n) sum_j E |h_D(x) - h_{D^(j)}(x)|^2 <= alpha^2 for every x.

    Draws ``pairs`` pairs from the pool, without replacement within a pair: D of n records, and D with its j-th record,
    j uniform, replaced by another record; both are trained with the same coins. Use public or synthetic records: on
    private ones the result is private.

    Args:
        fit_predict: ``by_teachers`` of a recipe, ``one_by_one`` of any function, or one's own.
        x: Records of the pool, [N, ...], N > n.
        y: Their labels, [N].
        points: Where predictions are compared, [Q, ...].
        n: Records in a data set.
        pairs: Number of pairs.
        seed: Seed of the draws and the coins.
        batch: Pairs trained at once.

    Source: BTT18 Definition 5.7.
    """
    checks.integer("n", n, low=1)
    checks.integer("pairs", pairs, low=2)
    if len(x) != len(y) or len(x) <= n:
        raise checks.error(
            "n", n, f"must be below the pool's {len(x)} records", "One record is left over as the replacement."
        )
    generator = make_numpy_generator(seed, "on-average-stability")
    squares = []
    for start in range(0, pairs, batch):
        size = min(batch, pairs - start)
        # Pair by pair, so that the batch changes nothing but the time.
        drawn = [(generator.permutation(len(x))[: n + 1], generator.integers(n)) for _ in range(size)]
        kept = np.stack([chosen[:n] for chosen, _ in drawn])
        replaced = kept.copy()
        replaced[np.arange(size), [j for _, j in drawn]] = [chosen[n] for chosen, _ in drawn]
        coins = [derive_seed(seed, "coins", start + i) for i in range(size)] * 2
        both = np.concatenate([kept, replaced])
        score = np.asarray(fit_predict(x[both], y[both], points, coins), dtype=np.float64)
        if score.shape != (2 * size, len(points)) or not ((score >= 0) & (score <= 1)).all():
            raise checks.error("fit_predict", score.shape, f"must return [{2 * size}, {len(points)}] scores in [0, 1]")
        squares.append((score[:size] - score[size:]) ** 2)
    square_PQ = np.concatenate(squares)
    mean_Q = square_PQ.mean(0)
    worst = int(np.argmax(mean_Q))
    alpha, error = _root(square_PQ[:, worst])
    half_width = btt18_lemma_5_8(n, alpha=alpha)
    return OnAverageStability(alpha, np.sqrt(mean_Q), error, *_root(square_PQ.mean(1)), half_width)


def _root(square_P: Floats) -> tuple[float, float]:
    """The root of a mean over pairs, and its standard error."""
    root = float(np.sqrt(square_P.mean()))
    # Delta method: the error of a square root is the error of its square over twice the root.
    spread = float(square_P.std(ddof=1)) / np.sqrt(len(square_P))
    return root, spread / (2 * root) if root > 0 else 0.0
