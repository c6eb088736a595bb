"""Fused, element-wise optimizers of networks and of stacked teachers, each update one pass over memory.

Not ``torch.optim``: its first use imports torch's compiler, two to three seconds in every process, and it offers
nothing else we need. Element-wise only: nothing is normed or clipped across teachers. The tests hold both to
``torch.optim``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """AdamW (Loshchilov and Hutter 2019): decoupled weight decay; Adam where it is 0.

    Args:
        params: Parameters, updated in place.
        weight_decay: Decoupled weight decay.
    """

    def __init__(self, params: Sequence[Tensor], weight_decay: float) -> None:
        self.params, self.weight_decay = list(params), weight_decay
        self.mean = [torch.zeros_like(p) for p in params]
        self.square = [torch.zeros_like(p) for p in params]
        self.count = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters by their gradients, at this learning rate."""
        grads = [_get_gradient(p) for p in self.params]
        torch._foreach_add_(self.count, 1)
        torch._fused_adamw_(
            self.params,
            grads,
            self.mean,
            self.square,
            [],
            self.count,
            lr=rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=self.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


class Sgd:
    """Heavy-ball momentum; weight decay added to the gradient.

    Args:
        params: Parameters, updated in place.
        momentum: Share of the last update that is kept.
        weight_decay: Weight decay, added to the gradient.
    """

    def __init__(self, params: Sequence[Tensor], momentum: float, weight_decay: float) -> None:
        self.params, self.momentum, self.weight_decay = list(params), momentum, weight_decay
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters by their gradients, at this learning rate."""
        grads = [_get_gradient(p) for p in self.params]
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, self.params, alpha=self.weight_decay))
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, grads)
        torch._foreach_add_(self.params, self.buffers, alpha=-rate)


def _get_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad
