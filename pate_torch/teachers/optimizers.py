"""Fused, element-wise optimizers for stacked parameters, each update one pass over memory.

Not ``torch.optim``: its first use imports torch's compiler, three seconds in every worker process, and it offers
nothing else we need. Element-wise only: nothing is normed or clipped across teachers. The tests hold both to
``torch.optim``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch.teachers.recipe import TeacherRecipe

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """AdamW (Loshchilov and Hutter 2019): decoupled weight decay; Adam where it is 0.

    Args:
        params: Stacked parameters, updated in place.
        weight_decay: Decoupled weight decay.
    """

    def __init__(self, params: list[Tensor], weight_decay: float) -> None:
        self.params, self.weight_decay = params, weight_decay
        self.mean = [torch.zeros_like(p) for p in params]
        self.square = [torch.zeros_like(p) for p in params]
        self.count = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]

    def step(self, rate: float) -> None:
        """Update the parameters by their gradients, at this learning rate."""
        grads = [_gradient(p) for p in self.params]
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
        params: Stacked parameters, updated in place.
        momentum: Share of the last update that is kept.
        weight_decay: Weight decay, added to the gradient.
    """

    def __init__(self, params: list[Tensor], momentum: float, weight_decay: float) -> None:
        self.params, self.momentum, self.weight_decay = params, momentum, weight_decay
        self.buffers = [torch.zeros_like(p) for p in params]

    def step(self, rate: float) -> None:
        """Update the parameters by their gradients, at this learning rate."""
        grads = [_gradient(p) for p in self.params]
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, self.params, alpha=self.weight_decay))
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, grads)
        torch._foreach_add_(self.params, self.buffers, alpha=-rate)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the logits"
    return parameter.grad


def make_optimizer(params: list[Tensor], recipe: TeacherRecipe) -> Adam | Sgd:
    """The recipe's optimizer; ``step(rate)`` updates in place, without gradients being recorded."""
    if recipe.optimizer == "sgd":
        return Sgd(params, recipe.momentum, recipe.weight_decay)
    return Adam(params, recipe.weight_decay)
