"""The source of privacy noise, kept apart from every seeded stream.

Every bit comes from the operating system's entropy, not from a generator seeded by it: torch's generator on the CPU
keeps only 32 bits of its seed, few enough to try them all. ``insecure_seed`` makes a run repeatable and its guarantee
void: everything such a run writes says NOT PRIVATE.
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
"""Numbers drawn at a time: they stay in a core's cache, and several threads share out the blocks of a large draw."""


NOISE_KINDS = ("torch", "discrete")

MIN_CONTINUOUS_NOISE_DELTA = 1e-15
"""With continuous noise. Of ``_UNIFORM_BITS`` bits a normal number ends at 8.57 standard deviations, an exponential one
at 36.7 scales, and what lies beyond has probability 1e-17 and 1e-16: no smaller delta, and no pure epsilon, rests on
them."""


def check_noise(kind: str, insecure_seed: int | None) -> None:
    """Refuse a kind of noise that does not exist, or one with a seed that it cannot have.

    Raises:
        ValueError: Names the key.
    """
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
    """Refuse a delta that noise of this kind cannot keep: all but discrete noise is bounded.

    Raises:
        ValueError: Names the smallest delta.
    """
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
    """Draws noise for the device that holds the votes: float64 (continuous) or int64 (discrete).

    There are two, and no third: that of a ``budget.Spending``, which has been charged for, and a ``DryRunNoise``.
    Continuous noise is rounded to float64, and its rounding can in principle be attacked (Mironov 2012): discrete noise
    cannot.

    Attributes:
        kind: "torch" (continuous) or "discrete" (exact discrete Gaussian and Laplace).
        insecure_seed: Makes noise repeatable, and void as a protection; None: the operating system's entropy.
        state: PRIVATE. What a release goes on with in its next call, of noise that was drawn in this one.
    """

    kind: str = "torch"
    insecure_seed: int | None = None
    state: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _generator: torch.Generator | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self) is NoiseSource:
            raise TypeError("NoiseSource: noise is had by budget.spend, or in a DryRunNoise, which releases nothing")
        check_noise(self.kind, self.insecure_seed)
        if self.insecure_seed is not None:
            self._generator = torch.Generator().manual_seed(self.insecure_seed)

    @property
    def secret(self) -> bool:
        """Whether no outsider could know the noise; else nothing drawn is private."""
        return self.insecure_seed is None

    def stamp(self, answers: Answers) -> Answers:
        """The answers drawn from here, with what paid for them."""
        raise NotImplementedError

    def _check_draw_allowed(self) -> None:
        """Called before every draw."""

    def draw_uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Independent U(0, 1), float64, strictly between 0 and 1."""
        self._check_draw_allowed()
        return self._fill_blocks(self._make_uniform_block, shape).to(device)

    def draw_exponential(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Independent Exp(1), float64, strictly positive."""
        self._check_draw_allowed()
        return self._fill_blocks(self._make_exponential_block, shape).to(device)

    def draw_gumbel(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Independent standard Gumbel, float64: argmax(u + gumbel) samples proportionally to exp(u)."""
        self._check_draw_allowed()
        return self._fill_blocks(lambda size: self._make_exponential_block(size).log_().neg_(), shape).to(device)

    def draw_gaussian(self, shape: tuple[int, ...], sigma: float, device: torch.device) -> Tensor:
        """Independent N(0, sigma^2), float64, or the discrete Gaussian of that parameter, int64; sigma in votes."""
        checks.positive("sigma", sigma)
        self._check_draw_allowed()
        if self.kind == "discrete":
            return discrete_noise.draw_gaussian(shape, Fraction(sigma)).to(device)
        return self._fill_blocks(self._make_normal_block, shape).mul_(sigma).to(device)

    def draw_laplace(self, shape: tuple[int, ...], scale: float, device: torch.device) -> Tensor:
        """Independent Lap(scale), float64, or the discrete Laplace of that parameter, int64; scale in votes."""
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
        """Box and Muller 1958: a radius and an angle make two."""
        num_pairs = (size + 1) // 2
        radius, angle = (
            self._make_exponential_block(num_pairs).mul_(2).sqrt_(),
            self._make_uniform_block(num_pairs).mul_(2 * math.pi),
        )
        return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)])[:size]

    def _fill_blocks(self, make_block: Callable[[int], Tensor], shape: tuple[int, ...]) -> Tensor:
        """``make_block(size)`` for one block after the other; by threads, unless a seed fixes the order."""
        values = torch.empty(shape, dtype=torch.float64)
        blocks = [block for block in values.view(-1).split(_BLOCK_NUMBERS) if len(block)]

        def fill_block(block: Tensor) -> None:
            block.copy_(make_block(len(block)))

        if len(blocks) == 1 or self._generator is not None:
            for block in blocks:
                fill_block(block)
            return values
        with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(fill_block, blocks):  # raises what a thread raised: no block is left undrawn
                pass
        return values


@dataclass(eq=False)
class DryRunNoise(NoiseSource):
    """Noise for audits, plans and tests, which nobody is charged for: what is drawn with it cannot be released.

    It may stand in for a budget (``budget.NoiseProvider``), and then spends nothing.

    Attributes:
        events: What a budget would have been charged.
    """

    events: tuple[PrivacyEvent, ...] = ()

    def stamp(self, answers: Answers) -> DryRunAnswers:
        """The answers as those of a dry run, a type that nothing releases or writes."""
        return DryRunAnswers(**{f.name: getattr(answers, f.name) for f in fields(Answers)})

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Nothing to refuse: there is no account."""

    @contextmanager
    def spend(self, events: Iterable[PrivacyEvent], **facts: object) -> Iterator[DryRunNoise]:
        """This noise itself, with what a budget would have been charged in ``events``."""
        self.events += tuple(events)
        yield self

    @property
    def noise(self) -> DryRunNoise:
        """This noise itself, as the source of noise that a spending has."""
        return self

    def record_cost(self, events: Iterable[PrivacyEvent]) -> None:
        """Nothing: nobody is charged."""


_README = """PRIVATE: do not publish, do not share.

Noise that releases under way go on with, such as the thresholds of sparse vectors: whoever knows it can take it off the
answers. Keep it together with the privacy ledger beside this folder, which remembers its hash; without it a release
cannot go on, and stays charged at its worst.
"""


def save_noise_state(path: Path, noise_state: dict[str, float]) -> str:
    """PRIVATE. Write noise that a suspended release goes on with, whole or not at all.

    Returns:
        The hash of the file, which the ledger remembers; "" where nothing is kept.
    """
    if not noise_state:
        path.unlink(missing_ok=True)
        return ""
    # Salted: a hash of the noise alone could be tried against all the noise there is.
    content = json.dumps({"salt": secrets.token_hex(16), "kept": noise_state}).encode()
    create_private_folder(path.parent, _README)
    with atomic_replacement(path) as temporary:
        temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def load_noise_state(path: Path) -> tuple[dict[str, float], str]:
    """What was kept, and the hash of the file; nothing where there is no file, or a damaged one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}, ""
    digest = hashlib.sha256(content).hexdigest()
    try:
        return json.loads(content)["kept"], digest
    except (ValueError, KeyError, TypeError):
        return {}, digest  # which the ledger does not know
