"""One forward pass for K networks of the same architecture: their parameters stacked, [K, ...] each.

A convolution of K networks is one grouped convolution of images [B, K*Ch, H, W], a dense layer of K networks one
batched product of rows [K, B, D]. No operation mixes two networks, so teacher k's numbers do not depend on what teacher
j was trained on. An input [B, 1, ...] is shared by all networks (prediction).

Networks with a layer unknown here go through ``torch.vmap``, which is correct for all and about half as fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks

Parameters = dict[str, Tensor]

MATMUL_DEVICES = {"cuda"}
"""Devices on which a convolution is one batched product over networks.

Grouped convolutions are slow to differentiate on GPUs, and their algorithm may vary from run to run. On a CPU unfolding
costs more than it gains."""


def stack_initial(module: nn.Module, generators: list[torch.Generator], dtype: torch.dtype) -> Parameters:
    """Initial parameters [K, ...], each network from its own generator."""
    params = {name: torch.empty(len(generators), *p.shape, dtype=dtype) for name, p in module.named_parameters()}
    for k, generator in enumerate(generators):
        networks.initialize(module, generator)
        for name, parameter in module.named_parameters():
            params[name][k].copy_(parameter.detach())
    return params


def check_teacher(module: nn.Module, name: str) -> None:
    """Refuse layers that would make a teacher depend on more than its parameters and its input."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            raise checks.error("network", name, "teachers cannot use batch normalization", "Use norm=group.")
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            raise checks.error("network", name, "teachers cannot use dropout", "Use weight_decay or augmentation.")


def _extract_patches(x: Tensor, layer: nn.Conv2d, count: int) -> Tensor:
    """Patches [K, I*kh*kw, B, H', W'] of images [B, K*I, H, W]: one copy, of a strided view of the padded images."""
    (dh, dw), (kh, kw), (sh, sw) = layer.dilation, layer.kernel_size, layer.stride
    view = F.pad(x, _get_padding(layer)).unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
    view = view[..., ::dh, ::dw].unflatten(1, (count, -1))  # [B, K, I, H', W', kh, kw]
    return view.permute(1, 2, 5, 6, 0, 3, 4).flatten(1, 3)


def _get_padding(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    assert not isinstance(layer.padding, str)
    (top, left) = layer.padding
    return left, left, top, top


class _ConvMatmul(torch.autograd.Function):
    """Convolutions by one batched product over networks: weights [K, O, I*kh*kw] times patches [K, I*kh*kw, B*L].

    Patches are nine to twenty-five times as large as their images: they are not saved, but extracted again in the
    backward pass. The gradient of the images is a sum over the places in a patch, in a fixed order, without atomic
    additions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, relu: bool) -> Tensor:
        count, outputs = weight.shape[:2]
        patches, flat = _extract_patches(x, layer, count), weight.flatten(2)
        shape, patches = patches.shape[3:], patches.flatten(2)
        out = torch.bmm(flat, patches) if bias is None else torch.baddbmm(bias.unsqueeze(2), flat, patches)
        out = out.relu_() if relu else out
        out = out.view(count, outputs, len(x), *shape).permute(2, 0, 1, 3, 4).reshape(len(x), count * outputs, *shape)
        ctx.layer, ctx.relu, ctx.has_bias = layer, relu, bias is not None
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, out = ctx.saved_tensors
        layer: nn.Conv2d = ctx.layer
        if ctx.relu:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        count, (height, width) = len(weight), grad.shape[2:]
        grad = grad.unflatten(1, (count, -1)).permute(1, 2, 0, 3, 4).flatten(2)  # [K, O, B*L]
        grad_weight = torch.bmm(grad, _extract_patches(x, layer, count).flatten(2).mT).view_as(weight)
        grad_bias = grad.sum(2) if ctx.has_bias else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
            parts = torch.bmm(weight.flatten(2).mT, grad).view(count, -1, kh, kw, len(x), height, width)
            left, right, top, bottom = _get_padding(layer)
            grad_padded = x.new_zeros(len(x), x.shape[1], x.shape[2] + top + bottom, x.shape[3] + left + right)
            for i in range(kh):
                for j in range(kw):
                    rows = slice(i * dh, i * dh + (height - 1) * sh + 1, sh)
                    columns = slice(j * dw, j * dw + (width - 1) * sw + 1, sw)
                    grad_padded[:, :, rows, columns] += parts[:, :, i, j].permute(2, 0, 1, 3, 4).flatten(1, 2)
            grad_x = grad_padded[:, :, top : grad_padded.shape[2] - bottom, left : grad_padded.shape[3] - right]
        return grad_x, grad_weight, grad_bias, None, None


class _Layers:
    """The application of a module tree to stacked inputs. Images are [B, k*Ch, H, W] and rows [k, B, D].

    They contain k = ``num_separate`` networks: when all networks see the same input, 1 until the first layer with
    parameters, and K after it.
    """

    def __init__(self, params: Mapping[str, Tensor], num_separate: int) -> None:
        self.params, self.num_separate = params, num_separate
        self.networks = len(next(iter(params.values())))

    def get_parameter(self, name: str, reference: Tensor) -> Tensor | None:
        value = self.params.get(name)
        return None if value is None else value.to(reference.dtype)

    def expand(self, x: Tensor) -> Tensor:
        """Give every network its own copy of a shared input."""
        if self.num_separate == self.networks:
            return x
        self.num_separate = self.networks
        return x.repeat(1, self.networks, 1, 1) if x.dim() == 4 else x.expand(self.networks, -1, -1)

    def apply(self, module: nn.Module, prefix: str, x: Tensor, relu: bool = False) -> Tensor:
        """One layer, and the ReLU after it if ``relu``."""
        match module:
            case nn.Sequential():
                for name, layer, has_relu in plan_layers(module):
                    x = self.apply(layer, f"{prefix}{name}.", x, has_relu)
                return x
            case networks.Residual():
                x = self.expand(x)
                branch = self.apply(module.branch, prefix + "branch.", x)
                return self.apply(module.shortcut, prefix + "shortcut.", x) + branch
            case nn.Linear():
                x = self.expand(x)
                return self.apply_dense(prefix, x, relu)
            case nn.Conv2d():
                return self.apply_conv(module, prefix, x, relu)
            case nn.GroupNorm():
                return self.apply_group_norm(module, prefix, x)
            case nn.ReLU():
                return F.relu(x)
            case nn.Flatten():
                return x.unflatten(1, (self.num_separate, -1)).flatten(2).transpose(0, 1) if x.dim() == 4 else x
            case nn.MaxPool2d() | nn.AdaptiveAvgPool2d() | nn.Identity():
                return module(x)
        raise AssertionError(f"no stacked form for {type(module).__name__}")

    def apply_dense(self, prefix: str, x: Tensor, relu: bool) -> Tensor:
        """One batched product, transposed so that the weight's gradient comes in the layout of the weight."""
        weight, bias = self.get_parameter(prefix + "weight", x), self.get_parameter(prefix + "bias", x)
        assert weight is not None
        out = torch.bmm(weight, x.mT) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x.mT)
        return (F.relu_(out) if relu else out).mT

    def apply_conv(self, layer: nn.Conv2d, prefix: str, x: Tensor, relu: bool) -> Tensor:
        weight, bias = self.get_parameter(prefix + "weight", x), self.get_parameter(prefix + "bias", x)
        assert weight is not None and not isinstance(layer.padding, str)
        if x.device.type in MATMUL_DEVICES and self.num_separate == self.networks:
            return _ConvMatmul.apply(x, weight, bias, layer, relu)
        geometry = layer.stride, layer.padding, layer.dilation, self.num_separate  # one group for a shared input
        self.num_separate = self.networks
        x = x.contiguous(memory_format=torch.channels_last)  # half the time of a strided backward pass on a CPU
        out = F.conv2d(x, weight.flatten(0, 1), None if bias is None else bias.flatten(), *geometry)
        return F.relu_(out) if relu else out

    def apply_group_norm(self, layer: nn.GroupNorm, prefix: str, x: Tensor) -> Tensor:
        x = self.expand(x)
        weight, bias = self.get_parameter(prefix + "weight", x), self.get_parameter(prefix + "bias", x)
        assert weight is not None and bias is not None
        return F.group_norm(x, self.networks * layer.num_groups, weight.flatten(), bias.flatten(), layer.eps)


def plan_layers(sequence: nn.Sequential) -> list[tuple[str, nn.Module, bool]]:
    """The names and layers in order, each with whether it also applies the ReLU that follows, which is left out."""
    plan: list[tuple[str, nn.Module, bool]] = []
    for name, layer in sequence.named_children():
        if isinstance(layer, nn.ReLU) and plan and isinstance(plan[-1][1], nn.Linear | nn.Conv2d) and not plan[-1][2]:
            plan[-1] = (*plan[-1][:2], True)
        else:
            plan.append((name, layer, False))
    return plan


_STACKABLE_LAYERS = (nn.Sequential, networks.Residual, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Identity,
          nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, networks.Flatten)  # fmt: skip


def has_stacked_form(module: nn.Module) -> bool:
    """Whether this module has a stacked form of every layer."""
    is_known = all(type(layer) in _STACKABLE_LAYERS for layer in module.modules())
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return is_known and all(c.groups == 1 and c.padding_mode == "zeros" and c.padding != "same" for c in convolutions)


def forward(module: nn.Module, params: Parameters, x: Tensor) -> Tensor:
    """Logits [K, B, C] of inputs [B, K, ...] (each network its own) or [B, 1, ...] (the same for all)."""
    if not has_stacked_form(module):
        return forward_vmap(module, params, x)
    layers = _Layers(params, num_separate=x.shape[1])
    return layers.apply(module, "", x.flatten(1, 2) if x.dim() == 5 else x.transpose(0, 1))


def forward_vmap(module: nn.Module, params: Parameters, x: Tensor) -> Tensor:
    """The same by ``torch.vmap``, for any architecture without buffers; the slow twin of ``forward`` in the tests."""

    def call_one(single: Parameters, inputs: Tensor) -> Tensor:
        return torch.func.functional_call(module, single, (inputs,))

    num_networks = len(next(iter(params.values())))
    return torch.vmap(call_one, in_dims=(0, 1))(params, x.expand(-1, num_networks, *x.shape[2:]))
