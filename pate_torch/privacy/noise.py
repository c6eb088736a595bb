"""Sources of privacy noise, which are separate from every seeded generator.

Every random bit comes from the entropy of the operating system. Torch's generator is not used, because its CPU
generator keeps 32 bits of its seed, which an attacker can enumerate. ``insecure_seed`` makes a run repeatable and voids
its guarantee, and all files of such a run say NOT PRIVATE.

Continuous noise is rounded to float64, and the rounding can in principle be attacked (Mironov 2012). Discrete noise is
exact: the discrete Gaussian and the discrete Laplace distribution (Canonne, Kamath & Steinke 2020), in which P(z) is
proportional to exp(-z^2 / (2 sigma^2)) or to exp(-|z| / scale) on all integers z.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement, create_private_folder
from pate_torch.privacy.accounts import PURPOSE_LABELS
from pate_torch.privacy.records import Answers, DryRunAnswers
from pate_torch.privacy.sensitive import Sensitivity

NOISE_KINDS = ("torch", "discrete")
_UNIFORM_BITS = 52  # (k + 1/2) 2^-52 is exact in float64 and never 0 or 1
_BLOCK_NUMBERS = 1 << 18  # a block fits the cache of a core; several threads draw the blocks of a large tensor
MIN_CONTINUOUS_NOISE_DELTA = 1e-15
"""Smallest delta with continuous noise. With ``_UNIFORM_BITS`` bits, normal numbers end at 8.57 standard deviations and
exponential numbers at 36.7 scales. The missing tails have probability 1e-17 and 1e-16, so continuous noise supports no
smaller delta and no pure epsilon."""


def check_noise(kind: str, insecure_seed: int | None) -> None:
    """Raise ValueError if ``kind`` does not exist or cannot have a seed."""
    checks.one_of("noise", kind, NOISE_KINDS)
    if insecure_seed is not None:
        checks.integer("insecure_noise_seed", insecure_seed, low=0)
        if kind == "discrete":
            fix = "Discrete noise cannot be seeded. Use noise=torch for a repeatable, NOT PRIVATE run."
            raise checks.error("insecure_noise_seed", insecure_seed, "must be null with noise=discrete", fix)


def check_delta(kind: str, delta: float) -> None:
    """Raise ValueError if ``delta`` is below what the bounded tails of continuous noise support."""
    checks.delta("privacy.delta", delta)
    if kind != "discrete" and delta < MIN_CONTINUOUS_NOISE_DELTA:
        message = f"must be at least {MIN_CONTINUOUS_NOISE_DELTA:g} with continuous noise, whose tails are bounded"
        raise checks.error("privacy.delta", delta, message, "Use noise=discrete, or a larger delta.")


@dataclass(eq=False)
class NoiseSource:
    """A source of noise, float64 (continuous) or int64 (discrete).

    The two subclasses are the noise of a ``budget.Spending``, for which an account was charged, and ``DryRunNoise``.

    Attributes:
        kind: "torch" (continuous) or "discrete" (exact discrete Gaussian and Laplace).
        insecure_seed: Seed that makes noise repeatable and the release not private. None for the entropy of the
            operating system.
        state: PRIVATE. Noise that a later call of the same release needs again, such as a noisy threshold.
    """

    kind: str = "torch"
    insecure_seed: int | None = None
    state: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _generator: torch.Generator | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self) is NoiseSource:
            raise TypeError("NoiseSource: use the noise of budget.spend, or DryRunNoise to release nothing")
        check_noise(self.kind, self.insecure_seed)
        if self.insecure_seed is not None:
            self._generator = torch.Generator().manual_seed(self.insecure_seed)

    @property
    def secret(self) -> bool:
        """Whether the noise is secret. Answers drawn with seeded noise are not private."""
        return self.insecure_seed is None

    def stamp(self, answers: Answers) -> Answers:
        """Mark answers that were drawn from this source with the reservation that paid for them."""
        raise NotImplementedError

    def _check_draw_allowed(self) -> None:
        """Raise RuntimeError if no noise may be drawn now. Called before every draw."""

    def draw_uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw independent U(0, 1), float64, strictly between 0 and 1."""
        return self._fill_blocks(self._make_uniform_block, shape).to(device)

    def draw_gumbel(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw independent standard Gumbel, float64; argmax(u + gumbel) samples proportionally to exp(u)."""
        return self._fill_blocks(lambda size: self._make_exponential_block(size).log_().neg_(), shape).to(device)

    def draw_gaussian(self, shape: tuple[int, ...], sigma: float | Fraction, device: torch.device) -> Tensor:
        """Draw independent N(0, sigma^2), float64, or discrete Gaussians of this parameter, int64; sigma in votes."""
        return self._draw_scaled(shape, "sigma", sigma, self._make_normal_block).to(device)

    def draw_laplace(self, shape: tuple[int, ...], scale: float, device: torch.device) -> Tensor:
        """Draw independent Lap(scale), float64, or discrete Laplaces of this parameter, int64; scale in votes."""
        return self._draw_scaled(shape, "scale", scale, self._make_laplace_block).to(device)

    def _make_uniform_block(self, size: int) -> Tensor:
        if self._generator is not None:
            bits = torch.randint(1 << _UNIFORM_BITS, (size,), generator=self._generator)
        else:
            bits = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64)
            bits &= (1 << _UNIFORM_BITS) - 1
        return bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)

    def _make_exponential_block(self, size: int) -> Tensor:
        return self._make_uniform_block(size).log_().neg_()

    def _make_laplace_block(self, size: int) -> Tensor:
        return self._make_exponential_block(size).sub_(self._make_exponential_block(size))

    def _make_normal_block(self, size: int) -> Tensor:
        """Make normal numbers in pairs, from a radius and an angle (Box and Muller 1958)."""
        num_pairs = (size + 1) // 2
        radius = self._make_exponential_block(num_pairs).mul_(2).sqrt_()
        angle = self._make_uniform_block(num_pairs).mul_(2 * math.pi)
        return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)])[:size]

    def _fill_blocks(self, make_block: Callable[[int], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Fill a tensor block by block with ``make_block(size)``, in threads unless the noise is seeded."""
        self._check_draw_allowed()
        values = torch.empty(shape, dtype=torch.float64)
        blocks = [block for block in values.view(-1).split(_BLOCK_NUMBERS) if len(block)]

        def fill_block(block: Tensor) -> None:
            block.copy_(make_block(len(block)))

        if len(blocks) == 1 or self._generator is not None:
            for block in blocks:
                fill_block(block)
            return values
        with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(fill_block, blocks):  # re-raises the error of a thread, so that no block stays undrawn
                pass
        return values

    def _draw_scaled(
        self, shape: tuple[int, ...], name: str, value: float | Fraction, make_block: Callable[[int], Tensor]
    ) -> Tensor:
        checks.positive(name, value)
        if self.kind != "discrete":
            return self._fill_blocks(make_block, shape).mul_(float(value))
        self._check_draw_allowed()
        max_value = MAX_LARGE_SCALE if name == "sigma" else MAX_DISCRETE_SCALE
        if not value <= max_value:
            message = f"must be at most {max_value} with noise=discrete"
            raise checks.error(name, value, message, "Use noise=torch for larger noise.")
        if name == "sigma":
            return draw_large_discrete_gaussian(shape, Fraction(value))
        return draw_discrete(shape, "laplace", Fraction(value))


class NoiseProvider(Protocol):
    """A provider of noise: a ``budget.Budget``, or a ``DryRunNoise`` in its place."""

    @property
    def kind(self) -> str:
        """Kind of the noise (``NoiseSource.kind``)."""

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Raise ValueError if the value has another adjacency than the account."""

    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_LABELS
    ) -> AbstractContextManager[Any]:
        """Reserve the events and return a ``budget.Spending``, or the ``DryRunNoise`` itself."""


@dataclass(eq=False)
class DryRunNoise(NoiseSource):
    """Noise for audits, plans and tests, which charges no account and whose answers cannot be released.

    As a ``NoiseProvider``, this class can take the place of a budget.

    Attributes:
        events: Privacy events that a budget would have been charged.
    """

    events: tuple[PrivacyEvent, ...] = ()

    def stamp(self, answers: Answers) -> DryRunAnswers:
        """Convert the answers to ``DryRunAnswers``, which cannot be released or written."""
        return DryRunAnswers(**{f.name: getattr(answers, f.name) for f in fields(Answers)})

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Accept every adjacency, because there is no account."""

    @contextmanager
    def spend(self, events: Iterable[PrivacyEvent], **facts: object) -> Iterator[DryRunNoise]:
        """Add the events to ``events`` and yield this source itself."""
        self.events += tuple(events)
        yield self

    @property
    def noise(self) -> DryRunNoise:
        """This source, as for a ``Spending``."""
        return self

    def record_cost(self, events: Iterable[PrivacyEvent]) -> None:
        """Do nothing, because no account is charged."""


# ---- noise that a suspended release needs again ----------------------------------------------------------------------

_README = """PRIVATE: do not publish, do not share.

This folder holds noise that unfinished releases need again, such as the noisy thresholds of sparse vectors. Whoever
has this noise can subtract it from the answers. Keep the folder together with the privacy ledger beside it, which
stores a hash of each file. A release whose file is missing cannot be continued and stays charged at its worst case.
"""


def save_noise_state(path: Path, noise_state: dict[str, float]) -> str:
    """PRIVATE. Write the noise that a suspended release needs again, atomically.

    Returns:
        SHA-256 of the file, which the ledger stores. Empty if ``noise_state`` is empty.
    """
    if not noise_state:
        path.unlink(missing_ok=True)
        return ""
    # The salt prevents a search for noise with the hash that the ledger holds.
    content = json.dumps({"salt": secrets.token_hex(16), "kept": noise_state}).encode()
    create_private_folder(path.parent, _README)
    with atomic_replacement(path) as temporary:
        temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def load_noise_state(path: Path) -> tuple[dict[str, float], str]:
    """PRIVATE. Read a saved noise state; return (noise state, SHA-256 of the file). A damaged file gives {}."""
    if not path.exists():
        return {}, ""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    try:
        return json.loads(content)["kept"], digest
    except (ValueError, KeyError, TypeError):
        return {}, digest  # the ledger does not know this hash, so the release cannot be resumed


# ---- exact integer noise ---------------------------------------------------------------------------------------------
#
# A draw inverts the distribution function of |z| at a uniform real number U in [0, 1), of which 63 bits are drawn
# first. The lookup table holds a rigorous lower and upper bound of every boundary. If the bits do not decide between
# two values, more bits are drawn and a finer table is built. The rejection sampler of the paper has the same
# distribution at about 5e4 draws a second, and its duration depends on the secret draws. The table gives millions of
# draws a second, and its duration depends on the parameter alone.

_FIRST_BITS = 63  # fits int64 and uint64
_STEP_BITS = 64
_GUARD_BITS = 64  # for rounding in the table: about X^3 units after X entries
MAX_DISCRETE_SCALE = 20_000  # votes; a table has some 10 entries per vote (Gaussian) or 45 (Laplace)


def draw_discrete(shape: tuple[int, ...], kind: str, scale: Fraction, bits: int = _FIRST_BITS) -> Tensor:
    """Draw independent numbers of the discrete ``kind`` "gaussian" or "laplace" on the CPU, int64.

    The parameter ``scale``, in votes, is used exactly. The first lookup takes ``bits`` bits.
    """
    random_word = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
    # The lowest bit is the sign; the others are the first bits of U.
    first_bits = random_word >> np.uint64(64 - bits)
    low, high = _get_cdf_bounds(kind, scale, bits)
    magnitude = np.searchsorted(high, first_bits, side="right").astype(np.int64)
    lower_magnitude = np.searchsorted(low, first_bits, side="right")
    for i in np.flatnonzero((magnitude != lower_magnitude) | (magnitude == len(low))):
        magnitude[i] = _draw_until_decided(kind, scale, int(first_bits[i]), bits)
    sign = 1 - 2 * (random_word & np.uint64(1)).astype(np.int64)
    return torch.from_numpy(sign * magnitude).reshape(shape)


# A large discrete Gaussian number is drawn as z = +-(B y + u), with B = floor(sigma / 4096), y >= 0 of weight
# exp(-(B y)^2 / (2 sigma^2)), which is a discrete Gaussian of parameter sigma / B given that it is not negative, and u
# uniform on 0, ..., B - 1. The pair is kept with probability exp(-(2 B y u + u^2) / (2 sigma^2)), so that B y + u has
# weight exp(-(B y + u)^2 / (2 sigma^2)). One of the two zeros is dropped.

_COARSE_STEPS = 4096  # steps of y within one sigma
_ALWAYS_KEPT_BITS = 6  # a pair with y < 2^18 is kept with a probability above 1 - (y + 1) / 2^24 >= 1 - 2^-6
MAX_LARGE_SCALE = 1 << 50  # so that 64 standard deviations fit int64


def draw_large_discrete_gaussian(shape: tuple[int, ...], sigma: Fraction) -> Tensor:
    """Draw independent discrete Gaussian numbers of the exact parameter ``sigma``, which may be large, int64."""
    if sigma <= MAX_DISCRETE_SCALE:
        return draw_discrete(shape, "gaussian", sigma)
    if sigma > MAX_LARGE_SCALE:
        raise checks.error("sigma", float(sigma), f"must be at most 2^{MAX_LARGE_SCALE.bit_length() - 1}")
    width = math.floor(sigma / _COARSE_STEPS)
    numbers, missing = [np.empty(0, np.int64)], math.prod(shape)
    while missing > 0:
        # Half of the numbers y are negative, and a few pairs are not kept.
        y = draw_discrete((2 * missing + missing // 8 + 16,), "gaussian", sigma / width).numpy()
        y = y[y >= 0][:missing]
        u = _draw_uniform_integers(width, len(y))
        random_word = np.frombuffer(os.urandom(8 * len(y)), dtype=np.uint64)
        first_bits, is_negative = random_word >> np.uint64(1), (random_word & np.uint64(1)).astype(bool)
        certain = (1 << _FIRST_BITS) - (1 << (_FIRST_BITS - _ALWAYS_KEPT_BITS))
        is_kept = (first_bits < np.uint64(certain)) & (y < (2 * _COARSE_STEPS**2 >> _ALWAYS_KEPT_BITS + 1))
        for i in np.flatnonzero(~is_kept):
            exponent = (2 * width * int(y[i]) * int(u[i]) + int(u[i]) ** 2) / (2 * sigma**2)
            is_kept[i] = _is_below_exp(int(first_bits[i]), exponent)
        z = y * width + u
        is_kept &= ~(is_negative & (z == 0))
        numbers.append(np.where(is_negative, -z, z)[is_kept])
        missing -= int(is_kept.sum())
    return torch.from_numpy(np.concatenate(numbers)).reshape(shape)


def _draw_uniform_integers(limit: int, size: int) -> np.ndarray:
    """Draw independent uniform integers in [0, limit), int64."""
    mask, numbers = np.uint64((1 << (limit - 1).bit_length()) - 1), np.empty(0, np.int64)
    while len(numbers) < size:
        words = np.frombuffer(os.urandom(8 * 2 * (size - len(numbers))), dtype=np.uint64) & mask
        numbers = np.concatenate([numbers, words[words < np.uint64(limit)].astype(np.int64)])
    return numbers[:size]


def _is_below_exp(first_bits: int, exponent: Fraction) -> bool:
    """Whether a uniform U that begins with these 63 bits lies below exp(-exponent), with more bits if needed."""
    bits = _FIRST_BITS
    while True:
        low, high = _compute_exp_bounds(exponent, bits)
        if first_bits + 1 <= low:
            return True
        if first_bits >= high:
            return False
        first_bits = first_bits << _STEP_BITS | int.from_bytes(os.urandom(_STEP_BITS // 8), "big")
        bits += _STEP_BITS


def _draw_until_decided(kind: str, scale: Fraction, first_bits: int, bits: int) -> int:
    """Draw further bits of U until the bits decide the value."""
    while True:
        first_bits = first_bits << _STEP_BITS | int.from_bytes(os.urandom(_STEP_BITS // 8), "big")
        bits += _STEP_BITS
        magnitude = _build_cdf_table(kind, scale, bits).find_magnitude(first_bits)
        if magnitude is not None:
            return magnitude


@lru_cache(maxsize=64)
def _get_cdf_bounds(kind: str, scale: Fraction, bits: int) -> tuple[np.ndarray, np.ndarray]:
    table = _build_cdf_table(kind, scale, bits)
    return np.array(table.low, dtype=np.uint64), np.array(table.high, dtype=np.uint64)


@dataclass(frozen=True)
class _CdfTable:
    """Integers low[m] <= 2^bits P(|Z| <= m) <= high[m]. The probability beyond the last entry is below 2^-bits."""

    low: list[int]
    high: list[int]

    def find_magnitude(self, first_bits: int) -> int | None:
        """Return |Z| for a U that begins with ``first_bits``. None if these bits do not decide the value."""
        upper_rank, lower_rank = bisect_right(self.high, first_bits), bisect_right(self.low, first_bits)
        return upper_rank if upper_rank == lower_rank < len(self.low) else None


@lru_cache(maxsize=64)
def _build_cdf_table(kind: str, scale: Fraction, bits: int) -> _CdfTable:
    """Build the table by interval arithmetic on integers with guard bits; lower ends round down, upper ends up.

    Weights w_0 = 1, w_(m+1) = w_m r_m, with r_m constant (Laplace) or r_(m+1) = r_m exp(-1/sigma^2) (Gaussian).
    """
    precision = bits + _GUARD_BITS
    fixed_point_one = 1 << precision
    ratio = _compute_exp_bounds(1 / (2 * scale**2) if kind == "gaussian" else 1 / scale, precision)
    decay = _compute_exp_bounds(1 / scale**2, precision) if kind == "gaussian" else (fixed_point_one, fixed_point_one)

    def multiply_intervals(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] * right[0] >> precision, -(-left[1] * right[1] >> precision)

    weight = (fixed_point_one, fixed_point_one)
    sums = [(fixed_point_one, fixed_point_one)]
    while True:
        weight, ratio = multiply_intervals(weight, ratio), multiply_intervals(ratio, decay)
        # The weights left out fall at least as fast as a geometric series of the present ratio.
        tail = -(-2 * weight[1] * fixed_point_one // (fixed_point_one - ratio[1]))
        if tail < 1 << (_GUARD_BITS - 2):
            break
        sums.append((sums[-1][0] + 2 * weight[0], sums[-1][1] + 2 * weight[1]))
    total = (sums[-1][0], sums[-1][1] + tail)
    low = [(part << bits) // total[1] for part, _ in sums]
    high = [-(-(part << bits) // total[0]) for _, part in sums]
    return _CdfTable(low, high)


def _compute_exp_bounds(exponent: Fraction, precision: int) -> tuple[int, int]:
    """Return integers below and above exp(-exponent) 2^precision.

    The exponential of ``decimal`` is correctly rounded. Four units cover the other rounding errors.
    """
    # The digits of 2^precision, and the digits that exp loses because of the size of the exponent.
    digits = precision * 31 // 100 + 20 + len(str(math.ceil(exponent)))
    context = Context(prec=digits, Emin=-(10**9), Emax=10**9)
    power = context.exp(context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator)))
    nearest_integer = int(context.multiply(power, Decimal(1 << precision)))
    return max(0, nearest_integer - 4), nearest_integer + 4
