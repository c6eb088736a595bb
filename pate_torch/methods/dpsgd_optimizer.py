"""Opacus's optimizer of DP-SGD with the noise of this package, in a separate module because Opacus loads slowly."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from pate_torch.privacy.noise import NoiseSource


class NoiseSourceOptimizer(DPOptimizer):
    """Opacus's optimizer with noise from ``noise``; ``options`` are those of ``DPOptimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer, noise: NoiseSource, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.noise = noise

    def add_noise(self) -> None:
        for p in self.params:
            sigma = self.noise_multiplier * self.max_grad_norm
            noise = self.noise.draw_gaussian(tuple(p.summed_grad.shape), sigma, p.device)
            p.grad = (p.summed_grad + noise.to(p.dtype)).view_as(p)
