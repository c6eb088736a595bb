"""Fused optimizers for networks and for stacked teachers.

``torch.optim`` is not used, because the first step of its optimizers imports PyTorch's compiler, which takes two to
three seconds in every process. All updates are element-wise, so that no norm or clipping mixes the parameters of
different teachers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ADAM_OPTIONS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}

VECTOR = 64
"""Multiple of the largest number of values that a processor updates at once."""


class Adam:
    """AdamW (Loshchilov and Hutter 2019), which updates ``params`` in place. Without ``weight_decay``, it is Adam."""

    def __init__(self, params: Sequence[Tensor], weight_decay: float) -> None:
        self.params, self.weight_decay = list(params), weight_decay
        self.mean = [torch.zeros_like(p) for p in params]
        self.square = [torch.zeros_like(p) for p in params]
        self.count = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters with learning rate ``rate``."""
        torch._foreach_add_(self.count, 1)
        tensors: Any = self.params, _get_gradients(self.params), self.mean, self.square, [], self.count
        torch._fused_adamw_(*tensors, lr=rate, weight_decay=self.weight_decay, **ADAM_OPTIONS)


class Sgd:
    """Stochastic gradient descent with heavy-ball momentum, which updates ``params`` in place.

    ``weight_decay`` is the coefficient of the L2 penalty.
    """

    def __init__(self, params: Sequence[Tensor], momentum: float, weight_decay: float) -> None:
        self.params, self.momentum, self.weight_decay = list(params), momentum, weight_decay
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters with learning rate ``rate``."""
        grads = _get_gradients(self.params)
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, self.params, alpha=self.weight_decay))
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, grads)
        torch._foreach_add_(self.params, self.buffers, alpha=-rate)


class ParameterBuffer:
    """Parameters in one buffer, each at a multiple of ``VECTOR`` numbers, which an optimizer updates as one parameter.

    A processor rounds numbers at the end of a tensor differently if they fill no whole vector. In separate tensors, the
    bits of a teacher would therefore depend on the number of teachers that are trained together.

    ``values`` holds all parameters, of one type on one device, and zeros between them. ``params`` are its parts.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        *starts, total = itertools.accumulate((-(-p.numel() // VECTOR) * VECTOR for p in params), initial=0)
        self.values = params[0].detach().new_zeros(total)
        gradient = self.values.grad = torch.zeros_like(self.values)
        self.params, self.grads = list[Tensor](), list[Tensor]()
        for start, p in zip(starts, params, strict=True):
            part, grad = (flat[start : start + p.numel()].view(p.shape) for flat in (self.values, gradient))
            part.copy_(p.detach())
            self.params.append(part.detach().requires_grad_())
            self.grads.append(grad)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Copy the gradients of the parameters to the gradient of the buffer, and remove them."""
        torch._foreach_copy_(self.grads, _get_gradients(self.params))
        for p in self.params:
            p.grad = None


def _get_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    grads = [p.grad for p in params if p.grad is not None]
    assert len(grads) == len(params), "a parameter has no gradient"
    return grads
