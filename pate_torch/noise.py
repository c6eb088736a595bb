"""The source of privacy noise, kept apart from every seeded stream.

Seeded by the operating system's entropy. ``insecure_seed`` makes a run repeatable and its guarantee void: everything
such a run writes says NOT PRIVATE.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pate_torch import checks


@dataclass(eq=False)
class NoiseSource:
    """Draws noise on the device that holds the votes, in float64 (continuous) or int64 (discrete).

    kind: "torch" (continuous) or "discrete" (exact discrete Gaussian and Laplace over the system's entropy).
    """

    kind: str = "torch"
    insecure_seed: int | None = None
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        checks.one_of("noise", self.kind, ("torch", "discrete"))
        if self.insecure_seed is not None:
            checks.integer("insecure_noise_seed", self.insecure_seed, low=0)
            if self.kind == "discrete":
                raise checks.fail(
                    "insecure_noise_seed",
                    self.insecure_seed,
                    "must be null with noise=discrete",
                    "It draws from the operating system's entropy only; use noise=torch for a repeatable, NOT PRIVATE run.",
                )

    @property
    def private(self) -> bool:
        """False when the noise could be known to an outsider."""
        return self.insecure_seed is None

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            seed = secrets.randbits(63) if self.insecure_seed is None else self.insecure_seed
            self._generators[device] = torch.Generator(device=device).manual_seed(seed)
        return self._generators[device]

    def gaussian(self, shape: tuple[int, ...], sigma: float, device: torch.device) -> Tensor:
        """Independent N(0, sigma^2), float64; sigma in votes."""
        checks.positive("sigma", sigma)
        return torch.randn(shape, dtype=torch.float64, device=device, generator=self._generator(device)) * sigma

    def laplace(self, shape: tuple[int, ...], scale: float, device: torch.device) -> Tensor:
        """Independent Lap(scale), float64; scale in votes."""
        checks.positive("scale", scale)
        signed = self.exponential(shape, device) - self.exponential(shape, device)
        return signed * scale

    def exponential(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Independent Exp(1), float64, strictly positive."""
        return torch.empty(shape, dtype=torch.float64, device=device).exponential_(generator=self._generator(device))

    def gumbel(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Independent standard Gumbel, float64: argmax(u + gumbel) samples proportionally to exp(u)."""
        return -self.exponential(shape, device).log()

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Independent U[0, 1), float64."""
        return torch.rand(shape, dtype=torch.float64, device=device, generator=self._generator(device))
