"""Exact laws of small votes by direct integration or summation, independent of the package; and a recording source."""

import math

import numpy as np
from scipy import stats

from pate_torch.privacy.noise import DryRunNoise

NO_ANSWER = -1
TINY = 1e-9
"""A false alarm of a test on the system's entropy, which no seed repeats: once in a thousand million runs."""
CERTAIN = 1 - TINY
"""The confidence of an audit in a test."""


class Recorder(DryRunNoise):
    """A noise source that keeps what it gave: ``drawn`` is a list of (kind, tensor)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drawn = []

    def _keep(self, kind, tensor):
        self.drawn.append((kind, tensor.clone()))
        return tensor

    def draw_gaussian(self, shape, sigma, device):
        return self._keep("gaussian", super().draw_gaussian(shape, sigma, device))

    def draw_laplace(self, shape, scale, device):
        return self._keep("laplace", super().draw_laplace(shape, scale, device))

    def draw_gumbel(self, shape, device):
        return self._keep("gumbel", super().draw_gumbel(shape, device))


class Discrete:
    """An integer law with the methods of a SciPy one, by direct normalization."""

    def __init__(self, kind: str, scale: float) -> None:
        self.reach = int(60 * scale + 10)
        z = np.arange(-self.reach, self.reach + 1)
        weight = np.exp(-(z**2) / (2 * scale**2)) if kind == "gaussian" else np.exp(-np.abs(z) / scale)
        self.mass = weight / weight.sum()
        self.below = np.cumsum(self.mass)

    def _at(self, table, x):
        index = np.floor(np.asarray(x, dtype=float)).astype(int) + self.reach
        return np.where(index < 0, 0.0, table[np.clip(index, 0, len(table) - 1)])

    def pmf(self, x):
        return self._at(self.mass, x)

    def cdf(self, x):
        """P(Z <= x)."""
        return self._at(self.below, x)

    def sf(self, x):
        """P(Z > x)."""
        return 1 - self.cdf(x)


def law(kind: str, scale: float, discrete: bool):
    if discrete:
        return Discrete(kind, scale)
    return stats.norm(scale=scale) if kind == "gaussian" else stats.laplace(scale=scale)


def fit(x: np.ndarray, kind: str, scale: float, discrete: bool) -> float:
    """p-value of draws against a law: Kolmogorov-Smirnov, or chi-square on the integers."""
    if not discrete:
        cdf = stats.gumbel_r(scale=scale).cdf if kind == "gumbel" else law(kind, scale, False).cdf
        return float(stats.kstest(x, cdf).pvalue)
    exact = law(kind, scale, True)
    # Bins at the quantiles of the law, so that every one has its share.
    edges = np.unique(np.searchsorted(exact.below, np.linspace(0.02, 0.98, 40)) - exact.reach)
    share = np.diff(np.concatenate([[0.0], exact.cdf(edges), [1.0]]))
    seen = np.bincount(np.searchsorted(edges, x), minlength=len(share))
    return float(stats.chisquare(*pooled(seen, share * len(x))).pvalue)


def has_this_scale_alone(p_value) -> bool:
    """Whether ``p_value``, of a factor on the scale, accepts 1 and rejects two thirds and one and a half."""
    return p_value(1) > TINY > max(p_value(2 / 3), p_value(3 / 2))


def argmax_law(counts, noise) -> np.ndarray:
    """P(argmax(counts + noise) = c), ties to the lowest class."""
    if isinstance(noise, Discrete):
        x = np.arange(-noise.reach, noise.reach + 1) + int(max(counts))
        terms = [
            noise.pmf(x - n) * math.prod(noise.cdf(x - m - (j < c)) for j, m in enumerate(counts) if j != c)
            for c, n in enumerate(counts)
        ]
        return np.array([t.sum() for t in terms])
    # The integrand has kinks (Laplace), which all lie on the grid.
    x = np.arange(min(counts) - 200, max(counts) + 200, 1 / 128)
    return np.array(
        [
            (noise.pdf(x - n) * math.prod(noise.cdf(x - m) for j, m in enumerate(counts) if j != c)).sum() / 128
            for c, n in enumerate(counts)
        ]
    )


def at_least(noise, x: float) -> float:
    """P(noise >= x)."""
    return float(noise.sf(math.ceil(x) - 1) if isinstance(noise, Discrete) else noise.sf(x))


def sparse_law(distances, threshold: float, scale: float, max_failures: int, discrete: bool) -> dict:
    """P(pass/fail pattern) of the sparse vector; a pattern ends with the last failure allowed.

    Blocks are independent, and given its threshold so are the tests of a block.
    """
    coarse, fine = law("laplace", scale, discrete), law("laplace", 2 * scale, discrete)
    if discrete:
        t = np.arange(-coarse.reach, coarse.reach + 1)
        weight = coarse.pmf(t)
    else:
        t = np.arange(-40 * scale, 40 * scale, scale / 500)
        weight = coarse.pdf(t) * scale / 500
    patterns: dict = {}

    def extend(prefix, start, failures, probability):
        if start == len(distances) or failures == max_failures:
            patterns[prefix] = patterns.get(prefix, 0) + probability
            return
        alive = weight.copy()
        for q in range(start, len(distances)):
            passes = fine.sf(threshold + t - distances[q])
            passed = tuple(True for _ in range(start, q))
            extend((*prefix, *passed, False), q + 1, failures + 1, probability * (alive * (1 - passes)).sum())
            alive = alive * passes
        done = (*prefix, *(True for _ in range(start, len(distances))))
        patterns[done] = patterns.get(done, 0) + probability * alive.sum()

    extend((), 0, 0, 1.0)
    return patterns


def chi_square(observed: dict, expected: dict) -> float:
    """p-value of counts against probabilities, rare outcomes pooled."""
    size = sum(observed.values())
    assert abs(sum(expected.values()) - 1) < 1e-3, sum(expected.values())
    assert set(observed) <= set(expected), set(observed) - set(expected)
    seen, hoped = pooled([observed.get(o, 0) for o in expected], [expected[o] * size for o in expected])
    return float(stats.chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue)


def pooled(seen, hoped, least: float = 50):
    """Counts and their expectations, the rarest cells made one until every cell expects ``least``.

    A cell that expects five has a tail far above that of chi-square: nominal 1e-9 would be 1e-7.
    """
    seen, hoped = (np.asarray(part, dtype=float)[np.argsort(hoped)] for part in (seen, hoped))
    rare = max(1, int((hoped < least).sum()), int((np.cumsum(hoped) < least).sum()) + 1)
    return [np.append(part[:rare].sum(), part[rare:]) for part in (seen, hoped)]
