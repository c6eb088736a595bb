"""Privacy noise: its law, its entropy, and exactness where it is promised."""

import math
import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.privacy import noise
from pate_torch.privacy.noise import MIN_CONTINUOUS_NOISE_DELTA, DryRunNoise, check_delta
from tests.mechanisms.vote_laws import TINY, fit, has_this_scale_alone
from tests.spies import spy

CPU = torch.device("cpu")
N = 40_000


def samples(kind: str, scale: float, seed: int | None = None) -> np.ndarray:
    source = DryRunNoise(insecure_seed=seed)
    given = (scale,) if kind in ("gaussian", "laplace") else ()
    return getattr(source, f"draw_{kind}")((N,), *given, CPU).numpy()


LAWS = {
    "gaussian": lambda scale: stats.norm(scale=scale),
    "laplace": lambda scale: stats.laplace(scale=scale),
    "gumbel": lambda scale: stats.gumbel_r(scale=scale),
    "uniform": lambda scale: stats.uniform(scale=scale),
}


@pytest.mark.parametrize("seed", [None, 5], ids=["entropy", "seeded"])
@pytest.mark.parametrize("kind", LAWS)
def test_continuous_law_and_no_other_scale(kind, seed):
    scale = 7.5 if kind in ("gaussian", "laplace") else 1.0
    x = samples(kind, scale, seed)
    assert has_this_scale_alone(lambda factor: stats.kstest(x, LAWS[kind](scale * factor).cdf).pvalue)


def test_gaussian_draws_are_independent_in_pairs_and_of_any_size():
    source = DryRunNoise(insecure_seed=1)
    assert source.draw_gaussian((3, 5), 2.0, CPU).shape == (3, 5)
    assert source.draw_gaussian((0, 5), 2.0, CPU).shape == (0, 5)
    # The two halves share their radii: uncorrelated in value and in size only because the law is Gaussian.
    x = source.draw_gaussian((2 * N,), 1.0, CPU).view(2, N).numpy()
    for power in (1, 2):
        assert abs(np.corrcoef(x**power)[0, 1]) < 5 / math.sqrt(N)


def test_continuous_noise_ends_where_its_bits_do_and_bears_no_smaller_delta(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))  # the smallest uniform number there is
    source = DryRunNoise()
    assert float(source.draw_gaussian((1,), 1.0, CPU).abs()) == pytest.approx(8.57, abs=0.005)
    assert float(source._make_exponential_block(1)) == pytest.approx(36.74, abs=0.005)
    assert 2 * stats.norm.sf(8.57) < math.exp(-36.73) < MIN_CONTINUOUS_NOISE_DELTA
    check_delta("torch", MIN_CONTINUOUS_NOISE_DELTA)
    check_delta("discrete", 1e-300)
    for kind in ("torch", "by opacus"):
        with pytest.raises(ValueError, match=r"privacy\.delta=9e-16: must be at least 1e-15.*noise=discrete"):
            check_delta(kind, 9e-16)


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_extreme_entropy_gives_finite_noise(monkeypatch, byte):
    monkeypatch.setattr(os, "urandom", lambda size: byte * size)
    for kind in LAWS:
        assert np.isfinite(samples(kind, 1.0)).all()
    uniform = samples("uniform", 1.0)
    assert uniform.min() > 0 and uniform.max() < 1


def test_every_draw_spends_its_own_entropy(monkeypatch):
    """A generator on the CPU that is only *seeded* by entropy keeps 32 bits of it."""
    spent = spy(monkeypatch, os, "urandom", lambda size: size)
    torch.manual_seed(0)
    DryRunNoise().draw_uniform((100,), CPU)
    assert sum(spent) == 800
    DryRunNoise("discrete").draw_gaussian((100,), 3.0, CPU)
    assert sum(spent) >= 1600
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 5 + (1 << 32))]
    assert torch.equal(*(torch.rand(4, generator=generator) for generator in generators))  # why


def test_noise_ignores_global_seeds_and_touches_no_global_stream():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        before = torch.get_rng_state()
        draws.append([DryRunNoise(kind).draw_gaussian((64,), 50.0, CPU) for kind in ("torch", "discrete")])
        assert torch.equal(before, torch.get_rng_state())
    for first, second in zip(*draws, strict=True):
        assert not torch.equal(first, second)


def test_insecure_seed_repeats_and_says_so():
    first, second, other = (DryRunNoise(insecure_seed=s) for s in (0, 0, 1))
    x = first.draw_laplace((50,), 1.0, CPU)
    assert torch.equal(x, second.draw_laplace((50,), 1.0, CPU)) and not torch.equal(
        x, other.draw_laplace((50,), 1.0, CPU)
    )
    assert not torch.equal(x, first.draw_laplace((50,), 1.0, CPU))
    assert not first.secret and DryRunNoise().secret and DryRunNoise("discrete").secret


@pytest.mark.parametrize(
    "build,field",
    [
        (lambda: DryRunNoise("gauss"), "noise"),
        (lambda: DryRunNoise(insecure_seed=-1), "insecure_noise_seed"),
        (lambda: DryRunNoise("discrete", insecure_seed=0), "insecure_noise_seed"),
        (lambda: DryRunNoise().draw_gaussian((1,), 0.0, CPU), "sigma"),
        (lambda: DryRunNoise().draw_laplace((1,), math.nan, CPU), "scale"),
        (lambda: DryRunNoise("discrete").draw_gaussian((1,), 1e16, CPU), "sigma"),
        (lambda: DryRunNoise("discrete").draw_laplace((1,), -1.0, CPU), "scale"),
    ],
)
def test_refuses(build, field):
    with pytest.raises(ValueError, match=field):
        build()


CASES = [("gaussian", 0.7), ("gaussian", 4.0), ("gaussian", 0.1 + 40), ("laplace", 0.5), ("laplace", 9.3)]


@pytest.mark.parametrize("kind,scale", CASES)
def test_discrete_law_and_no_other_scale(kind, scale):
    z = getattr(DryRunNoise("discrete"), f"draw_{kind}")((N,), scale, CPU)
    assert z.dtype == torch.int64
    assert has_this_scale_alone(lambda factor: fit(z.numpy(), kind, scale * factor, True))


def test_discrete_gaussian_is_not_a_rounded_one():
    rounded = np.rint(samples("gaussian", 0.7, seed=3)).astype(np.int64)
    assert fit(rounded, "gaussian", 0.7, True) < TINY


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind,scale", [("gaussian", 2.0), ("laplace", 3.0)])
def test_law_is_exact_however_few_bits_are_drawn_first(kind, scale, bits):
    """With 4 bits nearly every draw needs the refinement that 63 bits never need in a lifetime."""
    z = noise.draw_discrete((4000,), kind, Fraction(scale), bits)
    assert has_this_scale_alone(lambda factor: fit(z.numpy(), kind, scale * factor, True))


def exact_cdf(kind: str, scale: Fraction, entries: int) -> list[mpmath.mpf]:
    """P(|Z| <= m) for m < entries."""
    s = mpmath.mpf(scale.numerator) / scale.denominator
    weight = (lambda m: mpmath.exp(-(m**2) / (2 * s**2))) if kind == "gaussian" else (lambda m: mpmath.exp(-m / s))
    q = weight(1)
    total = mpmath.jtheta(3, 0, q) if kind == "gaussian" else (1 + q) / (1 - q)
    sums = [mpmath.mpf(1)]
    for m in range(1, entries):
        sums.append(sums[-1] + 2 * weight(m))
    return [part / total for part in sums]


@pytest.mark.parametrize("bits", [63, 127])
@pytest.mark.parametrize("kind,scale", [("gaussian", 1.0), ("gaussian", 40.1), ("gaussian", 0.3), ("laplace", 45.0798)])
def test_table_encloses_the_exact_distribution_function(kind, scale, bits):
    with mpmath.workdps(80):
        table = noise._build_cdf_table(kind, Fraction(scale), bits)
        exact = exact_cdf(kind, Fraction(scale), len(table.low))
        for low, value, high in zip(table.low, exact, table.high, strict=True):
            assert low <= value * 2**bits <= high
            assert high - low <= 4  # tight: otherwise most draws would need refining
        assert 1 - exact[-1] < mpmath.mpf(2) ** -bits


def test_lookup_decides_only_what_the_bits_decide():
    table = noise._build_cdf_table("gaussian", Fraction(2), 8)
    with mpmath.workdps(30):
        exact = exact_cdf("gaussian", Fraction(2), 40)
    undecided = 0
    for known in range(256):
        lowest = sum(c <= mpmath.mpf(known) / 256 for c in exact)
        highest = sum(c < mpmath.mpf(known + 1) / 256 for c in exact)
        found = table.find_magnitude(known)
        undecided += found is None
        if found is not None:
            assert found == lowest == highest
    assert 0 < undecided < 64


def bernoulli_exp(gamma: Fraction, rng: np.random.Generator) -> bool:
    """Canonne, Kamath & Steinke 2020, Algorithm 1, for 0 <= gamma <= 1."""
    k = 1
    while rng.integers(0, k * gamma.denominator) < gamma.numerator:
        k += 1
    return k % 2 == 1


def rejection(sigma: Fraction, rng: np.random.Generator) -> int:
    """The paper's rejection sampler (Algorithms 2 and 3): the slow twin."""
    t = math.floor(sigma) + 1
    while True:
        u = int(rng.integers(0, t))
        if not bernoulli_exp(Fraction(u, t), rng):
            continue
        v = 0
        while bernoulli_exp(Fraction(1), rng):
            v += 1
        magnitude, negative = u + t * v, bool(rng.integers(0, 2))
        if negative and magnitude == 0:
            continue
        gamma = (magnitude - sigma**2 / t) ** 2 / (2 * sigma**2)
        if all(bernoulli_exp(Fraction(1), rng) for _ in range(math.floor(gamma))) and bernoulli_exp(
            gamma - math.floor(gamma), rng
        ):
            return -magnitude if negative else magnitude


def test_agrees_with_the_rejection_sampler():
    rng = np.random.default_rng(0)
    slow = np.array([rejection(Fraction(5, 2), rng) for _ in range(3000)])
    fast = noise.draw_discrete((N,), "gaussian", Fraction(5, 2)).numpy()
    other = noise.draw_discrete((N,), "gaussian", Fraction(4)).numpy()
    edges = [-np.inf, -4.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 4.5, np.inf]
    counts = [np.histogram(np.clip(z, -50, 50), np.clip(edges, -99, 99))[0] for z in (slow, fast, other)]
    assert stats.chi2_contingency(counts[:2]).pvalue > TINY
    assert stats.chi2_contingency(counts[::2]).pvalue < TINY


def test_discrete_parameter_is_exactly_the_one_priced(monkeypatch):
    asked = []
    monkeypatch.setattr(noise, "draw_discrete", lambda shape, kind, scale: asked.append(scale) or torch.zeros(shape))
    DryRunNoise("discrete").draw_gaussian((1,), 0.1, CPU)
    assert asked == [Fraction(0.1)] and Fraction(0.1) != Fraction(1, 10)


def test_discrete_noise_of_tiny_scales_and_sizes():
    source = DryRunNoise("discrete")
    assert source.draw_gaussian((3, 4), 0.01, CPU).abs().sum() == 0  # exp(-5000) is not rounded up
    assert source.draw_laplace((0, 4), 1.0, CPU).shape == (0, 4)
