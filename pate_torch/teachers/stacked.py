"""One forward pass for K networks of the same architecture: their parameters stacked, [K, ...] each.

Images travel as [B, K, Ch, H, W], rows as [K, B, D]: a convolution of K networks is one grouped convolution on
[B, K*Ch, H, W], a dense layer of K networks one batched product. No operation mixes two networks, so teacher k's
numbers do not depend on what teacher j was trained on. An input [B, 1, ...] is shared by all networks (prediction).

Networks with a layer unknown here go through ``torch.vmap``, which is correct for all and about half as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import checks, networks

Parameters = dict[str, Tensor]


def stack_initial(module: nn.Module, generators: list[torch.Generator], dtype: torch.dtype) -> Parameters:
    """Initial parameters [K, ...], each network from its own generator."""
    stacked = {name: torch.empty(len(generators), *p.shape, dtype=dtype) for name, p in module.named_parameters()}
    for k, generator in enumerate(generators):
        networks.initialise(module, generator)
        for name, parameter in module.named_parameters():
            stacked[name][k].copy_(parameter.detach())
    return stacked


def check_teacher(module: nn.Module, name: str) -> None:
    """Refuse layers that would make a teacher depend on more than its parameters and its input."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            raise checks.fail("network", name, "teachers cannot use batch normalisation", "Use norm=group.")
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            raise checks.fail("network", name, "teachers cannot use dropout", "Use weight_decay or augmentation.")


def _linear(layer: nn.Linear, p: Callable[[str], Tensor], x: Tensor) -> Tensor:
    weight, bias = p("weight"), p("bias") if layer.bias is not None else None
    x = x.expand(len(weight), -1, -1)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _conv(layer: nn.Conv2d, p: Callable[[str], Tensor], x: Tensor) -> Tensor:
    weight, bias = p("weight"), p("bias") if layer.bias is not None else None
    networks_, batch = len(weight), len(x)
    assert layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    groups = x.shape[1]  # 1 when the input is shared: then one wide convolution serves all networks
    out = F.conv2d(
        x.flatten(1, 2), weight.flatten(0, 1), None if bias is None else bias.flatten(), layer.stride, layer.padding,
        layer.dilation, groups,
    )  # fmt: skip
    return out.view(batch, networks_, -1, *out.shape[2:])


def _group_norm(layer: nn.GroupNorm, p: Callable[[str], Tensor], x: Tensor) -> Tensor:
    weight, bias = p("weight"), p("bias")
    x = x.expand(-1, len(weight), -1, -1, -1)
    out = F.group_norm(x.flatten(1, 2), len(weight) * layer.num_groups, weight.flatten(), bias.flatten(), layer.eps)
    return out.view(x.shape)


def _forward(module: nn.Module, params: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    def p(name: str) -> Tensor:
        return params[prefix + name]

    match module:
        case nn.Sequential():
            for name, child in module.named_children():
                x = _forward(child, params, f"{prefix}{name}.", x)
            return x
        case networks.Residual():
            return _forward(module.shortcut, params, prefix + "shortcut.", x) + _forward(
                module.branch, params, prefix + "branch.", x
            )
        case nn.Linear():
            return _linear(module, p, x)
        case nn.Conv2d():
            return _conv(module, p, x)
        case nn.GroupNorm():
            return _group_norm(module, p, x)
        case nn.ReLU():
            return F.relu(x)
        case nn.Identity():
            return x
        case nn.MaxPool2d() | nn.AdaptiveAvgPool2d():
            out = module(x.flatten(1, 2))
            return out.view(*x.shape[:3], *out.shape[2:])
        case nn.Flatten():
            return x.flatten(2).transpose(0, 1)
    raise AssertionError(f"no stacked form for {type(module).__name__}")


_KNOWN = (nn.Sequential, networks.Residual, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Identity, nn.MaxPool2d,
          nn.AdaptiveAvgPool2d, nn.Flatten)  # fmt: skip


def has_stacked_form(module: nn.Module) -> bool:
    """Whether every layer is one that this module knows."""
    plain = all(type(layer) in _KNOWN for layer in module.modules())
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return plain and all(c.groups == 1 and c.padding_mode == "zeros" and c.padding != "same" for c in convolutions)


def forward(module: nn.Module, params: Parameters, x: Tensor) -> Tensor:
    """Logits [K, B, C] of inputs [B, K, ...] (each network its own) or [B, 1, ...] (the same for all)."""
    if has_stacked_form(module):
        return _forward(module, params, "", x)
    return forward_vmap(module, params, x)


def forward_vmap(module: nn.Module, params: Parameters, x: Tensor) -> Tensor:
    """The same by ``torch.vmap``, for any architecture without buffers; the slow twin of ``forward`` in the tests."""

    def one(single: Parameters, inputs: Tensor) -> Tensor:
        return torch.func.functional_call(module, single, (inputs,))

    networks_ = len(next(iter(params.values())))
    return torch.vmap(one, in_dims=(0, 1))(params, x.expand(-1, networks_, *x.shape[2:]))
