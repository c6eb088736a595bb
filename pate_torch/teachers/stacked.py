"""Forward pass of K networks of the same architecture with stacked parameters, [K, ...] each.

A convolution of K networks is one grouped convolution of images [B, K*Ch, H, W], and a linear layer of K networks is
one batched product of rows [K, B, D]. No operation mixes two networks, so the output of teacher k does not depend on
the records of other teachers. For predictions, all networks share an input [B, 1, ...].

Networks with other layers use ``torch.vmap``, which is about half as fast.
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
"""Devices on which a convolution is a batched product of patches.

On a GPU the backward pass of a grouped convolution is slow, and its algorithm may vary from run to run."""


def stack_initial(module: nn.Module, generators: list[torch.Generator], dtype: torch.dtype) -> Parameters:
    """Draw the initial parameters, [K, ...] each; network k uses generator k."""
    params = {name: torch.empty(len(generators), *p.shape, dtype=dtype) for name, p in module.named_parameters()}
    for k, generator in enumerate(generators):
        networks.initialize(module, generator)
        for name, parameter in module.named_parameters():
            params[name][k].copy_(parameter.detach())
    return params


def check_teacher(module: nn.Module, name: str) -> None:
    """Raise ValueError for layers whose output depends on more than their parameters and one input."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            raise checks.error("network", name, "teachers cannot use batch normalization", "Use norm=group.")
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            raise checks.error("network", name, "teachers cannot use dropout", "Use weight_decay or augmentation.")


def _extract_patches(x: Tensor, layer: nn.Conv2d, count: int) -> Tensor:
    """Extract patches [K, I*kh*kw, B, H', W'] of images [B, K*I, H, W], with one copy of a strided view."""
    assert not isinstance(layer.padding, str)
    (dh, dw), (kh, kw), (sh, sw), (ph, pw) = layer.dilation, layer.kernel_size, layer.stride, layer.padding
    view = F.pad(x, (pw, pw, ph, ph)).unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
    view = view[..., ::dh, ::dw].unflatten(1, (count, -1))  # [B, K, I, H', W', kh, kw]
    return view.permute(1, 2, 5, 6, 0, 3, 4).flatten(1, 3)


class _ConvMatmul(torch.autograd.Function):
    """Convolutions as one batched product: weights [K, O, I*kh*kw] times patches [K, I*kh*kw, B*L].

    Patches are much larger than their images, so the backward pass extracts them again. The gradient of the images is a
    sum over the positions in a patch in a fixed order, without atomic additions.
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
            assert not isinstance(layer.padding, str)
            (dh, dw), (kh, kw), (sh, sw), (ph, pw) = layer.dilation, layer.kernel_size, layer.stride, layer.padding
            parts = torch.bmm(weight.flatten(2).mT, grad).view(count, -1, kh, kw, len(x), height, width)
            grad_padded = x.new_zeros(*x.shape[:2], x.shape[2] + 2 * ph, x.shape[3] + 2 * pw)
            for i in range(kh):
                for j in range(kw):
                    rows = slice(i * dh, i * dh + (height - 1) * sh + 1, sh)
                    columns = slice(j * dw, j * dw + (width - 1) * sw + 1, sw)
                    grad_padded[:, :, rows, columns] += parts[:, :, i, j].permute(2, 0, 1, 3, 4).flatten(1, 2)
            grad_x = grad_padded[:, :, ph : ph + x.shape[2], pw : pw + x.shape[3]]
        return grad_x, grad_weight, grad_bias, None, None


class _Layers:
    """Application of a tree of modules to stacked inputs: images [B, k*Ch, H, W] or rows [k, B, D].

    The number k, ``num_separate``, is K. If all networks share an input, k is 1 until the first layer with parameters.
    """

    def __init__(self, params: Mapping[str, Tensor], num_separate: int) -> None:
        self.params, self.num_separate = params, num_separate
        self.networks = len(next(iter(params.values())))

    def get_parameters(self, prefix: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = self.params.get(prefix + "bias")
        return self.params[prefix + "weight"].to(x.dtype), None if bias is None else bias.to(x.dtype)

    def expand(self, x: Tensor) -> Tensor:
        if self.num_separate == self.networks:
            return x
        self.num_separate = self.networks
        return x.repeat(1, self.networks, 1, 1) if x.dim() == 4 else x.expand(self.networks, -1, -1)

    def apply(self, module: nn.Module, prefix: str, x: Tensor, relu: bool = False) -> Tensor:
        """Apply a module, and a ReLU after it if ``relu``."""
        match module:
            case nn.Sequential():
                return self.apply_sequence(module, prefix, x)
            case networks.Residual():
                x = self.expand(x)
                branch = self.apply(module.branch, prefix + "branch.", x)
                return self.apply(module.shortcut, prefix + "shortcut.", x) + branch
            case nn.Linear():  # the product is transposed, so that the weight's gradient has the layout of the weight
                x, (weight, bias) = self.expand(x), self.get_parameters(prefix, x)
                out = torch.bmm(weight, x.mT) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x.mT)
                return (F.relu_(out) if relu else out).mT
            case nn.Conv2d():
                return self.apply_conv(module, prefix, x, relu)
            case nn.GroupNorm():
                x, (weight, bias) = self.expand(x), self.get_parameters(prefix, x)
                assert bias is not None
                return F.group_norm(x, self.networks * module.num_groups, weight.flatten(), bias.flatten(), module.eps)
            case nn.ReLU():
                return F.relu(x)
            case nn.Flatten():
                return x.unflatten(1, (self.num_separate, -1)).flatten(2).transpose(0, 1) if x.dim() == 4 else x
            case nn.MaxPool2d() | nn.AdaptiveAvgPool2d() | nn.Identity():
                return module(x)
        raise AssertionError(f"no stacked form for {type(module).__name__}")

    def apply_sequence(self, sequence: nn.Sequential, prefix: str, x: Tensor) -> Tensor:
        """Apply the layers in order. A linear layer or convolution also applies the ReLU that follows."""
        previous: nn.Module | None = None
        children = list(sequence.named_children())
        for (name, layer), (_, next_layer) in zip(children, [*children[1:], ("", None)], strict=True):
            has_weight = isinstance(layer, nn.Linear | nn.Conv2d)
            if not (isinstance(layer, nn.ReLU) and isinstance(previous, nn.Linear | nn.Conv2d)):
                x = self.apply(layer, f"{prefix}{name}.", x, relu=has_weight and isinstance(next_layer, nn.ReLU))
            previous = layer
        return x

    def apply_conv(self, layer: nn.Conv2d, prefix: str, x: Tensor, relu: bool) -> Tensor:
        weight, bias = self.get_parameters(prefix, x)
        assert not isinstance(layer.padding, str)
        if x.device.type in MATMUL_DEVICES and self.num_separate == self.networks:
            return _ConvMatmul.apply(x, weight, bias, layer, relu)
        geometry = layer.stride, layer.padding, layer.dilation, self.num_separate  # a shared input is one group
        self.num_separate = self.networks
        x = x.contiguous(memory_format=torch.channels_last)  # halves the time of a strided backward pass on a CPU
        out = F.conv2d(x, weight.flatten(0, 1), None if bias is None else bias.flatten(), *geometry)
        return F.relu_(out) if relu else out


_STACKABLE_LAYERS = (nn.Sequential, networks.Residual, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Identity,
          nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, networks.Flatten)  # fmt: skip


def has_stacked_form(module: nn.Module) -> bool:
    """Return whether ``_Layers`` can apply all layers of this module."""
    is_known = all(type(layer) in _STACKABLE_LAYERS for layer in module.modules())
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return is_known and all(c.groups == 1 and c.padding_mode == "zeros" and c.padding != "same" for c in convolutions)


def forward(module: nn.Module, params: Parameters, x: Tensor) -> Tensor:
    """Compute logits [K, B, C] of inputs [B, K, ...], one for each network, or of shared inputs [B, 1, ...]."""
    if not has_stacked_form(module):
        return forward_vmap(module, params, x)
    layers = _Layers(params, num_separate=x.shape[1])
    return layers.apply(module, "", x.flatten(1, 2) if x.dim() == 5 else x.transpose(0, 1))


def forward_vmap(module: nn.Module, params: Parameters, x: Tensor) -> Tensor:
    """Compute the same logits as ``forward`` with ``torch.vmap``, for any architecture without buffers."""

    def call_one(single: Parameters, inputs: Tensor) -> Tensor:
        return torch.func.functional_call(module, single, (inputs,))

    num_networks = len(next(iter(params.values())))
    return torch.vmap(call_one, in_dims=(0, 1))(params, x.expand(-1, num_networks, *x.shape[2:]))
