"""AIM (McKenna and others, 2022) on ``mbi`` 2: an adaptive choice of marginals, and a graphical model of them.

    python benchmarks/aim.py in.npz out.npz

For the interpreter of an environment of its own (``pip install mbi``), because ``mbi`` brings JAX; ``synthesis.py`` calls
it. The loop, its constants and its accounting by zCDP are those of the mechanism in the repository of ``mbi`` (Apache-2);
the workload is all marginals of two columns and the target. Marginals of the model that it has not measured are summed
along its junction tree in NumPy, where ``mbi`` would compile a program for each of several hundred a round.
"""

from __future__ import annotations

import itertools
import math
import sys
import time

import numpy as np
import opt_einsum
from mbi import Domain, LinearMeasurement, estimation, junction_tree, marginal_oracles
from scipy.special import softmax

Clique = tuple[int, ...]


def compute_rho(epsilon: float, delta: float) -> float:
    """Compute the largest rho for which rho-zCDP implies (epsilon, delta)-DP, by Canonne, Kamath and Steinke (2020)."""

    def compute_log_delta(rho: float) -> float:
        a = np.geomspace(1e-3, 1e6, 200_001) + 1
        return float(np.min((a - 1) * (a * rho - epsilon) + a * np.log1p(-1 / a) - np.log(a - 1)))

    low, high = 0.0, epsilon + 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_log_delta(middle) <= math.log(delta) else (low, middle)
    return low


class Tree:
    """The junction tree of a model, whose marginals over any columns it sums."""

    def __init__(self, model, total: float) -> None:
        tree, _ = junction_tree.make_junction_tree(model.domain, model.potentials.cliques)
        self.graph = tree
        cliques = [tuple(clique) for clique in tree.nodes]
        beliefs = marginal_oracles.message_passing_stable(model.potentials.expand(cliques), 1.0)
        self.beliefs = {c: (beliefs[c].domain.attributes, np.asarray(beliefs[c].values, float)) for c in cliques}
        self.total = total

    def project(self, query: Clique) -> np.ndarray:
        """Sum the model's counts over the columns of the query, flat."""
        tree = self.graph.copy()
        pruned = True
        while pruned:  # A leaf that tells nothing about the query that its neighbour does not tell is left out.
            pruned = False
            for node in list(tree.nodes):
                near = list(tree.neighbors(node))
                wanted = set(query) & set(node)
                if len(near) <= 1 and wanted <= (set(near[0]) if near else set()):
                    tree.remove_node(node)
                    pruned = True
        operands: list = []
        seen: set[Clique] = set()
        for root in tree.nodes:
            stack = [] if root in seen else [(root, None)]
            while stack:
                node, parent = stack.pop()
                seen.add(node)
                columns, values = self.beliefs[node]
                if parent is not None:
                    shared = [j for j in columns if j in parent]
                    below = opt_einsum.contract(values, columns, shared)
                    inverse = np.divide(1.0, below, out=np.zeros_like(below), where=below > 0)
                    values = opt_einsum.contract(values, columns, inverse, shared, columns)
                operands += [values, columns]
                stack += [(other, node) for other in tree.neighbors(node) if other not in seen]
        return self.total * opt_einsum.contract(*operands, query, optimize="greedy").ravel()


def count(codes: np.ndarray, sizes: list[int], clique: Clique) -> np.ndarray:
    shape = [sizes[j] for j in clique]
    flat = np.ravel_multi_index([codes[:, j] for j in clique], shape)
    return np.bincount(flat, minlength=math.prod(shape)).astype(float)


def run(
    codes: np.ndarray,
    sizes: list[int],
    target: int,
    rho: float,
    rounds: int,
    megabytes: float,
    iterations: int,
    generator: np.random.Generator,
) -> tuple:
    """Measure, estimate and choose until the budget is spent; return the model and how many marginals were chosen."""
    domain = Domain(range(len(sizes)), sizes)
    others = [j for j in range(len(sizes)) if j != target]
    workload = [tuple(sorted((*pair, target))) for pair in itertools.combinations(others, 2)]
    closure = {part for clique in workload for k in (1, 2, 3) for part in itertools.combinations(clique, k)}
    weights = {part: sum(len({*part} & {*clique}) for clique in workload) for part in sorted(closure, key=len)}
    answers = {clique: count(codes, sizes, clique) for clique in weights}
    estimator = estimation.MirrorDescent()

    def measure(clique: Clique, sigma: float) -> LinearMeasurement:
        noisy = answers[clique] + sigma * generator.standard_normal(len(answers[clique]))
        return LinearMeasurement(noisy, clique, stddev=sigma)

    sigma, epsilon = math.sqrt(rounds / (2 * 0.9 * rho)), math.sqrt(8 * 0.1 * rho / rounds)
    measured = [measure(clique, sigma) for clique in weights if len(clique) == 1]
    used = len(measured) * 0.5 / sigma**2
    model = estimator.estimate(domain, measured, iters=iterations)
    chosen, last = 0, False
    while not last:
        if rho - used < 2 * (0.5 / sigma**2 + epsilon**2 / 8):
            sigma, epsilon, last = math.sqrt(1 / (1.8 * (rho - used))), math.sqrt(0.8 * (rho - used)), True
        used += epsilon**2 / 8 + 0.5 / sigma**2
        cliques = list(model.potentials.cliques)
        covered = {part for c in cliques for k in range(1, 4) for part in itertools.combinations(sorted(c), k)}
        limit = megabytes * used / rho
        tree = Tree(model, float(model.total))
        errors = {}
        for clique, weight in weights.items():
            if clique in covered or junction_tree.hypothetical_model_size(domain, [*cliques, clique]) <= limit:
                gap = np.abs(answers[clique] - tree.project(clique)).sum()
                errors[clique] = weight * (gap - math.sqrt(2 / math.pi) * sigma * len(answers[clique]))
        scale = 0.5 * epsilon / max(weights[clique] for clique in errors)
        shares = softmax(scale * np.array(list(errors.values())))
        clique = list(errors)[generator.choice(len(shares), p=shares)]
        before = tree.project(clique)
        measured.append(measure(clique, sigma))
        model = estimator.estimate(domain, measured, iters=iterations, warm_start=model)
        chosen += 1
        after = Tree(model, float(model.total)).project(clique)
        print(chosen, clique, len(before), f"{sigma:.1f} {used / rho:.3f} {time.process_time():.1f} s", flush=True)
        if np.abs(after - before).sum() <= sigma * math.sqrt(2 / math.pi) * len(before):
            sigma, epsilon = sigma / 2, epsilon * 2
    return model, chosen


def main(source: str, target: str) -> None:
    given = np.load(source)
    sizes = given["sizes"].tolist()
    seed = int(given["seed"])
    np.random.seed(seed)  # mbi draws its rows by the global generator.
    model, chosen = run(
        given["codes"],
        sizes,
        int(given["target"]),
        compute_rho(float(given["epsilon"]), float(given["delta"])),
        int(given["rounds"]) or 16 * len(sizes),
        float(given["megabytes"]),
        int(given["iterations"]),
        np.random.default_rng(seed),
    )
    rows = int(given["num_rows"]) or None
    drawn = model.synthetic_data(rows).to_dict()
    codes = np.stack([drawn[j] for j in range(len(sizes))], axis=1).astype(np.int64)
    np.savez(target, codes=codes, chosen=chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
