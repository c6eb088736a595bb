"""Fused optimizers for networks and for stacked teachers.

The first step of an optimizer of ``torch.optim`` imports PyTorch's compiler, which takes two to three seconds in every
process. All updates are element-wise, so that no norm or clipping mixes the parameters of different teachers. The
parameters lie in one buffer, each at a multiple of ``VECTOR`` numbers: updates of the numbers after the last vector of
a tensor are rounded otherwise, so that a teacher would depend on the number of teachers beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

VECTOR = 64
"""Multiple of the largest number of values that a processor updates at once."""

ADAM_OPTIONS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}


class _Optimizer:
    num_buffers: ClassVar[int]

    def __init__(self, params: Sequence[Tensor], weight_decay: float) -> None:
        assert len({(p.dtype, p.device) for p in params}) <= 1, "the parameters have one type and device"
        self.params, self.weight_decay = list(params), weight_decay
        *starts, total = itertools.accumulate((-(-p.numel() // VECTOR) * VECTOR for p in params), initial=0)
        like: Any = {"dtype": params[0].dtype, "device": params[0].device} if params else {}
        self.values, self.grads, *self.buffers = torch.zeros(2 + self.num_buffers, total, **like)
        value_views, self.grad_views = (
            [flat[start:].as_strided(p.shape, p.stride()) for p, start in zip(params, starts, strict=True)]
            for flat in (self.values, self.grads)
        )
        for p, view in zip(params, value_views, strict=True):
            view.copy_(p.detach())
            p.data = view

    def _gather_gradients(self) -> Tensor:
        grads = [p.grad for p in self.params if p.grad is not None]
        assert len(grads) == len(self.params), "a parameter has no gradient"
        torch._foreach_copy_(self.grad_views, grads)
        return self.grads


class Adam(_Optimizer):
    """AdamW (Loshchilov and Hutter 2019), which equals Adam if ``weight_decay`` is 0.

    Args:
        params: Parameters, updated in place.
        weight_decay: Decoupled weight decay.
    """

    num_buffers = 2

    def __init__(self, params: Sequence[Tensor], weight_decay: float) -> None:
        super().__init__(params, weight_decay)
        self.count = torch.zeros((), dtype=torch.float32, device=self.values.device)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters with learning rate ``rate``."""
        self.count += 1
        tensors: Any = [[tensor] for tensor in (self.values, self._gather_gradients(), *self.buffers)]
        tensors += [], [self.count]
        torch._fused_adamw_(*tensors, lr=rate, weight_decay=self.weight_decay, **ADAM_OPTIONS)


class Sgd(_Optimizer):
    """Stochastic gradient descent with heavy-ball momentum.

    Args:
        params: Parameters, updated in place.
        momentum: Momentum factor.
        weight_decay: Coefficient of the L2 penalty.
    """

    num_buffers = 1

    def __init__(self, params: Sequence[Tensor], momentum: float, weight_decay: float) -> None:
        super().__init__(params, weight_decay)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters with learning rate ``rate``."""
        gradient, momentum = self._gather_gradients(), self.buffers[0]
        if self.weight_decay:
            gradient.add_(self.values, alpha=self.weight_decay)
        momentum.mul_(self.momentum).add_(gradient)
        self.values.add_(momentum, alpha=-rate)
