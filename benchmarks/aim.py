"""AIM (McKenna and others, 2022): an adaptive choice of marginals, and a graphical model of what was measured.

The loop, its constants, its accounting by zCDP and the steps of the estimation are those of ``mbi`` (Apache-2) and of
the mechanism in its repository; the workload is all marginals of two columns and the target. The estimation is written
in NumPy, because ``mbi`` compiles a program in every round, which takes minutes for twenty columns: no privacy rests on
it, and from the same measurements it arrives at the loss of ``mbi`` within 1.5 %; neither has converged by then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import softmax

Clique = tuple[int, ...]
TINY = 1e-300


def compute_rho(epsilon: float, delta: float) -> float:
    """Compute the largest rho for which rho-zCDP implies (epsilon, delta)-DP, by Canonne, Kamath and Steinke (2020)."""
    a = np.geomspace(1e-3, 1e6, 200_001) + 1
    constant = a * np.log1p(-1 / a) - np.log(a - 1) - (a - 1) * epsilon
    low, high = 0.0, epsilon + 1
    for _ in range(60):
        middle = (low + high) / 2
        fits = np.min((a - 1) * a * middle + constant) <= math.log(delta)
        low, high = (middle, high) if fits else (low, middle)
    return low


def triangulate(cliques: Iterable[Clique], sizes: Sequence[int]) -> list[Clique]:
    """Eliminate the column with the smallest table first; return the maximal cliques of the graph that results."""
    near: list[set[int]] = [set() for _ in sizes]
    for clique in cliques:
        for j in clique:
            near[j].update(clique)
    for j, others in enumerate(near):
        others.discard(j)
    left = set(range(len(sizes)))
    costs = {j: math.prod(sizes[k] for k in near[j]) * sizes[j] for j in left}
    found: list[frozenset[int]] = []
    while left:
        j = min(left, key=costs.__getitem__)
        together = frozenset(near[j] | {j})
        if not any(together <= other for other in found):
            found.append(together)
        left.discard(j)
        for k in near[j]:
            near[k] |= near[j]
            near[k] -= {j, k}
            costs[k] = math.prod(sizes[i] for i in near[k]) * sizes[k]
    return [tuple(sorted(clique)) for clique in found]


def compute_megabytes(cliques: Iterable[Clique], sizes: Sequence[int]) -> float:
    return sum(math.prod(sizes[j] for j in clique) for clique in triangulate(cliques, sizes)) * 8 / 2**20


class Model:
    """A graphical model: potentials on the measured cliques, and calibrated beliefs on a junction tree."""

    def __init__(self, potentials: dict[Clique, np.ndarray], sizes: Sequence[int], total: float) -> None:
        self.potentials, self.sizes, self.total = potentials, sizes, total
        self.axes: dict[tuple[Clique, Clique], tuple[int, ...]] = {}
        self.shapes: dict[tuple[Clique, Clique], tuple[int, ...]] = {}
        self.nodes = triangulate(potentials, sizes)
        self.parents: list[int] = [-1] * len(self.nodes)
        self.order = [0]
        waiting = set(range(1, len(self.nodes)))
        while waiting:  # The spanning tree of the widest separators, from the root down.
            pairs = ((len({*self.nodes[i]} & {*self.nodes[p]}), -i, -p) for i in waiting for p in self.order)
            _, i, p = max(pairs)
            self.parents[-i] = -p
            self.order.append(-i)
            waiting.discard(-i)
        self.separators = [
            tuple(j for j in node if p >= 0 and j in self.nodes[p])
            for node, p in zip(self.nodes, self.parents, strict=True)
        ]
        self.home = {c: next(i for i, node in enumerate(self.nodes) if {*c} <= {*node}) for c in potentials}
        self.beliefs = self.calibrate(potentials)

    def spread(self, values: np.ndarray, clique: Clique, node: Clique) -> np.ndarray:
        """Give a table over a clique the axes of a larger one, both sorted."""
        if (shape := self.shapes.get((clique, node))) is None:
            shape = self.shapes[clique, node] = tuple(self.sizes[j] if j in clique else 1 for j in node)
        return values.reshape(shape)

    def calibrate(self, potentials: dict[Clique, np.ndarray]) -> list[np.ndarray]:
        """Compute the probabilities of every node's cells."""
        logs = [np.zeros([self.sizes[j] for j in node]) for node in self.nodes]
        for clique, values in potentials.items():
            i = self.home[clique]
            logs[i] += self.spread(values, clique, self.nodes[i])
        below: list[np.ndarray] = [np.empty(0)] * len(self.nodes)
        for i in reversed(self.order):
            top = logs[i].max()
            logs[i] = np.exp(logs[i] - top)
            if (p := self.parents[i]) >= 0:
                below[i] = self.sum_to(logs[i], self.nodes[i], self.separators[i]) + TINY
                logs[p] += self.spread(np.log(below[i]) + top, self.separators[i], self.nodes[p])
        for i in self.order:
            if (p := self.parents[i]) >= 0:
                ratio = self.sum_to(logs[p], self.nodes[p], self.separators[i]) / below[i]
                logs[i] *= self.spread(ratio, self.separators[i], self.nodes[i])
            else:
                logs[i] /= logs[i].sum()
        return logs

    def sum_to(self, values: np.ndarray, node: Clique, clique: Clique) -> np.ndarray:
        if (axes := self.axes.get((node, clique))) is None:
            axes = self.axes[node, clique] = tuple(k for k, j in enumerate(node) if j not in clique)
        return np.add.reduce(values, axis=axes) if axes else values

    def project(self, query: Clique) -> np.ndarray:
        """Sum the model's counts over the columns of a sorted query, with one axis a column."""
        kept = set(self.order)
        links: dict[int, set[int]] = {i: set() for i in kept}
        for i, p in enumerate(self.parents):
            if p >= 0:
                links[i].add(p)
                links[p].add(i)
        leaves = [i for i in kept if len(links[i]) <= 1]
        while leaves:  # A leaf that tells nothing about the query that its neighbour does not tell is left out.
            i = leaves.pop()
            near = next(iter(links[i]), None)
            told = {*query} & {*self.nodes[i]}
            if i in kept and len(kept) > 1 and near is not None and told <= {*self.nodes[near]}:
                kept.discard(i)
                links[near].discard(i)
                if len(links[near]) == 1:
                    leaves.append(near)
        below: dict[int, tuple[np.ndarray, Clique]] = {}
        result: tuple[np.ndarray, Clique] = np.empty(0), ()
        for i in reversed([i for i in self.order if i in kept]):
            values, columns = self.beliefs[i], self.nodes[i]
            if i in below:
                message, given = below.pop(i)
                values, columns = _multiply(values, columns, message, given)
            p, separator = self.parents[i], self.separators[i]
            if p in kept:
                out = tuple(j for j in columns if j in separator or j in query)
                values = np.einsum(values, columns, out)
                share = self.sum_to(self.beliefs[i], self.nodes[i], separator) + TINY
                values = np.einsum(values, out, 1 / share, separator, out)
                below[p] = _multiply(*below[p], values, out) if p in below else (values, out)
            else:
                result = values, columns
        return self.total * np.einsum(result[0], result[1], query)

    def sample(self, rows: int, generator: np.random.Generator) -> np.ndarray:
        """Draw rows, by systematic sampling within every value of a separator."""
        codes = np.zeros((rows, len(self.sizes)), np.int64)
        for i in self.order:
            node, separator = self.nodes[i], self.separators[i]
            rest = tuple(j for j in node if j not in separator)
            shape = [self.sizes[j] for j in rest]
            table = np.einsum(self.beliefs[i], node, (*separator, *rest)).reshape(-1, math.prod(shape))
            group = np.zeros(rows, np.int64)
            for j in separator:
                group = group * self.sizes[j] + codes[:, j]
            for value in np.unique(group):
                places = generator.permutation(np.flatnonzero(group == value))
                steps = np.cumsum(table[value]) + TINY
                u = (np.arange(len(places)) + generator.random(len(places))) / len(places)
                cells = np.minimum(np.searchsorted(steps / steps[-1], u, side="right"), len(steps) - 1)
                codes[places[:, None], rest] = np.stack(np.unravel_index(cells, shape), axis=1)
        return codes


def _multiply(a: np.ndarray, first: Clique, b: np.ndarray, second: Clique) -> tuple[np.ndarray, Clique]:
    out = (*first, *(j for j in second if j not in first))
    return np.einsum(a, first, b, second, out), out


Measurements = dict[Clique, tuple[np.ndarray, float]]
"""Of each measured clique the mean of its noisy counts, weighted by precision, and the sum of the precisions."""


def estimate(
    measured: Measurements, sizes: Sequence[int], start: Model | None, iterations: int, tolerance: float
) -> Model:
    """Fit a model by mirror descent with Armijo's rule, from the potentials of an earlier one."""
    shapes = {c: [sizes[j] for j in c] for c in measured}
    weights = np.array([precision / noisy.size for noisy, precision in measured.values()])
    total = max(1.0, float(np.average([noisy.sum() for noisy, _ in measured.values()], weights=weights)))
    old = start.potentials if start else {}
    model = Model({c: old.get(c, np.zeros(shapes[c])) for c in measured}, sizes, total)
    largest = [c for c in measured if not any({*c} < {*d} for d in measured)]
    blocks = dict.fromkeys(largest, 0.0)
    for clique, (noisy, precision) in measured.items():
        within = next(c for c in largest if {*clique} <= {*c})
        blocks[within] += precision * math.prod(shapes[within]) / noisy.size
    step = 2.0 / (max(blocks.values()) * total)

    def assess(beliefs: list[np.ndarray]) -> tuple[float, dict[Clique, np.ndarray], dict[Clique, np.ndarray]]:
        loss, slopes, points = 0.0, {}, {}
        for clique, (noisy, precision) in measured.items():
            i = model.home[clique]
            points[clique] = total * model.sum_to(beliefs[i], model.nodes[i], clique)
            gap = points[clique] - noisy
            slopes[clique] = precision * gap
            loss += precision * float((gap * gap).sum()) / 2
        return loss, slopes, points

    loss, slopes, points = assess(model.beliefs)
    marked, stalls = loss, 0
    for iteration in range(1, iterations + 1):
        trial = {c: model.potentials[c] - step * slopes[c] for c in measured}
        beliefs = model.calibrate(trial)
        next_loss, next_slopes, next_points = assess(beliefs)
        expected = sum(float((slopes[c] * (points[c] - next_points[c])).sum()) for c in measured)
        if loss - next_loss >= 0.5 * step * expected:
            model.potentials, model.beliefs = trial, beliefs
            loss, slopes, points = next_loss, next_slopes, next_points
            step *= 1.1
        else:
            step *= 0.5
        if iteration % 20 == 0:
            stalls = stalls + 1 if marked - loss <= tolerance * max(loss, 1.0) else 0
            marked = loss
            if stalls == 2:
                break
    return model


def count(codes: np.ndarray, sizes: Sequence[int], clique: Clique) -> np.ndarray:
    shape = [sizes[j] for j in clique]
    flat = np.ravel_multi_index([codes[:, j] for j in clique], shape)
    return np.bincount(flat, minlength=math.prod(shape)).astype(float).reshape(shape)


def synthesize(
    codes: np.ndarray,
    sizes: Sequence[int],
    target: int,
    epsilon: float,
    delta: float,
    seed: int,
    num_rows: int | None = None,
    *,
    rounds: int | None = None,
    megabytes: float = 4.0,
    iterations: int = 200,
    tolerance: float = 1e-3,
    log: list | None = None,
) -> np.ndarray:
    """Measure, estimate and choose until the budget is spent, and draw rows; AIM's default is 80 megabytes.

    Args:
        codes: Private rows [N, J].
        sizes: The number of codes of each column.
        target: The column that is in all marginals of three columns.
        epsilon: The whole cost, with ``delta``, under add_remove.
        delta: See ``epsilon``.
        seed: Of noise and rows, for a benchmark alone.
        num_rows: How many rows to draw; by default the noisy total.
        rounds: What the first noise is laid out for; by default sixteen a column. The noise halves where it hides
            what a measurement adds, so that there are fewer.
        megabytes: The limit of the model's size.
        iterations: The most steps of an estimation but the last, which has ten times as many.
        tolerance: The relative progress over 20 steps below which an estimation ends; a hundredth for the last one.
        log: Where to put (measurements, model), for a check.
    """
    generator = np.random.default_rng([seed, 19])
    rho = compute_rho(epsilon, delta)
    rounds = rounds or 16 * len(sizes)
    others = [j for j in range(len(sizes)) if j != target]
    workload = [tuple(sorted((*pair, target))) for pair in itertools.combinations(others, 2)]
    answers = {clique: count(codes, sizes, clique) for clique in workload}
    parts = {part: c for c in workload for k in (1, 2, 3) for part in itertools.combinations(c, k)}
    weights = {part: sum(len({*part} & {*clique}) for clique in workload) for part in parts}
    measured: Measurements = {}

    def sum_to(values: np.ndarray, within: Clique, part: Clique) -> np.ndarray:
        return values.sum(axis=tuple(k for k, j in enumerate(within) if j not in part))

    def measure(clique: Clique, sigma: float) -> None:
        noisy = sum_to(answers[parts[clique]], parts[clique], clique)
        noisy = noisy + sigma * generator.standard_normal(noisy.shape)
        before, precision = measured.get(clique, (0.0, 0.0))
        now = precision + 1 / sigma**2
        measured[clique] = (before * precision + noisy / sigma**2) / now, now

    sigma, share = math.sqrt(rounds / (1.8 * rho)), math.sqrt(0.8 * rho / rounds)
    for j in range(len(sizes)):
        measure((j,), sigma)
    used = len(sizes) * 0.5 / sigma**2
    model = estimate(measured, sizes, None, iterations, tolerance)
    last = False
    while not last:
        if rho - used < 2 * (0.5 / sigma**2 + share**2 / 8):
            sigma, share, last = math.sqrt(1 / (1.8 * (rho - used))), math.sqrt(0.8 * (rho - used)), True
        used += share**2 / 8 + 0.5 / sigma**2
        gaps = {clique: answers[clique] - model.project(clique) for clique in workload}
        maximal = [c for c in measured if not any({*c} < {*d} for d in measured)]
        scores = {}
        for part, whole in parts.items():
            covered = any({*part} <= {*c} for c in maximal)
            if covered or compute_megabytes([*maximal, part], sizes) <= megabytes * used / rho:
                gap = sum_to(gaps[whole], whole, part)
                scores[part] = weights[part] * (np.abs(gap).sum() - math.sqrt(2 / math.pi) * sigma * gap.size)
        scale = 0.5 * share / max(weights[part] for part in scores)
        chances = softmax(scale * np.array(list(scores.values())))
        chosen = list(scores)[generator.choice(len(chances), p=chances)]
        before = model.project(chosen)
        measure(chosen, sigma)
        model = estimate(measured, sizes, model, (1 + 9 * last) * iterations, tolerance / (1 + 99 * last))
        if np.abs(model.project(chosen) - before).sum() <= sigma * math.sqrt(2 / math.pi) * before.size:
            sigma, share = sigma / 2, share * 2
    if log is not None:
        log.append((measured, model))
    return model.sample(num_rows or round(model.total), generator)
