"""The source of privacy noise, separate from every seeded generator.

Every random bit comes from the operating system, not from a generator that the system seeds: torch's CPU generator
keeps 32 bits of its seed, which an attacker can enumerate. ``insecure_seed`` makes a run repeatable and voids its
guarantee, and everything that such a run writes says NOT PRIVATE.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement, create_private_folder
from pate_torch.privacy import discrete_noise
from pate_torch.privacy.records import Answers, DryRunAnswers
from pate_torch.privacy.sensitive import Sensitivity

_UNIFORM_BITS = 52  # (k + 1/2) 2^-52 is exact in float64 and never 0 or 1
_BLOCK_NUMBERS = 1 << 18
"""Block size of a draw. A block fits a core's cache, and several threads draw the blocks of a large tensor."""


NOISE_KINDS = ("torch", "discrete")

MIN_CONTINUOUS_NOISE_DELTA = 1e-15
"""Smallest delta with continuous noise. A normal number made of ``_UNIFORM_BITS`` bits ends at 8.57 standard
deviations and an exponential number at 36.7 scales. The tails beyond have probability 1e-17 and 1e-16, so continuous
noise supports no smaller delta and no pure epsilon."""


def check_noise(kind: str, insecure_seed: int | None) -> None:
    """Raise ValueError if ``kind`` does not exist or cannot have a seed."""
    checks.one_of("noise", kind, NOISE_KINDS)
    if insecure_seed is not None:
        checks.integer("insecure_noise_seed", insecure_seed, low=0)
        if kind == "discrete":
            raise checks.error(
                "insecure_noise_seed",
                insecure_seed,
                "must be null with noise=discrete",
                "It draws from the system's entropy only; use noise=torch for a repeatable, NOT PRIVATE run.",
            )


def check_delta(kind: str, delta: float) -> None:
    """Raise ValueError if ``delta`` is below what the bounded tails of continuous noise support."""
    checks.delta("privacy.delta", delta)
    if kind != "discrete" and delta < MIN_CONTINUOUS_NOISE_DELTA:
        message = (
            f"must be at least {MIN_CONTINUOUS_NOISE_DELTA:g} with continuous noise, whose tails end where its bits do"
        )
        raise checks.error(
            "privacy.delta", delta, message, "Use noise=discrete, whose tails do not, or a larger delta."
        )


@dataclass(eq=False)
class NoiseSource:
    """A source of noise, float64 (continuous) or int64 (discrete), for the device that holds the votes.

    It has two subclasses: the noise of a ``budget.Spending``, for which an account was charged, and ``DryRunNoise``.
    Continuous noise is rounded to float64, and the rounding can in principle be attacked (Mironov 2012). Discrete noise
    is exact.

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
            raise TypeError("NoiseSource: use the noise of budget.spend, or a DryRunNoise, which releases nothing")
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
        """Raise RuntimeError if a draw is not allowed now. It is called before every draw."""

    def draw_uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw independent U(0, 1), float64, strictly between 0 and 1."""
        self._check_draw_allowed()
        return self._fill_blocks(self._make_uniform_block, shape).to(device)

    def draw_exponential(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw independent Exp(1), float64, strictly positive."""
        self._check_draw_allowed()
        return self._fill_blocks(self._make_exponential_block, shape).to(device)

    def draw_gumbel(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw independent standard Gumbel, float64; argmax(u + gumbel) samples proportionally to exp(u)."""
        self._check_draw_allowed()
        return self._fill_blocks(lambda size: self._make_exponential_block(size).log_().neg_(), shape).to(device)

    def draw_gaussian(self, shape: tuple[int, ...], sigma: float, device: torch.device) -> Tensor:
        """Draw independent N(0, sigma^2), float64, or discrete Gaussians of this parameter, int64; sigma in votes."""
        checks.positive("sigma", sigma)
        self._check_draw_allowed()
        if self.kind == "discrete":
            return discrete_noise.draw_gaussian(shape, Fraction(sigma)).to(device)
        return self._fill_blocks(self._make_normal_block, shape).mul_(sigma).to(device)

    def draw_laplace(self, shape: tuple[int, ...], scale: float, device: torch.device) -> Tensor:
        """Draw independent Lap(scale), float64, or discrete Laplaces of this parameter, int64; scale in votes."""
        checks.positive("scale", scale)
        self._check_draw_allowed()
        if self.kind == "discrete":
            return discrete_noise.draw_laplace(shape, Fraction(scale)).to(device)
        return (
            self._fill_blocks(
                lambda size: self._make_exponential_block(size).sub_(self._make_exponential_block(size)), shape
            )
            .mul_(scale)
            .to(device)
        )

    def _make_uniform_block(self, size: int) -> Tensor:
        if self._generator is not None:
            bits = torch.randint(1 << _UNIFORM_BITS, (size,), generator=self._generator)
        else:
            bits = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64).bitwise_and_(
                (1 << _UNIFORM_BITS) - 1
            )
        return bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)

    def _make_exponential_block(self, size: int) -> Tensor:
        return self._make_uniform_block(size).log_().neg_()

    def _make_normal_block(self, size: int) -> Tensor:
        """Box and Muller (1958): a radius and an angle give two normal numbers."""
        num_pairs = (size + 1) // 2
        radius, angle = (
            self._make_exponential_block(num_pairs).mul_(2).sqrt_(),
            self._make_uniform_block(num_pairs).mul_(2 * math.pi),
        )
        return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)])[:size]

    def _fill_blocks(self, make_block: Callable[[int], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Fill a tensor block by block with ``make_block(size)``; by threads, unless a seed fixes the order."""
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


@dataclass(eq=False)
class DryRunNoise(NoiseSource):
    """Noise for audits, plans and tests. No account is charged, and answers drawn with it cannot be released.

    It implements ``budget.NoiseProvider`` and can replace a budget.

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
        """This source itself, under the name by which a ``Spending`` holds its noise."""
        return self

    def record_cost(self, events: Iterable[PrivacyEvent]) -> None:
        """Do nothing, because no account is charged."""


_README = """PRIVATE: do not publish, do not share.

This folder holds noise that unfinished releases need again, such as the noisy thresholds of sparse vectors. With this
noise anybody could subtract it from the answers. Keep the folder together with the privacy ledger beside it, which
stores a hash of each file. A release whose file is missing cannot be continued and stays charged at its worst case.
"""


def save_noise_state(path: Path, noise_state: dict[str, float]) -> str:
    """PRIVATE. Write the noise that a suspended release needs again, atomically.

    Returns:
        SHA-256 of the file, which the ledger stores, or "" if there is nothing to keep.
    """
    if not noise_state:
        path.unlink(missing_ok=True)
        return ""
    # The salt prevents a search for the noise whose hash the ledger holds.
    content = json.dumps({"salt": secrets.token_hex(16), "kept": noise_state}).encode()
    create_private_folder(path.parent, _README)
    with atomic_replacement(path) as temporary:
        temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def load_noise_state(path: Path) -> tuple[dict[str, float], str]:
    """PRIVATE. Read a saved noise state; return (noise state, SHA-256 of the file). A damaged file gives no state."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}, ""
    digest = hashlib.sha256(content).hexdigest()
    try:
        return json.loads(content)["kept"], digest
    except (ValueError, KeyError, TypeError):
        return {}, digest  # the ledger does not know this hash, so the release cannot be resumed
